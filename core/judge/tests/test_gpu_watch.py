"""The GPU watched during a run: real watching processes, with a driver made of paper."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.judge.tests.processes import is_running, until
from core.judge.tests.records_factory import gpu_reading, make_checkout, make_record
from kda_judge import bench
from kda_judge import session as sessions
from kda_judge.contract.errors import MissingRequirement
from kda_judge.evidence import gpu_sampler as watcher
from kda_judge.evidence import gpu_state, gpu_watch, ledger
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.gpu_sampler import Reading, summarise
from kda_judge.evidence.gpu_state import GpuProcess
from kda_judge.evidence.gpu_watch import Watcher, completed, noise
from kda_judge.evidence.run_record import MachineWatch, RunRecord, Spread, WatchedProcess

FAKE = '''
"""pynvml's part that is read; what it says is in a file that the test may change at any time."""
import json, os, time
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_PERF_POLICY_THERMAL = 1, 2, 0, 1

class NVMLError(Exception):
    pass

def say():
    with open(os.environ["FAKE_NVML"]) as file:
        return json.load(file)

def nvmlInit():
    if say().get("broken"):
        raise NVMLError("Driver Not Loaded")

def nvmlShutdown():
    pass

def __getattr__(question):
    if not question.startswith("nvml"):
        raise AttributeError(question)
    def answer(*args):
        told = say()
        if question == "nvmlDeviceGetTemperature":
            with open(os.environ["FAKE_NVML"] + ".count", "a") as file:
                file.write(".")
            until = time.process_time() + told.get("burn_s", 0)
            while time.process_time() < until:
                pass
            time.sleep(told.get("sleep_s", 0))
        if question not in told:
            raise NVMLError("Not Supported")
        value = told[question]
        if isinstance(value, list):
            return [SimpleNamespace(**part) for part in value]
        return SimpleNamespace(**value) if isinstance(value, dict) else value
    return answer
'''
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": 0,
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlDeviceGetName": "NVIDIA Test",
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetTemperature": 41,
    "nvmlDeviceGetPowerUsage": 250_000,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
    "nvmlDeviceGetComputeRunningProcesses": [],
}


class Driver:
    """The driver made of paper, from the test's side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told = dict(ANSWERS)
        self.say()

    def say(self, **changes: Any) -> None:
        """Change answers from now on; None leaves a question without one."""
        self.told = {name: value for name, value in {**self.told, **changes}.items() if value is not None}
        self.path.with_suffix(".next").write_text(json.dumps(self.told))
        self.path.with_suffix(".next").replace(self.path)

    def asked(self) -> int:
        """How many readings were begun."""
        count = self.path.with_name(self.path.name + ".count")
        return count.stat().st_size if count.exists() else 0

    def wait(self, readings: int) -> None:
        """Until so many readings were begun and ended from now on."""
        enough = self.asked() + readings + 1
        assert until(lambda: self.asked() >= enough), f"{self.asked()} readings of {enough}"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """For every watching process that is started."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "pynvml.py").write_text(FAKE)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "answers.json"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Driver(tmp_path / "answers.json")


def watched(driver: Driver, readings: int = 3) -> MachineWatch:
    """What a watcher has seen after at least so many readings."""
    with Watcher(0) as watcher:
        driver.wait(readings + 1)  # the first one only asks whether there is a GPU
        seen = watcher.finish()
    assert isinstance(seen, MachineWatch), seen
    return seen


# ---- the process ------------------------------------------------------------------------------


def test_a_quiet_gpu(driver: Driver) -> None:
    seen = watched(driver, 4)
    assert seen.busy == seen.readings >= 4
    assert seen.seconds >= 0.2 * (seen.readings - 1)
    assert 0.2 <= seen.longest_gap_s <= seen.seconds
    assert seen.sm_mhz == seen.memory_mhz == Spread(low=1980, median=1980, high=1980)
    assert (seen.power_w, seen.temperature_c) == (
        Spread(low=250, median=250, high=250),
        Spread(low=41, median=41, high=41),
    )
    assert (seen.throttle_s, seen.foreign) == ({}, ())
    assert noise(seen, gpu_reading()) == []


def test_what_comes_and_goes_during_a_run_is_seen(driver: Driver) -> None:
    """None of it is there at the end, where `gpu.noise` looks."""
    foreign = {"pid": os.getppid(), "usedGpuMemory": 512 << 20}
    with Watcher(0) as watcher:
        driver.wait(2)
        driver.say(
            nvmlDeviceGetClockInfo=1700,
            nvmlDeviceGetCurrentClocksThrottleReasons=0x40,
            nvmlDeviceGetComputeRunningProcesses=[foreign],
        )
        driver.wait(4)
        driver.say(
            nvmlDeviceGetClockInfo=1980,
            nvmlDeviceGetCurrentClocksThrottleReasons=0,
            nvmlDeviceGetComputeRunningProcesses=[],
        )
        driver.wait(2)
        seen = watcher.finish()
    assert isinstance(seen, MachineWatch)
    assert seen.sm_mhz
    assert (seen.sm_mhz.low, seen.sm_mhz.high) == (1700, 1980)
    assert 0.6 <= seen.throttle_s["hw_thermal_slowdown"] < seen.seconds
    (process,) = seen.foreign
    assert (process.pid, process.memory_mb) == (os.getppid(), 512)
    assert 3 <= process.readings < seen.readings
    held, throttled = noise(seen, gpu_reading())
    assert held.startswith(f"during: the GPU was held by pid {os.getppid()} (512 MiB) in {process.readings} of ")
    assert throttled.startswith("during: clocks throttled by hw_thermal_slowdown for ")


def test_processes_of_the_run_are_not_foreign(driver: Driver) -> None:
    """The judge, a worker, a worker's child, and a worker that has ended and is still listed."""
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with Watcher(0) as watcher, subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        assert worker.stdout
        grandchild = int(worker.stdout.readline())
        pids = [os.getpid(), worker.pid, grandchild]
        driver.say(nvmlDeviceGetComputeRunningProcesses=[{"pid": pid, "usedGpuMemory": None} for pid in pids])
        driver.wait(3)
        driver.say(nvmlDeviceGetComputeRunningProcesses=[{"pid": worker.pid, "usedGpuMemory": None}])
        os.kill(grandchild, signal.SIGKILL)
        worker.wait()
        driver.wait(3)
        seen = watcher.finish()
    assert isinstance(seen, MachineWatch)
    assert seen.readings >= 6
    assert seen.foreign == ()


def test_expensive_readings_are_taken_seldom(driver: Driver) -> None:
    """A reading of 10 ms allows one a second."""
    driver.say(burn_s=0.01)
    seen = watched(driver, 2)
    assert seen.longest_gap_s >= 1.0
    assert seen.cpu_s >= 0.01 * seen.readings
    assert seen.cpu_s / seen.readings <= 0.011 * seen.longest_gap_s


def test_very_expensive_readings_leave_no_gap_that_spoils_the_run(driver: Driver) -> None:
    driver.say(burn_s=0.15)  # by the share alone 15 s apart
    assert watched(driver, 2).longest_gap_s < gpu_watch.LONGEST_GAP_S


def test_questions_without_an_answer(driver: Driver) -> None:
    unknown = ("ClockInfo", "PowerUsage", "CurrentClocksThrottleReasons", "ComputeRunningProcesses")
    driver.say(**{f"nvmlDeviceGet{question}": None for question in unknown})
    seen = watched(driver, 2)
    assert (seen.sm_mhz, seen.memory_mhz, seen.power_w) == (None, None, None)
    assert noise(seen, gpu_reading()) == []
    assert seen.temperature_c == Spread(low=41, median=41, high=41)


def test_a_watcher_that_cannot_watch_says_why(driver: Driver) -> None:
    driver.say(broken=True)
    with Watcher(0) as watcher:
        answer = watcher.finish()
    assert isinstance(answer, str)
    assert answer.startswith("the watcher ended with 1: ")
    assert "no NVIDIA GPU or driver: Driver Not Loaded" in answer


def test_a_watcher_that_was_killed(driver: Driver) -> None:
    with Watcher(0) as watcher:
        driver.wait(1)
        watcher._process.kill()
        assert watcher.finish() == "the watcher ended with -9: no message"


def test_a_watcher_that_hangs_is_given_up(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "ANSWER_S", 0.5)
    driver.say(sleep_s=60)
    with Watcher(0) as watcher:
        assert watcher.finish() == "the watcher did not answer within 0 s"
    assert not is_running(watcher._process.pid)


def test_ctrl_c_does_not_reach_the_watcher(driver: Driver) -> None:
    with Watcher(0) as watcher:
        assert os.getsid(watcher._process.pid) != os.getsid(0)


def test_a_watcher_does_not_outlive_a_judge_that_is_killed(driver: Driver) -> None:
    script = (
        "import os, signal, time\n"
        "from kda_judge.evidence.gpu_watch import Watcher\n"
        "with Watcher(0) as watcher:\n"
        "    print(watcher._process.pid, flush=True)\n"
        "    time.sleep(2)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE
    ) as judge:
        assert judge.stdout
        pid = int(judge.stdout.readline())
        assert is_running(pid)
        assert judge.wait() == -signal.SIGKILL
    assert until(lambda: not is_running(pid))


# ---- what is made of the readings -------------------------------------------------------------


def reading(at_s: float, pids: tuple[int, ...] = (), **changes: Any) -> Reading:
    processes = tuple(GpuProcess(pid=pid, memory_mb=100 * round(at_s) or None) for pid in pids)
    return Reading(at_s, gpu_reading().model_copy(update={"processes": processes, **changes}))


def test_summary_of_readings() -> None:
    seen = summarise(
        [
            reading(10.0, sm_mhz=345, throttle=("gpu_idle",), temperature_c=30, power_w=70.0),
            reading(10.5, sm_mhz=1980, temperature_c=35, power_w=None),
            reading(11.0, (8, 7), sm_mhz=1500, throttle=("sw_power_cap",), temperature_c=50, power_w=600.0),
            reading(12.0, (7,), sm_mhz=1400, throttle=("sw_power_cap", "hw_slowdown"), temperature_c=60, power_w=700.0),
            reading(12.2, sm_mhz=1980, memory_mhz=1593, temperature_c=58),
        ],
        cpu_s=0.02,
    )
    assert seen == MachineWatch(
        readings=5,
        busy=4,
        seconds=12.2 - 10.0,
        longest_gap_s=1.0,
        cpu_s=0.02,
        sm_mhz=Spread(low=1400, median=1740, high=1980),
        memory_mhz=Spread(low=1593, median=3201, high=3201),
        power_w=Spread(low=120.5, median=600, high=700),
        temperature_c=Spread(low=30, median=50, high=60),
        throttle_s={"gpu_idle": 0.0, "sw_power_cap": 1.5, "hw_slowdown": 1.0},
        foreign=(
            WatchedProcess(pid=7, readings=2, memory_mb=1200),
            WatchedProcess(pid=8, readings=1, memory_mb=1100),
        ),
    )


QUIET = summarise([reading(float(second)) for second in range(5)], cpu_s=0.01)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"throttle_s": {"gpu_idle": 3.0, "sw_power_cap": 2.0, "applications_clocks": 4.0}}, []),
        ({"foreign": (WatchedProcess(pid=7, readings=2, memory_mb=None),)}, []),
        (
            {"foreign": (WatchedProcess(pid=7, readings=3, memory_mb=None),)},
            ["during: the GPU was held by pid 7 in 3 of 5 readings"],
        ),
        (
            {"foreign": tuple(WatchedProcess(pid=n, readings=min(n, 5), memory_mb=1) for n in range(1, 8))},
            [
                *(f"during: the GPU was held by pid {n} (1 MiB) in 5 of 5 readings" for n in (5, 6, 7)),
                "during: the GPU was held by 2 more processes in as many readings or fewer",
            ],
        ),
        (
            {"throttle_s": dict.fromkeys(sorted(gpu_state.DISTURBING), 0.2)},
            [f"during: clocks throttled by {reason} for 0.2 s" for reason in sorted(gpu_state.DISTURBING)],
        ),
        ({"sm_mhz": Spread(low=345, median=1600, high=1980)}, []),
        (
            {"sm_mhz": Spread(low=345, median=1500, high=1980)},
            ["during: median SM clock 1500 MHz is 76% of 1980 MHz"],
        ),
        ({"longest_gap_s": 31.0}, ["during: the GPU was not watched for 31 s"]),
    ],
)
def test_noise_is_named(changes: dict[str, Any], expected: list[str]) -> None:
    assert noise(QUIET.model_copy(update=changes), gpu_reading()) == expected


def test_who_held_the_gpu_before_is_not_named_twice() -> None:
    before = gpu_reading().model_copy(update={"processes": (GpuProcess(pid=7, memory_mb=1),)})
    held = QUIET.model_copy(update={"foreign": (WatchedProcess(pid=7, readings=5, memory_mb=1),)})
    assert noise(held, before) == []
    assert len(noise(held, gpu_reading())) == 1


def test_parents_are_followed_by_the_kernel_s_own_account() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in watcher._children(os.getpid())
        assert watcher._descends(child.pid, os.getpid())
        assert watcher._descends(os.getpid(), os.getpid())
        assert not watcher._descends(os.getpid(), child.pid)
        assert not watcher._descends(2**30, os.getpid())
        child.kill()
    assert watcher._children(2**30) == set()


def test_a_workers_own_children_belong_to_the_run() -> None:
    start = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (below,) = watcher._children(child.pid)
        try:
            assert {os.getpid(), child.pid, below} <= watcher._tree(os.getpid())
        finally:
            os.kill(below, signal.SIGKILL)
            child.kill()


# ---- what becomes of the record ---------------------------------------------------------------


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return make_record(make_checkout(tmp_path))


def test_a_record_keeps_what_was_seen(record: RunRecord, tmp_path: Path) -> None:
    seen = QUIET.model_copy(update={"cpu_s": 0.123456789012, "throttle_s": {"hw_slowdown": 1.0}})
    full = completed(record.model_copy(update={"noisy": ("before: busy",), "seconds": 5.0}), seen)
    assert full.noisy == ("before: busy", "during: clocks throttled by hw_slowdown for 1.0 s")
    assert full.machine_watch == seen.model_copy(update={"cpu_s": 0.12345679})
    ledger.append(tmp_path / "ledger.jsonl", full)
    assert ledger.read(tmp_path / "ledger.jsonl") == [full]
    assert mismatches(full) == []


def test_a_run_that_was_not_watched_is_noisy(record: RunRecord) -> None:
    unwatched = completed(record, "the watcher ended with 1: no GPU")
    assert unwatched.noisy == ("during: the GPU was not watched: the watcher ended with 1: no GPU",)
    assert unwatched.machine_watch is None


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], sessions.Session]:
    def make(kind: str) -> sessions.Session:
        task = make_checkout(tmp_path / kind)
        monkeypatch.setattr(gpu_state, "has_gpu", lambda: kind == "cuda")
        monkeypatch.setattr(sessions, "_gpu", lambda request: 0 if kind == "cuda" else None)
        against = ["baseline"] if kind == "cuda" else []
        return sessions.open_session(sessions.Request(task=task, against=against))

    return make


def test_a_run_on_a_gpu_is_watched(
    driver: Driver, session: Callable[[str], sessions.Session], record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> RunRecord:
        driver.wait(3)
        return record

    monkeypatch.setattr(bench, "_run", run)
    result = bench.run(session("cuda"), ())
    assert result.machine_watch is not None
    assert result.machine_watch.readings >= 2
    assert result.noisy == ()
    monkeypatch.setattr(bench, "Watcher", None)
    monkeypatch.setattr(bench, "_run", lambda *_, **__: record)
    assert bench.run(session("cpu"), ()) == record
    assert bench.run(session("cuda"), (), measure=False) == record


def test_a_run_that_raises_leaves_no_watcher(
    driver: Driver, session: Callable[[str], sessions.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> RunRecord:
        raise MissingRequirement("the GPU is busy")

    monkeypatch.setattr(bench, "_run", run)
    before = watcher._children(os.getpid())
    with pytest.raises(MissingRequirement):
        bench.run(session("cuda"), ())
    assert watcher._children(os.getpid()) == before


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_state.has_gpu(), reason="needs an NVIDIA GPU")
def test_a_real_gpu_at_less_than_a_hundredth_of_a_core() -> None:
    with Watcher(0) as watcher:
        time.sleep(10)
        seen = watcher.finish()
    assert isinstance(seen, MachineWatch), seen
    assert seen.readings >= 3
    assert seen.cpu_s <= 0.015 * seen.seconds
    assert seen.sm_mhz or not seen.busy
    assert seen.temperature_c
