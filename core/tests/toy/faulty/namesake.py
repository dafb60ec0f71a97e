"""Returns a subclass that is called like the real thing."""

import torch


class Tensor(torch.Tensor):
    """Looks like a tensor, also by name."""


def axpy(x, y, *, factor):
    return (factor * x + y).as_subclass(Tensor)
