"""Find passages of `docs/skills/` and `external/` that fit a kernel: the sections that share the most of its words."""

from __future__ import annotations

import re
from collections import Counter
from math import fsum, log
from pathlib import Path

from kda_judge.contract.tasks import Task
from kda_tools.knowledge.passages import cut_files
from kda_tools.knowledge.ranking import Passage

PLACES = ("docs/skills/**/*.md", "external/**/*.md")
LEAST_WORDS = 2
"""Fewest words of the kernel that a passage must contain."""
WORD = re.compile(r"[a-z][a-z0-9]{2,}")
COMMON = frozenset(
    WORD.findall(
        "the and for with its from into that this are not per out one two all any each how what which kernel kernels "
        "ops task upstream row rows shape shapes dtype solution bfloat16 float16 float32 production models"
    )
)


def passages(root: Path, task: Task) -> list[Passage]:
    """The sections that fit, best first; empty if there is no such folder.

    A section's worth is the sum over the kernel's words in it of `log(1 + sections / sections with the word)`.
    """
    wanted = words_of(task)
    every = list(cut_files(root, PLACES))
    has = [(passage, set(WORD.findall(f"{passage.title} {passage.text}".lower())) & wanted) for passage in every]
    spread = Counter(word for _, words in has for word in words)
    worth = [
        (fsum(log(1 + len(every) / spread[word]) for word in words), passage)  # the same in any order of the words
        for passage, words in has
        if len(words) >= LEAST_WORDS
    ]
    return [passage for _, passage in sorted(worth, key=lambda one: (-one[0], one[1].place, one[1].title))]


def words_of(task: Task) -> set[str]:
    """What the kernel is about: words of its op, title and callables, and the tools that it is written with."""
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
