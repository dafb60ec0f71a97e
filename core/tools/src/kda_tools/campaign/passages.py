"""Passages of `docs/skills/` and `external/` that fit a kernel: sections that share the most of its words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path

from kda_judge.contract.tasks import Task

FOLDERS = ("docs/skills", "external")
MOST = 8
LARGEST = 400_000
"""Bytes of a file that is read; a larger one is no text for people."""
LEAST_WORDS = 2
"""Of the kernel's words that a passage has to have."""
WORD = re.compile(r"[a-z][a-z0-9]{2,}")
COMMON = frozenset(
    [
        "the",
        "and",
        "for",
        "with",
        "its",
        "from",
        "into",
        "that",
        "this",
        "are",
        "not",
        "per",
        "out",
        "one",
        "two",
        "all",
        "any",
        "each",
        "how",
        "what",
        "which",
        "kernel",
        "kernels",
        "op",
        "ops",
        "task",
        "upstream",
        "row",
        "rows",
        "shape",
        "shapes",
        "dtype",
        "solution",
        "bfloat16",
        "float16",
        "float32",
        "production",
        "models",
    ]
)


@dataclass(frozen=True)
class Passage:
    """One section of a file."""

    title: str
    text: str
    where: str


def passages(root: Path, task: Task) -> list[Passage]:
    """The sections that fit best, best first; none where there is no such folder.

    A section's worth is the sum over the kernel's words in it of `log(sections / sections with the word)`.
    """
    wanted = words_of(task)
    every = [passage for folder in FOLDERS for passage in _sections(root, root / folder)]
    has = [(passage, set(WORD.findall(f"{passage.title} {passage.text}".lower())) & wanted) for passage in every]
    spread = Counter(word for _, words in has for word in words)
    worth = [
        (sum(log(1 + len(every) / spread[word]) for word in words), passage)
        for passage, words in has
        if len(words) >= LEAST_WORDS
    ]
    return [passage for _, passage in sorted(worth, key=lambda one: (-one[0], one[1].where, one[1].title))[:MOST]]


def words_of(task: Task) -> set[str]:
    """What the kernel is about: words of its op, title and callables, and of what it is written with."""
    config = task.config
    text = " ".join([task.op, config.task.title, *config.ops]).replace("_", " ").lower()
    solution = "".join(
        path.read_text(encoding="utf-8", errors="replace") for path in (task.path / "solution").rglob("*.py")
    )
    tools = {
        name
        for name, sign in (("triton", "import triton"), ("cute", "import cutlass"), ("cuda", "cuda_cpp"))
        if sign in solution
    }
    return (set(WORD.findall(text)) - COMMON) | tools


def _sections(root: Path, folder: Path) -> Iterator[Passage]:
    for path in sorted(folder.rglob("*.md")) if folder.is_dir() else ():
        if path.is_symlink() or path.stat().st_size > LARGEST:
            continue
        where = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        for part in re.split(r"(?m)^(?=#{1,3} )", text):
            title, _, body = part.partition("\n")
            if title.startswith("#") and body.strip():
                yield Passage(f"{where}: {title.lstrip('# ').strip()}", body.strip(), where)
