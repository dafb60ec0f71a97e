"""A run on the terminal."""

import io
import re

from rich.console import Console

from core.judge.tests.records_factory import cpu_record, make_record
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, MachineWatch, Metric, RunRecord, Spread, Verdict
from kda_tools.publish.run_view import gpu_seen, print_run


def shown(record: RunRecord, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    print_run(console, record)
    return console.export_text()


def test_a_measured_run(task: Task) -> None:
    record = make_record(task)
    text = shown(record)
    row = record.rows[1]
    speedup = row.speedup[Basis.DEVICE]["baseline"]
    line = next(line for line in text.splitlines() if row.id in line)
    for cell in (
        f"{row.arms['baseline'].summary[Metric.DEVICE].median:.2f}",
        "75.0%, 100.0%",
        f"{row.speedup[Basis.PORTABLE]['baseline'].estimate:.3f}",
        f"{row.arms['solution'].summary[Metric.DEVICE].median:.2f}",
        f"{speedup.estimate:.3f} [{speedup.low:.3f}, {speedup.high:.3f}]",
        f"{row.attained:.3f}",
        "FASTER",
    ):
        assert cell in line
    assert record.headline is not None
    for basis, words in ((Basis.DEVICE, "device"), (Basis.PORTABLE, "portable wall")):
        estimate = record.headline.speedup[basis]["baseline"].estimate
        assert f"{words}: speedup against baseline (sglang 1.0): {estimate:.3f}" in text
    assert "2 production rows" in text


def test_a_narrow_log_cuts_no_number(task: Task) -> None:
    record = make_record(task)
    speedup = record.rows[0].speedup[Basis.DEVICE]["upstream_latest"]
    text = shown(record, width=60)
    assert "…" not in text
    assert f"{speedup.estimate:.3f}" in text
    assert f"[{speedup.low:.3f}, {speedup.high:.3f}]" in text
    assert f"{speedup.estimate:.3f} [" in shown(record, width=200)


def test_without_a_gpu_no_time_is_printed(task: Task) -> None:
    text = shown(cpu_record(task))
    assert text.count("CORRECT") == 2
    assert "an NVIDIA GPU would add" in text
    assert not re.search(r"\bus\b|speedup \d|attained|median|\d\.\d{2,3}(?!e)\b", text), text


def test_what_went_wrong_is_said_in_words(task: Task) -> None:
    record = make_record(task)
    bad = record.rows[0].model_copy(
        update={"verdict": Verdict.INCORRECT, "reason": "output 'y' at [3, 5]: expected 1.0, got [bold]2[/bold]"}
    )
    text = shown(record.model_copy(update={"rows": (bad,), "headline": None, "noisy": ("pid 7",), "partial": True}))
    assert "small-4x8: INCORRECT: output 'y' at [3, 5]: expected 1.0, got [bold]2[/bold]" in text
    assert "no production row was measured" in text
    assert "noisy, cannot be published: pid 7" in text
    assert "interrupted" in text


def test_a_row_that_never_ran_has_empty_cells(task: Task) -> None:
    record = make_record(task)
    row = record.rows[0].model_copy(
        update={"verdict": Verdict.ERROR, "reason": "baseline: exit code 1", "arms": {}, "limit": None, "speedup": {},
                "attained": None}
    )  # fmt: skip
    line = next(line for line in shown(record.model_copy(update={"rows": (row,)})).splitlines() if row.id in line)
    assert line.count(" - ") >= 5


def test_what_was_seen_of_the_gpu_is_one_line() -> None:
    seen = MachineWatch(
        readings=5,
        busy=4,
        seconds=2.2,
        longest_gap_s=1.0,
        cpu_s=0.02,
        sm_mhz=Spread(low=1400, median=1740, high=1980),
        memory_mhz=None,
        power_w=None,
        temperature_c=Spread(low=30, median=50, high=60),
        throttle_s={"gpu_idle": 0.0, "sw_power_cap": 1.5, "hw_slowdown": 1.0},
        foreign=(),
    )
    assert gpu_seen(seen) == (
        "SM clock 1740 MHz [1400, 1980], temperature 50 C [30, 60], hw_slowdown for 1.0 s, sw_power_cap for 1.5 s, "
        "5 readings in 2 s, 4 of them busy"
    )
