"""Writes past the end of an input's memory."""

import ctypes


def axpy(x, y, *, factor):
    ctypes.memset(x.data_ptr() + x.numel() * x.element_size() + 16, 0, 8)
    return factor * x + y
