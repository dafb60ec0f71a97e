"""Check what arms compute: draw inputs, make verified calls, and compare the outputs with the oracle's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kda_judge.arms.arm_process import ArmProcess, Refusal
from kda_judge.arms.input_values import Family, make
from kda_judge.arms.protocol import Called
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import LIMIT_ARM, OutputError
from kda_judge.judge.correctness import INPUT_ROUNDINGS, distance, further, worse, worse_than_baseline
from kda_judge.judge.idle_arms import alone
from kda_judge.judge.open_row import Case, Examined, output_spec
from kda_judge.judge.oracle import ask_oracle, last_bits
from kda_judge.judge.row_notes import ArmNotes, RowNotes
from kda_judge.judge.run_setup import Setup

if TYPE_CHECKING:
    import torch

REDRAWN = 64
"""`redraw` changes one part in this many of an input."""
ROUNDED = ("float32", "float16", "bfloat16")
"""Dtypes in which a draw's expected outputs are remembered."""
SPARE = 1 / 32
"""Share of a GPU's memory that the judge may hold unused: the oracle needs many times what an arm does."""


def give_back(device: str) -> None:
    """Give memory that the oracle has used back to the GPU, where all arms need theirs too."""
    import torch

    if device == "cpu":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > SPARE * total:
        torch.cuda.empty_cache()


def rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """In `dtype`, if it is one of `ROUNDED`."""
    import torch

    return values.to(getattr(torch, dtype)) if dtype in ROUNDED else values


class Checker:
    """Draws inputs, asks the oracle, and notes what is wrong with the arms' outputs."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.random = random.Random()  # seeded by the system: arms must not foresee the draws
        self.previous: tuple[torch.Tensor, ...] | None = None
        """The expected outputs of the draw before, rounded: an arm may have remembered its results."""
        self._drawn = ""

    def seed(self) -> int:
        """A seed that no file names."""
        return self.random.getrandbits(31)

    def draw(self, case: Case, notes: RowNotes, family: Family, seed: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Values of every input, and what the oracle makes of them."""
        with self._setup.spent.on("draws"):
            values = make(case.row, family, seed, self._setup.device)
        self._drawn = f"{family.value}, seed {seed}"
        with self._setup.spent.on("oracle"):
            expected = ask_oracle(self._setup.reference, case.op, case.row, values)
            give_back(self._setup.device)
        notes.oracle_dtype = str(expected[0].dtype).removeprefix("torch.")
        return values, expected

    def remember(self, case: Case, expected: tuple[torch.Tensor, ...]) -> None:
        """Keep a draw's expected outputs as an arm would return them: float64 takes up to four times the memory."""
        specs = [output_spec(case.op, case.row, name) for name in case.op.outputs]
        self.previous = tuple(rounded(one, spec.dtype) for one, spec in zip(expected, specs, strict=True))

    def redraw(self, case: Case, old: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """`old` with one stretch of every input drawn again: an arm that looks at a few elements sees no change."""
        with self._setup.spent.on("draws"):
            drawn, changed = make(case.row, Family.NORMAL, self.seed(), self._setup.device), {}
        for name, value in old.items():
            if value.is_floating_point() and value.is_contiguous() and value.numel() >= REDRAWN:
                flat, count = value.clone().view(-1), value.numel()
                start = self.random.randrange(count // 4, count - count // REDRAWN)  # the first few are looked at most
                stretch = slice(start, start + count // REDRAWN)
                flat[stretch] = drawn[name].reshape(-1)[stretch]
                changed[name] = flat.view(value.shape)
        values = {**old, **changed} if changed else drawn  # inputs too small to cut a stretch out of are all new
        self._drawn = f"a {REDRAWN}th of them drawn again"
        with self._setup.spent.on("oracle"):
            return values, ask_oracle(self._setup.reference, case.op, case.row, values)

    def write(self, case: Case, values: Any, cold: bool = False, slices: bool = False) -> None:
        """Put values into the row's buffers, as `Case.write`."""
        with self._setup.spent.on("writing inputs"):
            case.write(values, cold, slices)

    def takes_slices(self, row: Workload) -> bool:
        """Whether the subject has to be right on slices; an arm of upstream does not."""
        upstream = self._setup.config.arms[self._setup.settings.subject].upstream
        return not (self._setup.config.ops[row.op].takes_no_slices or upstream)

    def verify(
        self, case: Case, notes: RowNotes, seed: int, family: Family, slices: bool = False, twice: bool = False
    ) -> None:
        """Make one call of every arm on the same values, and compare it in full; on slices, of the subject alone.

        Upstream may refuse slices, and a misaligned access would end its process. With `twice`, an op that does not
        work in place is called again, and the second result needs memory of its own.
        """
        how = {"slices": slices, "twice": twice and not case.row.inplace}
        values, expected = self.draw(case, notes, family, seed)
        self._drawn += ", in slices" * slices
        errors: dict[str, Sequence[OutputError]] = {}
        ours: tuple[torch.Tensor, ...] = ()
        subject = self._setup.settings.subject
        for name, arm in sorted(notes.usable(self._setup.arms), key=lambda one: one[0] != subject):
            if name == LIMIT_ARM or (slices and name != subject):
                continue
            self.write(case, values, slices=slices)
            which = None if slices else 0
            with notes.arms[name].noting(), alone(name, self._setup.arms):
                called = self._called(notes.arms[name], arm, how)
                if called is not None:
                    errors[name] = self.examine(case, notes.arms[name], called, values, expected, family, which)
            if errors.get(name) and not slices:
                outputs = case.outputs(values)
                if name == subject:
                    ours = tuple(output.clone() for output in outputs) if len(self._setup.arms) > 1 else ()
                for output, one, other in zip(case.op.outputs, ours, outputs, strict=False) if name != subject else ():
                    known = notes.arms[name].distance
                    known[output] = further(known.get(output), distance(output, one, other))
        self.remember(case, expected)
        self.hold_to_yardstick(case, notes, values, expected, errors)

    def _called(self, notes: ArmNotes, arm: ArmProcess, how: Mapping[str, Any]) -> Called | None:
        """The worker's report of one call; None where an excused arm refused the call, which is noted."""
        try:
            return arm.ask("verify", Called, refusable=notes.excused, **how)[0]
        except Refusal as refusal:
            notes.outside = notes.outside or refusal.reason
            return None

    def hold_to_yardstick(
        self, case: Case, notes: RowNotes, values: Any, expected: Any, errors: Mapping[str, Sequence[OutputError]]
    ) -> None:
        """Compare the subject's errors of one draw with the first opponent's, where both are right."""
        subject, yardstick = self._setup.settings.subject, self._setup.settings.against[0]
        for own, base in zip(errors.get(subject, ()), errors.get(yardstick, ()), strict=False):
            if not case.op.tolerated(own.output):
                continue  # its rule alone decides: one unit more than the opponent's is not twice its error
            failure = worse_than_baseline(own, base)
            allowed = INPUT_ROUNDINGS.get(output_spec(case.op, case.row, own.output).dtype)
            if failure is not None and allowed is not None:
                seed = f"{case.row.id}/{self._drawn}"
                changes = last_bits(self._setup.reference, case.op, case.row, values, expected, seed)
                failure = worse_than_baseline(own, base, allowed * changes[case.op.outputs.index(own.output)])
            if failure is not None:
                notes.arms[subject].incorrect = notes.arms[subject].incorrect or f"{failure} [inputs: {self._drawn}]"

    def examine(
        self, case: Case, arm: ArmNotes, called: Called, values: Any, expected: Any, family: Family, which: int | None
    ) -> Sequence[OutputError]:
        """Note what is wrong with a call. Returns its errors if it is right, since a wrong call is no yardstick."""
        found = self.compare(case, called, values, expected, family, which)
        arm.checks += 1
        arm.incorrect = arm.incorrect or (found.broken if arm.excused else found.failure)
        if arm.excused:
            arm.outside = arm.outside or found.outside
        for error in found.errors:
            arm.errors[error.output] = worse(arm.errors.get(error.output, error), error)
        return found.errors if found.failure is None else ()

    def compare(
        self, case: Case, called: Called, values: Any, expected: Any, family: Family, which: int | None
    ) -> Examined:
        """Compare what a call left with the expected outputs; a failure's words name the draw."""
        # Another row's results have other shapes: only the same row's can have been remembered.
        previous = self.previous
        if previous is not None and [p.shape for p in previous] != [e.shape for e in expected]:
            previous = None
        with self._setup.spent.on("comparing"):
            found = case.examine(called, values, expected, previous, family, self._setup.config.tolerance, which)
        drawn = f" [inputs: {self._drawn}]"
        return dataclasses.replace(
            found, outside=found.outside and found.outside + drawn, broken=found.broken and found.broken + drawn
        )
