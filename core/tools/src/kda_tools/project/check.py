"""One line of what `kda doctor` says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    found: str
    needed_for: str
    remedy: str
    """What to do when it is not ok."""
