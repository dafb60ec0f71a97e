"""The ledger: what is written is read again, what is broken is named, and nothing is lost."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.judge.tests.records_factory import ROWS, cpu_record, make_checkout, make_record
from kda_judge.contract.errors import LedgerError, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.ledger import append, encode, merge, read
from kda_judge.evidence.run_record import SCHEMA_VERSION, OutputError, RunRecord, Verdict
from kda_tools.publish.task_claims import ledger_refusal

OLD = Path(__file__).parent / "data" / "ledger_v1.jsonl"
"""Two lines that the program wrote when 1 was its schema version: a measured run and one without a GPU."""


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


def whatever(_record: RunRecord) -> None:
    """For `merge`: every run is fit."""


def broken(line: bytes) -> dict[str, tuple[bytes, str]]:
    data = json.loads(line)
    return {
        "not JSON": (line[:50] + b"\n", "not valid JSON"),
        "no object": (b"[1]\n", "expected an object with schema_version 1 to 3, got None"),
        "empty line": (b"\n", "not valid JSON"),
        "nested": (b"[" * 100_000 + b"\n", "not valid JSON"),
        "not UTF-8": (b'{"schema_version": "\xff"}\n', "not valid JSON"),
        "future": (json.dumps({**data, "schema_version": 4}).encode() + b"\n", "schema_version 1 to 3, got 4"),
        "past": (json.dumps({**data, "schema_version": 0}).encode() + b"\n", "schema_version 1 to 3, got 0"),
        "version true": (json.dumps({**data, "schema_version": True}).encode() + b"\n", "1 to 3, got True"),
        "version a word": (json.dumps({**data, "schema_version": "2"}).encode() + b"\n", "1 to 3, got '2'"),
        "old with new keys": (
            json.dumps({**data, "schema_version": 1}).encode() + b"\n",
            "machine_watch, rerun_of: not a key of schema_version 1",
        ),
        "wrong type": (
            json.dumps({**data, "seconds": "1"}).encode() + b"\n",
            "seconds: Input should be a valid number",
        ),
        "torn": (line[:100] + line, "not valid JSON"),
        "unknown key": (json.dumps({**data, "extra": 1}).encode() + b"\n", "extra: Extra inputs"),
        "missing key": (
            json.dumps({k: v for k, v in data.items() if k != "utc"}).encode() + b"\n",
            "utc: Field required",
        ),
        "truncated": (line[:-1], "unfinished line"),
        "twice": (line, "is already on line 1"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        *("not JSON", "no object", "empty line", "not UTF-8", "future", "past", "version true", "version a word"),
        *("old with new keys", "wrong type", "torn", "unknown key", "missing key", "truncated", "twice"),
    ],
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
    write = os.write
    calls = []

    def full(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:100])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        append(task.ledger, make_record(task, seed=1))
    assert task.ledger.read_bytes() == before


def _append_many(path: str, root: str, writer: int, count: int) -> None:
    record = make_record(Task(Path(root)))
    for index in range(count):
        append(Path(path), record.model_copy(update={"run_id": f"{writer}-{index}"}))


def _merge_many(path: str, other: str, times: int) -> None:
    for _ in range(times):
        merge(Path(path), Path(other), whatever)


def _at_once(*calls: tuple[Callable[..., None], tuple[Any, ...]]) -> list[multiprocessing.process.BaseProcess]:
    """Start a process for each call."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=arguments) for function, arguments in calls]
    for process in processes:
        process.start()
    return processes


def _all_succeed(processes: list[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_concurrent_writers_lose_nothing(task: Task, tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    _all_succeed(_at_once(*((_append_many, (str(path), str(task.path), w, 8)) for w in range(4))))
    assert {record.run_id for record in read(path)} == {f"{w}-{i}" for w in range(4) for i in range(8)}


def test_concurrent_merges_bring_every_run_once(task: Task, record: RunRecord, tmp_path: Path) -> None:
    """Three machines' ledgers share some runs, and come in twice each, while a fourth writer appends."""
    others = [tmp_path / f"other{machine}.jsonl" for machine in range(3)]
    for machine, other in enumerate(others):
        for number in range(machine, machine + 4):
            append(other, record.model_copy(update={"run_id": f"shared-{number}"}))
    merges = ((_merge_many, (str(task.ledger), str(other), 2)) for other in others)
    _all_succeed(_at_once(*merges, (_append_many, (str(task.ledger), str(task.path), 9, 4))))
    names = [record.run_id for record in read(task.ledger)]
    assert sorted(names) == [*(f"9-{number}" for number in range(4)), *(f"shared-{number}" for number in range(6))]


def test_a_reader_sees_no_half_line(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that take 50 ms for a line: without the lock a reader would meet unfinished ones."""
    write = os.write

    def slowly(file: int, data: bytes) -> int:
        time.sleep(0.002)
        return write(file, data[:800])

    monkeypatch.setattr(os, "write", slowly)
    writers = _at_once(*((_append_many, (str(task.ledger), str(task.path), w, 6)) for w in range(2)))
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(len(read(task.ledger)))
    _all_succeed(writers)
    assert seen == sorted(seen)
    assert len(read(task.ledger)) == 12


def test_merge_appends_what_is_new_byte_for_byte(task: Task, record: RunRecord, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    append(task.ledger, record)
    append(other, record)
    append(other, make_record(task, seed=1))
    spaced = json.dumps(json.loads(other.read_bytes().splitlines()[1]), indent=None).encode() + b"\n"
    other.write_bytes(other.read_bytes().splitlines(keepends=True)[0] + spaced)
    assert merge(task.ledger, other, whatever) == 1
    assert task.ledger.read_bytes() == other.read_bytes()
    assert merge(task.ledger, other, whatever) == 0


def test_merge_mends_line_ends_alone(task: Task, record: RunRecord, tmp_path: Path) -> None:
    """What a mail program or an editor does to a line is no second version of the run."""
    other = tmp_path / "other.jsonl"
    append(task.ledger, record)
    known, new = task.ledger.read_bytes(), encode(make_record(task, seed=1))
    other.write_bytes(known.replace(b"\n", b"\r\n") + new.rstrip(b"\n"))
    assert merge(task.ledger, other, whatever) == 1
    assert task.ledger.read_bytes() == known + new
    assert merge(task.ledger, other, whatever) == 0
    other.write_bytes(known + new[:-100])
    with pytest.raises(LedgerError, match=r"other.jsonl:2: not valid JSON"):
        merge(task.ledger, other, whatever)


def test_merge_into_a_ledger_without_its_last_newline(task: Task, record: RunRecord, tmp_path: Path) -> None:
    """Ours is what this machine wrote: an unfinished line there is named, and nothing is added."""
    other = tmp_path / "other.jsonl"
    append(other, make_record(task, seed=1))
    append(task.ledger, record)
    task.ledger.write_bytes(task.ledger.read_bytes()[:-1])
    before = task.ledger.read_bytes()
    with pytest.raises(LedgerError, match=r"ledger.jsonl:1: unfinished line"):
        merge(task.ledger, other, whatever)
    assert task.ledger.read_bytes() == before


def test_merge_of_nothing_and_of_itself(task: Task, record: RunRecord, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    append(task.ledger, record)
    with pytest.raises(UsageError, match=r"empty.jsonl: expected the line of a run, or several, got an empty file"):
        merge(task.ledger, empty, whatever)
    assert merge(task.ledger, task.ledger, whatever) == 0
    with pytest.raises(UsageError, match=r"expected a file with the lines of runs, got none"):
        merge(task.ledger, tmp_path, whatever)


def test_merge_keeps_the_version_of_each_line(task: Task, record: RunRecord, tmp_path: Path) -> None:
    append(task.ledger, record.model_copy(update={"run_id": "new"}))
    ours = task.ledger.read_bytes()
    assert merge(task.ledger, OLD, whatever) == 2
    assert task.ledger.read_bytes() == ours + OLD.read_bytes()
    other = tmp_path / "old.jsonl"
    other.write_bytes(OLD.read_bytes())
    assert merge(other, task.ledger, whatever) == 1
    assert other.read_bytes() == OLD.read_bytes() + ours
    assert [record.schema_version for record in read(other)] == [SCHEMA_VERSION] * 3


def test_merge_takes_a_migrated_copy_for_another_version_of_the_run(task: Task, tmp_path: Path) -> None:
    """A line written again in the new form is an edited line: what was measured then did not have it."""
    task.ledger.parent.mkdir(parents=True)
    task.ledger.write_bytes(OLD.read_bytes())
    append(tmp_path / "other.jsonl", read(OLD)[0])
    with pytest.raises(LedgerError, match="one was edited"):
        merge(task.ledger, tmp_path / "other.jsonl", whatever)
    assert task.ledger.read_bytes() == OLD.read_bytes()


def test_merge_refuses_two_versions_of_one_run(task: Task, record: RunRecord, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    append(task.ledger, record)
    append(other, record.model_copy(update={"seconds": 1.0}))
    before = task.ledger.read_bytes()
    with pytest.raises(LedgerError, match=f"run {record.run_id} differs"):
        merge(task.ledger, other, whatever)
    with pytest.raises(UsageError, match=r"absent.jsonl: file not found"):
        merge(task.ledger, tmp_path / "absent.jsonl", whatever)
    assert task.ledger.read_bytes() == before


def test_merge_refuses_what_a_ledger_must_not_hold(task: Task, record: RunRecord, tmp_path: Path) -> None:
    """Nothing of the file is taken, and each refused line is named; a fit run and one that is there already are not."""
    first, *rest = record.rows
    attained = first.model_copy(update={"attained": 0.99, "attained_device": 0.98})
    there, fit, foreign, unmeasured, edited = (f"20261120T043000Z-00000{number}" for number in range(1, 6))
    lines = {
        there: record,
        fit: record,
        foreign: record.model_copy(update={"task": "other"}),
        unmeasured: cpu_record(task),
        edited: record.model_copy(update={"rows": (attained, *rest)}),
    }
    other = tmp_path / "other.jsonl"
    for name, one in lines.items():
        append(other, one.model_copy(update={"run_id": name}))
    with pytest.raises(LedgerError) as refused:
        merge(task.ledger, other, partial(ledger_refusal, task))
    assert not task.ledger.exists()
    said = str(refused.value).splitlines()
    assert said[:2] == [
        f"{other}:3: run {foreign} is refused: it is a run of other, expected one of fake",
        f"{other}:4: run {unmeasured} is refused: it was made without a GPU and measured nothing",
    ]
    why = f"row {ROWS[0]}: attained: the record says 0.99, its samples give "
    assert said[2].startswith(f"{other}:5: run {edited} is refused: {why}")
    assert said[2].endswith(" give 0.87356953")
    assert said[3:] == [f"nothing was appended to {task.ledger}"]
    for name in (there, unmeasured):
        append(task.ledger, lines[name].model_copy(update={"run_id": name}))
    other.write_bytes(b"".join(other.read_bytes().splitlines(keepends=True)[n] for n in (0, 1, 3)))
    assert merge(task.ledger, other, partial(ledger_refusal, task)) == 1
    assert [one.run_id for one in read(task.ledger)] == [there, unmeasured, fit]
