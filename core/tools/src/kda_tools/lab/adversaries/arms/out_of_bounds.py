"""Writes past the end of an input's memory.

Caught by: guards between the arena's tensors.
"""

import ctypes

import torch


class Memory:
    """Bytes of a GPU, in the form that torch adopts."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}


def wipe(address, device):
    """Eight bytes at an address."""
    if device.type == "cuda":
        torch.as_tensor(Memory(address, 8), device=device).zero_()
    else:
        ctypes.memset(address, 0, 8)


def axpy(x, y, *, factor):
    wipe(x.data_ptr() + x.numel() * x.element_size() + 16, x.device)
    return factor * x + y
