"""What the models run today, in PyTorch, and the same as plain indexing."""
