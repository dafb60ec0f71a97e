"""Write generated files, or with `check` report where each differs from its required text."""

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

from kda_tools.publish.report import COMMAND


def write_pages(wanted: Mapping[Path, str], check: bool, command: str = COMMAND) -> list[str]:
    """Write the files of `wanted` (path -> text) that are missing or differ; returns their paths.

    With `check` nothing is written; each such file is returned with its first differing line and the `command` to run.
    """
    found = []
    for path, text in wanted.items():
        old = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else None
        if old == text:
            continue
        found.append(_difference(path, old, text, command) if check else str(path))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
    return found


def _difference(path: Path, old: str | None, new: str, command: str) -> str:
    if old is None:
        return f"{path}: file not found; run `{command}`"
    lines = zip_longest(old.splitlines(), new.splitlines(), fillvalue="(end of file)")
    for number, (got, expected) in enumerate(lines, start=1):
        if got != expected:
            return f"{path}:{number}: expected {expected!r}, got {got!r}; run `{command}`"
    return f"{path}: differs in line endings or the newline at its end; run `{command}`"
