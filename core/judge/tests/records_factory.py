"""Synthetic tasks and records for tests of the ledger and the report. No number here was measured on anything."""

from pathlib import Path

import numpy as np

from kda_judge.contract.tasks import Task
from kda_judge.evidence import provenance
from kda_judge.evidence.derive import recompute
from kda_judge.evidence.gpu_state import GpuState
from kda_judge.evidence.run_record import (
    LIMIT_ARM,
    ArmRow,
    Basis,
    Correctness,
    Distance,
    Limit,
    Machine,
    Metric,
    OutputError,
    Provenance,
    Repeat,
    RowResult,
    RunRecord,
    Settings,
    Verdict,
)

WHEEL = "ab" * 32
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = ("small-4x8", "large-512x8")
SECONDS = {"baseline": 1.0, "upstream_latest": 0.9, "solution": 0.5}
"""Synthetic speed of each arm, relative to the baseline."""
CONFIG = f"""
[task]
op = "fake"
title = "A synthetic task"
[ops.fake]
inputs = ["x"]
outputs = ["y"]
like = {{ y = "x" }}
[upstream."sglang-1.0"]
package = "sglang"
version = "1.0"
wheel_sha256 = "{WHEEL}"
python = "312"
platform = "any"
licence = "Apache-2.0"
files = "baseline/sglang-1.0.sha256"
[arms.baseline]
module = "baseline"
upstream = "sglang-1.0"
[arms.upstream_latest]
module = "baseline.latest"
[arms.solution]
module = "solution"
devices = ["cuda", "cpu"]
[tolerance.float32]
atol = 1e-5
rtol = 1e-5
reason = "synthetic"
[targets.h200]
capability = "sm_90a"
attained = 0.8
within_us = 0.4
[targets.b200]
capability = "sm_100a"
[bench]
generations = 3
samples = 12
target_sample_us = 20000
seeds = [11, 23, 47]
"""


def make_checkout(root: Path) -> Task:
    """A checkout with one task `fam/k99_fake` and a README with an empty table."""
    folder = root / "fam" / "k99_fake"
    files = {
        root / "noxfile.py": "",
        root / "core" / "pyproject.toml": "",
        root / "README.md": "# Fake\n<!-- kda:results:begin -->\n<!-- kda:results:end -->\nThe rest.\n",
        folder / "config.toml": CONFIG,
        folder / "baseline" / "__init__.py": "def fake(x): ...\n",
        folder / "baseline" / "sglang-1.0.sha256": f"{'cd' * 32}  sglang/kernel.py\n",
        folder / "solution" / "__init__.py": "def fake(x):\n    return x\n",
        folder / "solution" / "tuned" / "h200.toml": "block = 128\n",
        folder / "bench" / "reference.py": "def fake(x):\n    return (x,)\n",
        folder / "bench" / "workloads.toml": "".join(
            f'[[workload]]\nid = "{row}"\nop = "fake"\nproduction = true\n'
            f'inputs.x = {{ shape = [4, 8], dtype = "float32" }}\n'
            for row in ROWS
        ),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Task(folder)


def gpu_reading(name: str = "NVIDIA H200") -> GpuState:
    """An idle GPU."""
    return GpuState(
        name=name,
        uuid="GPU-0",
        driver="580.1",
        cuda="13.0",
        sm_mhz=1980,
        sm_max_mhz=1980,
        memory_mhz=3201,
        memory_max_mhz=3201,
        temperature_c=40,
        power_w=120.5,
        power_limit_w=700.0,
        throttle=(),
        thermal_us=0,
        utilisation=0,
        processes=(),
        memory_total_mb=143771,
        memory_used_mb=4,
        ecc=True,
        mig=False,
    )


def samples(median: float, rng: np.random.Generator, generations: int = 3) -> tuple[tuple[float, ...], ...]:
    """12 samples a generation within 1% of `median`."""
    return tuple(tuple((median * (1 + rng.uniform(-0.01, 0.01, 12))).tolist()) for _ in range(generations))


def make_arm(wall: float, rng: np.random.Generator) -> ArmRow:
    """A correct arm with all four metrics."""
    error = OutputError(
        output="y", max_abs=1e-6, max_rel=1e-5, rel_l2=1e-6, worst_index=(3, 5), allowed=2e-5, used=0.05
    )
    return ArmRow(
        correctness=Correctness(passed=True, checks=20, outputs=(error,)),
        samples={
            Metric.WALL: samples(wall, rng),
            Metric.LATENCY: samples(wall + 4, rng),
            Metric.EVENTS: samples(wall, rng),
            Metric.DEVICE: samples(wall * 0.8, rng),
        },
        calls_per_sample=1000,
    )


def make_row(name: str, wall: float, rng: np.random.Generator) -> RowResult:
    """A measured row whose baseline takes `wall` us; the verdict is for `recompute` to find."""
    return RowResult(
        id=name,
        op="fake",
        production=True,
        verdict=Verdict.NOT_FASTER,
        reason="",
        arms={arm: make_arm(wall * share, rng) for arm, share in SECONDS.items()} | {LIMIT_ARM: limit_arm(wall)},
        limit=Limit(bytes_moved=256, device_us=wall * 0.35, host_us=4.3),
        input_shapes={"x": (4, 8)},
    )


def limit_arm(wall: float) -> ArmRow:
    """The limits' worker: an empty launch, and a stream of the row's bytes, within a tenth of a percent."""

    def around(median: float) -> tuple[tuple[float, ...], ...]:
        steps = np.linspace(-1e-3, 1e-3, 36).reshape(3, 12)
        return tuple(map(tuple, (median * (1 + steps)).tolist()))

    samples = {Metric.WALL: around(4.3), Metric.DEVICE: around(wall * 0.35)}
    return ArmRow(correctness=Correctness(passed=True, checks=0, outputs=()), samples=samples)


def portable_arm(wall: float, rng: np.random.Generator) -> ArmRow:
    """An arm of which the wall alone was timed."""
    arm = make_arm(wall, rng)
    return arm.model_copy(update={"samples": {Metric.WALL: arm.samples[Metric.WALL]}})


def with_columns(row: RowResult, wall: float, rng: np.random.Generator) -> RowResult:
    """The row with what came with version 3: cold inputs, the portable arm, distances, the eager arm's among them."""
    cold = {
        name: row.arms[name].model_copy(
            update={
                "samples": {**row.arms[name].samples, Metric.COLD: samples(wall * SECONDS[name], rng)},
                "distance": () if name == "solution" else (Distance(output="y", equal=0.75, near=1.0, ulps=1),),
            }
        )
        for name in SECONDS
    }
    eager = cold["baseline"].model_copy(update={"samples": {}, "calls_per_sample": None})
    beside = {"portable": portable_arm(wall * 0.7, rng), "eager": eager}
    return row.model_copy(update={"arms": {**row.arms, **cold, **beside}})


def make_record(task: Task, seed: int = 0, utc: str = "2026-11-20T04:30:00Z", old: bool = False) -> RunRecord:
    """A clean, publishable run with all numbers made from its samples; `old` as before version 3."""
    rng, later = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    walls = dict(zip(ROWS, (10.0, 80.0), strict=True))
    rows = tuple(make_row(name, wall, rng) for name, wall in walls.items())
    rows = rows if old else tuple(with_columns(row, walls[row.id], later) for row in rows)
    return recompute(
        RunRecord(
            run_id=f"{utc.replace('-', '').replace(':', '')}-{seed:06x}",
            utc=utc,
            seconds=61.5,
            command="kda bench fake --record",
            task="fake",
            provenance=Provenance(
                commit=COMMIT,
                dirty=False,
                hashes=provenance.hashes(task),
                pins=provenance.pins(task.config),
                versions={"python": "3.12.3", "torch": "2.11.0", "driver": "580.1"},
            ),
            machine=Machine(
                kind="cuda",
                cpu="Synthetic CPU",
                cores=16,
                pinned_core=15,
                platform="Linux",
                before=gpu_reading(),
                after=gpu_reading(),
            ),
            settings=Settings(
                subject="solution",
                against=("baseline", "upstream_latest"),
                generations=3,
                samples=12,
                target_sample_us=20_000,
                seeds=(11, 23, 47),
                families=("normal", "offset"),
                cold=not old,
                beside=() if old else ("portable", "eager"),
                decides=Basis.WALL if old else Basis.DEVICE,
                isolate="none",
            ),
            rows=rows,
            headline=None,
            noise_floor={ROWS[0]: Repeat(first=samples(10.0, rng), second=samples(10.0, rng))},
        )
    )


def cpu_record(task: Task) -> RunRecord:
    """The same run as a machine without a GPU leaves it: checked, not measured."""
    record = make_record(task)
    rows = tuple(
        row.model_copy(
            update={
                "verdict": Verdict.CORRECT,
                "reason": "ran without a GPU",
                "limit": None,
                "arms": {
                    name: arm.model_copy(update={"samples": {}, "calls_per_sample": None})
                    for name, arm in row.arms.items()
                },
            }
        )
        for row in record.rows
    )
    machine = record.machine.model_copy(update={"kind": "cpu", "before": None, "after": None, "pinned_core": None})
    return recompute(record.model_copy(update={"rows": rows, "machine": machine, "noise_floor": {}}))
