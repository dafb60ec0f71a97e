"""One line of the report of `kda doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    found: str
    needed_for: str
    remedy: str
    """What to do if the check is not ok."""
