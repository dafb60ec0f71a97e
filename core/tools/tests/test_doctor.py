"""`kda doctor` on machines where things are missing, broken or busy: it reports, and never fails itself."""

import importlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kda_judge import __version__
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import MissingRequirement, UpstreamError
from kda_judge.contract.tasks import find_task
from kda_judge.evidence import gpu_state
from kda_judge.evidence.gpu_state import GpuState
from kda_judge.evidence.provenance import GitState
from kda_tools.project import doctor, preflight
from kda_tools.project.check import Check
from kda_tools.project.doctor import checks

STATE = GpuState.model_construct(name="NVIDIA Test", driver="580.1", cuda="13.0", processes=(), utilisation=0)


def check(name: str) -> Check:
    return next(check for check in checks() if check.name == name)


def no_gpu(*args: object, **kwargs: object) -> GpuState:
    raise MissingRequirement("no NVIDIA GPU or driver: test")


@pytest.fixture(autouse=True)
def nothing_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: object, **kwargs: object) -> Path:
        raise MissingRequirement("offline, and no good wheel")

    monkeypatch.setattr(doctor, "fetch", absent)
    monkeypatch.setattr(preflight, "_states", list)


def test_every_check_says_what_it_is_for_and_what_to_do() -> None:
    report = checks()
    assert len({c.name for c in report}) == len(report)
    assert all(c.found and c.needed_for and c.remedy for c in report)
    assert {"python", "gpu", "torch", "triton", "nvcc", "ninja", "ncu", "compute-sanitizer"} <= {c.name for c in report}


def test_gpu_free_busy_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "read_state", lambda: STATE)
    assert check("gpu") == Check(
        "gpu",
        True,
        "NVIDIA Test, driver 580.1, CUDA 13.0; free",
        "measuring; without one, bench verifies and compiles",
        "end the other processes",
    )
    monkeypatch.setattr(gpu_state, "read_state", lambda: STATE.model_copy(update={"utilisation": 80}))
    busy = check("gpu")
    assert not busy.ok
    assert "80% busy" in busy.found
    monkeypatch.setattr(gpu_state, "read_state", no_gpu)
    absent = check("gpu")
    assert not absent.ok
    assert absent.found == "no NVIDIA GPU or driver: test"


def test_torch_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = check("torch")
    assert not found.ok
    assert "pip install" in found.remedy


def test_torch_without_cuda_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)
    assert check("torch").ok
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: True)
    assert not check("torch").ok
    assert check("torch").remedy == "install a torch built for CUDA"


def test_tool_found_broken_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check("nvcc").found == f"13.0, {tool}"
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert "does not run" in check("nvcc").found
    tool.unlink()
    monkeypatch.setattr(doctor.shutil, "which", lambda *args, **kwargs: None)
    assert (check("nvcc").ok, check("nvcc").found) == (False, "not found")


def test_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", version)
    assert (check("ninja").ok, check("ninja").found) == (False, "not installed")


def test_the_remedy_for_missing_byte_code_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "with space" / "large_one"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(doctor, "LARGE", ("large_one", "not_installed"))
    importlib.invalidate_caches()
    before = check("byte code")
    assert (before.ok, before.found) == (False, "none of large_one")
    subprocess.run([sys.executable, *shlex.split(before.remedy)[1:]], check=True)
    assert (check("byte code").ok, check("byte code").found) == (True, "there")


def test_python_that_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("python").ok
    monkeypatch.setattr(doctor, "TESTED", ((3, 0), (3, 1)))
    assert (check("python").ok, check("python").remedy) == (False, "use Python 3.0 to 3.1")


def test_a_release_that_nobody_fetched_is_one_line() -> None:
    releases = [check for check in checks() if check.name.startswith("sglang")]
    assert len({check.name for check in releases}) == len(releases)
    pinned = check("sglang-0.5.12.post1")
    assert (pinned.ok, pinned.found, pinned.remedy) == (False, "not fetched", "kda fetch")
    assert "qknorm_rope" in pinned.needed_for
    assert "norm_infer" in pinned.needed_for


def test_a_release_that_some_tasks_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(pin: Pin, lock: Path, cache: Path, *, offline: bool) -> Path:
        if "k03" in str(lock):
            return tmp_path
        if "k01" in str(lock):
            raise UpstreamError("a file was changed\nmore lines")
        raise MissingRequirement("offline, and no good wheel")

    monkeypatch.setattr(doctor, "fetch", fetch)
    assert check("sglang-0.5.12.post1").found == "not fetched, but for qknorm_rope"
    damaged = check("sglang-0.5.12.post1, norm_infer")
    assert (damaged.ok, damaged.found) == (False, "a file was changed")
    assert damaged.remedy == "kda fetch norm_infer --refresh"
    monkeypatch.setattr(doctor, "fetch", lambda *args, **kwargs: tmp_path)
    assert check("sglang-0.5.12.post1").ok


def test_the_report_begins_with_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "git_state", lambda root: GitState("0123456789abcdef", dirty=True))
    assert checks()[0].found == f"{__version__}, commit 0123456789 with changes"
    monkeypatch.setenv("KDA_ROOT", str(tmp_path / "nowhere"))
    assert not checks()[0].ok
    assert "KDA_ROOT: expected a folder" in checks()[0].found


def test_a_broken_task_does_not_break_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "family" / "k01_broken" / "config.toml"
    broken.parent.mkdir(parents=True)
    broken.write_text("[task]\n")
    shutil.copytree(find_task("qknorm_rope").path, tmp_path / "family" / "k03_qknorm_rope")
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    assert str(broken) in check("task broken").found
    assert check("sglang-0.5.23").needed_for == "the upstream arms of qknorm_rope"
