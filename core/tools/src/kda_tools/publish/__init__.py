"""Make pages, plots and terminal tables from records."""
