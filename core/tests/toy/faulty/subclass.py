"""Returns a tensor that could compute later."""

import torch


class Lazy(torch.Tensor):
    """Looks like a tensor."""


def axpy(x, y, *, factor):
    return (factor * x + y).as_subclass(Lazy)
