"""Returns unwritten memory, and computes when the worker hands it to the judge, through the worker's own method.

Caught by: the copy, which calls methods that were bound before the arm was imported.
"""

import sys

import torch

worker = sys.modules["kda_judge.arms.arm_worker"]
_hand_back = worker.Worker._hand_back
_PENDING = {}


def late(self, result):
    # Not taken out: a replayed graph has its one output handed back again and again.
    x, y, factor = _PENDING[result.data_ptr()]
    torch.add(y, x, alpha=factor, out=result)
    return _hand_back(self, result)


worker.Worker._hand_back = late


def axpy(x, y, *, factor):
    out = torch.empty_like(x)
    _PENDING[out.data_ptr()] = (x, y, factor)
    return out
