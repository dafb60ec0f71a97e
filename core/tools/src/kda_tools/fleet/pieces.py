"""The data of a fleet, all as JSON lines: the order, the pieces that it is split into, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import chain, pairwise
from math import ceil
from typing import Annotated, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict

SHARES = (1 / 2, 1 / 3, 1 / 6)
"""Sizes of a worker's pieces, as fractions of its share of the items, the largest first. With small ones at the end,
all GPUs stop at about the same time.
"""
RUNS = 4
"""Runs of neighbours in a worker's only piece. Neighbours share compiled kernels; with one run, a worker could get all
the slow ones.
"""
Kind = Literal["cuda", "cpu"]


class Job(str, Enum):
    """A kind of work, and how it is split."""

    BENCH = "bench"
    """By task, and with `parts` by rows of a task, which are published as one run."""
    VALIDATE = "validate"
    """By rows of a grid."""
    TUNE = "tune"
    """By rows of a sweep. All candidates of a row stay on one GPU: their times differ by less than two boards' do."""
    ADVERSARIES = "adversaries"
    """By adversary."""
    MODEL = "model"
    """By model and release."""


class Order(Strict):
    """What the user asks."""

    job: Job
    names: tuple[str, ...]
    """Ops, adversaries or models."""
    kind: Kind
    rows: tuple[str, ...] = ()
    """Row patterns; empty: every row."""
    full: bool = False
    """Check the whole grid on the CPU, too."""
    quick: bool = False
    parts: Annotated[int, Field(gt=0)] = 1
    """Number of pieces that the bench of a task is split into."""
    missing: Count = 0
    """Above 0: bench only the rows that recorded runs lack, at most this many in a piece; 0: every row."""
    record: bool = False
    command: str


class Piece(Strict):
    """The work that one GPU does at a time. A piece that is not completed is tried again."""

    id: str
    subject: str
    """Op or model; empty for adversaries."""
    items: tuple[str, ...] = ()
    """Row ids, adversaries, or a model's release. Empty: all rows that were asked for."""


class Question(Strict):
    """The input of the process of a piece."""

    order: Order
    piece: Piece | None = None
    """None: only report what the worker runs on (`NodeFacts`)."""
    node: str = ""
    attempt: Annotated[int, Field(gt=0)] = 1
    slot: Count = 0
    slots: Annotated[int, Field(gt=0)] = 1
    """Number of equal shares of the node's cores; the process keeps to share `slot`."""
    probe: bool = False
    """A short run of `piece` on which the neighbours' influence is measured; its record is not kept."""
    limit_s: Amount | None = None
    """Seconds after which no further row of a grid or a sweep begins."""


class Answer(Strict):
    """The output of the process of a piece: a record, or why there is none."""

    line: str | None = None
    """The record as JSON, in the form of its own log; `NodeFacts` if the question had no `piece`."""
    complete: bool = True
    """False: the process was interrupted; the record holds what was finished by then."""
    items: tuple[str, ...] = ()
    """If incomplete: the items of the piece that are finished nevertheless, and need not be done again."""
    spent: str | None = None
    """What the seconds were spent on, of a bench."""
    refused: str | None = None
    """What the user has to fix. It would fail on every worker, so the piece is not tried again."""
    exit_code: int = 0
    """Exit code of `kda` for `refused`."""
    failed: str | None = None
    """What this machine lacked, or what broke; the piece is tried elsewhere."""


class NodeFacts(Strict):
    """What one worker runs on and with. Workers must agree in GPU, versions, commit and files."""

    host: str
    kind: Kind
    gpu: str | None = None
    uuid: str | None = None
    commit: str
    dirty: bool
    versions: dict[str, str]
    """Name -> version; the GPU's driver is among them."""
    files: dict[str, Digest]
    """Op -> digest of all that decides its numbers."""
    cores: Count
    cpu: str


class Result(Strict):
    """A line of a fleet's `results.jsonl`: one piece that came back."""

    piece: str
    attempt: Annotated[int, Field(gt=0)]
    node: str
    gpu: str | None
    """Uuid of the GPU; None without one."""
    seconds: Amount
    complete: bool
    items: tuple[str, ...] = ()
    """As in `Answer`."""
    spent: str | None = None
    """As in `Answer`."""
    line: str
    """The record, as in `Answer`."""


def remaining(piece: Piece, results: Sequence[Result]) -> Piece:
    """The piece without the items that interrupted attempts have finished."""
    finished = {item for result in results if result.piece == piece.id for item in result.items}
    return piece.model_copy(update={"items": tuple(item for item in piece.items if item not in finished)})


def cut(items: Sequence[str], workers: int, least: int = 1) -> list[tuple[str, ...]]:
    """Split all items into pieces for `workers`: each worker's share, in order, is divided by `SHARES`.

    Each piece starts arm processes of its own, which takes as long as a hundred rows of a grid. So if the smallest
    piece would have fewer than `least` items, each worker gets one piece: runs of neighbours from all over the items.
    """
    if len(items) / workers * SHARES[-1] < least:
        count = min(workers * RUNS, len(items))
        ends = [len(items) * one // max(count, 1) for one in range(count + 1)]
        runs = [items[first:last] for first, last in pairwise(ends)]
        return [tuple(chain.from_iterable(runs[one::workers])) for one in range(min(workers, count))]
    left, found = list(items), list[tuple[str, ...]]()
    for share in SHARES:
        size = ceil(len(items) / workers * share)
        for _ in range(workers):
            if left:
                found.append(tuple(left[:size]))
                left = left[size:]
    assert not left
    return found


def deal(items: Sequence[str], workers: int) -> list[tuple[str, ...]]:
    """One piece for each of `workers`, of items that come with the slowest first: dealt in turn, there and back.

    So the sums of the pieces differ little, whatever an item takes.
    """
    found: list[list[str]] = [[] for _ in range(min(workers, len(items)))]
    for number, item in enumerate(items):
        turn, place = divmod(number, workers)
        found[place if turn % 2 == 0 else workers - 1 - place].append(item)
    return [tuple(piece) for piece in found]
