"""What NVML knows about the GPU before and after a run, and whether that makes the run noisy."""

import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import IntFlag
from pathlib import Path
from typing import Any

from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.strict_models import Amount, Count, Strict

BUSY_UTILISATION = 10
"""Per cent of the last NVML sampling period; a display or a monitor stays below it, a kernel loop does not."""
LOW_CLOCK = 0.8
"""SM clock over its maximum: if something holds it lower than this, times do not compare with other runs."""
THERMAL_US = 1000
"""Microseconds of thermal throttling that cannot change a median: a run lasts minutes, a sample 10 ms."""


class Throttle(IntFlag):
    """Reasons why clocks are lower than they could be, NVML's `nvmlClocksEventReasons`."""

    GPU_IDLE = 0x1
    APPLICATIONS_CLOCKS = 0x2
    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    HW_POWER_BRAKE_SLOWDOWN = 0x80
    DISPLAY_CLOCKS = 0x100


DISTURBING = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
"""Reasons that are never part of normal work. The software power cap is: it shows in the clock instead."""


class GpuProcess(Strict):
    """A process of somebody else that holds the GPU."""

    pid: Count
    memory_mb: Count | None


class GpuState(Strict):
    """One reading of one GPU. None: the driver does not support the question."""

    name: str
    uuid: str
    driver: str
    cuda: str | None
    """Newest CUDA version that the driver supports."""
    sm_mhz: Count | None
    sm_max_mhz: Count | None
    memory_mhz: Count | None
    memory_max_mhz: Count | None
    temperature_c: int | None
    power_w: Amount | None
    power_limit_w: Amount | None
    throttle: tuple[str, ...]
    """Names of `Throttle`, in lower case."""
    thermal_us: Count | None
    """Microseconds of thermal throttling since the driver was loaded."""
    utilisation: Count | None
    """Per cent of the last sampling period in which a kernel ran."""
    processes: tuple[GpuProcess, ...]
    """Processes that are not ours."""
    memory_total_mb: Count | None
    memory_used_mb: Count | None
    ecc: bool | None
    mig: bool | None


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible to CUDA programs started now; loads neither torch nor CUDA."""
    try:
        with _nvml() as nvml:
            return bool(_visible(nvml))
    except MissingRequirement:
        return False


def read_state(device: int | str = 0, own_pids: Collection[int] = ()) -> GpuState:
    """Read the GPU that CUDA calls `device` (under CUDA_VISIBLE_DEVICES), or the one with that uuid.

    `own_pids` are processes of this run that hold the GPU now; before the run starts those of `holding`. In a container
    NVML may report the host's pids: then as many unknown pids as own ones are missing from its list count as ours.
    """
    with _nvml() as nvml:
        handle = _handle(nvml, device)

        def ask(question: str, *args: Any) -> Any:
            return _ask(nvml, getattr(nvml, question), handle, *args)

        power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
        thermal = ask("nvmlDeviceGetViolationStatus", nvml.NVML_PERF_POLICY_THERMAL)
        rates, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
        ecc, mig = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode")
        version = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        return GpuState(
            name=nvml.nvmlDeviceGetName(handle),
            uuid=nvml.nvmlDeviceGetUUID(handle),
            driver=nvml.nvmlSystemGetDriverVersion(),
            cuda=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
            sm_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            sm_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            memory_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            memory_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
            temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            throttle=_names(ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0),
            thermal_us=None if thermal is None else thermal.violationTime // 1000,
            utilisation=None if rates is None else rates.gpu,
            processes=_foreign(ask("nvmlDeviceGetComputeRunningProcesses") or [], own_pids),
            memory_total_mb=None if memory is None else memory.total >> 20,
            memory_used_mb=None if memory is None else memory.used >> 20,
            ecc=None if ecc is None else bool(ecc[0]),
            mig=None if mig is None else bool(mig[0]),
        )


def holding() -> list[int]:
    """This process's id if an earlier run in it uses CUDA already: NVML lists the process only from then on."""
    torch = sys.modules.get("torch")
    return [os.getpid()] if torch is not None and torch.cuda.is_initialized() else []


def busy(state: GpuState) -> str | None:
    """Why the GPU is not free to be measured on, or None. `state` is read before the run uses the GPU."""
    if state.processes:
        return f"{state.name} is held by {_list(state.processes)}"
    if state.utilisation is not None and state.utilisation >= BUSY_UTILISATION:
        return f"{state.name} is {state.utilisation}% busy with work of processes that NVML does not show here"
    return None


def noise(before: GpuState, after: GpuState) -> list[str]:
    """Reasons why times between two readings may not be the kernels' own; empty for a quiet run.

    Read `after` right at the end of the measurements: an idle GPU lowers its clocks.
    """
    reasons = []
    if occupied := busy(before):
        reasons.append(f"before: {occupied}")
    if newcomers := tuple(p for p in after.processes if p.pid not in {q.pid for q in before.processes}):
        reasons.append(f"after: {after.name} is held by {_list(newcomers)}")
    for label, state in (("before", before), ("after", after)):
        disturbing = sorted(DISTURBING.intersection(state.throttle))
        if disturbing:
            reasons.append(f"{label}: clocks throttled by {', '.join(disturbing)} at {state.temperature_c} C")
    if before.thermal_us is not None and after.thermal_us is not None:
        throttled = after.thermal_us - before.thermal_us
        if throttled > THERMAL_US:
            reasons.append(f"thermal throttling for {throttled / 1000:.0f} ms during the run")
    if after.throttle and "gpu_idle" not in after.throttle and after.sm_mhz and after.sm_max_mhz:
        share = after.sm_mhz / after.sm_max_mhz
        if share < LOW_CLOCK:
            why = ", ".join(after.throttle)
            reasons.append(f"after: SM clock {after.sm_mhz} MHz is {share:.0%} of {after.sm_max_mhz} MHz ({why})")
    return reasons


@contextmanager
def _nvml() -> Iterator[Any]:
    """The initialised pynvml module."""
    try:
        import pynvml
    except ImportError:
        raise MissingRequirement("no NVML bindings: `pip install nvidia-ml-py`") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MissingRequirement(f"no NVIDIA GPU or driver: {error}") from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise MissingRequirement(f"NVML: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any, question: Callable[..., Any], *args: Any) -> Any:
    """The answer, or None where this driver, GPU or permission does not give one."""
    try:
        return question(*args)
    except nvml.NVMLError:
        return None


def _visible(nvml: Any) -> list[Any]:
    """Handles in CUDA's order: CUDA_VISIBLE_DEVICES chooses and orders, and its first bad entry ends the list.

    Numbers count in PCI order here; CUDA's default order differs only between GPUs of different speed.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    visible = []
    for entry in (part.strip() for part in wanted.split(",")):
        matches = [handle for handle, uuid in zip(handles, uuids, strict=True) if entry and uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(handles):
            visible.append(handles[int(entry)])
        elif len(matches) == 1:
            visible.append(matches[0])
        elif entry.startswith("MIG-"):
            visible.append(_parent(nvml, entry))
        else:
            break
    return visible


def _parent(nvml: Any, uuid: str) -> Any:
    """The GPU that the MIG instance `uuid` is a part of."""
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(uuid))


def _handle(nvml: Any, device: int | str) -> Any:
    if isinstance(device, str):
        # torch gives the uuid without NVML's prefix.
        return nvml.nvmlDeviceGetHandleByUUID(device if device.startswith(("GPU-", "MIG-")) else f"GPU-{device}")
    visible = _visible(nvml)
    if device >= len(visible):
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise MissingRequirement(f"GPU {device}: {len(visible)} visible, CUDA_VISIBLE_DEVICES is {chosen!r}")
    return visible[device]


def _names(mask: int) -> tuple[str, ...]:
    return tuple(reason.name.lower() for reason in Throttle if mask & reason and reason.name)


def _foreign(listed: list[Any], own: Collection[int]) -> tuple[GpuProcess, ...]:
    others = [process for process in listed if process.pid not in own]
    unaccounted = len(own) - (len(listed) - len(others))
    foreign = []
    for process in others:
        if unaccounted > 0 and not Path(f"/proc/{process.pid}").exists():
            unaccounted -= 1
            continue
        memory = process.usedGpuMemory
        foreign.append(GpuProcess(pid=process.pid, memory_mb=None if memory is None else memory >> 20))
    return tuple(foreign)


def _list(processes: tuple[GpuProcess, ...]) -> str:
    shown = (f"pid {p.pid}" + ("" if p.memory_mb is None else f" ({p.memory_mb} MiB)") for p in processes)
    return ", ".join(shown)
