"""What a fleet is asked, the pieces that it is split into, and what comes back of one: all as JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import ceil
from typing import Annotated, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict

SHARES = (1 / 2, 1 / 3, 1 / 6)
"""Of what falls to one worker, a piece each, the large ones first. Each piece starts workers of its own, which takes
as long as dozens of rows of a grid, so there are few; with small ones at the end all GPUs stop at about the same time.
"""
Kind = Literal["cuda", "cpu"]


class Job(str, Enum):
    """What can be split."""

    BENCH = "bench"
    """By task, and with `parts` by rows of a task, which are published as one run."""
    VALIDATE = "validate"
    """By rows of a grid."""
    TUNE = "tune"
    """By rows of a sweep. All candidates of a row stay on one GPU: they differ by less than two boards do."""
    ADVERSARIES = "adversaries"
    """By adversary."""
    MODEL = "model"
    """By model."""


class Order(Strict):
    """What the user asks."""

    job: Job
    names: tuple[str, ...]
    """Ops, adversaries or models."""
    kind: Kind
    rows: tuple[str, ...] = ()
    """Row patterns; empty: every row."""
    full: bool = False
    """Of a grid, the whole of it on the CPU, too."""
    quick: bool = False
    parts: Annotated[int, Field(gt=0)] = 1
    """Pieces of a task's bench."""
    missing: Count = 0
    """Of a bench only the rows that recorded runs lack, at most so many in a piece; 0: every row."""
    record: bool = False
    command: str


class Piece(Strict):
    """What one GPU does at a time; it is kept whole, or tried again."""

    id: str
    subject: str
    """Op or model; empty for adversaries."""
    items: tuple[str, ...] = ()
    """Row ids or adversaries. Empty: all rows that were asked for."""


class Question(Strict):
    """What a process of a piece is told."""

    order: Order
    piece: Piece | None = None
    """None: only say what there is (`NodeFacts`)."""
    node: str = ""
    attempt: Annotated[int, Field(gt=0)] = 1
    slot: Count = 0
    slots: Annotated[int, Field(gt=0)] = 1
    """The process keeps to the `slot`-th of so many equal shares of the node's cores."""
    probe: bool = False
    """A short run of `piece` on which the neighbours' influence is measured; its record is not kept."""


class Answer(Strict):
    """What a process of a piece says in the end: a record, or why there is none."""

    line: str | None = None
    """The record as JSON, in the form in which its own log keeps it; for no `piece`, `NodeFacts`."""
    complete: bool = True
    """False: interrupted; the record holds what was there by then."""
    items: tuple[str, ...] = ()
    """Where incomplete: the items of the piece that are finished all the same, and need not be done again."""
    refused: str | None = None
    """What the user has to mend. Nowhere would it go better, so it is not tried again."""
    exit_code: int = 0
    """Of `kda`, for `refused`."""
    failed: str | None = None
    """What this machine lacked, or what broke; to be tried elsewhere."""


class NodeFacts(Strict):
    """What one worker runs on and with; where workers differ in it, their results are not of one kind."""

    host: str
    kind: Kind
    gpu: str | None = None
    uuid: str | None = None
    commit: str
    dirty: bool
    versions: dict[str, str]
    """The driver among them."""
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
    """Its uuid; None without one."""
    seconds: Amount
    complete: bool
    items: tuple[str, ...] = ()
    """As in `Answer`."""
    line: str
    """The record, as in `Answer`."""


def remaining(piece: Piece, results: Sequence[Result]) -> Piece:
    """The piece without what interrupted attempts have finished of it."""
    finished = {item for result in results if result.piece == piece.id for item in result.items}
    return piece.model_copy(update={"items": tuple(item for item in piece.items if item not in finished)})


def cut(items: Sequence[str], workers: int) -> list[tuple[str, ...]]:
    """The items in pieces for so many workers, `SHARES` of a worker's share each, in order and none left out."""
    left, found = list(items), list[tuple[str, ...]]()
    for share in SHARES:
        size = ceil(len(items) / workers * share)
        for _ in range(workers):
            if left:
                found.append(tuple(left[:size]))
                left = left[size:]
    assert not left
    return found
