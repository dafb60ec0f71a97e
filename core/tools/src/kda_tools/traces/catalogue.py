"""The catalogue of fast paths: patterns that a task here or an operation of upstream covers, and their constraints.

It is data, `docs/catalogue/*.toml` in the checkout, of the schema `CatalogueFile`. `judge` puts a hotspot of a trace
beside it: covered by a task here, covered upstream but not hit, or new.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Strict, read_toml, validate
from kda_tools.traces.hotspots import Hotspot
from kda_tools.traces.kernel_classes import KernelClass
from kda_tools.traces.own_kernels import own_kernels
from kda_tools.traces.trace_events import contiguous
from kda_tools.traces.trace_profile import Profile, Tensor

FOLDER = Path("docs") / "catalogue"


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from None
    return text


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]


class Upstream(Strict):
    """Where upstream has it."""

    release: Annotated[str, Field(pattern=r"^\S+ \S+$")]
    """Package and version: `sglang 0.5.23`."""
    path: str
    """In the release's wheel, or the option's name where it is no file."""
    op: str
    """Public callable, or what to switch on."""


class Constraint(Strict):
    """What upstream asks for before it takes the path. Without any check it cannot be seen in a trace."""

    needs: str
    """In words."""
    input: Annotated[int, Field(ge=0)] = 0
    """Which tensor of the eager operator the checks look at."""
    dim: int = -1
    multiple_of: Annotated[int, Field(gt=0)] | None = None
    at_most: int | None = None
    at_least: int | None = None
    one_of: tuple[int, ...] | None = None
    """Lengths that the dimension may have."""
    dtypes: tuple[str, ...] | None = None
    """As PyTorch's traces name them: `c10::BFloat16`."""
    contiguous: bool | None = None
    overlapped_at_least: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of a whole trace: the share of communication's time in which other kernels ran."""

    @property
    def visible_in_trace(self) -> bool:
        """Whether a trace can tell."""
        checks = (self.multiple_of, self.at_most, self.at_least, self.one_of, self.dtypes, self.contiguous)
        return any(check is not None for check in (*checks, self.overlapped_at_least))


class Replaced(Strict):
    """What the pattern looks like where the path is not taken. Every given expression has to be found."""

    kernel: Pattern | None = None
    operator: Pattern | None = None
    module: Pattern | None = None


class Numerics(str, Enum):
    """What upstream states of a fused op's results, beside the eager chain that it replaces."""

    EXACT = "bit-exact"
    """Every rounding of the eager chain is reproduced."""
    CLOSE = "close"
    """Within a tolerance, mounted always."""
    LOSSLESS = "lossless"
    """Same maths and precision, rounded elsewhere; mounted from the quality tier of that name on."""
    HIGH = "high"
    """Lower precision somewhere; mounted from the quality tier of that name on."""
    NATIVE = "native"
    """Part of a checkpoint's own format."""


class Entry(Strict):
    """One fast path."""

    id: Annotated[str, Field(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]
    pattern: str
    """The computation, as a formula."""
    kind: KernelClass
    fast: tuple[Pattern, ...] = ()
    """Kernels or operators that are this path. `load` adds the kernels of the task's solution."""
    replaces: tuple[Replaced, ...] = ()
    numerics: Numerics | None = None
    """None where upstream states nothing."""
    upstream: tuple[Upstream, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    task: str | None = None
    """Folder of the task here."""


class CatalogueFile(Strict):
    """One file of the catalogue."""

    entry: tuple[Entry, ...]


class Status(str, Enum):
    """What is known of a hotspot."""

    TASK = "task here"
    NOT_HIT = "upstream, not hit"
    NEW = "new"


@dataclass(frozen=True)
class Finding:
    """What the catalogue says of one hotspot."""

    status: Status
    why: str
    entry: Entry | None = None


def load(root: Path) -> tuple[Entry, ...]:
    """Every entry of the checkout at `root`, in the order of files and lines, with the kernels of the tasks' solutions.

    Raises:
        UsageError: no catalogue, a file that breaks the schema, an id used twice, a task that does not exist, or a
            solution that is no Python.
    """
    files = sorted((root / FOLDER).glob("*.toml"))
    if not files:
        raise UsageError(f"{root / FOLDER}: expected the catalogue's TOML files, got none")
    found: dict[str, Entry] = {}
    for path in files:
        for entry in validate(CatalogueFile, read_toml(path), path).entry:
            if entry.id in found:
                raise UsageError(f"{path}: entry {entry.id!r}: expected an id of its own, got one that is taken")
            if entry.task is not None and not any(root.glob(f"*/{entry.task}/config.toml")):
                raise UsageError(
                    f"{path}: entry {entry.id!r}: key 'task': expected a task's folder, got {entry.task!r}"
                )
            found[entry.id] = entry
    for folder in dict.fromkeys(entry.task for entry in found.values() if entry.task is not None):
        of_task = [entry for entry in found.values() if entry.task == folder]
        for name, pattern in own_kernels(next(root.glob(f"*/{folder}/config.toml")).parent / "solution").items():
            # If the task has several entries: the first whose patterns already match the kernel.
            entry = next((one for one in of_task if any(re.search(p, name) for p in one.fast)), of_task[0])
            found[entry.id] = found[entry.id].model_copy(update={"fast": (*found[entry.id].fast, pattern)})
    return tuple(found.values())


def judge(spot: Hotspot, entries: tuple[Entry, ...], profile: Profile) -> Finding:
    """What covers this hotspot, and why, as `match` finds it."""
    status, entry = match(spot.costs[0].source.kernel, spot.name, spot.module, entries)
    if entry is None:
        return Finding(status, "nothing in the catalogue")
    if status is Status.NOT_HIT:
        last = entry.upstream[-1]
        return Finding(status, f"{last.op} ({last.release}): {_hindrance(entry, spot, profile)}", entry)
    return Finding(status, entry.task or f"runs upstream's {entry.id}; no task here", entry)


def match(kernel: str, name: str, module: str, entries: tuple[Entry, ...]) -> tuple[Status, Entry | None]:
    """The status, and the entry: one whose own kernels a hotspot runs, else the first one that could replace it.

    Of several entries whose kernels it runs the first one with a task counts, else the first one. `name` and `module`
    are those of the hotspot; `kernel` is its largest kernel, "" if that is not known.
    """
    running = [e for e in entries if any(re.search(p, one) for p in e.fast for one in (kernel, name))]
    if running:
        fast = next((e for e in running if e.task is not None), running[0])
        return Status.NEW if fast.task is None else Status.TASK, fast
    for entry in entries:
        if any(_fits(replaced, kernel, name, module) for replaced in entry.replaces):
            if entry.upstream:
                return Status.NOT_HIT, entry
            if entry.task is not None:
                return Status.TASK, entry
    return Status.NEW, None


def _fits(replaced: Replaced, kernel: str, name: str, module: str) -> bool:
    asked = ((replaced.kernel, kernel), (replaced.operator, name), (replaced.module, module))
    return any(p is not None for p, _ in asked) and all(p is None or re.search(p, text) for p, text in asked)


def _hindrance(entry: Entry, spot: Hotspot, profile: Profile) -> str:
    """The first constraint that is seen to fail, else those that no trace shows."""
    for constraint in entry.constraints:
        if (got := next(_failures(constraint, spot, profile), None)) is not None:
            return f"fails: {constraint.needs}; got {got}"
    unseen = [constraint.needs for constraint in entry.constraints if not constraint.visible_in_trace]
    return f"a trace cannot show: {'; '.join(unseen)}" if unseen else "every listed constraint holds"


def _failures(constraint: Constraint, spot: Hotspot, profile: Profile) -> Iterator[str]:
    if constraint.overlapped_at_least is not None and profile.communication_us:
        share = 1 - profile.exposed_us / profile.communication_us
        if share < constraint.overlapped_at_least:
            yield f"{share:.0%}"
    for cost in spot.costs:
        inputs = cost.source.inputs or ()
        if constraint.input < len(inputs):
            yield from _unfit(constraint, inputs[constraint.input])


def _unfit(needs: Constraint, tensor: Tensor) -> Iterator[str]:
    shape = list(tensor.shape)
    if needs.dtypes is not None and tensor.dtype and tensor.dtype not in needs.dtypes:
        yield tensor.dtype
    if needs.contiguous and tensor.strides is not None and not contiguous(tensor.shape, tensor.strides):
        yield f"{shape} with strides {list(tensor.strides)}"
    if not -len(shape) <= needs.dim < len(shape):
        return
    length = shape[needs.dim]
    if (
        (needs.multiple_of is not None and length % needs.multiple_of)
        or (needs.at_most is not None and length > needs.at_most)
        or (needs.at_least is not None and length < needs.at_least)
        or (needs.one_of is not None and length not in needs.one_of)
    ):
        yield f"{length} in {shape}"
