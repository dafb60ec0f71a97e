"""The upstream arms: what both releases' models run in PyTorch, and the kernel that the later release has for it."""
