"""A task's own documents: whether a copy's are still its source's, where links lead, and which runs they quote."""

import re
from collections.abc import Iterator
from pathlib import Path

from kda_core.tasks import Task

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
"""A relative Markdown link or picture."""
QUOTED = re.compile(r"\b(?:\d{8}T\d{6}Z-[0-9a-f]{6}|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)\b")
"""A run by its id, or a sweep by its time."""
COPIED = "of which this task is a copy (`kda new`)"
"""In the note that `kda new` puts into what is still about the copy's source."""
NOTED = ("prompt.md", "config.toml", "docs/dispatch.md")
"""Where it puts one."""


def copied(task: Task) -> list[str]:
    """The files, relative to the task, in which the note of a copy still stands."""
    texts = ((name, task.path / name) for name in NOTED)
    return [name for name, path in texts if path.is_file() and COPIED in path.read_text(encoding="utf-8")]


def dead_links(task: Task) -> list[str]:
    """Relative links of the card and of `docs/` that lead nowhere, one line each: with one the site is not built."""
    return [
        f"{path}:{number}: link to {match['target']}: no such file"
        for path in _written(task)
        for number, match in _links(path.read_text(encoding="utf-8"))
        if not (path.parent / match["target"]).exists()
    ]


def unrecorded(task: Task) -> list[str]:
    """Runs and sweeps that the task's notes quote and none of its records holds, one line each.

    A copy's notes speak of its source as long as they say so.
    """
    records = "".join(path.read_text(encoding="utf-8") for path in sorted(task.path.glob("docs/*.jsonl")))
    foreign = {task.path / name for name in copied(task)}
    return [
        f"{path}:{number}: {name} is quoted, and no line of docs/*.jsonl has it"
        for path in _written(task)
        if path not in foreign
        for number, name in quoted(path.read_text(encoding="utf-8"))
        if name not in records
    ]


def quoted(text: str) -> Iterator[tuple[int, str]]:
    """Line number and name of every run and sweep that a text speaks of."""
    for number, line in enumerate(text.splitlines(), start=1):
        yield from ((number, match[0]) for match in QUOTED.finditer(line))


def unlink(task: Task) -> None:
    """Leave of every link that leads nowhere its text: a copy lacks the records of its source, of which notes speak."""
    for path in _written(task):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for number, match in reversed(list(_links(text))):
            if not (path.parent / match["target"]).exists():
                line = lines[number - 1]
                kept = line[match.start("text") : match.end("text")]
                lines[number - 1] = line[: match.start()] + kept + line[match.end() :]
        path.write_text("".join(lines), encoding="utf-8")


def _written(task: Task) -> list[Path]:
    return [path for path in (task.path / "prompt.md", *sorted(task.path.glob("docs/*.md"))) if path.is_file()]


def _links(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Line number and match, with its places in that line, of every relative link outside code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith("    "):
            blanked = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), line)
            yield from ((number, match) for match in LINK.finditer(blanked))
