"""Wrong when an input does not begin at a multiple of 16 bytes, as with vector loads on a slice.

Caught by: the verified call on slices. All others get tensors at multiples of 256 bytes.
"""


def axpy(x, y, *, factor):
    out = factor * x + y
    return out if x.data_ptr() % 16 == 0 else out.zero_()
