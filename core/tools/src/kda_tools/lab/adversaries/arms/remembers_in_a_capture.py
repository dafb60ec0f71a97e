"""While a CUDA graph is captured, computes once for each input and returns that result again.

Caught by: a graph whose inputs change ahead of one of its calls.
"""

import torch

_LAST = {}


def axpy(x, y, *, factor):
    if not torch.cuda.is_current_stream_capturing():
        _LAST.clear()
        return factor * x + y
    if x.data_ptr() not in _LAST:
        _LAST[x.data_ptr()] = factor * x + y
    return _LAST[x.data_ptr()]
