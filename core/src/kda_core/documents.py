"""A task's own documents: whether they are still those of the task that it is a copy of, and where their links lead."""

import re
from collections.abc import Iterator
from pathlib import Path

from kda_core.tasks import Task

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
"""A relative Markdown link or picture."""
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
        f"{path}:{number}: link to {target}: no such file"
        for path in _written(task)
        for number, target in _links(path)
        if not (path.parent / target).exists()
    ]


def unlink(task: Task) -> None:
    """Leave of every link that leads nowhere its text: a copy lacks the records of its source, of which notes speak."""
    for path in _written(task):
        text = path.read_text(encoding="utf-8")
        for match in reversed(list(LINK.finditer(text))):
            if not (path.parent / match["target"]).exists():
                text = text[: match.start()] + match["text"] + text[match.end() :]
        path.write_text(text, encoding="utf-8")


def _written(task: Task) -> list[Path]:
    return [path for path in (task.path / "prompt.md", *sorted(task.path.glob("docs/*.md"))) if path.is_file()]


def _links(path: Path) -> Iterator[tuple[int, str]]:
    """Line and target of every relative link outside code."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith("    "):
            yield from ((number, match["target"]) for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)))
