"""Writes past the end of an input's memory.

Caught by: guards between the arena's tensors.
"""

import ctypes

import torch


class Memory:
    """Bytes of a GPU, in the form that torch adopts."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}


def axpy(x, y, *, factor):
    behind = x.data_ptr() + x.numel() * x.element_size() + 16
    if x.is_cuda:
        torch.as_tensor(Memory(behind, 8), device=x.device).zero_()
    else:
        ctypes.memset(behind, 0, 8)
    return factor * x + y
