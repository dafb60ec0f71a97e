"""`kda why`: the numbers are the record's, what is missing is named, and it fits a screen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from core.judge.tests.records_factory import make_checkout, make_record
from core.tools.tests.every_task import every_task
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task, find_task
from kda_judge.evidence import ledger
from kda_judge.evidence.derive import recompute
from kda_tools.campaign.history import row_history
from kda_tools.publish import report
from kda_tools.publish.read_once import unchanged_files
from kda_tools.publish.why import LINES, WIDTH, _notes, find_row, missing_rows, why

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    made = make_checkout(tmp_path)
    ledger.append(made.ledger, make_record(made))
    return made


def test_times_limit_and_gap_are_the_records(task: Task) -> None:
    record = ledger.read(task.ledger)[0]
    row = record.rows[0]
    said = why(task, row.id)
    device = row.arms["solution"].summary[report.Metric.DEVICE].median
    assert row.limit is not None
    assert f"run {record.run_id}, NVIDIA H200, 2026-11-20" in said
    assert f"device {device:.2f} us" in said
    assert f"GAP: {device - row.limit.device_us:+.2f} us to the device's limit; target within 0.4 us: MISSED" in said
    assert f"attained {row.attained:.3f}" in said
    assert "STALE" not in said


@pytest.mark.parametrize(("device", "decides"), [(7.9, "host"), (8.1, "device")])
def test_the_host_decides_where_the_tasks_page_says_so(tmp_path: Path, device: float, decides: str) -> None:
    task = make_checkout(tmp_path)
    record = make_record(task)
    row = record.rows[0]
    arm = row.arms["solution"]
    walls, devices = ((tuple([us] * 8),) * 3 for us in (10.0, device))
    samples = {**arm.samples, report.Metric.WALL: walls, report.Metric.DEVICE: devices}
    changed = row.model_copy(update={"arms": {**row.arms, "solution": arm.model_copy(update={"samples": samples})}})
    ledger.append(task.ledger, recompute(record.model_copy(update={"rows": (changed, *record.rows[1:])})))
    assert f"the {decides} decides its wall" in why(task, row.id)


def test_a_stale_run_says_so(task: Task) -> None:
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x + 0\n")
    assert "STALE: solution has changed" in why(task, "small-4x8")


def test_what_a_record_lacks_is_named(tmp_path: Path) -> None:
    task = make_checkout(tmp_path)
    assert "never measured on a GPU: kda bench fake --rows 'small-4x8'" in why(task, "small-4x8")
    old = make_record(task, old=True)
    ledger.append(task.ledger, old)
    said = " ".join(why(task, "small-4x8").split())
    assert "this row was never profiled: kda profile fake --row small-4x8" in said
    assert f"in run {old.run_id}: device times with cold inputs, wall of the plain export" in said
    assert "distance from the other arms' bits, the GPU's state during the run" in said
    assert "no sweep has this row" in said
    assert "an iteration of a campaign that is about this row" in said
    assert "first idea: revert: gain 0.9" in why(task, "small-4x8", [("first idea", "revert: gain 0.9")])


def test_notes_that_name_the_row_are_shown(task: Task) -> None:
    notes = task.path / "docs" / "dispatch.md"
    notes.write_text(
        "# Which\n\nTwo [warps](a.md#b) were slower on 4 x 8 by 3%. Nothing of 14 x 80.\n\n- small-4x8 is host-bound.\n"
    )
    said = why(task, "small-4x8")
    assert "note: Two warps were slower on 4 x 8 by 3%." in said
    assert "note: small-4x8 is host-bound." in said
    assert "14 x 80" not in said


def test_notes_that_do_not_name_the_row_are_shown_by_what_they_say_of_all(task: Task) -> None:
    notes = task.path / "docs" / "dispatch.md"
    notes.write_text(
        "# Which\n\nOne path.\n\n## What bounds it\n\nThe host.\n\n"
        "## Tried in vain\n\n- Two warps: slower.\n\n## Else\n\nNo.\n"
    )
    shown = [line for line in why(task, "small-4x8").splitlines() if "note: " in line]
    assert shown == ["  note: The host.", "  note: Two warps: slower."]


def test_a_row_without_an_interval_has_the_ratio_of_medians(tmp_path: Path) -> None:
    task = make_checkout(tmp_path)
    record = make_record(task)
    row = record.rows[0]
    ledger.append(task.ledger, record.model_copy(update={"rows": (row.model_copy(update={"speedup": {}}),)}))
    ratio = report.row_ratio(record, row.model_copy(update={"speedup": {}}), report.Basis.DEVICE, "baseline")
    assert f"speedup, device: baseline {ratio:.3f} (ratio of medians)" in why(task, row.id)


def test_the_count_of_stale_parts_that_are_left_out_is_said(task: Task) -> None:
    record = ledger.read(task.ledger)[0]
    hashes = dict.fromkeys(record.provenance.hashes, "0" * 64)
    old = record.model_copy(update={"provenance": record.provenance.model_copy(update={"hashes": hashes})})
    task.ledger.write_text("")
    ledger.append(task.ledger, old)
    assert f"; and {len(report.stale(task, old)) - 3} more" in " ".join(why(task, "small-4x8").split())


def test_an_unknown_row_names_those_near_it(task: Task) -> None:
    with pytest.raises(UsageError, match=r"ROW 'smal-4x8': no such row of fake; nearest: small-4x8"):
        find_row(task, "smal-4x8")


def test_rows_that_miss_come_with_the_largest_gap_first(task: Task) -> None:
    assert missing_rows(task) == ["large-512x8", "small-4x8"]


@every_task
def test_every_row_fits_a_screen(task: Task) -> None:
    with unchanged_files():
        for row in task.workloads:
            lines = why(task, row.id, row_history(task, row.id)).splitlines()
            assert len(lines) <= LINES, row.id
            assert max(map(len, lines)) <= WIDTH, row.id


def test_what_does_not_fit_is_left_out_whole_and_named(task: Task) -> None:
    points = [f"Change {at}: {'slower on every row, ' * 8}and dropped." for at in range(30)]
    notes = "".join(f"- {one}\n" for one in points)
    (task.path / "docs" / "dispatch.md").write_text(f"# Which\n\n## Tried in vain\n\n{notes}")
    campaigns = [(f"idea {at}", "revert: no gain") for at in range(3)]
    lines = why(task, "small-4x8", campaigns).splitlines()
    assert len(lines) <= LINES
    said = " ".join(" ".join(lines).split())
    assert all(f"idea {at}: revert: no gain" in said for at in range(3))
    shown = [one for one in points if f"note: {one}" in said]
    assert 0 < len(shown) == said.count("note: Change")
    assert f"not shown: {30 - len(shown)} in docs/dispatch.md, 'Tried in vain'" in said
    many = why(task, "small-4x8", campaigns * 20)
    assert len(many.splitlines()) <= LINES
    assert "in docs/iterations.md; 30 in docs/dispatch.md, 'Tried in vain'" in " ".join(many.split())
    assert "no record shows:" in many


def test_notes_on_other_ops_of_the_task_are_not_shown() -> None:
    task = find_task("moe_routing")
    for begin, others in (("topk-", ("alignment", "the sum for")), ("align-", ("top-k", "the sum for"))):
        row = next(row for row in task.workloads if row.id.startswith(begin))
        notes = [one for one, _ in _notes(task, row)]
        assert notes
        assert not any(other in one.lower() for one in notes for other in others if "and the top-k" not in one)


def test_a_word_of_an_id_that_is_no_size_names_no_row(task: Task) -> None:

    notes = task.path / "docs" / "dispatch.md"
    notes.write_text("# Which\n\n## Else\n\nLogits of float32 take longer. Rows of 1 x 77 take 3 us.\n")
    row = task.workloads[0].model_copy(update={"id": "model-1x77-float32"})
    assert _notes(task, row) == [("note: Rows of 1 x 77 take 3 us.", "docs/dispatch.md, 'Else'")]


def test_a_published_run_on_another_gpu_is_named_with_its_times() -> None:
    task = find_task("qknorm_rope")
    runs = report.published_runs(task)
    assert len(runs) > 1
    row = task.workloads[0].id
    said = " ".join(why(task, row).split())
    newest = max(runs.values(), key=report.by_age)
    for record in runs.values():
        us = next(one.arms["solution"].summary[report.Metric.DEVICE].median for one in record.rows if one.id == row)
        named = re.search(
            rf"also published on {report.gpu_of(record.machine)}(, STALE)?: device solution {us:.2f} us", said
        )
        assert (named is None) == (record is newest)


def test_a_profile_is_quoted_with_its_state() -> None:
    task = find_task(str(ROOT / "diffusion" / "k02_rotary_embedding"))
    line = json.loads((task.path / "docs" / "profile.jsonl").read_text().splitlines()[-1])
    text = " ".join(why(task, line["row"]).split())
    assert f"profile {line['run_id']}, {line['gpu']['name']}, ncu {line['ncu']}" in text
    assert re.search(r" solution: memory, \d\d% of peak .* stalls: long_scoreboard \d\d%", text)
