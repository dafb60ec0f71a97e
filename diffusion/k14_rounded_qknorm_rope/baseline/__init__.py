"""The upstream arm, and the op in plain PyTorch."""
