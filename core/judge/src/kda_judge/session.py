"""What a run is about: a user's request, and the arms, device and settings that it becomes."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kda_judge.arms.arm_import import REPLAYER
from kda_judge.arms.input_values import Family
from kda_judge.arms.protocol import ArmSpec
from kda_judge.arms.upstream import cache_folder, check_python, fetch, read_lock
from kda_judge.contract.config import Arm, Config
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.contract.workloads import Workload, select, shrink
from kda_judge.evidence import gpu_state
from kda_judge.evidence.run_record import AGAIN, LIMIT_ARM, PORTABLE_ARM, REPLAYED_ARM, Settings
from kda_judge.judge.open_row import output_spec
from kda_judge.judge.oracle import load_reference

QUICK_SAMPLES = 4
"""Samples of a quick run per row and arm."""
EAGER = "eager"
"""The arm of a task that is the chain of PyTorch operations which the op replaces."""
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
    device: str = "auto"
    """`auto` takes a GPU if there is one; `cuda`, `cuda:1`, `cpu`."""
    again: bool = False
    """Measure A/A as well."""
    allow_busy: bool = False
    generations: int | None = None
    samples: int | None = None
    quick: bool = False
    """A first look: one generation, one seed, few samples, kernels not counted. Never published."""
    limits: bool = True
    """Measure what the machine allows as well, where rows are timed on a GPU."""
    ports: Mapping[str, Path] = field(default_factory=dict)
    """Further arms by name: the folder of a package with the task's public functions, an export for example. The one
    named `portable` is the solution without its launcher, and is timed beside it."""
    node: str | None = None
    attempt: int | None = None
    """Which try of a fleet this is; only recorded, as `node` is."""


@dataclass(frozen=True)
class Session:
    """A request made definite: which arms run on what."""

    request: Request
    config: Config
    kind: Kind
    settings: Settings
    gpu: int | None
    """Index of the GPU among the visible ones; None on a CPU. Judges on different GPUs may run at the same time."""

    @property
    def device(self) -> str:
        """Name of the device in torch."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu}"

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm that runs."""
        return tuple(dict.fromkeys((*self.settings.against, self.settings.subject, *self.settings.beside)))


def open_session(request: Request) -> Session:
    """Decide device, opponents and settings; a wrong name, or a request that cannot be met, is an error here."""
    config = _with_ports(request.task, request.ports)
    gpu = _gpu(request)
    kind: Kind = "cpu" if gpu is None else "cuda"
    bench = config.bench
    subject, against = _arm(config, request.subject, kind, "--arm"), _opponents(request, config, kind)
    settings = Settings(
        subject=subject,
        against=against,
        beside=tuple(name for name in _beside(config, kind) if name not in (subject, *against)),
        generations=request.generations or (1 if request.quick else bench.generations),
        samples=request.samples or ((QUICK_SAMPLES if request.quick else bench.samples) if kind == "cuda" else 1),
        # A CPU's clock decides nothing: one call exercises the protocol.
        target_sample_us=bench.target_sample_us if kind == "cuda" else 1,
        seeds=bench.seeds[:1] if request.quick else bench.seeds,
        families=tuple(family.value for family in Family),
        cold=kind == "cuda",
        quick=request.quick,
        isolate=bench.isolate,
        rows=tuple(request.rows),
    )
    return Session(request=request, config=config, kind=kind, settings=settings, gpu=gpu)


def frozen_rows(session: Session) -> tuple[Workload, ...]:
    """The frozen rows asked for, fit for the session's device."""
    task = session.request.task
    rows = offered(session, select(task.workloads, session.request.rows))
    return fit(session, rows, task.path / "bench" / "workloads.toml")


def offered(session: Session, rows: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """The rows whose op every arm of the session has.

    Raises:
        UsageError: no row is left.
    """
    config = session.config
    found = tuple(row for row in rows if all(row.op in config.ops_of(name) for name in session.arms))
    if rows and not found:
        few = [f"{name} has {', '.join(config.arms[name].ops)}" for name in session.arms if config.arms[name].ops]
        raise UsageError(f"--rows: expected some of ops that every arm has, got none: {'; '.join(few)}")
    return found


def fit(session: Session, rows: tuple[Workload, ...], source: Path) -> tuple[Workload, ...]:
    """The rows, each checked against its op's contract, and shrunken on a CPU. Errors name the file `source`."""
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
            if dtype not in session.config.tolerance and session.config.ops[row.op].tolerated(name):
                raise UsageError(
                    f"{task.path / 'config.toml'}: missing key 'tolerance.{dtype}': output {name!r} of row {row.id!r}"
                )
    cpu = session.config.cpu
    return rows if session.kind == "cuda" else tuple(shrink(row, cpu.keep, cpu.shrink) for row in rows)


def arm_spec(session: Session, name: str) -> ArmSpec:
    """What the process of arm `name` is started with; brings its pinned upstream files into the cache."""
    task, arm = session.request.task, session.config.arms[name]
    root = version = pin = None
    if arm.upstream is not None:
        pin = session.config.upstream[arm.upstream]
        check_python(pin, name)
        root, version = str(fetch(pin, task.path / pin.files, cache_folder(checkout_root()))), pin.version
    return ArmSpec(
        name=name,
        folder=str(session.request.ports.get(PORTABLE_ARM if name == REPLAYED_ARM else name, task.path)),
        module=arm.module,
        device=session.device,
        upstream_root=root,
        upstream_version=version,
        upstream_module=pin.module if pin else "sglang",
        compiled=arm.compiled,
        replayed=name == REPLAYED_ARM,
    )


def _gpu(request: Request) -> int | None:
    """Index of the GPU to run on; None for the CPU."""
    named = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", request.device)
    if named is None:
        raise UsageError(f"--device: expected auto, cpu, cuda or cuda:INDEX, got {reprlib.repr(request.device)}")
    if request.device == "cpu":
        return None
    index = int(named[1] or 0)
    if gpu_state.has_gpu():
        import torch

        if not torch.cuda.is_available():
            raise MissingRequirement(
                f"a GPU is here, but torch {torch.__version__} cannot use it: install a CUDA build, or use --device cpu"
            )
        if index >= torch.cuda.device_count():
            raise MissingRequirement(f"--device {request.device}: expected one of {torch.cuda.device_count()} GPUs")
        return index
    if request.device != "auto":
        raise MissingRequirement(
            f"--device {request.device}: no NVIDIA GPU is visible here; `kda doctor` shows what was found"
        )
    return None


def _arm(config: Config, name: str, kind: Kind, option: str) -> str:
    if name not in config.arms:
        raise UsageError(f"{option} {name!r}: no such arm; nearest: {', '.join(nearest(name, config.arms))}")
    if kind not in config.arms[name].devices:
        able = [other for other, arm in config.arms.items() if kind in arm.devices]
        raise MissingRequirement(f"{option} {name!r}: this arm needs a GPU; without one there are: {', '.join(able)}")
    return name


def _with_ports(task: Task, ports: Mapping[str, Path]) -> Config:
    """The config with the request's arms added; the portable arm also under upstream's launcher, if a pin has one."""
    config = task.config
    for name, folder in ports.items():
        if name in (*config.arms, AGAIN, LIMIT_ARM, REPLAYED_ARM):
            raise UsageError(f"--port {name!r}: expected a name that no arm of the task has: {', '.join(config.arms)}")
        if not (folder / "__init__.py").is_file():
            raise UsageError(f"--port {name}={folder}: expected the folder of a package, found no __init__.py there")
    brought = {name: Arm(module="", devices=("cuda", "cpu")) for name in ports}
    pins = [name for name, pin in config.upstream.items() if REPLAYER in read_lock(task.path / pin.files)]
    if PORTABLE_ARM in ports and pins:
        brought[REPLAYED_ARM] = Arm(module="", upstream=pins[-1], devices=("cuda",))
    return config.model_copy(update={"arms": {**config.arms, **brought}})


def _beside(config: Config, kind: Kind) -> list[str]:
    """On a GPU the portable arms, and the eager one, with whose outputs the subject's are compared."""
    wanted = (PORTABLE_ARM, REPLAYED_ARM, EAGER) if kind == "cuda" else ()
    return [name for name in wanted if name in config.arms and kind in config.arms[name].devices]


def _opponents(request: Request, config: Config, kind: Kind) -> tuple[str, ...]:
    """The opponents that the request names; else upstream's arms, or on a CPU the eager arm."""
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
