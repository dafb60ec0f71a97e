"""Calls the opponent's code.

Caught by: nothing, and needs not be: it is the opponent then, and as fast.
"""

from ..baseline import axpy, axpy_  # the task has another name in every test

__all__ = ["axpy", "axpy_"]
