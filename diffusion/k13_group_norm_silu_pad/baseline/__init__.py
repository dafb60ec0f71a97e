"""PyTorch's own kernels for clips in channels-last order, and the same maths in float32."""
