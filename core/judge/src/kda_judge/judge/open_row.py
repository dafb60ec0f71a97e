"""One open row on the judge's side: its arena, where everything lies in it, and what a call left there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from kda_judge.arms.arena import GUARD_BYTE, Arena, Plan, as_bits, has_gaps
from kda_judge.arms.input_values import Family
from kda_judge.arms.protocol import Called, Place, RowSpec, Traffic
from kda_judge.contract.config import Op, Tolerance
from kda_judge.contract.tensor_spec import INTEGRAL, ITEM_SIZE, OutputSpec
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import OutputError
from kda_judge.judge.output_rules import judged

if TYPE_CHECKING:
    import torch

    Values = Mapping[str, torch.Tensor]


NAN_BYTE = 0xFF
"""All bits set is NaN in every floating-point dtype."""
RESTORED_SETS = 20
"""Input sets of a row with `restore`, whose calls all work on values as drawn: a graph uses each set once."""
COLD_SETS = 64
"""Most input sets for cold inputs. Where more would be needed, other memory is read before each replay."""


class Expected(tuple[Any, ...]):
    """What the oracle wants, one float64 (or float32) tensor per output, in order; of a pool the rows that slots name.

    `keys` holds what stands at the indices that an output may name: [..., n] with its leading dimensions, or [n].
    """

    keys: Mapping[str, torch.Tensor]

    def __new__(cls, outputs: Iterable[torch.Tensor], keys: Mapping[str, torch.Tensor]) -> Expected:
        """A tuple of `outputs`, with `keys` beside it."""
        made = super().__new__(cls, outputs)
        made.keys = keys
        return made


def output_spec(op: Op, row: Workload, name: str) -> OutputSpec:
    """The spec of output `name`: in place the input's own, else contiguous, as the row says or like an input."""
    if name in op.per_row:
        return row.outputs[name]
    like = row.inputs[op.like.get(name, name)]
    return like if name in row.inplace else like.model_copy(update={"stride": None})


def judged_shape(op: Op, row: Workload, name: str) -> tuple[int, ...]:
    """Shape of what is compared of output `name`: all of it, or of a pool one row per slot."""
    shape = output_spec(op, row, name).shape
    return (prod(row.inputs[op.pools[name]].shape), *shape[1:]) if name in op.pools else shape


def traffic(op: Op, row: Workload, reference: Any) -> Traffic:
    """Bytes that the op must move.

    Each input is read once and each output written once, in-place tensors both; of a pool only the rows that slots name
    are written. Where that is not true, `bytes_moved(row)` of the task's `bench/reference.py` gives all bytes moved;
    what it has besides the written bytes counts as read.
    """
    written = sum(_touched(op, row, name) for name in op.outputs)
    custom = getattr(reference, "bytes_moved", None)
    read = (
        custom(row) - written
        if custom
        else sum(spec.nbytes for name, spec in row.inputs.items() if name not in op.pools)
    )
    # What is read and written at one place counts twice as traffic, and once as memory.
    in_place = 2 * (read + written - footprint(op, row)) >= written > 0
    return Traffic(read=read, written=written, in_place=in_place)


def _touched(op: Op, row: Workload, name: str) -> int:
    """Bytes of output `name` that a call writes."""
    spec = output_spec(op, row, name)
    return prod(judged_shape(op, row, name)) * ITEM_SIZE[spec.dtype] if name in op.pools else spec.nbytes


def footprint(op: Op, row: Workload) -> int:
    """Bytes of the tensors that the op touches."""
    made = sum(_touched(op, row, name) for name in op.outputs if name not in row.inplace or name in op.pools)
    return made + sum(spec.nbytes for name, spec in row.inputs.items() if name not in op.pools)


@dataclass(frozen=True)
class Examined:
    """What the checks of one call found."""

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
    """The row as the workers get it."""
    input_sets: tuple[dict[str, Place], ...]
    """Every input set, the canary last where there is one."""
    slices: dict[str, Place]
    """The inputs of the one call on slices; empty where no such call is made."""
    drawn: dict[str, torch.Tensor] = field(default_factory=dict)
    """The values that were written last."""

    @classmethod
    def open(
        cls, op: Op, row: Workload, device: str, moved: Traffic, slices: bool = False, beyond: tuple[int, int] = (0, 0)
    ) -> Case:
        """Lay out the input sets (and for in-place ops the canary), `slices`, and the outputs in a new arena.

        Times with hot inputs use the first set, or in a row with `restore` the first `RESTORED_SETS`. `beyond` has the
        bytes of a cache and of the tensors that one call touches; if given, there are sets for cold inputs, too.
        """
        plan = Plan()
        hot = RESTORED_SETS if row.restore else 1
        cache, touched = beyond
        wanted = 2 + 2 * cache // max(touched, 1) if cache else 1
        sets = max(min(wanted, COLD_SETS), hot)
        count = sets + bool(row.inplace)
        names = [name for name in op.inputs if name in row.inputs]
        placed = tuple({name: plan.add(row.inputs[name]) for name in names} for _ in range(count))
        sliced = {name: plan.add(row.inputs[name], elements=1) for name in names if slices}
        outputs = tuple(plan.add(output_spec(op, row, name)) for name in op.outputs if name not in row.inplace)
        calls = [{name: places.get(name) for name in op.inputs} for places in (*placed, sliced)]
        spec = RowSpec(
            op=row.op,
            sets=tuple(calls[:sets]),
            hot=hot,
            flush=2 * cache if sets < wanted else 0,
            canary=calls[sets] if row.inplace else None,
            slices=calls[-1] if slices else None,
            scalars=row.scalars,
            inplace=row.inplace,
            outputs=outputs,
            returns_none=op.returns == "none",
            by_name=op.by_name,
            traffic=moved,
        )
        return cls(row, op, device, Arena(plan, device), spec, placed, sliced)

    def close(self) -> None:
        """Free the arena."""
        self.arena.close()

    def write(self, values: Values, cold: bool = False, slices: bool = False) -> None:
        """Put `values` into the hot input sets, into all or into the slices, and NaN into the outputs' places.

        The workers cannot notice: no version counter of their tensors changes.
        """
        for places in self._written(slices):
            for place in filter(has_gaps, places.values()):
                self.arena.fill(place, GUARD_BYTE)
        for place in self.spec.outputs:
            # Nothing of another arm's result, or of an earlier one, may stay: an arm could read it, or claim it.
            # Integers get another byte: all bits set is -1, which padding often is.
            self.arena.fill(place, GUARD_BYTE if place.dtype in INTEGRAL else NAN_BYTE)
        self.replace(values, cold, slices)

    def replace(self, values: Values, cold: bool = False, slices: bool = False) -> None:
        """Write the inputs alone. Calls may be running, so elements that stay the same never hold anything else."""
        self.drawn.clear()
        self.drawn.update(values)
        for places in self._written(slices):
            self._put(values, places)
        sets = len(self.spec.sets) if cold else self.spec.hot
        if sets > 1 and not slices:  # laid out alike, one behind the other: one copy writes them all
            start, second = (min(place.offset for place in places.values()) for places in self.input_sets[:2])
            blocks = self.arena.bytes[start : start + sets * (second - start)].view(sets, -1)
            blocks[1:] = blocks[0]
        self._finish()

    def offer(self, values: Values) -> None:
        """Put `values` into the last input set alone, from which a graph copies them before one of its calls."""
        places = self.input_sets[self.last_set]
        for place in filter(has_gaps, places.values()):
            self.arena.fill(place, GUARD_BYTE)
        self._put(values, places)
        self._finish()

    @property
    def last_set(self) -> int:
        """Number of the last input set, the canary not counted."""
        return len(self.spec.sets) - 1

    def _put(self, values: Values, places: Mapping[str, Place]) -> None:
        for name, place in places.items():
            target, source = self.arena.view(place), values[name]
            for dim, step in enumerate(place.stride):
                if step == 0 and place.shape[dim] > 1:
                    target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
            target.copy_(source)

    def _finish(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()

    def _written(self, slices: bool) -> Sequence[Mapping[str, Place]]:
        """The input sets that are written tensor by tensor: the slices, or the first set and the canary."""
        return (self.slices,) if slices else (self.input_sets[0], *self.input_sets[len(self.spec.sets) :])

    def restore(self) -> None:
        """In place: write the last values again, so that the next timed call does not start from what others left."""
        if self.row.inplace and self.drawn:
            self.write(dict(self.drawn))

    def most_calls(self, limit: int) -> int:
        """Calls that one sample may make: as many as there are hot input sets where none may be used twice."""
        return min(limit, self.spec.hot) if self.row.restore else limit

    def outputs(self, values: Values) -> list[torch.Tensor]:
        """What is compared of each output that a single call left, in place or handed back."""
        returned = iter(self.spec.outputs)
        places = [self.input_sets[0][name] if name in self.row.inplace else next(returned) for name in self.op.outputs]
        return [
            self.judged_part(name, self.arena.view(place), values)
            for name, place in zip(self.op.outputs, places, strict=True)
        ]

    def examine(
        self,
        called: Called,
        values: Values,
        expected: Expected,
        previous: Sequence[torch.Tensor] | None,
        family: Family,
        tolerances: Mapping[str, Tolerance],
        which: int | None,
    ) -> Examined:
        """Check everything about a call that worked on input set `which`, or for None on the slices."""
        worked_on = self.slices if which is None else self.input_sets[which]
        errors: list[OutputError] = []
        outside = None
        broken = self._form(called)
        if broken is None:
            returned = iter(self.spec.outputs)
            for number, (name, want) in enumerate(zip(self.op.outputs, expected, strict=True)):
                place = worked_on[name] if name in self.row.inplace else next(returned)
                before = previous[number] if previous is not None else None
                out, keys = self.judged_part(name, self.arena.view(place), values), expected.keys.get(name)
                found = judged(name, self.op.rules.get(name), tolerances, out, want, family.magnitude, before, keys)
                errors.append(found.error)
                outside = outside or found.failure
            broken = self._changed_input(values, worked_on)
        if called.overrun:
            broken = broken or "wrote past the beginning or the end of memory that it allocated"
        guard = self.arena.broken_guard()
        if guard is not None:
            self.arena.repair_guards()
            broken = broken or f"wrote outside its tensors, {guard} bytes into the shared memory"
        return Examined(tuple(errors), outside, broken)

    def _form(self, called: Called) -> str | None:
        """What is wrong with the form of the returned value, or None."""
        want = self.spec.outputs
        if self.op.returns == "argument":
            written = [self.row.inputs[name] for name in self.op.outputs]
            shapes = [(got.in_arena, got.shape, got.dtype) for got in called.outputs]
            fits = shapes == [(True, one.shape, one.dtype) for one in written]
            named = " and ".join(map(repr, self.op.outputs))
            return None if fits else f"expected {named}, which it wrote into, got {called.returned}"
        if self.spec.returns_none:
            return (
                None if called.returned == "None" else f"expected None (the op works in place), got {called.returned}"
            )
        if len(called.outputs) != len(want) or (len(want) == 1 and called.returned != "tensor"):
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
            for fact, wanted, found in facts:
                if wanted != found:
                    return f"output {name!r}: expected {fact} {wanted}, got {found}"
            if got.in_arena:
                return f"output {name!r} is an alias of an input"
            if got.shared:
                return f"output {name!r} lies in the memory of another output that is still in use"
        return None if called.copied else "outputs could not be copied out"

    def judged_part(self, name: str, out: torch.Tensor, values: Values) -> torch.Tensor:
        """What is compared of an output: all of it, or of a pool the rows that the slots among `values` name."""
        if name not in self.op.pools:
            return out
        return as_bits(out).index_select(0, self._slots(name, values)).view(out.dtype)

    def _slots(self, pool: str, values: Values) -> torch.Tensor:
        """The rows of a pool that the op writes, int64, one dimension."""
        return values[self.op.pools[pool]].reshape(-1).long()

    def _changed_input(self, values: Values, worked_on: Mapping[str, Place]) -> str | None:
        for name, place in worked_on.items():
            if self.arena.gap_changed(place):
                return f"memory between the elements of the strided {name!r} was changed"
            if name in self.row.inplace and name not in self.op.pools:
                continue
            changed = as_bits(self.arena.view(place)) != as_bits(values[name])
            if name not in self.op.pools:
                if bool(changed.any()):
                    return f"input {name!r} was changed; the op must leave it as it is"
                continue
            rows = changed.flatten(1).any(1)
            rows[self._slots(name, values)] = False
            if bool(rows.any()):
                return (
                    f"row {int(rows.nonzero()[0])} of {name!r} was changed, which {self.op.pools[name]!r} does not name"
                )
        return None
