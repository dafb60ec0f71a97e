"""The upstream arm, and the chain that it replaces."""
