"""What a compiler made of kernels, and the tools of the CUDA toolkit."""
