"""Returns unwritten memory, and computes when the worker copies it out, through a patched `Tensor.detach`.

Caught by: the copy, which is made by address and past torch.
"""

import torch

_PENDING = {}
_detach = torch.Tensor.detach


def late(tensor):
    work = _PENDING.pop(tensor.data_ptr(), None)
    if work is not None:
        x, y, factor = work
        torch.add(y, x, alpha=factor, out=tensor)
    return _detach(tensor)


torch.Tensor.detach = late


def axpy(x, y, *, factor):
    out = torch.empty_like(x)
    _PENDING[out.data_ptr()] = (x, y, factor)
    return out
