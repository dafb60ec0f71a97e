"""Wrong in one element, by a little."""


def axpy(x, y, *, factor):
    out = factor * x + y
    out[-1, -1] += 0.01 * (1 + out[-1, -1].abs())
    return out
