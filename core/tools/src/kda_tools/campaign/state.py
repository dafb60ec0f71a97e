"""Derive from a campaign's record where it stands, what is left, and what is due. Nothing else is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise

from kda_tools.campaign.events import (
    Answered,
    Begun,
    Claimed,
    Continued,
    Decision,
    Done,
    Ended,
    Entry,
    Finding,
    Launched,
    Promoted,
    Refused,
    Reviewed,
    parse_utc,
)

UNIMPROVED = (Decision.REVERT, Decision.FAILED)


@dataclass(frozen=True)
class State:
    """One campaign, from its lines."""

    entries: tuple[Entry, ...]

    @property
    def launched(self) -> Launched:
        """The first line."""
        event = self.entries[0].event
        assert isinstance(event, Launched)
        return event

    @property
    def agents(self) -> list[str]:
        """The agents that worked on the campaign, in order."""
        return [entry.event.agent for entry in self.entries if isinstance(entry.event, Launched | Continued)]

    @property
    def begun(self) -> dict[int, Begun]:
        """Iteration -> its latest attempt."""
        return {event.iteration: event for entry in self.entries if isinstance(event := entry.event, Begun)}

    @property
    def finished_iterations(self) -> dict[int, Done]:
        """Iteration -> how it ended."""
        return {event.iteration: event for entry in self.entries if isinstance(event := entry.event, Done)}

    @property
    def open_iteration(self) -> Begun | None:
        """The iteration that was begun and has not ended: it was interrupted."""
        return next((begun for number, begun in self.begun.items() if number not in self.finished_iterations), None)

    @property
    def tries(self) -> int:
        """Measurements so far: every attempt is one."""
        return sum(isinstance(entry.event, Begun) for entry in self.entries)

    @property
    def best(self) -> str:
        """The commit of the best so far: the last one kept, else the base."""
        kept = [number for number, done in self.finished_iterations.items() if done.decision is Decision.KEEP]
        return self.begun[kept[-1]].commit if kept else self.launched.base

    @property
    def stalled(self) -> int:
        """Iterations without improvement since the last one that was kept, or that changed direction."""
        count = 0
        for number, done in self.finished_iterations.items():
            if done.decision in UNIMPROVED:
                count = 1 if self.begun[number].direction else count + 1
            elif done.decision is Decision.KEEP or self.begun[number].direction:
                count = 0
        return count

    @property
    def directions(self) -> list[str]:
        """Changes of direction that were written down."""
        return [begun.direction for begun in self.begun.values() if begun.direction]

    @property
    def profile_at_stall(self) -> str | None:
        """Id of the newest profile when the first iteration without improvement began: the next one needs another."""
        first = None
        for number, done in self.finished_iterations.items():
            begun = self.begun[number]
            if done.decision is Decision.KEEP:
                first = None
            elif done.decision in UNIMPROVED and (first is None or begun.direction):
                first = begun
        return first.profile if first else None

    @property
    def claimed(self) -> list[Claimed]:
        """Iterations of another harness, none of which was measured here."""
        return [entry.event for entry in self.entries if isinstance(entry.event, Claimed)]

    @property
    def refused(self) -> list[Refused]:
        """Iterations that were refused, and not begun."""
        return [entry.event for entry in self.entries if isinstance(entry.event, Refused)]

    @property
    def findings(self) -> dict[int, Finding]:
        """Number -> finding about the best so far."""
        found = (entry.event for entry in self.entries if isinstance(entry.event, Finding))
        return {one.number: one for one in found if one.commit == self.best}

    @property
    def answers(self) -> dict[int, Answered]:
        """Number of a finding -> its latest answer."""
        return {event.finding: event for entry in self.entries if isinstance(event := entry.event, Answered)}

    @property
    def unanswered(self) -> list[Finding]:
        """Findings that block promotion."""
        return [finding for number, finding in self.findings.items() if number not in self.answers]

    @property
    def reviews(self) -> list[Reviewed]:
        """Reviews of the best so far."""
        found = (entry.event for entry in self.entries if isinstance(entry.event, Reviewed))
        return [one for one in found if one.commit == self.best]

    @property
    def promoted(self) -> list[Promoted]:
        """Promotions, refused ones too."""
        return [entry.event for entry in self.entries if isinstance(entry.event, Promoted)]

    @property
    def ended(self) -> str | None:
        """Why the campaign has ended; None if no end was recorded."""
        return next((entry.event.reason for entry in self.entries if isinstance(entry.event, Ended)), None)

    def hours(self, now: datetime | None = None) -> float:
        """Hours of wall time since the launch."""
        start = parse_utc(self.entries[0].utc)
        return ((now or datetime.now(timezone.utc)) - start).total_seconds() / 3600

    def spent(self, now: datetime | None = None) -> str | None:
        """Which budget is spent, in words; None if some of each is left."""
        rules = self.launched.rules
        if self.tries >= rules.tries:
            return f"{self.tries} of {rules.tries} tries are spent"
        if (hours := self.hours(now)) >= rules.hours:
            return f"{hours:.1f} of {rules.hours:g} hours are spent"
        return None


def current(entries: Sequence[Entry]) -> State | None:
    """The campaign that was launched last; None if there is none."""
    starts = [place for place, entry in enumerate(entries) if entry.event.kind == "launched"]
    return State(tuple(entries[starts[-1] :])) if starts else None


def campaigns(entries: Sequence[Entry]) -> list[State]:
    """Every campaign of a file, oldest first."""
    starts = [place for place, entry in enumerate(entries) if entry.event.kind == "launched"]
    return [State(tuple(entries[one:end])) for one, end in pairwise([*starts, len(entries)])]
