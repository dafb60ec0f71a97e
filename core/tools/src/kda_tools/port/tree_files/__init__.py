"""Files that a port takes along as they are; in the tree both are called `taken.py`."""
