"""The numbers of docs/method.md that are of recorded runs follow from the ledgers."""

from math import exp, log
from statistics import median

import pytest

from kda_core.ledger import read
from kda_core.records import Interval, Metric, RowResult
from kda_core.report import median as median_of
from kda_core.tables import host_bound
from kda_core.tasks import checkout_root, find_task


def reach(interval: Interval | None) -> float:
    """Half the interval, on the log scale, as a share."""
    assert interval is not None
    return exp(log(interval.high / interval.low) / 2) - 1


def is_host_bound(row: RowResult) -> bool:
    wall, device = (median_of(row, "solution", metric) for metric in (Metric.WALL, Metric.DEVICE))
    assert wall is not None
    assert device is not None
    return host_bound(wall, device)


def side_by_side(op: str, alone: str, beside: str, host: bool) -> str:
    """What the table under "Runs side by side" says of one kind of rows, behind the runs' names."""
    runs = {record.run_id: record for record in read(find_task(op).ledger)}
    old, new = runs[alone], runs[beside]
    pairs = [(then, now) for now in new.rows for then in old.rows if then.id == now.id and is_host_bound(now) is host]

    def ratios(arm: str, metric: Metric) -> list[float]:
        times = [[median_of(row, arm, metric) for row in pair] for pair in pairs]
        return [after / before for before, after in times if before and after]

    floors = [now.limit.host_us / then.limit.host_us for then, now in pairs if now.limit and then.limit]
    walls = [*(median(ratios(arm, Metric.WALL)) for arm in ("baseline", "solution")), median(floors)]
    devices = [ratio for arm in ("baseline", "solution", "upstream_latest") for ratio in ratios(arm, Metric.DEVICE)]
    speedups = [median(reach(row.speedup["baseline"]) for row in rows) for rows in zip(*pairs, strict=True)]
    repeats = [median(reach(run.noise_floor[row.id].ratio) for row, _ in pairs) for run in (old, new)]
    return (
        f"| {len(pairs)} {'host' if host else 'device'}-bound | {', '.join(f'{ratio:.3f}' for ratio in walls)} "
        f"| {min(devices):.3f} to {max(devices):.3f} | {speedups[0]:.1%}, then {speedups[1]:.1%} "
        f"| {repeats[0]:.1%}, then {repeats[1]:.1%} |"
    )


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(
    ("op", "alone", "beside"),
    [
        ("norm_infer", "20261120T131441Z-50d568", "20261120T135435Z-ad46c1"),
        ("norm_infer", "20261120T131441Z-50d568", "20261120T205703Z-712ba1"),
        ("norm_infer", "20261120T131441Z-50d568", "20261121T001530Z-c10803"),
        ("qknorm_rope", "20261120T063350Z-1c8dc9", "20261120T135432Z-f832a3"),
        ("qknorm_rope", "20261120T063350Z-1c8dc9", "20261120T205702Z-5cfb55"),
        ("qknorm_rope", "20261120T063350Z-1c8dc9", "20261121T001510Z-ff46c6"),
    ],
)
def test_runs_side_by_side(op: str, alone: str, beside: str, host: bool) -> None:
    root = checkout_root()
    assert root is not None
    lines = (root / "docs" / "method.md").read_text().splitlines()
    (first,) = (number for number, line in enumerate(lines) if f"{alone}, {beside} |" in line)
    assert lines[first + (not host)].endswith(side_by_side(op, alone, beside, host))
