"""NVML readings, with a driver made of paper: drivers that answer, that do not, and that are not there."""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kda_judge.bench import _gpu_before
from kda_judge.contract.errors import MissingRequirement
from kda_judge.evidence.gpu_state import GpuState, busy, has_gpu, noise, read_state

UUIDS = ["GPU-aaaa1111", "GPU-bbbb2222", "GPU-cccc3333"]
ALWAYS_ANSWERED = {"nvmlDeviceGetName", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion"}
HOST_PID = 2**30
"""Above every pid of this machine, as a host's pid looks from a container."""


class FakeNvml(ModuleType):
    """The part of pynvml that is used, for three GPUs; `answers` replaces what a question says."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_PERF_POLICY_THERMAL = 1, 2, 0, 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        self.answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlSystemGetCudaDriverVersion": 13010,
            "nvmlDeviceGetCount": len(UUIDS),
            "nvmlDeviceGetName": "NVIDIA Test",
            "nvmlDeviceGetClockInfo": {1: 1980, 2: 3201},
            "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 3201},
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 123_456,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
            "nvmlDeviceGetViolationStatus": SimpleNamespace(referenceTime=0, violationTime=5_000_000),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=141 << 30, used=3 << 20),
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetMigMode": [0, 0],
        }

    def nvmlInit(self) -> None:
        if isinstance(error := self.answers.get("nvmlInit"), Exception):
            raise error
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return UUIDS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid == "MIG-of-cccc":
            return uuid
        if uuid not in UUIDS:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return UUIDS[2]

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def __getattr__(self, question: str) -> Any:
        def answer(*args: Any) -> Any:
            assert self.open == 1, f"{question} outside nvmlInit"
            value = self.answers[question]
            if isinstance(value, Exception):
                raise value
            return value[args[1]] if isinstance(value, dict) else value

        if not question.startswith("nvml"):
            raise AttributeError(question)
        return answer


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def process(pid: int, memory: int | None = 512 << 20) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


def state(**changes: Any) -> GpuState:
    fake = FakeNvml()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", fake)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return read_state().model_copy(update=changes)


def test_full_reading(nvml: FakeNvml) -> None:
    read = read_state()
    assert (read.name, read.uuid, read.driver, read.cuda) == ("NVIDIA Test", UUIDS[0], "580.1", "13.1")
    assert (read.sm_mhz, read.sm_max_mhz, read.memory_mhz) == (1980, 1980, 3201)
    assert (read.temperature_c, read.power_w, read.power_limit_w) == (41, 123.456, 700.0)
    assert (read.thermal_us, read.utilisation, read.throttle, read.processes) == (5000, 0, (), ())
    assert (read.memory_total_mb, read.memory_used_mb, read.ecc, read.mig) == (141 << 10, 3, True, False)
    assert nvml.open == 0
    assert GpuState.model_validate_json(read.model_dump_json()) == read


@pytest.mark.parametrize("question", sorted(set(FakeNvml().answers) - ALWAYS_ANSWERED))
def test_one_unsupported_question_leaves_the_rest(nvml: FakeNvml, question: str) -> None:
    complete = read_state().model_dump()
    nvml.answers[question] = nvml.NVMLError("Not Supported")
    partial = read_state().model_dump()
    changed = {key for key in complete if partial[key] != complete[key]}
    assert all(partial[key] is None for key in changed)
    assert len(changed) <= 2
    assert changed or question.endswith(("Processes", "Reasons"))
    assert nvml.open == 0


def test_no_driver_no_bindings_and_a_lost_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_gpu()
    nvml.answers["nvmlDeviceGetName"] = nvml.NVMLError("GPU is lost")
    with pytest.raises(MissingRequirement, match="GPU is lost"):
        read_state()
    assert nvml.open == 0
    nvml.answers["nvmlInit"] = nvml.NVMLError("NVML Shared Library Not Found")
    assert not has_gpu()
    with pytest.raises(MissingRequirement, match="no NVIDIA GPU or driver: NVML Shared Library Not Found"):
        read_state()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not has_gpu()
    with pytest.raises(MissingRequirement, match="pip install nvidia-ml-py"):
        read_state()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-bbbb", [1]),
        ("GPU-cccc3333, 0", [2, 0]),
        ("MIG-of-cccc", [2]),
        ("1,7,0", [1]),
        ("", []),
        ("-1", []),
        ("GPU-", []),
    ],
)
def test_visible_devices(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[int]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert has_gpu() == bool(seen)
    assert [read_state(index).uuid for index in range(len(seen))] == [UUIDS[index] for index in seen]
    with pytest.raises(MissingRequirement, match=f"GPU {len(seen)}: {len(seen)} visible, CUDA_VISIBLE_DEVICES"):
        read_state(len(seen))


def test_by_uuid_with_and_without_prefix(nvml: FakeNvml) -> None:
    assert read_state("GPU-bbbb2222").uuid == read_state("bbbb2222").uuid == UUIDS[1]
    with pytest.raises(MissingRequirement, match="Not Found"):
        read_state("dddd")


def test_own_processes_do_not_count(nvml: FakeNvml) -> None:
    me = os.getpid()
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = [process(me), process(1, None)]
    assert [p.pid for p in read_state().processes] == [me, 1]
    read = read_state(own_pids=[me])
    assert [(p.pid, p.memory_mb) for p in read.processes] == [(1, None)]


def test_a_second_run_in_a_process_does_not_find_itself(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = SimpleNamespace(gpu=0, request=SimpleNamespace(allow_busy=False))
    listed = nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = [process(HOST_PID)]
    with pytest.raises(MissingRequirement, match=f"held by pid {HOST_PID}"):  # nothing of ours is on the GPU yet
        _gpu_before(asked)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for own in (os.getpid(), HOST_PID):
        listed[:] = [process(own)]
        assert _gpu_before(asked) == read_state(own_pids=[os.getpid()])
    listed[:] = [process(os.getpid()), process(1)]
    with pytest.raises(MissingRequirement, match="held by pid 1 "):
        _gpu_before(asked)


def test_pids_of_another_namespace(nvml: FakeNvml) -> None:
    listed = [process(HOST_PID), process(HOST_PID + 1), process(HOST_PID + 2)]
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = listed
    assert len(read_state().processes) == 3
    assert [p.pid for p in read_state(own_pids=[os.getpid(), os.getppid()]).processes] == [HOST_PID + 2]


def test_throttle_names(nvml: FakeNvml) -> None:
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x1 | 0x4 | 0x40 | 0x4000
    assert read_state().throttle == ("gpu_idle", "sw_power_cap", "hw_thermal_slowdown")


def test_busy(nvml: FakeNvml) -> None:
    assert busy(read_state()) is None
    nvml.answers["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=97, memory=0)
    assert "97% busy" in (busy(read_state()) or "")
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = [process(1)]
    assert busy(read_state()) == "NVIDIA Test is held by pid 1 (512 MiB)"


def test_quiet_run_has_no_noise() -> None:
    idle = state(throttle=("gpu_idle",), sm_mhz=345)
    assert noise(idle, state(throttle=("sw_power_cap",), utilisation=100)) == []
    assert noise(idle, idle) == []
    assert noise(idle, state(throttle=(), sm_mhz=345)) == []


def test_readings_without_answers_make_no_noise() -> None:
    unknown = state(thermal_us=None, sm_mhz=None, sm_max_mhz=None, utilisation=None, temperature_c=None)
    assert noise(unknown, unknown) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"utilisation": 40}, {}, "before: NVIDIA Test is 40% busy"),
        ({}, {"throttle": ("hw_power_brake_slowdown",)}, "after: clocks throttled by hw_power_brake_slowdown at 41 C"),
        ({"throttle": ("sw_thermal_slowdown",)}, {}, "before: clocks throttled by sw_thermal_slowdown"),
        ({"thermal_us": 5000}, {"thermal_us": 305_000}, "thermal throttling for 300 ms during the run"),
        (
            {},
            {"sm_mhz": 1200, "throttle": ("sw_power_cap",)},
            "after: SM clock 1200 MHz is 61% of 1980 MHz (sw_power_cap)",
        ),
    ],
)
def test_noise_is_named(before: dict[str, Any], after: dict[str, Any], expected: str) -> None:
    (reason,) = noise(state(**before), state(**after))
    assert reason.startswith(expected)


def test_newcomers_are_noise_once(nvml: FakeNvml) -> None:
    quiet = read_state()
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = [process(1)]
    held = read_state()
    assert noise(quiet, held) == ["after: NVIDIA Test is held by pid 1 (512 MiB)"]
    assert noise(held, held) == ["before: NVIDIA Test is held by pid 1 (512 MiB)"]
