import multiprocessing

import pytest

from kda_judge.contract.errors import LedgerError
from kda_judge.contract.strict_models import Strict
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
