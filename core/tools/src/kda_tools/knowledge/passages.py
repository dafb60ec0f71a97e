"""Split skills, guides, task notes and files of `external/` into passages, one per heading, and search them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_tools.knowledge.ranking import Hit, Passage, rank

PLACES = (
    "docs/skills/**/*.md",
    "docs/*.md",
    "*.md",
    "*/*/prompt.md",
    "*/*/docs/dispatch.md",
    "*/*/docs/profile.md",
    "*/*/docs/tried.md",
    "external/*/**/*.md",
)
"""Patterns, relative to the checkout, of the files that are searched."""
FIRST, FIRST_WEIGHT = "docs/skills/", 1.6
"""Folder of the skills and the weight of their passages: they rank above notes and pages with the same words."""
HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*$")
LARGEST = 1_000_000
"""Most bytes of a file that is read."""


def passages(root: Path) -> list[Passage]:
    """Every passage of the checkout, with its path added to the text: names of folders and files describe contents."""
    return [
        replace(
            one,
            text=f"{one.text}\n{re.sub(r'[/._-]+', ' ', one.place)}",
            weight=FIRST_WEIGHT if one.place.startswith(FIRST) else 1.0,
        )
        for one in cut_files(root, PLACES)
    ]


def cut_files(root: Path, patterns: Iterable[str]) -> Iterator[Passage]:
    """The passages of the files that fit the patterns, each file once, links and very large files left out."""
    for path in dict.fromkeys(path for pattern in patterns for path in sorted(root.glob(pattern))):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST:
            yield from cut(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def cut(place: str, text: str) -> Iterator[Passage]:
    """A file's passages, one for each heading; a passage's title joins the headings above it."""
    headings: list[str] = []
    lines: list[str] = []
    first, fenced = 1, False

    def passage() -> Iterator[Passage]:
        if body := "\n".join(lines).strip():
            yield Passage(place, first, " > ".join(headings) or place, body)

    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and (match := HEADING.match(line)):
            yield from passage()
            depth = len(match[1])
            headings = [*headings[: depth - 1], match[2]]
            lines, first = [], number
        else:
            lines.append(line)
    yield from passage()


def search(root: Path, terms: str, most: int) -> list[Hit]:
    """The passages that match the words best.

    Raises:
        UsageError: no passage has any of the words.
    """
    if not (found := rank(passages(root), terms, most)):
        raise UsageError(
            f"{terms}: no skill, guide or note has any of these words; try other ones, or kda catalogue find"
        )
    return found
