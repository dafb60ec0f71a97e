"""Search the catalogue: entries and the facts of their ops, ranked by words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kda_tools.knowledge.op_facts import OpFacts, Release, load_facts
from kda_tools.knowledge.ranking import Hit, Passage, rank, split
from kda_tools.knowledge.watchlist import Pull, load_watchlist
from kda_tools.traces.catalogue import Entry, load


@dataclass(frozen=True)
class Known:
    """An entry of the catalogue with the facts of its ops."""

    entry: Entry
    ops: tuple[tuple[Release, OpFacts], ...]
    """In the order of the releases."""
    pulls: tuple[Pull, ...]
    """Open pull requests of upstream that touch the same pattern."""


def known_entries(root: Path) -> tuple[Known, ...]:
    """Every entry of the catalogue with the facts of its ops."""
    releases, pulls = load_facts(root), load_watchlist(root)
    return tuple(
        Known(
            entry,
            tuple(
                (release, op)
                for release in releases
                for one in entry.upstream
                if one.release == release.release and (op := release.find_op(one.op)) is not None
            ),
            tuple(pull for pull in pulls if entry.id in pull.entries),
        )
        for entry in load(root)
    )


def find(known: tuple[Known, ...], terms: str, most: int) -> list[Known]:
    """The entries that match the words best, best first: by the number of words in the id, then by the whole text."""
    by_id = {one.entry.id: one for one in known}
    hits = rank([_passage(one) for one in known], terms, len(known))
    words = _words(terms)

    def fit(hit: Hit) -> tuple[int, int]:
        own = _words(hit.passage.title)
        return -len(words & own), len(own - words)

    order = sorted(hits, key=fit)
    return [by_id[hit.passage.place] for hit in order[:most]]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", split(text.lower())))


def _passage(known: Known) -> Passage:
    entry, ops = known.entry, [op for _, op in known.ops]
    names = dict.fromkeys([*(one.op for one in entry.upstream), *(name for op in ops for name in op.kernels)])
    title = entry.id.replace("-", " ")
    body = [entry.pattern, *names, entry.task or "", entry.kind.value]
    body += dict.fromkeys(text for op in ops for text in (*op.models, *op.needs, *op.raises, *op.language, op.path))
    return Passage(entry.id, 0, title, " ".join(body).replace("/", " "))


def lines(known: Known, whole: bool) -> Iterator[str]:
    """One entry for a terminal; `whole` adds every condition and caller."""
    entry = known.entry
    yield f"{entry.id}: {entry.pattern}"
    numerics = f", {entry.numerics.value}" if entry.numerics else ""
    yield f"  {entry.kind.value}{numerics}; {f'task {entry.task}' if entry.task else 'no task here'}"
    yield from (f"  needs {one.needs}" for one in entry.constraints if whole)
    for release, op in known.ops:
        yield f"  {release.release}: {op.name} ({'/'.join(op.language)}), {op.path}"
        if whole:
            yield f"    {op.name}{'' if op.signature.startswith('(') else ': '}{op.signature}"
            for name in ("needs", "raises", "host_checks", "falls_back", "guards", "models"):
                for text in getattr(op, name):
                    yield f"    {name}: {text}"
        elif op.needs:
            rest = len(op.needs) - 3
            yield f"    needs {'; '.join(op.needs[:3])}{f'; and {rest} more' if rest > 0 else ''}"
    for pull in known.pulls:
        yield f"  open upstream: {pull.line}"
