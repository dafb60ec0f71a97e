"""Ledger lines of older schema versions: read as they were meant, never rewritten, and not improved upon."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from core.judge.tests.records_factory import make_checkout, make_record
from kda_judge.contract.tasks import find_tasks
from kda_judge.evidence import ledger_migrations
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.ledger import append, encode, read
from kda_judge.evidence.ledger_migrations import MIGRATIONS, is_known, migrate
from kda_judge.evidence.run_record import SCHEMA_VERSION, RunRecord, Verdict
from kda_tools.publish.generate import publish

OLD = Path(__file__).parent / "data" / "ledger_v1.jsonl"
ROOT = Path(__file__).resolve().parents[3]
CHANGED = ("schema_version", "settings", "rows", "headline", "speedup", "attained", "attained_device")
"""What version 3 says in another form."""
LEDGERS = sorted(ROOT.glob("*/*/docs/ledger.jsonl"))


def raw(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def holds(whole: Any, part: Any) -> bool:
    """Whether everything in `part` is in `whole` too, which may have more keys."""
    if isinstance(part, dict):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(holds, whole, part))
    return bool(whole == part)


def test_every_version_has_a_way_to_the_current_one() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))
    assert [version for version in (None, 0, 1, 2, 3, 1.0, True, "1") if is_known(version)] == [1, 2, 3]
    assert RunRecord.model_fields["schema_version"].default == SCHEMA_VERSION


def test_lines_of_version_1_are_read(tmp_path: Path) -> None:
    before = OLD.read_bytes()
    assert [line["schema_version"] for line in raw(OLD)] == [1, 1]
    measured, checked = read(OLD)
    assert OLD.read_bytes() == before
    assert (measured.schema_version, measured.machine_watch, measured.rerun_of) == (SCHEMA_VERSION, None, None)
    assert {row.verdict for row in measured.rows} == {Verdict.FASTER}
    assert {row.verdict for row in checked.rows} == {Verdict.CORRECT}
    assert mismatches(measured) + mismatches(checked) == []
    # The program that wrote them and this one agree on everything but what is new.
    new: Any = {"provenance": True, "rows": {"__all__": {"input_shapes"}}}
    again = make_record(make_checkout(tmp_path), old=True).model_dump(exclude=new)
    assert measured.model_dump(exclude=new) == again


def test_an_edited_digit_of_an_old_line_is_found(tmp_path: Path) -> None:
    line = raw(OLD)[0]
    line["rows"][0]["speedup"]["baseline"]["estimate"] += 0.001
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (wrong,) = mismatches(read(path)[0])
    assert wrong.startswith("row small-4x8: speedup.wall.baseline.estimate: the record says ")


@pytest.mark.parametrize("path", LEDGERS, ids=lambda path: path.parents[1].name)
def test_the_ledgers_of_this_repository_are_read_and_left_alone(path: Path) -> None:
    before = path.read_bytes()
    for record, line in zip(read(path), raw(path), strict=True):
        assert mismatches(record) == []
        kept = migrate(line)
        assert holds(json.loads(encode(record)), kept)
        if line["schema_version"] == SCHEMA_VERSION:
            assert kept == line
            continue
        assert holds(kept, {key: part for key, part in line.items() if key not in CHANGED})
        for row, old in zip(kept["rows"], line["rows"], strict=True):
            assert holds(row, {key: part for key, part in old.items() if key not in CHANGED})
            assert row["speedup"].get("wall", {}) == old["speedup"]
            assert row["attained"] == old["attained_device"]
    assert path.read_bytes() == before


def test_published_pages_follow_from_old_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page made of the old lines is the page made of the same runs in the new form."""
    old = [path for path in LEDGERS if any(line["schema_version"] != SCHEMA_VERSION for line in raw(path))]
    assert old
    for name in ("old", "new"):
        root = tmp_path / name
        for path in old:
            folder = path.parents[1].relative_to(ROOT)
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for empty in ("noxfile.py", "core/judge/pyproject.toml"):
            (root / empty).parent.mkdir(parents=True, exist_ok=True)
            (root / empty).touch()
        (root / "README.md").write_text("<!-- kda:results:begin -->\n<!-- kda:results:end -->\n")
        monkeypatch.setenv("KDA_ROOT", str(root))
        for task in find_tasks():
            if name == "new":
                records = read(task.ledger)
                task.ledger.unlink()
                for record in records:
                    append(task.ledger, record)
        publish(find_tasks(), check=False, draw=False)
    for path in old:
        page = path.with_name("results.md").relative_to(ROOT)
        assert (tmp_path / "old" / page).read_bytes() == (tmp_path / "new" / page).read_bytes()
    assert (tmp_path / "old" / "README.md").read_bytes() == (tmp_path / "new" / "README.md").read_bytes()


def test_steps_are_taken_in_order_and_the_line_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {1: lambda line: {**line, "path": "one"}, 2: lambda line: {**line, "path": line["path"] + " two"}}
    monkeypatch.setattr(ledger_migrations, "MIGRATIONS", steps)
    monkeypatch.setattr(ledger_migrations, "SCHEMA_VERSION", 3)
    old: dict[str, Any] = {"schema_version": 1}
    assert migrate(old) == {"schema_version": 3, "path": "one two"}
    assert old == {"schema_version": 1}
    assert migrate({"schema_version": 2, "path": "-"}) == {"schema_version": 3, "path": "- two"}
    current = {"schema_version": 3}
    assert migrate(current) is current


def test_a_key_before_its_time_is_refused() -> None:
    with pytest.raises(ValueError, match="rerun_of: not a key of schema_version 1"):
        migrate({"schema_version": 1, "rerun_of": "20261120T043000Z-000000"})
