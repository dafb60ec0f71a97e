"""The numbers of docs/method_evidence.md that are of recorded runs follow from the ledgers."""

from math import exp, log
from statistics import median

import pytest

from kda_judge.contract.tasks import checkout_root, find_task
from kda_judge.evidence.ledger import read
from kda_judge.evidence.run_record import Basis, Interval, Metric, RowResult, RunRecord
from kda_tools.lab.compare_runs import compare
from kda_tools.publish.report import median as median_of
from kda_tools.publish.tables import host_bound


def reach(interval: Interval | None) -> float:
    """Half the interval, on the log scale, as a share."""
    assert interval is not None
    return exp(log(interval.high / interval.low) / 2) - 1


def is_host_bound(row: RowResult) -> bool:
    wall, device = (median_of(row, "solution", metric) for metric in (Metric.WALL, Metric.DEVICE))
    assert wall is not None
    assert device is not None
    return host_bound(wall, device)


def side_by_side(op: str, before: str, after: str, host: bool) -> str:
    """What the table under "Runs side by side" says of one kind of rows, behind the runs' names."""
    old, new = runs_of(op, before, after)
    pairs = [(then, now) for now in new.rows for then in old.rows if then.id == now.id and is_host_bound(now) is host]

    def ratios(arm: str, metric: Metric) -> list[float]:
        times = [[median_of(row, arm, metric) for row in pair] for pair in pairs]
        return [after / before for before, after in times if before and after]

    floors = [now.limit.host_us / then.limit.host_us for then, now in pairs if now.limit and then.limit]
    walls = [*(median(ratios(arm, Metric.WALL)) for arm in ("baseline", "solution")), median(floors)]
    devices = [ratio for arm in ("baseline", "solution", "upstream_latest") for ratio in ratios(arm, Metric.DEVICE)]
    speedups = [median(reach(row.speedup[Basis.WALL]["baseline"]) for row in rows) for rows in zip(*pairs, strict=True)]
    repeats = [median(reach(run.noise_floor[row.id].ratio) for row, _ in pairs) for run in (old, new)]
    return (
        f"| {len(pairs)} {'host' if host else 'device'}-bound | {', '.join(f'{ratio:.3f}' for ratio in walls)} "
        f"| {min(devices):.3f} to {max(devices):.3f} | {speedups[0]:.1%}, then {speedups[1]:.1%} "
        f"| {repeats[0]:.1%}, then {repeats[1]:.1%} |"
    )


ALONE = [
    ("norm_infer", "20261120T131441Z-50d568", "20261121T024456Z-5fcfb3"),
    ("qknorm_rope", "20261120T063350Z-1c8dc9", "20261121T025132Z-5caad7"),
]
SIDE_BY_SIDE = [
    ("norm_infer", "20261121T001530Z-c10803", "20261121T024456Z-5fcfb3"),
    ("rotary_embedding", "20261121T001105Z-b365f8", "20261121T024738Z-540e1a"),
    ("qknorm_rope", "20261121T001510Z-ff46c6", "20261121T025132Z-5caad7"),
    ("norm_tanh_mul_add", "20261121T001105Z-6f8bd0", "20261121T024236Z-ce2446"),
    ("fuse_scale_shift", "20261121T001104Z-31def7", "20261121T023800Z-dea5d6"),
    ("group_norm_silu", "20261121T001103Z-f6d969", "20261121T022720Z-fa6c2d"),
]
BESIDE_GRIDS = [
    ("norm_scale_shift", "20261120T205701Z-6809a9", "20261121T025621Z-43bbfc"),
    ("fuse_scale_shift", "20261120T205658Z-72b0e0", "20261121T023800Z-dea5d6"),
]


@pytest.fixture(scope="module")
def method() -> str:
    root = checkout_root()
    assert root is not None
    return (root / "docs" / "method_evidence.md").read_text()


def runs_of(op: str, *names: str) -> tuple[RunRecord, ...]:
    runs = {record.run_id: record for record in read(find_task(op).ledger)}
    return tuple(runs[name] for name in names)


@pytest.mark.parametrize(("op", "old", "new"), [*ALONE, SIDE_BY_SIDE[1], SIDE_BY_SIDE[-1], BESIDE_GRIDS[-1]])
def test_runs_side_by_side(op: str, old: str, new: str, method: str) -> None:
    lines = method.splitlines()
    (first,) = (number for number, line in enumerate(lines) if f"{old}, {new} |" in line)
    kinds = [host for host in (True, False) if any(is_host_bound(row) is host for row in runs_of(op, new)[0].rows)]
    for line, host in enumerate(kinds, first):
        assert lines[line].endswith(side_by_side(op, old, new, host))


def moved(pairs: list[tuple[str, str, str]]) -> tuple[int, list[str]]:
    """Rows that pairs of runs have in common, and the names of those whose speedup moved."""
    found = [compare(*runs_of(op, old, new)) for op, old, new in pairs]
    assert not any(comparison.lost for comparison in found)
    rows = [{change.row for change in comparison.changes} for comparison in found]
    names = {change.row for comparison in found for change in comparison.changes if change.moved}
    return sum(map(len, rows)), sorted(names)


def test_rows_that_moved(method: str) -> None:
    text = " ".join(method.split())
    quiet, none = moved(ALONE + SIDE_BY_SIDE)
    assert none == []
    assert f"alone or side by side the speedup of none of {quiet} rows changed by more than 2%" in text
    rows, names = moved(BESIDE_GRIDS)
    assert f"Beside grids {len(names)} of {rows} did: {', '.join(names)}." in text


def test_the_two_pages_say_what_the_appendix_has(method: str) -> None:
    """Coverage and false verdicts are those of the simulation's table, at 3 generations and 1%."""
    root = checkout_root()
    assert root is not None
    short = " ".join((root / "docs" / "method.md").read_text().split())
    line = next(line for line in method.splitlines() if line.startswith("| 3 | 1% |"))
    alone, used = (cell.strip().split(", ") for cell in line.split("|")[3:5])
    assert f"it covers the truth in {used[0]} of runs and calls {used[1]} `FASTER` by mistake" in short
    assert f"the bootstrap alone would do so in {alone[1]}" in short
    assert len(short.split()) <= 1000
