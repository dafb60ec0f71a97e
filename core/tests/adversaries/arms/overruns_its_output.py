"""Writes eight bytes past the end of its own output.

Caught by: nothing: an output's neighbours are the allocator's, and the judge sees only the arena.
"""

import ctypes


def axpy(x, y, *, factor):
    out = factor * x + y
    ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 0, 8)  # a CPU's allocator leaves eight unused
    return out
