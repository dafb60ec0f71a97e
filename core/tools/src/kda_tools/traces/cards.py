"""Draft task cards for new hotspots of a trace: their inputs, the device limit, and what a task would gain.

A card is a TOML file of the schema `Card`, from which `kda new --from-trace` makes a task's folder. It is a draft: a
person has to say what the hotspot computes, and which bytes really have to move.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Annotated

import tomlkit
from pydantic import Field

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Amount, Count, Digest, Strict, read_toml, validate
from kda_tools.traces.catalogue import Finding, Status
from kda_tools.traces.copy_limit import CopyLimit
from kda_tools.traces.hotspots import Hotspot, rows
from kda_tools.traces.kernel_classes import KernelClass, short_name
from kda_tools.traces.trace_profile import Profile, Tensor

LEAST_SHARE = 0.01
"""Smallest share of the GPU's time for a card, 0 to 1."""
MOST_UNATTRIBUTED = 0.05
"""Largest unattributed share of the GPU's time, 0 to 1; with more, the ranking would only show what is known."""
SIZES = {
    **dict.fromkeys(("double", "long", "long int", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int", "unsigned int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short", "short int"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "char"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2", "c10::Float8_e4m3fnuz", "c10::Float8_e5m2fnuz"), 1),
}
"""Bytes of an element, by the dtype's name in PyTorch's traces."""
BYTES_RULE = (
    "Every input is read once (a dimension of stride 0 counts once), and one output is written that is as large as the "
    "largest input. Copies: the second input is read, the first one written. Concatenations: all inputs are read and "
    "written. Names that end in _: the first input is written. The driver's copies: the bytes it reports, twice on the "
    "device. Upsampling and repeating: unknown. A trace holds no outputs: correct this where it is wrong."
)
RESIZES = re.compile(r"aten::_?(upsample|repeat)")
"""Operators whose output has a size that does not follow from their inputs."""


MovedBy = Callable[[Hotspot, "tuple[Tensor, ...] | None"], "int | None"]


class CardTensor(Strict):
    """One input."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None


class CardRow(Strict):
    """Calls with the same inputs."""

    inputs: tuple[CardTensor, ...] | None = None
    """None: the trace holds no shapes; profile with record_shapes=True."""
    calls_per_step: Amount
    us_per_call: Amount
    share: Amount
    """Share of the GPU's time, 0 to 1."""
    bytes: Count | None = None
    """Bytes of a call by `bytes_rule`; None if a dtype or the shapes are unknown."""
    limit_us: Amount | None = None
    """Microseconds that the device needs to move these bytes."""
    phase: str | None = None
    """Name of the phase, if the card is from an inventory of several traces."""


class PhaseShare(Strict):
    """The operator's figures in one phase of an inventory. The same keys of `Card` are for the largest share."""

    phase: str
    share: Amount
    us_per_step: Amount
    calls_per_step: Amount
    step_us: Amount
    saved_us_per_step: Amount | None = None
    step_speedup_at_most: Amount | None = None


class Card(Strict):
    """A draft of a task."""

    operator: str
    module: str
    kind: KernelClass
    why: str
    """What the catalogue says."""
    kernels: tuple[str, ...]
    trace: str
    trace_sha256: Digest
    gpu: str
    steps: Annotated[int, Field(gt=0)]
    step_us: Amount
    calls_per_step: Amount
    us_per_step: Amount
    share: Amount
    """Share of the GPU's time, 0 to 1."""
    saved_us_per_step: Amount | None = None
    """GPU time that a kernel at its limit saves, summed over rows with a known limit; None if no row has one."""
    step_speedup_at_most: Amount | None = None
    """Amdahl's law: step / (step - saved). The real speedup is less if the GPU waits for the host or overlaps work."""
    limit_source: str
    bytes_rule: str
    model: str | None = None
    """Name of the model; this field and the next two are only set for a card from an inventory."""
    phase: str | None = None
    phases: tuple[PhaseShare, ...] = ()
    row: tuple[CardRow, ...]


def cards(profile: Profile, judged: Iterable[tuple[Hotspot, Finding]], limit: CopyLimit | None) -> list[Card]:
    """A card for every new hotspot of at least LEAST_SHARE that is bound by bytes, those that bring most first.

    Raises:
        UsageError: more than MOST_UNATTRIBUTED of the GPU's time is unattributed.
    """
    unknown = profile.share(profile.unattributed_us)
    if unknown > MOST_UNATTRIBUTED:
        raise UsageError(
            f"--cards: {profile.file}: expected at most {MOST_UNATTRIBUTED:.0%} of GPU time unattributed, got "
            f"{unknown:.1%}; profile without CUDA graphs, with CPU activities, with_stack=True and record_shapes=True"
        )
    made = [card(profile, spot, found, limit) for spot, found in judged if wants_card(profile, spot, found)]
    return sorted(made, key=lambda one: (-(one.saved_us_per_step or 0.0), -one.share, one.operator, one.module))


def wants_card(profile: Profile, spot: Hotspot, found: Finding) -> bool:
    """Whether it is new, large enough, and bound by bytes rather than by arithmetic or links."""
    large = profile.share(spot.us) >= LEAST_SHARE
    return found.status is Status.NEW and large and spot.attributed and spot.bound_by_bytes


def card(
    profile: Profile,
    spot: Hotspot,
    found: Finding,
    limit: CopyLimit | None,
    moved_by: MovedBy | None = None,
    rule: str = BYTES_RULE,
) -> Card:
    """The draft for one hotspot; without a limit, the fields that need one are None.

    `moved_by` returns the bytes of a call by a better `rule` than BYTES_RULE; if it returns None, BYTES_RULE is used.
    """
    made, saved = [], None
    for row in rows(spot):
        moved = moved_by(spot, row.inputs) if moved_by is not None else None
        moved = bytes_moved(spot, row.inputs, row.moved // row.calls) if moved is None else moved
        floor = limit.us(moved) if limit is not None and moved else None
        if floor is not None:
            saved = (saved or 0.0) + max(row.us - floor * row.calls, 0.0) / profile.steps
        made.append(
            CardRow(
                inputs=None if row.inputs is None else tuple(CardTensor(**vars(tensor)) for tensor in row.inputs),
                calls_per_step=row.calls / profile.steps,
                us_per_call=row.us / row.calls,
                share=profile.share(row.us),
                bytes=moved,
                limit_us=floor,
            )
        )
    source = f"device limits that the judge measured on {profile.gpu}, runs {', '.join(limit.runs)}" if limit else ""
    return Card(
        operator=spot.name,
        module=spot.module,
        kind=spot.kind,
        why=found.why,
        kernels=tuple(dict.fromkeys(short_name(name) for name in spot.kernels)),
        trace=profile.file,
        trace_sha256=profile.sha256,
        gpu=profile.gpu,
        steps=profile.steps,
        step_us=profile.step_us,
        calls_per_step=spot.calls / profile.steps,
        us_per_step=spot.us / profile.steps,
        share=profile.share(spot.us),
        saved_us_per_step=saved,
        step_speedup_at_most=None
        if saved is None or saved >= profile.step_us
        else profile.step_us / (profile.step_us - saved),
        limit_source=source or f"none: no clean run of a task is recorded on {profile.gpu or 'this unnamed GPU'}",
        bytes_rule=rule,
        row=tuple(made),
    )


def bytes_moved(spot: Hotspot, inputs: tuple[Tensor, ...] | None, driver: int = 0) -> int | None:
    """Bytes of a call by BYTES_RULE; None if they are unknown. `driver`: bytes that the driver reports."""
    kernel = spot.costs[0].source.kernel
    if driver:
        return driver * (2 if "DtoD" in kernel else 1)
    if RESIZES.match(spot.name):
        return None
    opaque = re.search(r"OpaqueType<(\d+)u?>", kernel)  # in a list of tensors only the kernel's name has the size
    sizes = []
    for tensor in inputs or ():
        width = SIZES.get(tensor.dtype) or (int(opaque[1]) if opaque and not tensor.dtype else None)
        if width is None:
            return None
        steps = tensor.strides or (1,) * len(tensor.shape)
        sizes.append(width * prod(n for n, step in zip(tensor.shape, steps, strict=True) if step))
    if not sizes:
        return None
    if spot.name in ("aten::copy_", "aten::copy") and len(sizes) > 1:
        return sizes[0] + sizes[1]
    if spot.kind is KernelClass.CAT:
        return 2 * sum(sizes)
    return sum(sizes) + (sizes[0] if spot.name.endswith("_") else max(sizes))


def empty_folder(folder: Path, argument: str) -> None:
    """Make the folder for `write`, or refuse one that is not empty, by the name of its `argument`; call it first.

    Raises:
        UsageError: the folder holds something, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{argument} {folder}: expected a new or empty folder, got one that holds files")
    except OSError as error:
        raise UsageError(f"{argument} {folder}: expected a place for a folder, got: {error.strerror}") from None


def write(made: Iterable[Card], folder: Path) -> list[Path]:
    """One file per card, named by rank and operator, in a folder as `empty_folder` asks for."""
    empty_folder(folder, "--cards")
    paths = []
    for rank, draft in enumerate(made, start=1):
        name = re.sub(r"\W+", "_", f"{draft.operator}_{draft.module}").strip("_")
        path = folder / f"{rank:02d}_{name[:60]}.toml"
        document = tomlkit.document()
        document.add(tomlkit.comment("A draft of a task card; times in microseconds."))
        for key, value in draft.model_dump(mode="json", exclude_none=True).items():
            document[key] = value
        path.write_text(tomlkit.dumps(document), encoding="utf-8")
        paths.append(path)
    return paths


def read(path: Path) -> Card:
    """The card of a file; a broken one is a UsageError that names file and key."""
    return validate(Card, read_toml(path), path)
