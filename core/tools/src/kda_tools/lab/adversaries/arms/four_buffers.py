"""Allocates four buffers once and returns them in turn, so that a caller who keeps five results loses one.

Caught by: outputs of single calls are kept until the timing begins, and no other may lie in their memory.
"""

import torch

_OUT = []


def axpy(x, y, *, factor):
    if not _OUT or _OUT[0].shape != x.shape:
        _OUT[:] = [torch.empty_like(x) for _ in range(4)]
    _OUT.append(_OUT.pop(0))
    return torch.add(y, x, alpha=factor, out=_OUT[-1])
