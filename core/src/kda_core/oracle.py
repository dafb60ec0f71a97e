"""A task's oracle, `bench/reference.py`: load it and ask it. What it answers is checked before anything rests on it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kda_core.case import output_spec
from kda_core.errors import UsageError
from kda_core.inputs import nudged

if TYPE_CHECKING:
    import torch

    from kda_core.config import Op
    from kda_core.tasks import Task
    from kda_core.workloads import Workload

DTYPES = ("float64", "float32")
"""float32 only where memory forbids float64; the record says which it was."""

NUDGES = 8
"""Draws of directions for `last_bits`: one alone may leave a small output nearly where it was."""


def load_reference(task: Task) -> Any:
    """The task's reference module; a UsageError names an op it has no oracle for."""
    root = str(task.path.parents[1])
    if root not in sys.path:
        sys.path.insert(0, root)
    module = importlib.import_module(f"{task.package}.bench.reference")
    for op in task.config.ops:
        if not callable(getattr(module, op, None)):
            raise UsageError(
                f"{task.path / 'bench' / 'reference.py'}: expected a function {op!r}, the oracle of that op"
            )
    return module


def ask_oracle(reference: Any, op: Op, row: Workload, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What the outputs of `row` must be, one float64 (or float32) tensor per output of the op, in order."""
    import torch

    where = f"{reference.__file__}: {row.op}, row {row.id!r}"
    try:
        expected = getattr(reference, row.op)(*(values.get(name) for name in op.inputs), **row.scalars)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(f"{where}: the oracle raised {type(error).__name__}: {error}") from error
    if not isinstance(expected, tuple) or len(expected) != len(op.outputs):
        came = f"tuple of {len(expected)}" if isinstance(expected, tuple) else type(expected).__name__
        raise UsageError(f"{where}: expected a tuple of {len(op.outputs)} tensors, one per output, got {came}")
    for name, tensor in zip(op.outputs, expected, strict=True):
        shape = output_spec(op, row, name).shape
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape:
            hint = "; sizes that are sums or products of others shrink on a CPU unless [cpu] keep names them"
            raise UsageError(
                f"{where}: output {name!r}: expected shape {list(shape)}, got {list(tensor.shape)}"
                f"{hint if name in op.per_row else ''}"
            )
        if dtype not in DTYPES:
            raise UsageError(f"{where}: output {name!r}: expected dtype {' or '.join(DTYPES)}, got {dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{where}: output {name!r} of the oracle is not finite everywhere")
    return expected


def last_bits(
    reference: Any,
    op: Op,
    row: Workload,
    values: Mapping[str, torch.Tensor],
    expected: tuple[torch.Tensor, ...],
    seed: str,
) -> list[float]:
    """Output by output, how far the last bit of float32 inputs moves it: the largest change over `NUDGES` draws.

    Every element of every float32 input goes to the next number above or below. No kernel can be blamed for an error of
    that size: it is what one rounding of its inputs would have done.
    """
    changes = [0.0] * len(expected)
    for draw in range(NUDGES):
        moved = ask_oracle(reference, op, row, nudged(values, f"{seed}/{draw}"))
        for place, (new, old) in enumerate(zip(moved, expected, strict=True)):
            if old.numel():
                changes[place] = max(changes[place], float((new - old).abs_().max()))
    return changes
