"""Returns a subclass that is called like the real thing.

Caught by: the check of the form: types are compared, not names.
"""

import torch


class Tensor(torch.Tensor):
    """Looks like a tensor, also by name."""


def axpy(x, y, *, factor):
    return (factor * x + y).as_subclass(Tensor)
