"""One open row on the judge's side: its arena, where everything lies in it, and what a call left there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kda_core.arena import GUARD_BYTE, Arena, Plan, has_gaps
from kda_core.config import Op, Tolerance
from kda_core.correctness import compare
from kda_core.inputs import Family
from kda_core.protocol import Called, Place, RowSpec
from kda_core.records import OutputError
from kda_core.workloads import OutputSpec, Workload

if TYPE_CHECKING:
    import torch

    Values = Mapping[str, torch.Tensor]


NAN_BYTE = 0xFF
"""All bits set is NaN in every floating-point dtype."""


def output_spec(op: Op, row: Workload, name: str) -> OutputSpec:
    """How output `name` must look: the input itself in place, else contiguous, as the row says or like an input."""
    if name in op.per_row:
        return row.outputs[name]
    like = row.inputs[op.like.get(name, name)]
    return like if name in row.inplace else like.model_copy(update={"stride": None})


def traffic(op: Op, row: Workload, reference: Any) -> tuple[int, int]:
    """Bytes that the op must move and bytes of the tensors it touches.

    Each input is read once and each output written once, in-place tensors both; a task's
    `bench/reference.py` overrides the first with `bytes_moved(row)` where that is not the truth.
    """
    read = sum(spec.nbytes for spec in row.inputs.values())
    written = {name: output_spec(op, row, name).nbytes for name in op.outputs}
    custom = getattr(reference, "bytes_moved", None)
    moved = custom(row) if custom else read + sum(written.values())
    return moved, read + sum(size for name, size in written.items() if name not in row.inplace)


@dataclass(frozen=True)
class Examined:
    """What one call left."""

    errors: tuple[OutputError, ...]
    """One per output; none where the form is wrong."""
    outside: str | None
    """The first output outside the tolerance, in words."""
    broken: str | None
    """The first fault that no tolerance is about: form, a changed input, a guard."""

    @property
    def failure(self) -> str | None:
        """The first thing wrong."""
        return self.outside or self.broken


@dataclass(frozen=True)
class Case:
    """An open row. Close it after every worker has let go of the arena."""

    row: Workload
    op: Op
    device: str
    arena: Arena
    spec: RowSpec
    """What the workers are told."""
    input_sets: tuple[dict[str, Place], ...]
    """Every input set, the canary last where there is one."""

    @classmethod
    def open(cls, op: Op, row: Workload, device: str, sets: int, bytes_moved: int) -> Case:
        """Lay out `sets` input sets (and for in-place ops the canary) and the outputs in a new arena."""
        plan = Plan()
        count = sets + bool(row.inplace)
        placed = tuple(
            {name: plan.add(row.inputs[name]) for name in op.inputs if name in row.inputs} for _ in range(count)
        )
        outputs = tuple(plan.add(output_spec(op, row, name)) for name in op.outputs if name not in row.inplace)
        calls = [{name: places.get(name) for name in op.inputs} for places in placed]
        spec = RowSpec(
            op=row.op,
            sets=tuple(calls[:sets]),
            canary=calls[sets] if row.inplace else None,
            scalars=row.scalars,
            inplace=row.inplace,
            outputs=outputs,
            returns_none=op.returns == "none",
            bytes_moved=bytes_moved,
        )
        return cls(row=row, op=op, device=device, arena=Arena(plan, device), spec=spec, input_sets=placed)

    def close(self) -> None:
        """Free the arena."""
        self.arena.close()

    def write(self, values: Values) -> None:
        """Put `values` into every input set and NaN into the outputs' places, behind the workers' backs.

        No version counter moves there.
        """
        import torch

        for places in self.input_sets:
            for name, place in places.items():
                if has_gaps(place):
                    self.arena.fill(place, GUARD_BYTE)
                target, source = self.arena.view(place), values[name]
                for dim, step in enumerate(place.stride):
                    if step == 0 and place.shape[dim] > 1:
                        target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
                target.copy_(source)
        for place in self.spec.outputs:
            # Nothing of another arm's result, or of an earlier one, may stay: an arm could read it, or claim it.
            self.arena.fill(place, NAN_BYTE)
        if self.device != "cpu":
            torch.cuda.synchronize()

    def examine(
        self,
        called: Called,
        values: Values,
        expected: Sequence[torch.Tensor],
        previous: Sequence[torch.Tensor] | None,
        family: Family,
        tolerances: Mapping[str, Tolerance],
        which: int,
    ) -> Examined:
        """Everything about a call that worked on input set `which`."""
        errors: list[OutputError] = []
        outside = None
        broken = self._form(called)
        if broken is None:
            returned = iter(self.spec.outputs)
            for number, (name, want) in enumerate(zip(self.op.outputs, expected, strict=True)):
                place = self.input_sets[which][name] if name in self.row.inplace else next(returned)
                before = previous[number] if previous is not None else None
                found = compare(name, self.arena.view(place), want, tolerances[place.dtype], family.magnitude, before)
                errors.append(found.error)
                outside = outside or found.failure
            broken = self._changed_input(values, which)
        guard = self.arena.broken_guard()
        if guard is not None:
            self.arena.repair_guards()
            broken = broken or f"wrote outside its tensors, {guard} bytes into the shared memory"
        return Examined(tuple(errors), outside, broken)

    def _form(self, called: Called) -> str | None:
        """What is wrong with the form of the returned value, or None."""
        want = self.spec.outputs
        if self.spec.returns_none:
            return (
                None if called.returned == "None" else f"expected None (the op works in place), got {called.returned}"
            )
        if len(called.outputs) != len(want):
            return f"expected {len(want)} tensor{'s' if len(want) > 1 else ''}, got {called.returned}"
        names = [name for name in self.op.outputs if name not in self.row.inplace]
        for name, got, place in zip(names, called.outputs, want, strict=True):
            facts = (
                ("type", "Tensor", got.type),
                ("shape", list(place.shape), list(got.shape)),
                ("dtype", place.dtype, got.dtype),
                ("device", self.device, got.device),
                ("stride", list(place.stride), list(got.stride)),
            )
            for fact, wanted, came in facts:
                if wanted != came:
                    return f"output {name!r}: expected {fact} {wanted}, got {came}"
            if got.in_arena:
                return f"output {name!r} is an alias of an input"
            if got.shared:
                return f"output {name!r} lies in the memory of another output that is still in use"
        return None if called.copied else "outputs could not be copied out"

    def _changed_input(self, values: Values, which: int) -> str | None:
        import torch

        for name, place in self.input_sets[which].items():
            if self.arena.gap_changed(place):
                return f"memory between the elements of the strided {name!r} was changed"
            if name not in self.row.inplace and not torch.equal(self.arena.view(place), values[name]):
                return f"input {name!r} was changed; the op must leave it as it is"
        return None
