"""Make the cards of `kda llm cards`: a task card for every operation of an inventory that is worth one.

A card is a `kda_tools.traces.cards.Card`, so `kda new --from-trace` accepts it. Its figures are from the phase in which
the operation's share is largest. Its rows are from all phases, each with the phase's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kda_judge.contract.errors import UsageError
from kda_tools.llm import operation_bytes
from kda_tools.llm.inventory import Inventory, InventoryPhase
from kda_tools.llm.inventory_profile import as_profile
from kda_tools.llm.served_names import is_stand_in
from kda_tools.traces import cards as drafts
from kda_tools.traces import catalogue
from kda_tools.traces.cards import Card, PhaseShare
from kda_tools.traces.catalogue import Entry, Finding, Status
from kda_tools.traces.copy_limit import CopyLimit
from kda_tools.traces.hotspots import Hotspot, hotspots
from kda_tools.traces.trace_profile import Profile


@dataclass(frozen=True)
class Judged:
    """One hotspot of one phase."""

    phase: InventoryPhase
    profile: Profile
    spot: Hotspot
    found: Finding

    @property
    def share(self) -> float:
        """The hotspot's share of the phase's GPU time, 0 to 1."""
        return self.profile.share(self.spot.us)


@dataclass(frozen=True)
class Worth:
    """Whether one operation of an inventory is worth a card."""

    name: str
    module: str
    largest: Judged
    phases: tuple[Judged, ...]
    what: str
    """`card`, a task's folder, or why there is neither."""


def judge(inventory: Inventory, entries: tuple[Entry, ...]) -> list[Judged]:
    """Every hotspot of every phase beside the catalogue."""
    found = []
    for phase in inventory.phases:
        profile = as_profile(phase)
        found += [Judged(phase, profile, spot, catalogue.judge(spot, entries, profile)) for spot in hotspots(profile)]
    return found


def worth(judged: Iterable[Judged], threshold: float) -> list[Worth]:
    """One line for each operation that reaches the threshold (a share, 0 to 1) in some phase; largest share first."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for one in judged:
        groups.setdefault((one.spot.name, one.spot.module), []).append(one)
    found = []
    for (name, module), phases in groups.items():
        largest = max(phases, key=lambda one: (one.share, one.phase.name))
        if largest.share >= threshold:
            found.append(Worth(name, module, largest, tuple(phases), _what(largest)))
    return sorted(found, key=lambda one: (-one.largest.share, one.name, one.module))


def _what(one: Judged) -> str:
    spot, found = one.spot, one.found
    if is_stand_in(spot.name) or is_stand_in(spot.module):
        return "a stand-in: no server runs it like this"
    if not spot.bound_by_bytes:
        return f"no card: {spot.kind.value} is not bound by bytes"
    if found.status is Status.TASK:
        return f"covered by {found.why}"
    if found.status is Status.NOT_HIT:
        return f"no card, upstream has it: {found.why}"
    return "card" if spot.attributed else "no card: unattributed"


def cards(
    inventory: Inventory, entries: tuple[Entry, ...], limits: Mapping[str, CopyLimit | None], threshold: float
) -> tuple[list[Card], list[Worth]]:
    """The cards, largest saving first, and an entry for every operation above the threshold.

    Raises:
        UsageError: nothing was timed, or more of a phase's GPU time is unattributed than `MOST_UNATTRIBUTED`.
    """
    if not inventory.timed:
        raise UsageError(
            f"{inventory.model}: this inventory holds calls alone, as nothing was timed: a card says what share of a "
            "step a kernel takes; capture on a machine with a GPU"
        )
    for phase in inventory.phases:
        if phase.unattributed > drafts.MOST_UNATTRIBUTED:
            raise UsageError(
                f"{inventory.model}, {phase.name}: expected at most {drafts.MOST_UNATTRIBUTED:.0%} of GPU time "
                f"unattributed, got {phase.unattributed:.1%}; give a trace without CUDA graphs, with CPU activities "
                "and shapes (`kda llm profile --shapes`), or capture in process"
            )
    lines = worth(judge(inventory, entries), threshold)
    made = [_card(inventory.model, one, limits) for one in lines if one.what == "card"]
    return sorted(made, key=lambda card: (-(card.saved_us_per_step or 0.0), -card.share, card.operator)), lines


def _card(model: str, one: Worth, limits: Mapping[str, CopyLimit | None]) -> Card:
    by_phase = []
    for each in one.phases:
        limit = limits.get(each.phase.gpu)
        known = operation_bytes.has_formula(each.spot)
        rule = (operation_bytes.bytes_moved, operation_bytes.RULE) if known else (None, drafts.BYTES_RULE)
        by_phase.append((each, drafts.card(each.profile, each.spot, each.found, limit, *rule)))
    best = next(card for each, card in by_phase if each is one.largest)
    return best.model_copy(
        update={
            "model": model,
            "phase": one.largest.phase.name,
            "phases": tuple(
                PhaseShare(
                    phase=each.phase.name,
                    share=card.share,
                    us_per_step=card.us_per_step,
                    calls_per_step=card.calls_per_step,
                    step_us=card.step_us,
                    saved_us_per_step=card.saved_us_per_step,
                    step_speedup_at_most=card.step_speedup_at_most,
                )
                for each, card in by_phase
            ),
            "row": tuple(
                row.model_copy(update={"phase": each.phase.name}) for each, card in by_phase for row in card.row
            ),
        }
    )


def names(made: Sequence[Card]) -> str:
    """The number of cards as text, for example `2 cards`."""
    return f"{len(made)} card{'s'[: len(made) != 1]}"
