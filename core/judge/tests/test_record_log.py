import multiprocessing
import os

import pytest

from kda_judge.contract.errors import LedgerError, MissingRequirement
from kda_judge.contract.strict_models import Strict
from kda_judge.evidence.append_only import demand_appendable
from kda_judge.evidence.record_log import append, read


class Line(Strict):
    number: int


def add(path, numbers):
    for number in numbers:
        append(path, Line(number=number))


def test_writers_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "docs" / "lines.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=add, args=(path, range(first, 200, 2))) for first in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(line.number for line in read(path, Line)) == list(range(200))


def test_an_unfinished_line_is_kept_and_named(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"number":1}\n{"numb')
    append(path, Line(number=3))
    assert path.read_bytes() == b'{"number":1}\n{"numb\n{"number":3}\n'
    with pytest.raises(LedgerError, match=r"lines\.jsonl:2: line: Invalid JSON"):
        read(path, Line)


def test_no_file_has_no_lines(tmp_path):
    assert read(tmp_path / "none.jsonl", Line) == []


@pytest.mark.parametrize("end", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_line_that_broke_off_is_taken_back(tmp_path, monkeypatch, end):
    path, write, calls = tmp_path / "lines.jsonl", os.write, []
    append(path, Line(number=1))

    def full(file, data):
        if calls:
            raise end
        calls.append(data)
        return write(file, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(type(end)):
        append(path, Line(number=2))
    assert read(path, Line) == [Line(number=1)]


@pytest.mark.parametrize("make", [lambda path: path.symlink_to(path), os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_taken_for_an_empty_one(tmp_path, make):
    make(path := tmp_path / "lines.jsonl")
    for refused in (lambda: read(path, Line), lambda: demand_appendable(path)):
        with pytest.raises(LedgerError, match=r"lines\.jsonl: expected a file, got"):
            refused()


def test_a_log_that_may_not_be_written_is_refused_ahead(tmp_path, monkeypatch):
    demand_appendable(tmp_path / "new" / "lines.jsonl")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(MissingRequirement, match=r"lines\.jsonl: .* may not be written"):
        demand_appendable(tmp_path / "new" / "lines.jsonl")
