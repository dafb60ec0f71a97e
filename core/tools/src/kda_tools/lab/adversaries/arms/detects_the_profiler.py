"""As `constant_in_the_loop`, but honest while a profiler runs.

Caught by: the bound of twice the baseline's error, which timed calls are held to as well.
"""

import torch

from . import constant_in_the_loop


def squash(x, *, factor):
    if torch.autograd._profiler_enabled():
        return constant_in_the_loop.honest(x, factor)
    return constant_in_the_loop.squash(x, factor=factor)
