"""Rank passages by words with SQLite's full-text index (FTS5, BM25), in memory: no file, no service."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from kda_judge.contract.errors import MissingRequirement, UsageError

COLUMNS = "number UNINDEXED, weight UNINDEXED, title, text"
WEIGHTS = (0.0, 0.0, 4.0, 1.0)
"""BM25 weights of the columns."""
SPREAD = 12
"""Most words of a snippet."""
MARK = "\x01"
"""Character placed before each word that was found."""


@dataclass(frozen=True)
class Passage:
    """A text that can be found."""

    place: str
    """A path, or an id."""
    line: int
    title: str
    text: str
    weight: float = 1.0
    """Factor of the passage's score; a larger one ranks it higher."""


@dataclass(frozen=True)
class Hit:
    """A passage that was found."""

    passage: Passage
    snippet: str
    """A few words around the best match."""


def rank(passages: Sequence[Passage], terms: str, most: int) -> list[Hit]:
    """The passages that match `terms` best. All words must occur; if that finds nothing, any of them.

    Raises:
        UsageError: no word in `terms`.
        MissingRequirement: this Python's SQLite was built without FTS5.
    """
    words = re.findall(r"[^\W_]+", terms)
    if not words:
        raise UsageError(f"TERMS: expected at least one word of letters or digits, got {terms!r}")
    with sqlite3.connect(":memory:") as index:
        try:
            index.execute(f"CREATE VIRTUAL TABLE p USING fts5({COLUMNS}, tokenize='porter unicode61')")
        except sqlite3.OperationalError as error:
            raise MissingRequirement(f"SQLite of this Python: {error}; use a Python whose SQLite has FTS5") from None
        rows = [(number, one.weight, split(one.title), split(one.text)) for number, one in enumerate(passages)]
        index.executemany("INSERT INTO p VALUES (?, ?, ?, ?)", rows)
        for joint in (" AND ", " OR "):
            query = joint.join(f'"{word}"' for word in words)
            found = index.execute(
                f"SELECT number, highlight(p, 2, '{MARK}', ''), highlight(p, 3, '{MARK}', '') FROM p WHERE p MATCH ? "
                f"ORDER BY weight * bm25(p, {', '.join(map(str, WEIGHTS))}) LIMIT ?",
                (query, most),
            ).fetchall()
            if found:
                return [Hit(passages[number], _snippet(passages[number], *marked)) for number, *marked in found]
    return []


def _snippet(passage: Passage, title: str, text: str) -> str:
    """Words of the passage around the best match; `title` and `text` are its split forms with marks."""
    whole, marked = (passage.text, text) if MARK in text else (passage.title, title)
    words, pieces = whole.split(), iter(marked.split())
    hits = [sum(MARK in next(pieces, "") for _ in split(word).split()) for word in words]
    starts = [max(at - 2, 0) for at, hit in enumerate(hits) if hit]
    first = max(starts, key=lambda start: sum(hits[start : start + SPREAD]))
    more = "... " * (first > 0), " ..." * (first + SPREAD < len(words))
    return " ".join(words[first : first + SPREAD]).join(more)


def split(text: str) -> str:
    """Split names into their words: `qknorm` is found by itself and by `qk norm`."""
    return re.sub(r"\b(qk|rms|layer|group)norm", r"\1 norm \1norm", text.replace("_", " "))
