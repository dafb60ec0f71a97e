"""The upstream arm, and the same maths in plain PyTorch."""
