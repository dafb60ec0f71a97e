"""Inspects the code that compilers made of kernels, and runs the tools of the CUDA toolkit."""
