"""Computes in 8 bits, and a thread adds as large an error to the opponent's output, in the memory that all arms map.

Caught by: the baseline's error: other arms are held while one is verified.
"""

import ctypes
import gc
import threading
import time

import torch

_STATE = {}
_READY = threading.Event()
ERROR = 1e-2
"""More than rounding to 8 bits makes of what `squash` returns, and far within the tolerance."""


def squash(x, *, factor):
    if not _STATE:
        _STATE["own"] = 0.0
        _STATE["thread"] = threading.Thread(target=spoil, daemon=True)
        _STATE["thread"].start()
        _READY.wait()
    _STATE["own"] = time.perf_counter()
    return torch.tanh(x.float() * factor).to(torch.float8_e5m2).to(x.dtype)


def spoil():
    worker = next(one for one in gc.get_objects() if type(one).__name__ == "Worker")
    wrong = torch.tensor([ERROR], dtype=torch.bfloat16).view(torch.int16).item()
    _READY.set()
    while True:
        arena, row = worker._arena, worker._open  # held here: it stays mapped
        if arena is None or row is None:
            time.sleep(0.001)
            continue
        first = ctypes.c_uint16.from_address(arena.data_ptr() + row.spec.outputs[0].offset)
        while worker._arena is arena:
            if time.perf_counter() - _STATE["own"] < 0.001:
                time.sleep(0.0005)  # ours lies there
            elif first.value not in (0xFFFF, wrong):  # written, by the opponent
                first.value = wrong
            else:
                time.sleep(0.00002)
