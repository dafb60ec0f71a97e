"""`kda doctor` on machines where things are missing, broken or busy: it reports, and never fails itself."""

import sys
from pathlib import Path

import pytest

from kda_core import doctor, gpu
from kda_core.doctor import Check, checks
from kda_core.errors import MissingRequirement, UpstreamError
from kda_core.gpu import GpuState

STATE = GpuState.model_construct(name="NVIDIA Test", driver="580.1", cuda="13.0", processes=(), utilisation=0)


def check(name: str) -> Check:
    return next(check for check in checks() if check.name == name)


def no_gpu(*args: object, **kwargs: object) -> GpuState:
    raise MissingRequirement("no NVIDIA GPU or driver: test")


@pytest.fixture(autouse=True)
def nothing_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: object, **kwargs: object) -> Path:
        raise UpstreamError("the wheel is not in the cache\nmore lines")

    monkeypatch.setattr(doctor, "fetch", absent)


def test_every_check_says_what_it_is_for_and_what_to_do() -> None:
    report = checks()
    assert len({c.name for c in report}) == len(report)
    assert all(c.found and c.needed_for and c.remedy for c in report)
    assert {"python", "gpu", "torch", "triton", "nvcc", "ninja", "ncu", "compute-sanitizer"} <= {c.name for c in report}


def test_gpu_free_busy_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "read_state", lambda: STATE)
    assert check("gpu") == Check(
        "gpu",
        True,
        "NVIDIA Test, driver 580.1, CUDA 13.0; free",
        "measuring; without one, bench verifies and compiles",
        "end the other processes",
    )
    monkeypatch.setattr(gpu, "read_state", lambda: STATE.model_copy(update={"utilisation": 80}))
    busy = check("gpu")
    assert not busy.ok
    assert "80% busy" in busy.found
    monkeypatch.setattr(gpu, "read_state", no_gpu)
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
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    assert check("torch").ok
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
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


def test_python_that_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("python").ok
    monkeypatch.setattr(doctor, "TESTED", ((3, 0), (3, 1)))
    assert (check("python").ok, check("python").remedy) == (False, "use Python 3.0 to 3.1")


def test_upstream_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = check("sglang-0.5.12.post1, qknorm_rope")
    assert not pinned.ok
    assert (pinned.found, pinned.remedy) == ("the wheel is not in the cache", "kda fetch qknorm_rope")
    monkeypatch.setattr(doctor, "fetch", lambda *args, **kwargs: tmp_path / "tree")
    assert check("sglang-0.5.12.post1, qknorm_rope").ok


def test_a_broken_task_does_not_break_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "family" / "k01_broken" / "config.toml"
    broken.parent.mkdir(parents=True)
    broken.write_text("[task]\n")
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    assert str(broken) in check("tasks").found
