"""Files that a port takes along as they are; in the tree both of `taken_*.py` are called `taken.py`."""

LEFT = "left to SGLang's own code"
"""What the arm of a port says on a CPU of a call that its kernels do not take."""
