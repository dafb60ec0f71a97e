"""Find the folders of a checkout that list known models in a `models.toml`."""

from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import checkout_root

FILE = "models.toml"


def find(place: Path) -> Path | None:
    """The folder at `place` in the checkout; None outside a checkout, or if the folder has no `models.toml`."""
    root = checkout_root()
    return root / place if root is not None and (root / place / FILE).is_file() else None


def demand(place: Path) -> Path:
    """As `find`, but raises a UsageError if there is no such folder."""
    if (found := find(place)) is None:
        raise UsageError(f"no {place / FILE}: run inside a checkout, or set KDA_ROOT")
    return found
