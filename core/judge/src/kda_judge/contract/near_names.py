"""Nearest names, for errors about names that do not exist."""

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from kda_judge.contract.errors import UsageError


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` known names that look most like `name`; the first few when none does."""
    names = list(known)
    return difflib.get_close_matches(name, names, n=count, cutoff=0.4) or names[:count]


def expect_matches(option: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Raise a UsageError for a pattern that fits no name. It must fit a whole name, which users easily forget."""
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        for wider in (f"{pattern}*", f"*{pattern}*"):
            if count := sum(fnmatchcase(name, wider) for name in names):
                raise UsageError(
                    f"{option} {pattern!r}: fits the whole of no id; {wider!r} fits {count} of {len(names)}"
                )
        raise UsageError(f"{option} {pattern!r}: no such row; nearest: {', '.join(nearest(pattern, names))}")
