"""Returns a tensor subclass, which could compute later.

Caught by: the check of the form: the exact type is wanted.
"""

import torch


class Lazy(torch.Tensor):
    """Looks like a tensor."""


def axpy(x, y, *, factor):
    return (factor * x + y).as_subclass(Lazy)
