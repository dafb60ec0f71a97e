"""Older lines of a ledger in the form of the current schema version. Applied on reading; no file is ever rewritten.

A change of the record's schema raises `SCHEMA_VERSION`, adds here the function that takes a line of the version before
one step further, and leaves that version's schema where it is (`docs/schema/`). A field that older lines cannot have
must be one that can say so: nothing is made up for them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kda_core.records import SCHEMA_VERSION

Line = dict[str, Any]
"""A ledger line as JSON gives it."""


def _from_1(line: Line) -> Line:
    """Version 2 adds what was seen of the GPU during the run, and the run that is repeated."""
    return _added(line, machine_watch=None, rerun_of=None)


MIGRATIONS: Final[Mapping[int, Callable[[Line], Line]]] = {1: _from_1}
"""Version -> what makes it a line of the next one."""


def is_known(version: object) -> bool:
    """Whether a line that states this version can be read."""
    return type(version) is int and (version in MIGRATIONS or version == SCHEMA_VERSION)


def migrate(line: Line) -> Line:
    """The line in the form of the current version; the line itself is not changed.

    Raises:
        ValueError: the line has a key that its version does not know.
    """
    while (version := line["schema_version"]) != SCHEMA_VERSION:
        line = {**MIGRATIONS[version](line), "schema_version": version + 1}
    return line


def _added(line: Line, **keys: Any) -> Line:
    """The line with keys that came with the next version."""
    if early := sorted(line.keys() & keys.keys()):
        raise ValueError(f"{', '.join(early)}: not a key of schema_version {line['schema_version']}")
    return {**line, **keys}
