"""What a profile and a sanitizer run have in common: they are about one state of a solution."""

from kda_core.provenance import hashes
from kda_core.records import Provenance
from kda_core.tasks import Task

PARTS = ("solution", "library")
"""What decides which kernels run: the solution, and what it shares with others."""


def is_outdated(task: Task, source: Provenance) -> bool:
    """Whether the solution is another one now than the one that `source` is about."""
    now = hashes(task)
    return any(source.hashes.get(part) != now.get(part) for part in PARTS)


def described(source: Provenance, command: str) -> str:
    """Commit and command, in Markdown."""
    return f"commit `{source.commit[:10]}`{' (dirty)' if source.dirty else ''}, `{command}`"
