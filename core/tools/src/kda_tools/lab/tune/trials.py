"""Finds out what each candidate of a sweep would launch on each row, and compiles it; needs no GPU."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_tools.lab.inspect.aot import Compilable, launches_of_row, meta_tensors, resources

if TYPE_CHECKING:
    from kda_judge.contract.tasks import Task
    from kda_judge.contract.workloads import Workload
    from kda_tools.lab.tune.sweep import Sweep


@dataclass(frozen=True)
class Trial:
    """One row of one sweep."""

    sweep: Sweep[Any]
    row: Workload
    features: dict[str, float]
    """The features that the solution passes to the table."""
    launches: tuple[tuple[Compilable, ...] | None, ...]
    """The launches of each candidate; None if it is not tried."""

    @property
    def twins(self) -> dict[int, list[int]]:
        """Candidate -> all candidates with the same launches, itself included; every tried one is in one list."""
        found: dict[int, list[int]] = {}
        for place, launches in enumerate(self.launches):
            if launches is None:
                continue
            first = next((other for other in found if self.launches[other] == launches), place)
            found.setdefault(first, []).append(place)
        return found

    @property
    def launch_kinds(self) -> tuple[str | None, ...]:
        """For each candidate its launches by type, such as `2 Launch`; the host's work depends on these."""
        return tuple(None if launches is None else _kind(launches) for launches in self.launches)


@dataclass(frozen=True)
class Compiled:
    """What one variant of a kernel uses on one target, or why it does not compile."""

    registers: int = 0
    shared_bytes: int = 0
    spill_bytes: int = 0
    failure: str | None = None


def _kind(launches: Sequence[Compilable]) -> str:
    counts = Counter(type(one).__name__ for one in launches)
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def trials(task: Task, sweep: Sweep[Any], rows: Iterable[Workload]) -> list[Trial]:
    """The rows that ask the sweep's table and have a candidate, with what every candidate would launch there."""
    solution = task.load("solution")
    if not hasattr(solution, "launches"):
        raise UsageError(f"{task.path / 'solution'}: expected a function launches(op, inputs, scalars), found none")
    found = []
    for row in rows:
        inputs = meta_tensors(row)
        launches: list[tuple[Compilable, ...] | None] = []
        features = None
        for config in sweep.candidates:
            with sweep.table.forced(config) as asked:
                made = launches_of_row(solution, row, inputs)
            if not asked:
                break
            features = asked[0]
            launches.append(made if sweep.applies(config, features) else None)
        if features is not None and any(made is not None for made in launches):
            found.append(Trial(sweep, row, features, tuple(launches)))
    return found


def compile_all(found: Sequence[Trial], targets: Sequence[str]) -> dict[tuple[str, str, str], Compiled]:
    """Compile every variant once per target, in parallel: (target, name, variant) -> what it uses."""
    todo = [(target, one) for target in targets for one in _variants(found)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        used = pool.map(lambda item: _compile(item[1], item[0]), todo)
        return {(target, one.name, one.variant): result for (target, one), result in zip(todo, used, strict=True)}


def fill_cache(found: Sequence[Trial], target: str) -> None:
    """Compile every variant into the cache on disk, in which the first call of a candidate finds it.

    Triton's variants compile in as many processes as there are cores, since its compiler holds the interpreter's lock.
    Meanwhile the others compile one after the other: the CuTe DSL compiles in one thread at a time. Errors are ignored
    here; the first call reports them.
    """
    from kda_runtime.launch import Launch

    def attempt(several: Sequence[Compilable]) -> None:
        for one in several:
            with suppress(Exception):
                one.compile(target)

    def attempt_in_process(several: Sequence[Compilable]) -> None:
        with suppress(KeyboardInterrupt):  # the parent process handles it
            attempt(several)

    variants, cores = _variants(found), len(os.sched_getaffinity(0))
    kernels = [one for one in variants if isinstance(one, Launch)]
    fork = multiprocessing.get_context("fork")  # the variants' kernels cannot be sent to a new interpreter
    shares = [kernels[start::cores] for start in range(min(cores, len(kernels)))]
    processes = [fork.Process(target=attempt_in_process, args=(share,), daemon=True) for share in shares]
    for process in processes:
        process.start()
    attempt([one for one in variants if not isinstance(one, Launch)])
    for process in processes:
        process.join()


def _variants(found: Sequence[Trial]) -> list[Compilable]:
    """The launches of the trials, every variant once."""
    from triton import knobs

    if knobs.runtime.interpret:
        raise MissingRequirement("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled; unset it")
    launches = [one for trial in found for made in trial.launches for one in made or ()]
    return list({(one.name, one.variant): one for one in launches}.values())


def _compile(launch: Compilable, target: str) -> Compiled:
    try:
        binary = launch.compile(target)
    except Exception as error:  # noqa: BLE001  whatever a compiler raises for a configuration is that one's failure
        return Compiled(failure=error_line(error))
    registers, static_shared, local = resources(binary.cubin)
    return Compiled(registers, static_shared + binary.dynamic_shared_bytes, local)


def error_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0][:200]}" if message else type(error).__name__
