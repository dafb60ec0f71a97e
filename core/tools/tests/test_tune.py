"""Sweeps: what is measured, what follows from it, and when a tuning table is not what the record gives."""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kda_judge.arms.protocol import Traffic
from kda_judge.contract.errors import ExitCode, LedgerError, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import record_log
from kda_judge.judge.open_row import RESTORED_SETS
from kda_runtime import tuned_table
from kda_runtime.tuned_table import Line, Table
from kda_tools.lab.tune import Sweep, run_sweep
from kda_tools.lab.tune import tuning_files as tune
from kda_tools.lab.tune.choose_lines import choose, derive, expected, score
from kda_tools.lab.tune.host_time import host_times
from kda_tools.lab.tune.sweep_record import RowTimes, SweepRecord, TableTimes, Walls, Wrong
from kda_tools.project import check_tuning, tune_task, validate
from kda_tools.publish import tuning_page
from kda_tools.publish.tuning_page import digest_md


@dataclass(frozen=True)
class Config:
    warps: int
    early: bool = True
    store: str = ""


GRID = (Config(4), Config(8), Config(4, store=".cs"), Config(4, early=False, store=".cs"))
TABLE = Table("/nowhere/norm.py", "norm", Config)
LINES: tuple[dict[str, float], ...] = ({"width": 512}, {})
SWEEP = Sweep(table=TABLE, candidates=GRID, lines=LINES)


def row(width: int, times: Sequence[float | None], spread: float = 0.0, wrong: Sequence[int] = ()) -> RowTimes:
    return RowTimes(
        row=f"r{width}",
        features={"width": width},
        bytes_moved=1000,
        copy_us=1.0,
        median_us=tuple(times),
        spread=tuple(None if time is None else spread for time in times),
        wrong=tuple(Wrong(candidate=place, reason="not finite") for place in wrong),
    )


def test_the_context_of_a_sweep_is_no_stranger_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing the device may make a context before the GPU is read."""

    def read(_device: int, own_pids: Sequence[int] = ()) -> None:
        raise UsageError(f"read beside {list(own_pids)}")

    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr("kda_judge.evidence.gpu_state.read_state", read)
    request: Any = run_sweep.Request(task=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=re.escape(f"read beside [{os.getpid()}]")):
        run_sweep.sweep(run_sweep.Plan(request, (), whole=True, gpu=0), lambda *_: None)


def record(*rows: RowTimes, utc: str = "2026-12-01T00:00:00Z", **changes: Any) -> SweepRecord:
    candidates = tuple({"warps": one.warps, "early": one.early, "store": one.store} for one in GRID)
    made = SweepRecord(
        utc=utc,
        seconds=1.0,
        command="kda tune norm",
        commit="0" * 40,
        dirty=False,
        solution="s",
        capability=9,
        device="NVIDIA H200",
        versions={},
        rounds=7,
        partial=False,
        noisy=(),
        tables=(TableTimes(table="norm", candidates=candidates, rows=rows),),
    )
    return made.model_copy(update=changes)


def chosen(*records: SweepRecord, current: Sequence[Line] = (), sweep: Sweep[Config] = SWEEP) -> list[Config]:
    lines = expected([sweep], records, {"norm": current})["norm"]
    return [TABLE.parse(line.config, line.at_most) for line in lines]


# ---- the rule ---------------------------------------------------------------------------------


def test_each_line_takes_the_best_mean_of_its_own_rows() -> None:
    narrow = [row(128, (3.0, 1.0, 2.0, 2.0)), row(512, (1.0, 2.0, 9.0, 9.0))]  # means: 1.73, 1.41, 4.24, 4.24
    wide = [row(513, (2.0, 2.0, 1.0, 1.5))]
    assert chosen(record(*narrow, *wide)) == [Config(8), Config(4, store=".cs")]


def test_the_mean_is_over_ratios_and_not_over_times() -> None:
    """In microseconds the large row alone would decide."""
    rows = [row(1, (1.0, 2.0, 9.0, 9.0)), row(2, (110.0, 100.0, 999.0, 999.0)), row(999, (1.0, 2.0, 2.0, 2.0))]
    assert chosen(record(*rows))[0] == Config(4)


def test_within_the_spread_the_plainest_is_taken_and_the_reason_says_so() -> None:
    # Two departures fastest, one departure 0.5% behind, none 0.9% behind.
    times = (1.009, 3.0, 1.005, 1.0)
    wide = row(999, (1.0, 2.0, 2.0, 2.0))
    for spread, config in (
        (0.01, Config(4)),
        (0.006, Config(4, store=".cs")),
        (0.0, Config(4, early=False, store=".cs")),
    ):
        assert chosen(record(row(1, times, spread), wide))[0] == config
    first, _ = expected([SWEEP], [record(row(1, times, 0.01), wide)], {})["norm"]
    assert first.reason == (
        "1 rows, 4 candidates: 1.009 of each row's best; next warps=4 early=False store=.cs 1.000; equal within the "
        "spread, and plainer; spread 1.0%; 1.009 of the streaming copy's time"
    )
    assert (first.date, first.device, first.capability) == ("2026-12-01", "NVIDIA H200", 9)
    assert first.config == {"warps": 4}


def test_equally_plain_ones_are_taken_in_the_grids_order() -> None:
    wide = row(999, (1.0, 2.0, 2.0, 2.0))
    assert chosen(record(row(1, (1.001, 1.0, 9.0, 9.0), spread=0.01), wide))[0] == Config(4)
    turned = replace(SWEEP, candidates=GRID[::-1])
    assert chosen(record(row(1, (1.001, 1.0, 9.0, 9.0), spread=0.01), wide), sweep=turned)[0] == Config(8)


def test_one_noisy_candidate_makes_no_ties() -> None:
    times = row(1, (1.05, 3.0, 3.0, 1.0)).model_copy(update={"spread": (0.2, 0.001, 0.001, 0.001)})
    assert chosen(record(times, row(999, (1.0, 2.0, 2.0, 2.0))))[0] == Config(4, early=False, store=".cs")


def test_a_candidate_that_was_wrong_on_any_row_is_chosen_nowhere() -> None:
    narrow, wide = row(1, (2.0, 1.0, 3.0, 3.0)), row(999, (2.0, None, 3.0, 3.0), wrong=[1])
    assert chosen(record(narrow, wide)) == [Config(4), Config(4)]
    nobody = row(999, (None, None, None, None), wrong=[0, 1, 2, 3])
    with pytest.raises(
        UsageError, match=re.escape("at_most {'width': 512}: the sweep of 2026-12-01T00:00:00Z has no cand")
    ):
        chosen(record(narrow, nobody))


def test_a_candidate_that_was_not_tried_on_a_row_is_out_for_that_rows_line_alone() -> None:
    narrow = [row(1, (2.0, 1.0, 3.0, 3.0)), row(2, (2.0, None, 3.0, 3.0))]
    assert chosen(record(*narrow, row(999, (2.0, 1.0, 3.0, 3.0)))) == [Config(4), Config(8)]


def test_a_line_without_a_row_is_an_error() -> None:
    with pytest.raises(
        UsageError, match=re.escape("[[norm]]: line 2, at_most {}: the sweep of 2026-12-01T00:00:00Z has")
    ):
        derive(SWEEP, made := record(row(1, (1.0, 2.0, 3.0, 4.0))), made.tables[0])


def test_candidates_are_found_again_by_their_fields() -> None:
    """A field added since the sweep had its default then; a configuration that was not measured cannot be chosen."""
    table = TableTimes(table="norm", candidates=({"warps": 16}, {"warps": 8, "early": True}), rows=())
    rows = [row(1, (1.0, 2.0))]
    (only,) = score(SWEEP, table, rows)
    assert (only.config, only.score) == (Config(8), 1.0)
    assert choose([only], rows)[1].startswith("1 rows, 1 candidates: 1.000 of each row's best; spread 0.0%")


# ---- the host ---------------------------------------------------------------------------------

ONE, TWO = "1 Launch", "2 Launch"
KINDS = (ONE, ONE, TWO, TWO)


def walled(
    width: int,
    times: Sequence[float | None],
    walls: Sequence[float | None],
    spread: float = 0.003,
    op: str = "norm",
    kinds: Sequence[str | None] = KINDS,
) -> RowTimes:
    made = Walls(op=op, kinds=tuple(kinds), median_us=tuple(walls))
    return row(width, times, spread).model_copy(update={"walls": made})


def reason(*rows: RowTimes) -> str:
    return expected([SWEEP], [record(*rows)], {})["norm"][0].reason


DEVICE_BOUND = walled(999, (90.0, 95.0, 70.0, 75.0), (91.0, 96.0, 71.0, 76.0))


def test_where_the_host_decides_a_single_launch_beats_a_shorter_device_time() -> None:
    narrow = walled(1, (6.0, 5.0, 4.0, 4.5), (6.5, 6.9, 11.1, 10.5))
    assert chosen(record(narrow, DEVICE_BOUND)) == [Config(8), Config(4, store=".cs")]
    without = [one.model_copy(update={"walls": None}) for one in (narrow, DEVICE_BOUND)]
    assert chosen(record(*without)) == [Config(4, store=".cs")] * 2
    assert reason(narrow, DEVICE_BOUND) == (
        "1 row, 4 candidates: 1.000 of each row's best; next warps=4 1.000; equal within the spread, and faster on the "
        "device; the host decides: device time alone would take warps=4 store=.cs, 1.565; 6.90 us of the host a call, "
        "longer than the device on 1 of 1; spread 0.3%; 5.000 of the streaming copy's time"
    )
    assert "host" not in expected([SWEEP], [record(narrow, DEVICE_BOUND)], {})["norm"][1].reason


def test_where_the_host_costs_the_same_device_time_decides_and_then_plainness() -> None:
    """Not the host's noise, by which the third of them would be the cheapest."""
    walls = (6.6, 6.8, 6.1, 7.0)
    for times, config in (
        ((5.0, 4.0, 4.5, 3.9), Config(4, early=False, store=".cs")),
        ((5.0, 4.0, 4.5, 3.99), Config(8)),
    ):
        narrow = walled(1, times, walls, kinds=[ONE] * 4)
        assert chosen(record(narrow, DEVICE_BOUND))[0] == config
        assert "the host decides" not in reason(narrow, DEVICE_BOUND)
    assert "; equal within the spread, and plainer; 6.70 us of the host" in reason(narrow, DEVICE_BOUND)


def test_a_line_weighs_rows_that_the_host_decides_against_those_that_it_does_not() -> None:
    """Two launches cost 11 us for 7, but they save more on the row that takes the device longer."""
    host = walled(1, (6.0, 5.0, 4.0, 4.5), (7.0, 7.0, 11.0, 11.0))
    device = walled(2, (30.0, 30.0, 15.0, 16.0), (31.0, 31.0, 16.0, 17.0))
    assert chosen(record(host, device, DEVICE_BOUND))[0] == Config(4, store=".cs")
    assert "11.00 us of the host a call, longer than the device on 1 of 2;" in reason(host, device, DEVICE_BOUND)
    milder = walled(2, (30.0, 30.0, 25.0, 26.0), (31.0, 31.0, 26.0, 27.0))
    assert chosen(record(host, milder, DEVICE_BOUND))[0] == Config(8)


def test_a_kind_of_call_takes_the_host_the_least_median_of_a_row_that_was_bound_by_it() -> None:
    rows = [
        walled(1, (5.0, 5.0, 4.0, 4.0), (6.5, 9.9, 11.0, 12.0)),  # a burst on the second
        # The second is less than a tenth over its device time.
        walled(2, (6.0, 6.4, 5.0, None), (6.7, 6.7, 11.4, None)),
        walled(3, (50.0, 50.0, 30.0, 30.0), (50.5, 50.5, 30.5, 40.0)),
    ]
    assert host_times(rows) == {("norm", ONE): 6.7, ("norm", TWO): 11.4}
    assert host_times(rows[2:]) == {("norm", TWO): 40.0}
    assert host_times([row(1, (1.0, 2.0, 3.0, 4.0))]) == {}


def test_rows_on_a_slow_host_do_not_rank_kinds_that_other_rows_had_too() -> None:
    """As recorded for k07 on 2026-11-20: from the eighth row on the host took 1.6 times as long for everything."""
    kinds = (ONE, "1 ClusterLaunch", TWO, TWO)
    calm = [walled(n, (3.0, 2.0, 4.0, 4.0), (6.2, 6.1, 10.0, 10.2), kinds=kinds) for n in range(7)]
    slow = [walled(n, (None, 3.0, 4.0, 4.0), (None, 9.8, 16.4, 16.5), kinds=kinds) for n in range(7, 20)]
    assert host_times([*calm, *slow]) == {("norm", ONE): 6.1, ("norm", "1 ClusterLaunch"): 6.1, ("norm", TWO): 10.1}


def test_kinds_of_an_op_that_are_less_than_the_resolution_apart_cost_the_same() -> None:
    def walls(other: float, op: str = "norm") -> list[RowTimes]:
        return [walled(1, (1.0,) * 3, (6.0, 6.6, other), op=op, kinds=(ONE, ONE, "1 ClusterLaunch"))]  # 6.3 us

    assert host_times(walls(6.6)) == {("norm", ONE): 6.3, ("norm", "1 ClusterLaunch"): 6.3}
    assert host_times(walls(6.7)) == {("norm", ONE): 6.3, ("norm", "1 ClusterLaunch"): 6.7}
    assert host_times(walls(6.1)) == {("norm", ONE): 6.1, ("norm", "1 ClusterLaunch"): 6.1}
    both = host_times([*walls(6.7), *walls(6.5, op="another")])
    assert both["norm", "1 ClusterLaunch"] == 6.7
    assert both["another", "1 ClusterLaunch"] == both["another", ONE] == 6.3


GOOD = (row(1, (1.0, 2.0, 2.0, 2.0)), row(999, (1.0, 2.0, 2.0, 2.0)))
OTHER = (row(1, (2.0, 1.0, 2.0, 2.0)), row(999, (2.0, 1.0, 2.0, 2.0)))


def hand(config: str = "{warps = 8}", capability: int = 9, reason: str = "not measured: a guess") -> list[Line]:
    fields = {"warps": 8} if config == "{warps = 8}" else {"warps": 7}
    made = Line(capability=capability, config=fields, device="d", date="2026-11-20", reason=reason)
    return [replace(made, at_most={"width": 512}), made]


@pytest.mark.parametrize("unfit", [{"partial": True}, {"noisy": ("clocks throttled",)}])
def test_the_latest_whole_and_quiet_sweep_counts(unfit: dict[str, Any]) -> None:
    assert chosen(record(*OTHER), record(*GOOD)) == [Config(4)] * 2
    assert chosen(record(*GOOD), record(*OTHER, **unfit)) == [Config(4)] * 2
    assert chosen(record(*GOOD, **unfit), current=hand()) == [Config(8)] * 2


def test_capabilities_do_not_mix() -> None:
    assert chosen(record(*OTHER, capability=10), current=[*hand("{}", 9), *hand("{}", 10)]) == [
        *[Config(7)] * 2,  # capability 9 has no sweep: as it was
        *[Config(8)] * 2,
    ]


# ---- the record -------------------------------------------------------------------------------


def test_the_log_keeps_what_was_appended_and_names_a_broken_line(tmp_path: Path) -> None:
    log = tmp_path / "docs" / "tuning.jsonl"
    assert record_log.read(log, SweepRecord) == []
    records = [record(*GOOD), record(*OTHER, partial=True)]
    for one in records:
        record_log.append(log, one)
    assert record_log.read(log, SweepRecord) == records
    log.write_bytes(log.read_bytes() + log.read_bytes()[:100])
    with pytest.raises(LedgerError, match=r"tuning.jsonl:3: line: Invalid JSON"):
        record_log.read(log, SweepRecord)


def test_a_row_has_one_time_per_candidate(tmp_path: Path) -> None:
    log = tmp_path / "tuning.jsonl"
    data = json.loads(record(*GOOD).model_dump_json())
    data["tables"][0]["rows"][0]["median_us"].pop()
    log.write_text(json.dumps(data) + "\n")
    with pytest.raises(LedgerError, match="row 'r1': expected 4 times, one per candidate"):
        record_log.read(log, SweepRecord)
    data = json.loads(record(DEVICE_BOUND).model_dump_json())
    log.write_text(json.dumps(data) + "\n")
    assert record_log.read(log, SweepRecord) == [record(DEVICE_BOUND)]
    data["tables"][0]["rows"][0]["walls"]["median_us"].pop()
    log.write_text(json.dumps(data) + "\n")
    with pytest.raises(LedgerError, match="row 'r999': expected 4 times, one per candidate"):
        record_log.read(log, SweepRecord)


def test_lines_from_before_wall_times_are_read(tmp_path: Path) -> None:
    log = tmp_path / "tuning.jsonl"
    data = json.loads(record(*GOOD).model_dump_json())
    for one in data["tables"][0]["rows"]:
        del one["walls"]
    log.write_text(json.dumps(data) + "\n")
    assert record_log.read(log, SweepRecord) == [record(*GOOD)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lines": ({"width": 512},)}, "lines: expected the last one to have no bound"),
        ({"candidates": (Config(4), Config(4))}, "candidates: expected one or more, each once, got 2"),
        ({"candidates": ()}, "candidates: expected one or more, each once, got 0"),
    ],
)
def test_a_sweep_that_makes_no_sense(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        replace(SWEEP, **changes)
    with pytest.raises(
        UsageError, match=re.escape("expected features that the solution asks with, ['rows'], got ['width']")
    ):
        SWEEP.line_of({"rows": 1})


# ---- a task -----------------------------------------------------------------------------------

SOLUTION = '''"""An arm whose configurations are of no use, and one of them wrong."""
from dataclasses import dataclass

import torch

from kda_runtime.tuned_table import Table


@dataclass(frozen=True)
class Config:
    blocks: int
    fault: str = ""


TUNED = Table(__file__, "axpy", Config)
ASKS = True
LAST = None
FREED = []


@dataclass(frozen=True)
class Kernel:
    blocks: int
    name: str = "axpy"

    @property
    def variant(self):
        return f"{self.blocks}"

    def compile(self, target):
        raise NotImplementedError


def choose(y):
    global LAST
    LAST = TUNED.select(9, step=y.stride(0)) if ASKS else Config(1)
    return LAST


def axpy(x, y, *, factor):
    config = choose(y)
    if config.fault == "raises":
        raise RuntimeError("too many resources\\nin detail")
    if config.fault == "unwritten":
        out = FREED[-1]  # as the GPU's allocator would give it out again
        out.view(-1)[:-1] = torch.add(y, x, alpha=factor).reshape(-1)[:-1]
        return out
    if config.fault == "shape":
        return torch.add(y, x, alpha=factor)[:1]
    return torch.add(y, x, alpha=factor).contiguous()


def axpy_(x, y, *, factor):
    x.copy_(torch.add(y, x, alpha=factor + (choose(y).fault == "factor")))


def launches(op, inputs, scalars):
    if op == "axpy_" and not ASKS:
        return []
    config = TUNED.select(9, step=inputs["y"].stride(0))
    return [Kernel(min(config.blocks, 4))]
'''
TUNE = """from ..solution import TUNED, Config
from kda_tools.lab.tune import Sweep

SWEEPS = (Sweep(table=TUNED, candidates=(Config(1), Config(4), Config(8), Config(2)), lines=({"step": 30}, {})),)
"""
HEAD = "# Written by `kda tune axpy`; `kda tune axpy --derive` makes it again from docs/tuning.jsonl.\n"


def tuned_line(blocks: int, bound: str = "", reason: str = "not measured: a guess") -> str:
    return (
        f"\n[[axpy]]\ncapability = 9\n{bound}config = {{blocks = {blocks}}}\n"
        f'device = "none"\ndate = "2026-11-20"\nreason = "{reason}"\n'
    )


GUESSES = HEAD + tuned_line(4, "at_most = {step = 30}\n") + tuned_line(2)


@pytest.fixture
def tuning_task(toy: Task) -> Task:
    """The test task with a table, a sweep and two guessed lines."""
    pytest.importorskip("torch")
    (toy.path / "solution" / "__init__.py").write_text(SOLUTION)
    (toy.path / "bench" / "tune.py").write_text(TUNE)
    tune.tuned_path(toy).write_text(GUESSES)
    return toy


class FakeWatch:
    """Times by the configuration that was chosen last: 10 us and 1% per block, one round in four slower."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.samples: list[int] = []
        self.walls: list[tuple[int, float]] = []
        self.room = 1000

    def capture(self, call: Callable[..., Any], sets: Sequence[Any]) -> Callable[[], float]:
        call(*sets[0])
        blocks = self.module.LAST.blocks
        return lambda: self._sample(blocks)

    def _sample(self, blocks: int) -> float:
        self.samples.append(blocks)
        slow = 0.004 if self.samples.count(blocks) % 4 == 0 else 0.0
        return 10 * (1 + blocks / 100) * (1 + slow)

    def copy(self, moved: Traffic) -> Callable[[], float]:
        return lambda: 5.0 + moved.in_place

    def wall(self, call: Callable[..., Any], sets: Sequence[Any], device_us: float) -> float:
        """Only a call before this one can have chosen."""
        blocks = self.module.LAST.blocks
        self.walls.append((blocks, device_us))
        return 20 + blocks + 0.1 * [one for one, _ in self.walls].count(blocks)

    def together(self, output_bytes: int) -> int:
        return self.room

    def settle(self) -> None:
        pass


def trials_of(task: Task, **changes: Any) -> tuple[Any, list[Any], FakeWatch]:
    from kda_tools.lab.tune.trials import trials

    (sweep,) = tune.load(task)
    module = task.load("solution")
    if changes.get("faults"):
        sweep = replace(
            sweep, candidates=(*sweep.candidates, *(module.Config(9, fault) for fault in changes["faults"]))
        )
    return module, trials(task, sweep, task.workloads), FakeWatch(module)


def measured(task: Task, watch: FakeWatch, found: Sequence[Any], **options: Any) -> tuple[list[TableTimes], bool]:
    from kda_tools.lab.tune.time_candidates import measure

    given = {"rounds": 5, "until": None, "done": lambda trial, times: None, **options}
    return measure(task, found, watch, "cpu", **given)


def test_every_candidate_is_timed_in_alternating_rounds_and_twins_once(tuning_task: Task) -> None:
    _, found, watch = trials_of(tuning_task)
    (table,), complete = measured(tuning_task, watch, found[:1])
    assert complete
    assert table.candidates == tuple({"blocks": n, "fault": ""} for n in (1, 4, 8, 2))
    # 8 launches what 4 does, so it has the same time.
    assert watch.samples[:9] == [1, 4, 2, 2, 4, 1, 1, 4, 2]
    (times,) = table.rows
    assert times.median_us == (10.1, 10.4, 10.4, 10.2)
    assert times.spread == (0.0,) * 4  # one slow round of five does not move the quartiles
    assert (times.wrong, times.copy_us, times.features) == ((), 5.0, {"step": found[0].features["step"]})
    assert [blocks for blocks, _ in watch.walls] == [1, 4, 2, 2, 4, 1, 1, 4, 2]
    assert watch.walls[:3] == [(1, 10.1), (4, 10.4), (2, 10.2)]
    assert times.walls == Walls(op=found[0].row.op, kinds=("1 Kernel",) * 4, median_us=(21.2, 24.2, 24.2, 22.2))


def test_the_kind_of_a_call_is_its_launches_by_type(tuning_task: Task) -> None:
    module, (one, *_), _ = trials_of(tuning_task)
    launches = ((module.Kernel(1),), (module.Kernel(1), Config(1), module.Kernel(2)), None, ())
    assert replace(one, launches=launches).launch_kinds == ("1 Kernel", "2 Kernel + 1 Config", None, "")


@pytest.mark.parametrize(("device_us", "calls"), [(2.0, 150), (50.0, 20), (1300.0, 1), (5000.0, 1)])
def test_a_sample_of_wall_time_is_of_many_short_calls_or_few_long_ones(
    device_us: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from kda_judge.arms import clocks
    from kda_tools.lab.tune.time_candidates import GraphWatch

    made = []

    def wall(_clock: Any, op: Callable[..., Any], calls: Sequence[Any], scalars: dict[str, Any]) -> Any:
        made.extend(op(*arguments, **scalars) for arguments in calls)
        return 3.0 * len(calls), None, None

    monkeypatch.setattr(clocks.Clock, "wall", wall)
    assert GraphWatch().wall(lambda x: x, [("called",)], device_us) == 3.0
    assert made == ["called"] * calls
    made.clear()
    assert GraphWatch().wall(lambda x: x, [(n,) for n in range(20)], device_us) == 3.0
    assert made == [*range(20)][:calls], "each of several sets once"


def test_candidates_that_do_not_fit_together_are_timed_in_parts(tuning_task: Task) -> None:
    _, found, watch = trials_of(tuning_task)
    watch.room = 2
    (table,), _ = measured(tuning_task, watch, found[:1], rounds=3)
    assert watch.samples == [1, 4, 4, 1, 1, 4, 2, 2, 2]
    assert None not in table.rows[0].median_us


def test_a_candidate_is_tried_only_where_it_applies(tuning_task: Task) -> None:
    from kda_tools.lab.tune.trials import trials

    _, found, watch = trials_of(tuning_task)
    asked = []

    def applies(config: Any, features: tuned_table.Features) -> bool:
        asked.append(features)
        return config.blocks not in (4, 2)

    (one, *_) = trials(tuning_task, replace(found[0].sweep, applies=applies), [found[0].row])
    assert asked == [found[0].features] * 4
    assert one.twins == {0: [0], 2: [2]}
    (table,), _ = measured(tuning_task, watch, [one])
    (times,) = table.rows
    assert (times.median_us, times.wrong) == ((10.1, None, 10.8, None), ())
    assert times.walls == Walls(
        op=one.row.op, kinds=("1 Kernel", None, "1 Kernel", None), median_us=(21.2, None, 28.2, None)
    )
    assert set(watch.samples) == {1, 8}
    nowhere = replace(found[0].sweep, applies=lambda config, features: False)
    assert trials(tuning_task, nowhere, tuning_task.workloads) == []


def test_wrong_candidates_are_named_and_not_timed(tuning_task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    module, found, watch = trials_of(tuning_task, faults=["raises", "unwritten", "shape"])

    def full(*arguments: Any, **options: Any) -> torch.Tensor:
        module.FREED.append(torch.empty(arguments[0], **options).fill_(arguments[1]))
        return module.FREED[-1]

    monkeypatch.setattr(torch, "full", full)
    found = [replace(one, launches=tuple((n,) for n in range(7))) for one in found]  # no twins
    (table,), _ = measured(tuning_task, watch, [one for one in found if one.row.op == "axpy"][:1])
    (times,) = table.rows
    reasons = {failure.candidate: failure.reason for failure in times.wrong}
    assert reasons[4] == "RuntimeError: too many resources"
    assert reasons[5].startswith("output 'out': 1 of 1024 elements outside tolerance")
    assert reasons[5].endswith("1 not finite")
    assert reasons[6].startswith("output 'out': expected float32 [")
    assert times.median_us[4:] == (None,) * 3
    assert times.walls is not None
    assert times.walls.median_us[4:] == (None,) * 3
    assert 9 not in watch.samples
    assert module.TUNED._forced is None


@pytest.mark.parametrize(("us", "sets", "calls"), [(1.0, 1, 300), (20.0, 1, 100), (500.0, 1, 20), (1.0, 20, 20)])
def test_small_kernels_are_timed_in_large_graphs(
    monkeypatch: pytest.MonkeyPatch, us: float, sets: int, calls: int
) -> None:
    """As the judge times them; a set of inputs that is restored serves one call only."""
    from kda_judge.arms import clocks
    from kda_tools.lab.tune.time_candidates import GraphWatch

    made = []

    class Graph:
        def __init__(self, _call: object, given: Sequence[object], _scalars: object) -> None:
            self.calls = len(given)
            made.append(self.calls)

        def replay(self, times: int) -> tuple[float, float]:
            return 0.0, us * self.calls * times

    monkeypatch.setattr(clocks, "Graph", Graph)
    assert GraphWatch().capture(lambda x: x, [(n,) for n in range(sets)])() == pytest.approx(us)
    assert made[-1] == calls


def test_an_op_in_place_gets_fresh_inputs_for_every_candidate(tuning_task: Task) -> None:
    _, found, watch = trials_of(tuning_task, faults=["factor"])
    found = [replace(one, launches=tuple((n,) for n in range(5))) for one in found if one.row.op == "axpy_"]
    (table,), _ = measured(tuning_task, watch, found[:1])
    assert [failure.candidate for failure in table.rows[0].wrong] == [4]
    assert table.rows[0].copy_us == 6.0


@pytest.mark.parametrize(("restore", "sets"), [(False, 1), (True, RESTORED_SETS)])
def test_an_op_in_place_is_timed_on_the_values_as_drawn(tuning_task: Task, restore: bool, sets: int) -> None:
    """Each sample, of the device and of the wall, as the judge's own: not on what the calls before have left."""
    import torch

    _, found, plain = trials_of(tuning_task)
    seen: list[list[torch.Tensor]] = []

    class Watch(FakeWatch):
        def _run(self, call: Callable[..., Any], given: Sequence[Any]) -> None:
            seen.append([x.clone() for x, *_ in given])
            assert len({x.data_ptr() for x, *_ in given}) == len(given)
            for arguments in given:
                call(*arguments)

        def capture(self, call: Callable[..., Any], sets: Sequence[Any]) -> Callable[[], float]:
            sample = super().capture(call, sets)
            return lambda: self._run(call, sets) or sample()

        def wall(self, call: Callable[..., Any], sets: Sequence[Any], device_us: float) -> float:
            time_us = super().wall(call, sets, device_us)
            self._run(call, sets)
            return time_us

    watch = Watch(plain.module)
    (one, *_) = (one for one in found if one.row.op == "axpy_")
    measured(tuning_task, watch, [replace(one, row=one.row.model_copy(update={"restore": restore}))])
    assert len(seen) == len(watch.samples) + len(watch.walls)
    assert {len(values) for values in seen} == {sets}
    drawn = seen[0][0]
    assert all(torch.equal(x, drawn) for values in seen for x in values)


def test_a_call_that_does_not_ask_the_table_is_an_error(tuning_task: Task) -> None:
    module, found, watch = trials_of(tuning_task)
    module.ASKS = False
    with pytest.raises(UsageError, match=r"row '.*': axpy did not ask the table 'axpy' on this device"):
        measured(tuning_task, watch, [one for one in found if one.row.op == "axpy"])


def test_out_of_time_and_interrupted_sweeps_keep_whole_rows(tuning_task: Task) -> None:
    _, found, watch = trials_of(tuning_task)
    assert len(found) > 1
    (table,), complete = measured(tuning_task, watch, found, until=0.0)
    assert (table.rows, complete) == ((), False)

    def stop(trial: Any, times: RowTimes) -> None:
        raise KeyboardInterrupt

    (table,), complete = measured(tuning_task, watch, found, done=stop)
    assert (len(table.rows), complete) == (1, False)


def test_the_plan_wants_a_row_for_every_line_and_rows_with_ids_of_their_own(tuning_task: Task) -> None:
    from kda_tools.lab.tune.run_sweep import Request, plan

    whole = plan(Request(tuning_task))
    assert whole.whole
    assert not plan(Request(tuning_task, rows=[tuning_task.workloads[0].id])).whole
    path = tuning_task.path / "bench" / "tune.py"
    module = tuning_task.load("bench.tune")
    (sweep,) = module.SWEEPS
    module.SWEEPS = (replace(sweep, lines=({"step": 0}, {})),)
    with pytest.raises(
        UsageError, match=re.escape(f"{path}: table 'axpy': no row falls into line 1, at_most {{'step': 0}}")
    ):
        plan(Request(tuning_task))
    several = replace(
        sweep, lines=({},), applies=lambda config, features: (config.blocks == 1) == (features["step"] < 30)
    )
    module.SWEEPS = (several,)
    with pytest.raises(
        UsageError, match=re.escape("table 'axpy': applies: no candidate is tried on all rows of line 1, at_most {}")
    ):
        plan(Request(tuning_task))
    module.SWEEPS = (replace(sweep, rows=tuning_task.workloads[:1]),)
    with pytest.raises(UsageError, match=re.escape(f"ids have to be new ones, got ['{tuning_task.workloads[0].id}']")):
        plan(Request(tuning_task))


def recorded(task: Task) -> SweepRecord:
    """A whole sweep by the fake watch, appended to the task's log."""
    _, found, watch = trials_of(task)
    tables, complete = measured(task, watch, found)
    made = record(partial=not complete, tables=tuple(tables))
    record_log.append(tune.log(task), made)
    return made


@pytest.mark.parametrize(
    ("changes", "table", "code"),
    [
        ({}, [{"blocks": 1}, {"blocks": 1}], ExitCode.OK),
        ({"partial": True}, [{"blocks": 4}, {"blocks": 2}], ExitCode.INTERRUPTED),
        ({"noisy": ("clocks throttled",)}, [{"blocks": 4}, {"blocks": 2}], ExitCode.OK),
    ],
)
def test_a_sweep_is_recorded_and_becomes_the_table_if_it_may(
    tuning_task: Task,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    table: list[dict[str, int]],
    code: ExitCode,
) -> None:
    from kda_judge import session as sessions
    from kda_tools.lab.tune import run_sweep

    _, found, watch = trials_of(tuning_task)
    made = record(tables=tuple(measured(tuning_task, watch, found)[0]), solution="another", **changes)
    monkeypatch.setattr(sessions, "_gpu", lambda request: 0)
    monkeypatch.setattr(run_sweep, "sweep", lambda planned, show: made)
    assert tune_task.run(run_sweep.Request(tuning_task)) is code
    assert tune.recorded(tuning_task) == [made]
    assert [line.config for line in tuned_table.read(tune.tuned_path(tuning_task))["axpy"]] == table
    printed = capsys.readouterr().out
    assert ("no table follows from it" in printed) == bool(changes)
    assert ("the solution has changed since the sweep of 2026-12-01T00:00:00Z" in printed) == (not changes)


def test_without_a_gpu_candidates_are_compiled_and_spilling_ones_named(
    tuning_task: Task, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kda_runtime.launch import Binary
    from kda_tools.lab.tune import run_sweep
    from kda_tools.lab.tune import trials as trial

    def compile_one(kernel: Any, target: str) -> Binary:
        if kernel.blocks == 2:
            raise ValueError("no such tile\nin detail")
        return Binary(cubin=bytes([kernel.blocks]), dynamic_shared_bytes=100)

    module, _, _ = trials_of(tuning_task)
    monkeypatch.setattr(module.Kernel, "compile", compile_one, raising=False)
    monkeypatch.setattr(trial, "resources", lambda cubin: (32 * cubin[0], 5, 64 if cubin[0] == 4 else 0))
    assert tune_task.run(run_sweep.Request(tuning_task, device="cpu")) is ExitCode.OK
    lines = [re.sub(r"\s+", " ", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "sm_90a: compiled ahead of time, not run"
    for line in (
        "axpy blocks=1 2 32 105 0",
        "axpy blocks=4 2 128 105 64",
        "axpy blocks=8 2 128 105 64",
        "axpy blocks=2 2 ValueError: no such tile",
        "3 variants, 1 spill, 1 do not compile",
    ):
        assert line in lines
    assert lines[-1].startswith("CORRECT")
    assert not tune.log(tuning_task).exists()


@pytest.mark.parametrize("triton", [True, False])
def test_on_a_gpu_the_cache_is_filled_before_anything_is_measured(
    triton: bool, tuning_task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel that does not compile, and a missing cuobjdump, must not end the sweep before it begins."""
    from kda_runtime import launch
    from kda_tools.lab.tune import trials as trial

    log = tmp_path / "compiled"

    def compile_one(kernel: Any, target: str) -> None:
        with log.open("a", encoding="utf-8") as lines:
            lines.write(f"{kernel.blocks} {target} {os.getpid()}.{threading.get_ident()}\n")
        if kernel.blocks == 2:
            raise ValueError("no such tile")

    module, found, _ = trials_of(tuning_task)
    monkeypatch.setattr(module.Kernel, "compile", compile_one, raising=False)
    if triton:
        monkeypatch.setattr(launch, "Launch", module.Kernel)
    trial.fill_cache([*found, replace(found[0], launches=(None,))], "sm_90a")
    blocks, targets, threads = zip(*(line.split() for line in log.read_text().splitlines()), strict=True)
    assert sorted(blocks) == ["1", "2", "4"]
    assert set(targets) == {"sm_90a"}
    # Others' compilers may allow one thread only; Triton's holds the interpreter's lock.
    here = f"{os.getpid()}.{threading.get_ident()}"
    assert here not in threads if triton else set(threads) == {here}


# ---- the page ---------------------------------------------------------------------------------


TIMES = (1.0, 2.0, 3.0, 4.0)


def page_of(*records: SweepRecord, sweep: Sweep[Config] = SWEEP) -> list[str]:
    text = digest_md(Task(Path("/nowhere/k01_norm")), [sweep], records, records)
    assert text is not None
    return text.splitlines()


def table_of(*records: SweepRecord) -> list[str]:
    return str(tuning_page.rows_csv([SWEEP], records)).splitlines()


def choices_of(*records: SweepRecord) -> list[str]:
    """From the line's number on."""
    lines = str(tuning_page.choices_csv([SWEEP], records)).splitlines()
    assert lines[0] == (
        "table,gpu,sweep,line,instead,alone,alone_least,alone_most,at_best,at_best_least,at_best_most,paid,which"
    )
    return [line.split(",", 3)[3] for line in lines[1:]]


def test_the_page_says_what_every_other_choice_costs() -> None:
    narrow = [row(128, (1.0, 2.0, 1.5, 3.0)), row(512, (1.0, 8.0, 1.5, 0.75))]
    lines = page_of(record(*narrow, row(513, (4.0, 2.0, 4.0, 4.0))))
    assert "| 1 | width 512 | 2 | `warps=4` | 1.155 | 1.000 | 0.0% |" in lines
    assert "| 2 | any | 1 | `warps=8` | 1.000 | 2.000 | 0.0% |" in lines
    choices = choices_of(record(*narrow, row(513, (4.0, 2.0, 4.0, 4.0))))
    assert "1,warps=8,4.000,2.000,8.000,4.000,2.000,8.000,4.000,warps=8" in choices
    assert "1,early=False,,,,1.500,0.750,3.000,1.500,warps=4 early=False store=.cs" in choices
    assert "1,store=.cs,1.500,1.500,1.500,1.500,1.500,1.500,1.500,warps=4 store=.cs" in choices
    assert "2,warps=4,2.000,2.000,2.000,2.000,2.000,2.000,2.000,warps=4" in choices
    table = table_of(record(*narrow, row(513, (4.0, 2.0, 4.0, 4.0))))
    assert table[0].startswith(
        "table,gpu,sweep,line,row,bytes_moved,copy_us,chosen,chosen_us,chosen_over_copy,paid_us,"
    )
    assert table[2].endswith(",1.00,warps=4,1.00,1.000,1.00,warps=4 early=False store=.cs,0.75")
    assert table[3].startswith("norm,NVIDIA H200,2026-12-01T00:00:00Z,2,r513,")
    assert table[3].endswith(",1.00,warps=8,2.00,2.000,2.00,warps=8,2.00")


def test_the_page_says_what_settings_cost_that_no_line_uses() -> None:
    """`warps=8` is used on the second line, so it is not listed; `early=False` was not tried there alone."""
    narrow = [row(128, (1.0, 2.0, 1.5, 3.0)), row(512, (1.0, 8.0, 1.5, 0.75))]
    lines = page_of(record(*narrow, row(513, (4.0, 2.0, 4.0, 4.0))))
    begin = lines.index("| setting | rows | time with it | least | most |")
    assert lines[begin + 2 : begin + 5] == [
        "| `early=False` | 3 | 1.651 | 0.750 | 3.000 |",
        "| `store=.cs` | 3 | 1.651 | 1.500 | 2.000 |",
        "",
    ]
    used = page_of(record(row(128, (2.0, 2.0, 2.0, 1.0)), row(513, (4.0, 2.0, 4.0, 4.0))))
    assert not any(line.startswith("**Settings") for line in used), "every value is on some line"


def test_the_page_says_what_its_lines_cost_on_another_gpu() -> None:
    own = record(row(128, TIMES), row(513, TIMES))
    other = record(row(128, (3.0, 2.0, 4.0, 4.0)), row(513, (4.0, 2.0, 4.0, 4.0)))
    other = other.model_copy(update={"device": "NVIDIA H100", "utc": "2026-12-02T00:00:00Z"})
    text = digest_md(Task(Path("/nowhere/k01_norm")), [SWEEP], [own], [own, other]) or ""
    assert "| NVIDIA H100 | 2026-12-02T00:00:00Z | 2 | 1.732 | 1.500 | 2.000 |" in text
    assert "another GPU" not in (digest_md(Task(Path("/nowhere/k01_norm")), [SWEEP], [own], [own]) or "")


def test_the_page_says_what_is_paid_where_walls_were_taken() -> None:
    """Two launches have the shorter device time, and take the host 11 us."""
    narrow = walled(128, (6.0, 5.0, 4.0, 4.5), (6.9, 6.9, 11.0, 11.0))
    lines = page_of(record(narrow, DEVICE_BOUND))
    assert "| 1 | width 512 | 1 | `warps=8` | 1.000 | 5.000 | 0.3% |" in lines
    choices = choices_of(record(narrow, DEVICE_BOUND))
    assert "1,store=.cs,,,,0.800,0.800,0.800,1.594,warps=4 store=.cs" in choices
    table = table_of(record(narrow, DEVICE_BOUND))
    assert table[1].endswith(",1.00,warps=8,5.00,5.000,6.90,warps=4 store=.cs,4.00")
    assert table[2].split(",")[4] == "r999"
    assert table[2].endswith(",warps=4 store=.cs,70.00,70.000,70.00,warps=4 store=.cs,70.00")


def test_the_page_names_wrong_candidates() -> None:
    lines = page_of(record(row(128, (1.0, 1.0, 2.0, None), wrong=[3]), row(513, (1.0, 2.0, 2.0, 2.0))))
    assert "- never chosen: `warps=4 early=False store=.cs`: not finite" in lines


def test_a_sweep_of_other_configurations_is_said_to_be_one() -> None:
    """As it is after a change to the solution, until it is swept again."""
    other = replace(SWEEP, candidates=(Config(16),))
    lines = page_of(record(row(128, (1.0, 2.0, 3.0, 3.0)), row(513, (1.0, 2.0, 3.0, 3.0))), sweep=other)
    (said,) = (line for line in lines if line.startswith("[[norm]]"))
    assert said.startswith(
        "[[norm]]: line 1, at_most {'width': 512}: the sweep of 2026-12-01T00:00:00Z has no candidate"
    )
    assert "## `norm` on NVIDIA H200" in lines
    assert "## Recorded sweeps" in lines


def test_the_page_lists_every_sweep() -> None:
    rows = (row(128, (1.0, 2.0, 3.0, 3.0)), row(513, (1.0, 2.0, 3.0, 3.0)))
    first, second = record(*rows), record(*rows, utc="2026-12-02T00:00:00Z")
    cut = record(*rows, utc="2026-12-03T00:00:00Z", partial=True, noisy=("hot",), dirty=True)
    history = [line.split(" | ") for line in page_of(first, second, cut) if line.startswith("| 2026")]
    assert [line[0][2:12] for line in history] == ["2026-12-03", "2026-12-02", "2026-12-01"]
    assert [line[-1] for line in history] == [
        "no table follows: rows are missing; hot |",
        "used above |",
        "superseded |",
    ]
    assert history[0][2] == "`0000000000` and changes"
    assert not any(line.startswith("## `norm`") for line in page_of(cut))
    # No table follows from it, so there is no file to link to.
    assert [any("](tuning.csv)" in line for line in page_of(one)) for one in (first, cut)] == [True, False]


def test_the_page_follows_the_log_even_where_no_table_does(
    tuning_task: Task, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kda_judge import session as sessions
    from kda_tools.lab.tune import run_sweep

    _, found, watch = trials_of(tuning_task)
    made = record(tables=tuple(measured(tuning_task, watch, found)[0]), noisy=("clocks throttled",))
    monkeypatch.setattr(sessions, "_gpu", lambda request: 0)
    monkeypatch.setattr(run_sweep, "sweep", lambda planned, show: made)
    tune_task.run(run_sweep.Request(tuning_task))
    assert check_tuning.check(tuning_task) == []
    assert not tuning_page.table(tuning_task).exists(), "nothing was chosen"
    page = tuning_page.page(tuning_task)
    assert "| no table follows: clocks throttled |" in page.read_text()
    page.write_text(page.read_text().replace("throttled", "fine"))
    (line,) = check_tuning.check(tuning_task)
    assert line == f"{page}: not what {tune.log(tuning_task)} gives; run `kda tune axpy --derive`"
    tune_task.rederive(tuning_task)
    assert f"{page}: written" in capsys.readouterr().out.replace("\n", "")
    assert check_tuning.check(tuning_task) == []
    tune.log(tuning_task).unlink()
    assert check_tuning.check(tuning_task) == [f"{page}: no sweep is recorded that it follows from"]


def test_without_tomlkit_the_sweep_is_kept_and_the_tables_are_made_elsewhere(
    tuning_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kda_judge import session as sessions

    _, found, watch = trials_of(tuning_task)
    made = record(tables=tuple(measured(tuning_task, watch, found)[0]))
    monkeypatch.setattr(sessions, "_gpu", lambda request: 0)
    monkeypatch.setattr(run_sweep, "sweep", lambda planned, show: made)
    monkeypatch.setitem(sys.modules, "tomlkit", None)
    with pytest.raises(MissingRequirement, match=r"sweeps are kept\. .*, on any machine: `kda tune axpy --derive`"):
        tune_task.run(run_sweep.Request(tuning_task))
    assert tune.recorded(tuning_task) == [made]


# ---- the check --------------------------------------------------------------------------------


def test_guesses_are_sound_until_a_sweep_is_recorded(tuning_task: Task) -> None:
    assert check_tuning.check(tuning_task) == []
    recorded(tuning_task)
    (line,) = check_tuning.check(tuning_task)
    assert line.endswith(f"[[axpy]]: not what {tune.log(tuning_task)} gives; run `kda tune axpy --derive`")
    assert tune.write(tuning_task, tune.derive_tables(tuning_task, tune.load(tuning_task)))
    assert tuning_page.write_page(tuning_task, tune.load(tuning_task))
    assert check_tuning.check(tuning_task) == []
    written = tuned_table.read(tune.tuned_path(tuning_task))["axpy"]
    assert [one.config for one in written] == [{"blocks": 1}] * 2
    assert [one.at_most for one in written] == [{"step": 30}, {}]


def test_lines_follow_the_kind_of_gpu_that_they_name(tuning_task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    """An H100 and an H200 have one capability, so a sweep on one must not replace what was chosen on the other."""
    first = recorded(tuning_task)
    tune_task.rederive(tuning_task)
    chosen = tune.tuned_path(tuning_task).read_text()
    rows = [one.model_copy(update={"median_us": (40.0, 30.0, 20.0, 10.0)}) for one in first.tables[0].rows]
    table = first.tables[0].model_copy(update={"rows": tuple(rows)})
    changes = {"device": "NVIDIA H100", "utc": "2026-12-02T00:00:00Z", "tables": (table,)}
    record_log.append(tune.log(tuning_task), first.model_copy(update=changes))
    capsys.readouterr()
    tune_task.rederive(tuning_task)
    assert tune.tuned_path(tuning_task).read_text() == chosen
    assert "`kda tune axpy --derive --gpu 'NVIDIA H100'` changes that" in capsys.readouterr().out.replace("\n", " ")
    assert "| the tables follow another kind of GPU |" in tuning_page.page(tuning_task).read_text()
    assert check_tuning.check(tuning_task) == []
    tune_task.rederive(tuning_task, "NVIDIA H100")
    lines = tuned_table.read(tune.tuned_path(tuning_task))["axpy"]
    assert [(one.device, one.config) for one in lines] == [("NVIDIA H100", {"blocks": 2})] * 2
    assert check_tuning.check(tuning_task) == []
    with pytest.raises(
        UsageError, match=r"--gpu 'L4': expected a GPU of a usable sweep in .*: 'NVIDIA H100', 'NVIDIA H200'"
    ):
        tune_task.rederive(tuning_task, "L4")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("blocks = 2", "blocks = 3", "[[axpy]]: at_most {}: key 'config': {'blocks': 3} is no candidate of the sweep"),
        ("step = 30", "step = 31", "capability 9: key 'at_most': expected [{'step': 30}, {}], got [{'step': 31}, {}]"),
        (
            "not measured: a guess",
            "fastest",
            "key 'reason': no sweep is recorded, so it has to begin with 'not measured'",
        ),
        ("[[axpy]]", "[[apxy]]", "[[axpy]]: missing, and no sweep is recorded that gives it"),
        ("device", "devise", "[[axpy]], line 1: unknown key 'devise'; did you mean device?"),
        (HEAD, "", "not as `kda tune axpy --derive` writes it"),
    ],
)
def test_a_hand_that_slips(tuning_task: Task, old: str, new: str, expected: str) -> None:
    path = tune.tuned_path(tuning_task)
    path.write_text(path.read_text().replace(old, new))
    found = check_tuning.problems(tuning_task)
    assert found
    assert all(str(tuning_task.path) in line for line in found)
    assert any(expected in line for line in found), found


def test_after_a_sweep_no_line_can_be_changed_by_hand(tuning_task: Task) -> None:
    recorded(tuning_task)
    tune.write(tuning_task, tune.derive_tables(tuning_task, tune.load(tuning_task)))
    path = tune.tuned_path(tuning_task)
    path.write_text(path.read_text().replace("blocks = 1}", "blocks = 4}", 1))
    assert len(check_tuning.problems(tuning_task)) == 1
    tune.log(tuning_task).write_text("{}\n")
    assert "tuning.jsonl:1: utc: Field required" in check_tuning.problems(tuning_task)[0]


def test_validation_asks_for_it(tuning_task: Task) -> None:
    path = tune.tuned_path(tuning_task)
    path.write_text(path.read_text().replace("blocks = 2", "blocks = 3"))
    assert [line for line in validate.problems(tuning_task) if "no candidate of the sweep" in line]


def test_the_check_does_not_load_the_solution_into_this_process(tuning_task: Task) -> None:
    """It may judge that solution next."""
    assert check_tuning.problems(tuning_task) == []
    package = tuning_task.load("bench").__package__
    assert f"{package}.solution" not in sys.modules
    (tuning_task.path / "solution" / "__init__.py").write_text("raise RuntimeError('no solution')\n")
    (line,) = check_tuning.problems(tuning_task)
    assert line == f"{tuning_task.path / 'bench' / 'tune.py'}: cannot be checked: RuntimeError: no solution"


def test_a_table_without_a_sweep_is_an_orphan(tuning_task: Task) -> None:
    (tuning_task.path / "bench" / "tune.py").unlink()
    assert check_tuning.problems(tuning_task) == [
        f"{tune.tuned_path(tuning_task)}: there is no bench/tune.py that it follows from"
    ]
    tune.tuned_path(tuning_task).unlink()
    assert check_tuning.problems(tuning_task) == []


def test_a_copy_says_that_it_was_not_measured(tuning_task: Task) -> None:
    recorded(tuning_task)
    tune.write(tuning_task, tune.derive_tables(tuning_task, tune.load(tuning_task)))
    tune.log(tuning_task).unlink()
    assert check_tuning.check(tuning_task) != []
    tune.disown(tune.tuned_path(tuning_task), "axpy", "k01_source")
    assert check_tuning.check(tuning_task) == []
    reasons = {line.reason for line in tuned_table.read(tune.tuned_path(tuning_task))["axpy"]}
    assert reasons == {"not measured: as in k01_source, of which this task is a copy"}
