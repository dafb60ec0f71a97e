"""Check what an iteration must bring: one idea in one line, and after a stall a new profile and direction."""

from __future__ import annotations

from kda_judge.contract.errors import UsageError
from kda_judge.evidence import gpu_state
from kda_tools.campaign.events import Change
from kda_tools.campaign.rules import Rules
from kda_tools.campaign.state import State

LONGEST = 200
"""Most characters of a hypothesis."""
LEAST_WORDS = 8
"""Fewest words of a change of direction, which says what is given up and what is tried instead."""


def one_line(text: str, option: str, longest: int) -> str:
    """The text without blanks around it; a UsageError if it is empty, too long, or more than one line."""
    plain = text.strip()
    if not plain or "\n" in plain or len(plain) > longest:
        raise UsageError(
            f"{option}: expected one line of 1 to {longest} characters, got {len(plain)} characters in "
            f"{len(plain.splitlines())} lines; an iteration tests one idea"
        )
    return plain


def demand_one_idea(change: Change, rules: Rules) -> None:
    """Refuse a change that is too large for one idea."""
    lines = change.added + change.removed
    if lines > rules.changed_lines:
        raise UsageError(
            f"one idea an iteration: solution/ changes by {lines} lines, expected {rules.changed_lines} or fewer; "
            "measure the parts one after another"
        )


def demand_direction(state: State, direction: str | None, profile: str | None) -> None:
    """After `stall` iterations without improvement, demand a change of direction, and on a GPU a new profile."""
    rules = state.launched.rules
    if state.stalled < rules.stall:
        if direction is not None:
            raise UsageError(f"--direction: none is due: {state.stalled} of {rules.stall} iterations did not improve")
        return
    wanted = f"{state.stalled} iterations without improvement: the next one needs"
    if direction is None or len(direction.split()) < LEAST_WORDS:
        raise UsageError(
            f"{wanted} --direction with what you give up, what you try instead, and which counter of the profile says "
            f"so ({LEAST_WORDS} words or more)"
        )
    if direction in state.directions:
        raise UsageError(f"{wanted} a --direction that is not the one of an earlier iteration")
    if gpu_state.has_gpu() and profile in (None, state.profile_at_stall):
        raise UsageError(
            f"{wanted} a new profile: kda profile TASK --row ID, for a row that misses its target; the newest is "
            f"{profile or 'none'}"
        )
