"""Files that a port takes along as they are; in the tree both of `wrap_kernels_*.py` are called `wrap_kernels.py`."""

LEFT = "left to SGLang's own code"
"""What the arm of a port says on a CPU of a call that its kernels do not take."""
