"""Load a task's oracle, `bench/reference.py`, and ask it. Its answers are checked before anything relies on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kda_judge.arms.input_values import nudged
from kda_judge.contract.errors import UsageError
from kda_judge.evidence.provenance import drop_bytecode
from kda_judge.judge.open_row import Expected, judged_shape

if TYPE_CHECKING:
    import torch

    from kda_judge.contract.config import Op
    from kda_judge.contract.tasks import Task
    from kda_judge.contract.workloads import Workload

DTYPES = ("float64", "float32")
"""float32 only where memory forbids float64; the record says which it was."""

NUDGES = 8
"""How often `last_bits` draws directions: after a single draw a small output may have hardly changed."""


def load_reference(task: Task) -> Any:
    """The task's reference module; a UsageError names an op it has no oracle for."""
    drop_bytecode(task, "bench")
    module = task.load("bench.reference")
    for op in task.config.ops:
        if not callable(getattr(module, op, None)):
            raise UsageError(
                f"{task.path / 'bench' / 'reference.py'}: expected a function {op!r}, the oracle of that op"
            )
    return module


def ask_oracle(reference: Any, op: Op, row: Workload, values: Mapping[str, torch.Tensor]) -> Expected:
    """What the outputs of `row` must be, one float64 (or float32) tensor per output of the op, in order.

    Of a pool, only the rows that the slots name. Outputs with the rule `indices` get their keys from the reference's
    `keys(row, values)`, a dict of tensors by the output's name, float64 or float32. Without that function, or without
    such an output in the dict, the indices themselves are compared.
    """
    import torch

    where = f"{reference.__file__}: {row.op}, row {row.id!r}"
    try:
        expected = getattr(reference, row.op)(*(values.get(name) for name in op.inputs), **row.scalars)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(f"{where}: the oracle raised {type(error).__name__}: {error}") from error
    if not isinstance(expected, tuple) or len(expected) != len(op.outputs):
        got = f"tuple of {len(expected)}" if isinstance(expected, tuple) else type(expected).__name__
        raise UsageError(f"{where}: expected a tuple of {len(op.outputs)} tensors, one per output, got {got}")
    for name, tensor in zip(op.outputs, expected, strict=True):
        shape = judged_shape(op, row, name)
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
    return Expected(expected, _keys(reference, op, row, values, where))


def _keys(
    reference: Any, op: Op, row: Workload, values: Mapping[str, torch.Tensor], where: str
) -> dict[str, torch.Tensor]:
    """Output -> the key of each index, [..., n] with the output's leading dimensions, or [n]; checked."""
    named = {name: op.rules[name] for name in op.outputs if name in op.rules and op.rules[name].rule == "indices"}
    if not named or not hasattr(reference, "keys"):
        return {}
    found = reference.keys(row, values)
    if not isinstance(found, dict) or not set(found) <= set(named):
        got = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise UsageError(f"{where}: keys: expected a dict for outputs of {sorted(named)}, got {got}")
    for name, keys in found.items():
        dtype, leading = str(keys.dtype).removeprefix("torch."), judged_shape(op, row, name)[:-1]
        if dtype not in DTYPES or not keys.dim() or tuple(keys.shape[:-1]) not in ((), leading):
            raise UsageError(
                f"{where}: keys of output {name!r}: expected {' or '.join(DTYPES)} {[*leading, 'n']} or ['n'], got "
                f"{dtype} {list(keys.shape)}"
            )
    return found


def last_bits(
    reference: Any,
    op: Op,
    row: Workload,
    values: Mapping[str, torch.Tensor],
    expected: Expected,
    seed: str,
) -> list[float]:
    """For each output, its largest change over `NUDGES` draws when the last bit of the float32 inputs changes.

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
