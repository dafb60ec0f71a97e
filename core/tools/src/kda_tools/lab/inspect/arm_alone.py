"""Runs one arm alone in its process, for tools that inspect kernels: no judge, no clock, no oracle.

Started as `python -m kda_tools.lab.inspect.arm_alone JOB DONE`: JOB is the path of a `Job` as JSON, DONE a file that
gets the id of every row whose calls all ended. It imports the arm and fills the row's inputs as a worker does, but
every tensor has an allocation of its own, so that a memory checker sees where each one ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_judge.arms.arm_import import callable_of, import_arm, tensors_first
from kda_judge.arms.input_values import Family, make
from kda_judge.arms.process_tree import die_with_parent, supervise
from kda_judge.arms.protocol import ArmSpec
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload

if TYPE_CHECKING:
    import torch

STARTER = "KDA_STARTER"
"""Environment variable with the id of the starting process: its direct child ends with it, and takes its tree along."""


class Visit(Strict):
    """One row to call."""

    row: Workload
    inputs: tuple[str, ...]
    """The op's tensor arguments in positional order; those that the row leaves out are passed as None."""
    by_name: bool = False
    """Whether the tensors are passed by keyword."""


class Job(Strict):
    """What the process does."""

    arm: ArmSpec
    visits: tuple[Visit, ...]
    order: tuple[int, ...]
    """The input set that each call of a row works on, for example (0, 0, 1): twice the first, once a second one."""
    draw_on: str
    """Device that draws the values: the arm's own as in a benchmark, or `cpu`, which launches no other kernels."""
    mark_last: bool = False
    """Put the last call of a row, and nothing else, between cudaProfilerStart and cudaProfilerStop."""


def run(job: Job, done: Path) -> None:
    """Call every row and note it in `done`. Whatever the arm raises ends the process with a traceback."""
    import torch

    cuda = job.arm.device.startswith("cuda")
    module = import_arm(job.arm)
    with torch.no_grad():
        for visit in job.visits:
            op = tensors_first(callable_of(module, job.arm, visit.row.op), visit.inputs, visit.by_name)
            sets = {number: _arguments(visit, number, job) for number in sorted(set(job.order))}
            for position, number in enumerate(job.order):
                marked = job.mark_last and cuda and position == len(job.order) - 1
                _call(partial(op, *sets[number], **visit.row.scalars), cuda, marked)
            with done.open("a", encoding="utf-8") as file:
                file.write(f"{visit.row.id}\n")


def _arguments(visit: Visit, seed: int, job: Job) -> tuple[torch.Tensor | None, ...]:
    values = make(visit.row, Family.NORMAL, seed, job.draw_on)
    specs = visit.row.inputs
    return tuple(
        with_strides(values[name], specs[name], job.arm.device) if name in specs else None for name in visit.inputs
    )


def with_strides(value: torch.Tensor, spec: TensorSpec, device: str) -> torch.Tensor:
    """`value` in memory of its own on `device`, with the strides of `spec`."""
    import torch

    tensor = torch.empty_strided(spec.shape, spec.strides, dtype=value.dtype, device=device)
    target, source = tensor, value
    for dim, step in enumerate(spec.strides):
        if step == 0 and spec.shape[dim] > 1:  # a broadcast dimension holds one value
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return tensor


def _call(op: Callable[[], Any], cuda: bool, marked: bool) -> None:
    import torch

    if marked:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    op()
    if cuda:
        torch.cuda.synchronize()
    if marked:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def end_with_starter() -> None:
    """Return in a child whose supervisor ends it, and all that it starts, with the starter, or on SIGTERM.

    A compiler's processes may be in groups of their own, as those of ninja are. Below a tool no starter is set: a tool
    may fork in any thread.
    """
    if starter := os.environ.get(STARTER):
        die_with_parent(signal.SIGKILL)  # nothing is started yet; from `supervise` on the signal is SIGTERM
        if os.getppid() != int(starter):
            sys.exit("the process that started this one has ended")
        supervise(os.open(os.devnull, os.O_RDONLY))


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    end_with_starter()
    job, done = map(Path, arguments)
    run(Job.model_validate_json(job.read_text(encoding="utf-8")), done)


if __name__ == "__main__":
    main(sys.argv[1:])
