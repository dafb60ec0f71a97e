"""Nearest names, for errors about names that do not exist."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` known names that look most like `name`; the first few when none does."""
    names = list(known)
    return difflib.get_close_matches(name, names, n=count, cutoff=0.4) or names[:count]
