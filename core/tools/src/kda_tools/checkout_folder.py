"""Find the checkout, and its folders that list known models in a `models.toml`."""

from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import checkout_root

FILE = "models.toml"


def root() -> Path:
    """The checkout, or a UsageError outside of one."""
    if (found := checkout_root()) is None:
        raise UsageError("expected a checkout here or above, found none: run inside one, or set KDA_ROOT")
    return found


def find(place: Path) -> Path | None:
    """The folder at `place` in the checkout; None outside a checkout, or if the folder has no `models.toml`."""
    above = checkout_root()
    return above / place if above is not None and (above / place / FILE).is_file() else None


def demand(place: Path) -> Path:
    """As `find`, but raises a UsageError if there is no such folder."""
    if (found := find(place)) is None:
        raise UsageError(f"no {place / FILE}: run inside a checkout, or set KDA_ROOT")
    return found
