"""Older lines of a ledger in the form of the current schema version. Applied on reading; no file is ever rewritten.

A change of the record's schema raises `SCHEMA_VERSION`, adds here a function that turns lines of the version before
into lines of the new one, and keeps that version's schema (`docs/schema/`). A field that older lines lack must have a
value that says so: nothing is made up for them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kda_judge.evidence.run_record import SCHEMA_VERSION

Line = dict[str, Any]
"""A ledger line as JSON gives it."""


def _from_1(line: Line) -> Line:
    """Version 2 adds what was seen of the GPU during the run, and the run that is repeated."""
    return _added(line, 1, machine_watch=None, rerun_of=None)


def _from_2(line: Line) -> Line:
    """Version 3 has speedups by basis and attained by the device alone. The old basis, wall, is kept."""
    rows = [
        {
            **_without(row, "attained_device"),
            "verdict": {"UNVERIFIED": "CORRECT"}.get(row["verdict"], row["verdict"]),
            "speedup": {"wall": row["speedup"]} if row.get("speedup") else {},
            "attained": row.get("attained_device"),
        }
        for row in line["rows"]
    ]
    headline = line["headline"] and {
        **_without(line["headline"], "speedup_device", "attained_device"),
        "speedup": {
            basis: means
            for basis, key in (("device", "speedup_device"), ("wall", "speedup"))
            if (means := line["headline"][key])
        },
        "attained": line["headline"]["attained_device"],
    }
    settings = _added(line["settings"], 2, beside=[], decides="wall", quick=False)
    return _added(
        {**line, "rows": rows, "headline": headline, "settings": settings}, 2, node=None, attempt=None, parts=[]
    )


MIGRATIONS: Final[Mapping[int, Callable[[Line], Line]]] = {1: _from_1, 2: _from_2}
"""Version -> the function that makes its lines lines of the next version."""


def is_known(version: object) -> bool:
    """Whether a line that states this version can be read."""
    return type(version) is int and (version in MIGRATIONS or version == SCHEMA_VERSION)


def migrate(line: Line) -> Line:
    """The line in the form of the current version; the line itself is not changed.

    Raises:
        ValueError: the line has a key that its version does not know, or lacks one that it has.
    """
    while (version := line["schema_version"]) != SCHEMA_VERSION:
        try:
            line = {**MIGRATIONS[version](line), "schema_version": version + 1}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the form of schema_version {version}: {type(error).__name__}: {error}") from None
    return line


def _added(part: Line, version: int, **keys: Any) -> Line:
    """A part of a line of `version` with keys that came with the next one."""
    if early := sorted(part.keys() & keys.keys()):
        raise ValueError(f"{', '.join(early)}: not a key of schema_version {version}")
    return {**part, **keys}


def _without(part: Line, *keys: str) -> Line:
    return {key: value for key, value in part.items() if key not in keys}
