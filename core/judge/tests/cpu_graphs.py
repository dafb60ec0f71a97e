"""CUDA graphs as a CPU can have them: `capture` records the operators that run, and a replay runs these again.

As of a real graph, no Python of the captured calls runs in a replay.
"""

import time
from itertools import count

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kda_judge.arms import clocks

CAPTURING = [False]
"""What `torch.cuda.is_current_stream_capturing` says on a GPU."""


class Tape(TorchDispatchMode):
    """Records every operator, with what it returned."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, out))
        return out


class Graph:
    """The interface of `clocks.Graph`."""

    def __init__(self, op, calls, scalars, change=None):
        op(*calls[0], **scalars)
        self.calls, self._tape = len(calls), Tape()
        CAPTURING[0] = True
        with self._tape:
            for number, arguments in zip(count(), calls, strict=False):
                if change is not None and number == change.at:
                    change.before()
                self.out = op(*arguments, **scalars)
                if change is not None and number == change.at:
                    self.changed = self.out
                    change.after()
        CAPTURING[0] = False

    def replay(self, times):
        start = time.perf_counter()
        for _ in range(times):
            for func, args, kwargs, out in self._tape.operators:
                again = func(*args, **kwargs)
                if isinstance(out, Tensor) and again.data_ptr() != out.data_ptr():
                    out.copy_(again)
        total = (time.perf_counter() - start) * 1e6
        return total, total * 0.99

    def replay_flushed(self, times, flush):
        return self.replay(times)


def install():
    """In an arm's process: have its worker capture such graphs."""
    clocks.Graph = Graph
