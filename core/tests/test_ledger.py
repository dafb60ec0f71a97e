"""The ledger: what is written is read again, what is broken is named, and nothing is lost."""

import json
import multiprocessing
from pathlib import Path

import pytest

from core.tests.records_factory import make_checkout, make_record
from kda_core import ledger
from kda_core.derive import mismatches
from kda_core.errors import LedgerError
from kda_core.ledger import append, encode, merge, read
from kda_core.records import OutputError, RunRecord, Verdict
from kda_core.tasks import Task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_checkout(tmp_path)


@pytest.fixture
def record(task: Task) -> RunRecord:
    return make_record(task)


def test_a_record_comes_back_as_it_was(task: Task, record: RunRecord) -> None:
    assert read(task.ledger) == []
    append(task.ledger, record)
    first = task.ledger.read_bytes()
    append(task.ledger, make_record(task, seed=1))
    assert read(task.ledger)[0] == record
    assert task.ledger.read_bytes().startswith(first), "lines are never rewritten"
    assert first.count(b"\n") == 1
    assert mismatches(read(task.ledger)[1]) == []


def test_lines_are_compact(record: RunRecord) -> None:
    wall = json.loads(encode(record))["rows"][0]["arms"]["solution"]["samples"]["wall"][0]
    assert all(len(repr(value)) <= len("5.1234") for value in wall)
    assert b'": ' not in encode(record)


def test_infinite_errors_survive(task: Task, record: RunRecord) -> None:
    """An INCORRECT row may be off by infinity or NaN; that is what must be kept."""
    row = record.rows[0]
    error = OutputError(
        output="y",
        max_abs=float("inf"),
        max_rel=float("nan"),
        rel_l2=float("inf"),
        worst_index=(0,),
        allowed=1e-5,
    )
    arm = row.arms["solution"]
    wrong = arm.model_copy(
        update={"correctness": arm.correctness.model_copy(update={"passed": False, "outputs": (error,)})}
    )
    bad = row.model_copy(update={"arms": {**row.arms, "solution": wrong}, "verdict": Verdict.INCORRECT})
    append(task.ledger, record.model_copy(update={"rows": (bad,)}))
    kept = read(task.ledger)[0].rows[0].arms["solution"].correctness.outputs[0]
    assert kept.max_abs == float("inf")
    assert kept.max_rel != kept.max_rel


def broken(line: bytes) -> dict[str, tuple[bytes, str]]:
    data = json.loads(line)
    return {
        "not JSON": (line[:50] + b"\n", "not valid JSON"),
        "no object": (b"[1]\n", "expected an object with schema_version 1, got None"),
        "empty line": (b"\n", "not valid JSON"),
        "future": (json.dumps({**data, "schema_version": 2}).encode() + b"\n", "schema_version 1, got 2"),
        "unknown key": (json.dumps({**data, "extra": 1}).encode() + b"\n", "extra: Extra inputs"),
        "missing key": (
            json.dumps({k: v for k, v in data.items() if k != "utc"}).encode() + b"\n",
            "utc: Field required",
        ),
        "truncated": (line[:-1], "unfinished line"),
        "twice": (line, "is already on line 1"),
    }


@pytest.mark.parametrize(
    "kind", ["not JSON", "no object", "empty line", "future", "unknown key", "missing key", "truncated", "twice"]
)
def test_a_broken_line_is_named_by_file_and_number(task: Task, record: RunRecord, kind: str) -> None:
    append(task.ledger, record)
    content, message = broken(task.ledger.read_bytes())[kind]
    with task.ledger.open("ab") as file:
        file.write(content)
    with pytest.raises(LedgerError) as error:
        read(task.ledger)
    assert str(error.value).startswith(f"{task.ledger}:2: ")
    assert message in str(error.value)


def test_a_run_is_kept_behind_an_unfinished_line(task: Task, record: RunRecord) -> None:
    append(task.ledger, record)
    task.ledger.write_bytes(task.ledger.read_bytes()[:-100])
    append(task.ledger, make_record(task, seed=1))
    with pytest.raises(LedgerError, match=":1: not valid JSON"):
        read(task.ledger)
    assert task.ledger.read_bytes().splitlines(keepends=True)[1] == encode(make_record(task, seed=1))


def test_a_full_disk_leaves_no_half_line(task: Task, record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    append(task.ledger, record)
    before = task.ledger.read_bytes()
    write = ledger.os.write
    calls = []

    def full(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:100])

    monkeypatch.setattr(ledger.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        append(task.ledger, make_record(task, seed=1))
    assert task.ledger.read_bytes() == before


def _append_many(path: str, root: str, writer: int, count: int) -> None:
    record = make_record(Task(path=Path(root), package="fam.k99_fake"))
    for index in range(count):
        append(Path(path), record.model_copy(update={"run_id": f"{writer}-{index}"}))


def test_concurrent_writers_lose_nothing(task: Task, tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(str(path), str(task.path), w, 8)) for w in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert {record.run_id for record in read(path)} == {f"{w}-{i}" for w in range(4) for i in range(8)}


def test_merge_appends_what_is_new_byte_for_byte(task: Task, record: RunRecord, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    append(task.ledger, record)
    append(other, record)
    append(other, make_record(task, seed=1))
    spaced = json.dumps(json.loads(other.read_bytes().splitlines()[1]), indent=None).encode() + b"\n"
    other.write_bytes(other.read_bytes().splitlines(keepends=True)[0] + spaced)
    assert merge(task.ledger, other) == 1
    assert task.ledger.read_bytes() == other.read_bytes()
    assert merge(task.ledger, other) == 0


def test_merge_refuses_two_versions_of_one_run(task: Task, record: RunRecord, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    append(task.ledger, record)
    append(other, record.model_copy(update={"seconds": 1.0}))
    before = task.ledger.read_bytes()
    with pytest.raises(LedgerError, match=f"run {record.run_id} differs"):
        merge(task.ledger, other)
    with pytest.raises(LedgerError, match=r"absent.jsonl: file not found"):
        merge(task.ledger, tmp_path / "absent.jsonl")
    assert task.ledger.read_bytes() == before
