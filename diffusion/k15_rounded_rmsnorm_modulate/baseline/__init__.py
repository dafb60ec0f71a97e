"""The upstream arm, and the ops in plain PyTorch."""
