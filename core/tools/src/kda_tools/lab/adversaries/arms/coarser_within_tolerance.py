"""Computes a bfloat16 row in 8 bits, within the tolerance.

Caught by: the bound of twice the opponent's error.
"""

import torch


def squash(x, *, factor):
    return torch.tanh(x.to(torch.float8_e4m3fn).float() * factor).to(x.dtype)
