"""Right result, but writes between the rows of its strided input.

Caught by: the gaps hold a pattern, which is compared.
"""


def axpy(x, y, *, factor):
    out = factor * x + y
    y.as_strided((y.shape[0] - 1, y.stride(0)), (y.stride(0), 1))[:, y.shape[1] :] = 0
    return out
