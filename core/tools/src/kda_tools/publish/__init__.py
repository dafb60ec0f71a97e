"""From records to pages, plots and terminal tables."""
