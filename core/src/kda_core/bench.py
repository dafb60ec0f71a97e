"""One run from request to record: choose rows and arms, start the judge, gather what it found."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import kda_core
from kda_core import gpu, provenance
from kda_core.case import output_spec
from kda_core.config import Config
from kda_core.derive import recompute
from kda_core.errors import MissingRequirement, UsageError
from kda_core.inputs import Family
from kda_core.judge import Judge, Progress
from kda_core.oracle import load_reference
from kda_core.protocol import ArmSpec
from kda_core.records import LIMIT_ARM, ArmRow, Metric, Repeat, RowResult, RunRecord, Settings
from kda_core.suggest import nearest
from kda_core.tasks import Task, checkout_root
from kda_core.upstream import cache_folder, fetch
from kda_core.verdict import result
from kda_core.workers import ArmProcess
from kda_core.workloads import Workload, select, shrink

AGAIN = "again"
"""A second worker of the first opponent: A/A, the noise floor of the session."""
CHANGED = "changed on disk during the run"
"""Behind the name of a part, why a run is noisy."""
Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Request:
    """What a user asks of `kda bench` or `kda validate`."""

    task: Task
    rows: list[str] = field(default_factory=list)
    """Row patterns; empty means every frozen row."""
    subject: str = "solution"
    against: list[str] = field(default_factory=list)
    """Opponents; empty means the task's upstream arms, or on a CPU its eager arm."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    cold: bool = False
    again: bool = False
    """Measure A/A as well."""
    allow_busy: bool = False
    generations: int | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Session:
    """A request made definite: which arms run on what."""

    request: Request
    config: Config
    kind: Kind
    settings: Settings

    @property
    def device(self) -> str:
        """Name of the device in torch."""
        return "cuda:0" if self.kind == "cuda" else "cpu"


def open_session(request: Request) -> Session:
    """Decide device, opponents and settings; every wrong name or impossible wish is an error here."""
    config = request.task.config
    kind = _device(request)
    bench = config.bench
    settings = Settings(
        subject=_arm(config, request.subject, kind, "--arm"),
        against=_opponents(request, config, kind),
        generations=request.generations or bench.generations,
        samples=request.samples or (bench.samples if kind == "cuda" else 1),
        # A CPU's clock decides nothing: one call exercises the protocol.
        target_sample_us=bench.target_sample_us if kind == "cuda" else 1,
        seeds=bench.seeds,
        families=tuple(family.value for family in Family),
        cold=request.cold,
        isolate=bench.isolate,
        rows=tuple(request.rows),
    )
    return Session(request=request, config=config, kind=kind, settings=settings)


def frozen_rows(session: Session) -> tuple[Workload, ...]:
    """The frozen rows asked for, fit for the session's device."""
    task = session.request.task
    return fit(session, select(task.workloads, session.request.rows), task.path / "bench" / "workloads.toml")


def fit(session: Session, rows: tuple[Workload, ...], source: Path) -> tuple[Workload, ...]:
    """`rows`, each checked against the op's contract as `source` gives it, and then shrunken on a CPU."""
    task = session.request.task
    check = getattr(load_reference(task), "check", None)
    for row in rows:
        task.check_row(row, source)
        try:
            if check is not None:
                check(row)
        except ValueError as error:
            raise UsageError(f"{source}: row {row.id!r} breaks the contract of {row.op}: {error}") from None
        for name in session.config.ops[row.op].outputs:
            dtype = output_spec(session.config.ops[row.op], row, name).dtype
            if dtype not in session.config.tolerance:
                raise UsageError(
                    f"{task.path / 'config.toml'}: missing key 'tolerance.{dtype}': output {name!r} of row {row.id!r}"
                )
    cpu = session.config.cpu
    return rows if session.kind == "cuda" else tuple(shrink(row, cpu.keep, cpu.shrink) for row in rows)


def run(
    session: Session,
    rows: tuple[Workload, ...],
    measure: bool,
    progress: Progress,
    command: str = "",
    limit_s: float | None = None,
) -> RunRecord:
    """Verify (and with `measure` time) `rows`; always returns a record, a partial one after Ctrl-C.

    Without `measure`, rows that were not begun within `limit_s` seconds, or not finished before Ctrl-C, are absent.

    Raises:
        MissingRequirement: no GPU, or a busy one without `allow_busy`; an upstream file that cannot be had.
    """
    task, settings = session.request.task, session.settings
    started, begin = datetime.now(timezone.utc), time.monotonic()
    before = _gpu_before(session)
    source = provenance.collect(task, [settings.subject, *settings.against], before.driver if before else None)
    reference = load_reference(task)
    provenance.drop_bytecode(task)
    on_disk = provenance.on_disk(task)
    partial = False
    with _placed(session.kind) as core:
        judge = Judge(session.config, reference, _processes(session, measure), settings, session.device, core, progress)
        try:
            judge.run(rows, measure, until=None if limit_s is None else begin + limit_s)
        except KeyboardInterrupt:
            partial = True
        finally:
            try:
                after = gpu.read_state(0, judge.pids()) if before else None
            finally:
                judge.stop()
    l2 = _l2_bytes(session.device)
    noted = [notes for notes in judge.notes.values() if measure or notes.complete or notes.failed]
    results = [result(notes, settings, session.kind, l2, measure) for notes in noted]
    host = provenance.host(core)
    record = RunRecord(
        run_id=provenance.run_id(started),
        utc=provenance.utc(started),
        seconds=(datetime.now(timezone.utc) - started).total_seconds(),
        command=command,
        task=task.op,
        provenance=source,
        machine=host.model_copy(update={"kind": session.kind, "before": before, "after": after}),
        settings=settings,
        rows=tuple(_without_again(row) for row in results),
        headline=None,
        noise_floor={row.id: part for row in results if (part := _repeat(row, settings.against[0]))},
        noisy=(
            *(gpu.noise(before, after) if before and after else ()),
            *(f"{part} {CHANGED}" for part in provenance.changed(task, on_disk)),
        ),
        partial=partial,
    )
    return recompute(record) if session.kind == "cuda" and measure else record


# ---- choosing -------------------------------------------------------------------------------


def _device(request: Request) -> Kind:
    if request.device == "cpu":
        return "cpu"
    if gpu.has_gpu():
        import torch

        if not torch.cuda.is_available():
            raise MissingRequirement(
                f"a GPU is here, but torch {torch.__version__} cannot use it: install a CUDA build, or use --device cpu"
            )
        return "cuda"
    if request.device == "cuda":
        raise MissingRequirement("--device cuda: no NVIDIA GPU is visible here; `kda doctor` shows what was found")
    return "cpu"


def _arm(config: Config, name: str, kind: Kind, option: str) -> str:
    if name not in config.arms:
        raise UsageError(f"{option} {name!r}: no such arm; nearest: {', '.join(nearest(name, config.arms))}")
    if kind not in config.arms[name].devices:
        able = [other for other, arm in config.arms.items() if kind in arm.devices]
        raise MissingRequirement(f"{option} {name!r}: this arm needs a GPU; without one there are: {', '.join(able)}")
    return name


def _opponents(request: Request, config: Config, kind: Kind) -> tuple[str, ...]:
    """The arms named, or else upstream's; on a CPU the eager arm, the protocol's other side."""
    if request.against:
        names = tuple(_arm(config, name, kind, "--against") for name in request.against)
        if request.subject in names:
            raise UsageError(f"--against {request.subject!r}: an arm cannot run against itself; --aa measures A/A")
        return names
    usual = ("baseline", "upstream_latest") if kind == "cuda" else ("eager",)
    names = tuple(name for name in usual if name in config.arms and kind in config.arms[name].devices)
    names = tuple(name for name in names if name != request.subject)
    if not names and kind == "cuda":
        raise UsageError(f"--arm {request.subject!r}: no usual opponent is left; name one with --against")
    return names or (request.subject,)


# ---- preparing ------------------------------------------------------------------------------


def _processes(session: Session, measure: bool) -> dict[str, ArmProcess]:
    """One worker per arm, and with `measure` on a GPU the A/A twin and the limits."""
    settings, task = session.settings, session.request.task
    roots = [task.path.parents[1], Path(kda_core.__file__).parents[1]]
    # Triton kernels on CPU tensors run in Triton's interpreter.
    environment = {} if session.kind == "cuda" else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    names = dict.fromkeys((*settings.against, settings.subject))
    specs = {name: arm_spec(session, name) for name in names}
    if measure and session.kind == "cuda":
        if session.request.again:
            specs[AGAIN] = arm_spec(session, settings.against[0]).model_copy(update={"name": AGAIN})
        specs[LIMIT_ARM] = ArmSpec(name=LIMIT_ARM, module="kda_core.limits", device=session.device, limit=True)
    timeout = float(session.config.bench.timeout_s)
    return {name: ArmProcess(spec, roots, timeout, environment) for name, spec in specs.items()}


def arm_spec(session: Session, name: str) -> ArmSpec:
    """What the process of arm `name` is started with; brings its pinned upstream files into the cache."""
    task, arm = session.request.task, session.config.arms[name]
    root = version = None
    if arm.upstream is not None:
        pin = session.config.upstream[arm.upstream]
        root, version = str(fetch(pin, task.path / pin.files, cache_folder(checkout_root()))), pin.version
    return ArmSpec(
        name=name,
        module=f"{task.package}.{arm.module}",
        device=session.device,
        upstream_root=root,
        upstream_version=version,
        compiled=arm.compiled,
    )


def _gpu_before(session: Session) -> gpu.GpuState | None:
    if session.kind == "cpu":
        return None
    state = gpu.read_state(0)
    reason = gpu.busy(state)
    if reason is not None and not session.request.allow_busy:
        raise MissingRequirement(f"the GPU is busy: {reason}. Wait, or measure anyway with --allow-busy (marked noisy)")
    return state


@contextmanager
def _placed(kind: Kind) -> Iterator[int | None]:
    """Choose the core that workers are pinned to while timing, and keep the judge off it."""
    mine = os.sched_getaffinity(0)
    core = max(mine) if len(mine) > 1 and kind == "cuda" else None
    if core is not None:
        os.sched_setaffinity(0, mine - {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, mine)


def _l2_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    return int(torch.cuda.get_device_properties(device).L2_cache_size)


# ---- the A/A twin ---------------------------------------------------------------------------


def _repeat(row: RowResult, first: str) -> Repeat | None:
    """The wall samples of the first opponent from two workers of the same generation."""
    walls = [row.arms[name].samples.get(Metric.WALL) for name in (first, AGAIN) if name in row.arms]
    if len(walls) != 2 or not all(walls):
        return None
    return Repeat(first=walls[0] or (), second=walls[1] or ())


def _without_again(row: RowResult) -> RowResult:
    arms: dict[str, ArmRow] = {name: arm for name, arm in row.arms.items() if name != AGAIN}
    return row.model_copy(update={"arms": arms})
