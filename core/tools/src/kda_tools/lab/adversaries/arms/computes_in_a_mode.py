"""Returns unwritten memory, and computes when the worker copies it out, in a dispatch mode that it leaves switched on.

Caught by: the copy, which is made by address and past torch.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PENDING = {}


class Late(TorchDispatchMode):
    """Sees every operation of the process, the worker's copy among them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        source = args[1] if func is torch.ops.aten.copy_.default else None
        work = None if source is None else _PENDING.pop(source.data_ptr(), None)
        if work is not None:
            x, y, factor = work
            torch.add(y, x, alpha=factor, out=source)
        return func(*args, **(kwargs or {}))


def axpy(x, y, *, factor):
    if not _PENDING.get("on"):
        _PENDING["on"] = Late().__enter__()
    out = torch.empty_like(x)
    _PENDING[out.data_ptr()] = (x, y, factor)
    return out
