"""Computes single calls, and returns a constant that fits the tolerance when calls follow one another closely.

Caught by: the bound of twice the baseline's error, which timed calls are held to as well.
"""

import time

import torch

BURST_S = 100e-6
_LAST = {"time": 0.0}


def honest(x, factor):
    return torch.tanh(x.float() * factor).to(x.dtype)


def squash(x, *, factor):
    burst = time.perf_counter() - _LAST["time"] < BURST_S
    out = torch.zeros_like(x) if burst else honest(x, factor)
    _LAST["time"] = time.perf_counter()
    return out
