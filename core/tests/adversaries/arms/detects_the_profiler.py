"""As `constant_in_the_loop`, but honest while a profiler runs.

Caught by: nothing: timed calls are held to the tolerance alone, and the profiler is all that counts their kernels.
"""

import torch

from . import constant_in_the_loop


def squash(x, *, factor):
    if torch.autograd._profiler_enabled():
        return constant_in_the_loop.honest(x, factor)
    return constant_in_the_loop.squash(x, factor=factor)
