"""As `constant_in_the_loop`, and claims one kernel per call whenever it is asked.

Caught by: the bound of twice the baseline's error, which timed calls are held to as well.
"""

import sys

from .constant_in_the_loop import squash

worker = sys.modules["kda_judge.arms.arm_worker"]
worker.Worker.profile = lambda self, count: worker.Counted(calls=count, kernels=count)

__all__ = ["squash"]
