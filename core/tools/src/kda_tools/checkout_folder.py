"""Folders of a checkout that hold the known models of a kind, in a `models.toml`."""

from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import checkout_root

FILE = "models.toml"


def find(place: Path) -> Path | None:
    """The folder at `place` in the checkout; None outside of one, and in one without such models."""
    root = checkout_root()
    return root / place if root is not None and (root / place / FILE).is_file() else None


def demand(place: Path) -> Path:
    """As `find`; none is a UsageError."""
    if (found := find(place)) is None:
        raise UsageError(f"no {place / FILE}: run inside a checkout, or set KDA_ROOT")
    return found
