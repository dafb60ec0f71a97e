"""Find which calls of the tasks' ops one step makes, with the real sizes and all layers, without computing it.

The tensors are PyTorch's fake ones, which have shapes, dtypes and strides but no values, so a model of any size takes
seconds on any machine. A model that reads a value gets 0. SGLang's models read positions, on which no shape depends,
and whether a padding mask holds anything.

As everywhere without a GPU, the fused ops outside of the tasks run in their native forms, which call no op of a task.
Models also ask tensors whether they are on a GPU. At first the answer is yes. The step may then launch a kernel outside
of the tasks, which finds no memory and ends the worker. In that case it is tried once more with the answer no.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_tools.models import builders
from kda_tools.models.calls import Call, Log, Rows
from kda_tools.models.dataflow import Dataflow, fused_bytes
from kda_tools.models.known_models import Model
from kda_tools.models.seams import Seams
from kda_tools.models.stepping import Stepper

ROW = "[[workload]]\n"
KEY = "calls_a_step"


class _ReadsZero(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Values that are read from fake tensors are 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return {torch.bool: bool, torch.float32: float}.get(args[0].dtype, int)(0)
        return func(*args, **(kwargs or {}))


def calls_of(
    model: Model, request: builders.Request, seams: Seams, tasks: Iterable[Task], as_on_gpu: bool
) -> tuple[Call, ...]:
    """The calls of one step of the whole model with the release's own functions.

    With `as_on_gpu` all tensors say that they are on a GPU.
    """
    answer = patch.object(FakeTensor, "is_cuda", new=True) if as_on_gpu else nullcontext()
    with answer, FakeTensorMode(allow_non_fake_inputs=True), _ReadsZero():  # type: ignore[no-untyped-call]
        stepper = _stepped(model, request, model.shortened(0), seams, "upstream")
        log = Log()
        seams.use("upstream", log=log)
        stepper.step()
    return log.calls(Rows(tasks))


def flow_of(model: Model, request: builders.Request, layers: dict[str, int], seams: Seams) -> tuple[int, ...]:
    """Bytes of every kernel that `dataflow.fused_bytes` finds in one step with upstream's eager operations."""
    with FakeTensorMode(allow_non_fake_inputs=True), _ReadsZero():  # type: ignore[no-untyped-call]
        stepper = _stepped(model, request, layers, seams, "eager")
        seams.use("eager")
        with Dataflow() as flow:
            result = stepper.step()
        flow.hand_out(result)
    return tuple(fused_bytes(flow.operations))


def _stepped(model: Model, request: builders.Request, layers: dict[str, int], seams: Seams, arm: str) -> Stepper:
    """The model after its first step, which imports some of its modules."""
    built = builders.build(model, layers, request, values=False)
    seams.attach(built.module)
    stepper = Stepper(built, request.device, request.dtype, model.under_autocast(request.release))
    seams.use(arm)
    stepper.step()
    seams.find_places()
    return stepper


def by_row(found: Iterable[Sequence[Call]]) -> dict[tuple[str, str], int]:
    """(Task, row) -> calls in a step, from the first of these steps that calls the row."""
    known: dict[tuple[str, str], int] = {}
    for calls in found:
        counts: dict[tuple[str, str], int] = {}
        for call in calls:
            if call.row is not None:
                counts[call.task, call.row] = counts.get((call.task, call.row), 0) + call.count
        known = counts | known
    return known


def with_calls(text: str, counts: Mapping[str, int]) -> str:
    """The text of a `workloads.toml` with these calls a step, row id -> calls; other rows stay as they are.

    Raises:
        UsageError: there is no such row.
    """
    head, *rows = text.split(ROW)
    left = dict(counts)
    for number, row in enumerate(rows):
        named = re.search(r'^id = "(.*)"$', row, re.MULTILINE)
        if named is not None and (count := left.pop(named[1], None)) is not None:
            bare = re.sub(rf"^{KEY} = .*\n", "", row, flags=re.MULTILINE)
            above = r"^(production = .*\n)" if "\nproduction = " in bare else r"^(op = .*\n)"
            rows[number] = re.sub(above, rf"\g<1>{KEY} = {count}\n", bare, count=1, flags=re.MULTILINE)
    if left:
        raise UsageError(f"expected rows with these names, found none: {', '.join(left)}")
    return ROW.join([head, *rows])
