"""What is looked at before an installed SGLang runs: where it is, which release, a free GPU, room to write."""

import os
import sys
from pathlib import Path

import pytest

from kda_judge.contract.errors import MissingRequirement
from kda_judge.evidence import gpu_state
from kda_judge.evidence.gpu_state import GpuState
from kda_tools.project import preflight
from kda_tools.project.preflight import checks, demand_passed, demand_release, environment, find_sglang, python_of

KNOWN = ("0.5.12.post1", "0.5.23")


def gpu(number: int, busy: int = 0) -> GpuState:
    return GpuState.model_construct(name=f"GPU {number}", uuid=f"GPU-{number}", processes=(), utilisation=busy)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[GpuState]:
    """The GPUs of a machine, as NVML would list them; a test fills it."""
    there: list[GpuState] = []

    def read_state(index: int) -> GpuState:
        if index >= len(there):
            raise MissingRequirement(f"GPU {index}: {len(there)} visible")
        return there[index]

    monkeypatch.setattr(gpu_state, "read_state", read_state)
    monkeypatch.delenv(preflight.VISIBLE, raising=False)
    monkeypatch.delenv(preflight.FLASHINFER, raising=False)
    return there


def install(folder: Path, version: str | None) -> None:
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").write_text("raise SystemExit('was imported')\n")
    if version:
        metadata = folder / f"sglang-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")


def test_sglang_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert find_sglang(sys.executable) is None
    with pytest.raises(MissingRequirement, match=r"has no sglang, expected 0\.5\.12\.post1 or .*pip install 'sglang"):
        demand_release(sys.executable, KNOWN)
    install(tmp_path, None)
    with pytest.raises(MissingRequirement, match="got a version that is not written"):
        demand_release(sys.executable, KNOWN)


def test_only_known_releases_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    install(tmp_path, KNOWN[0])
    found = demand_release(sys.executable, KNOWN)
    assert found is not None
    assert (found.root, found.version) == (tmp_path / "sglang", KNOWN[0])
    with pytest.raises(MissingRequirement, match=r"expected sglang 0\.5\.23, got 0\.5\.12\.post1; pip install"):
        demand_release(sys.executable, KNOWN[1:])


def test_the_python_of_a_program(tmp_path: Path) -> None:
    def program(first: str) -> str:
        path = tmp_path / "program"
        path.write_bytes(first.encode() + b"\nimport sglang\n")
        return str(path)

    assert python_of(sys.executable) == sys.executable
    assert python_of(program(f"#!{sys.executable}")) == sys.executable
    named = python_of(program("#!/usr/bin/env python3"))
    assert named is None or Path(named).name == "python3"
    for other in ("#!/bin/sh", "#!", "\x7fELF", ""):
        assert python_of(program(other)) is None
    assert python_of(str(tmp_path / "absent")) is None


def test_one_idle_gpu_of_several_is_chosen(gpus: list[GpuState]) -> None:
    assert environment() == {preflight.FLASHINFER: "1"}  # no GPU: nothing to choose
    gpus[:] = [gpu(0, busy=90), gpu(1), gpu(2)]
    assert environment() == {preflight.FLASHINFER: "1", preflight.VISIBLE: "GPU-1"}
    assert environment(2)[preflight.VISIBLE] == "GPU-1,GPU-2"
    assert preflight.VISIBLE not in environment(0)
    with pytest.raises(MissingRequirement, match="expected 3 idle of 3 GPUs, got 2: GPU 0 is 90% busy"):
        environment(3)
    gpus[:] = [gpu(0)]
    assert preflight.VISIBLE not in environment()


def test_a_choice_of_the_user_is_left_alone(gpus: list[GpuState], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus[:] = [gpu(0, busy=90), gpu(1)]
    monkeypatch.setenv(preflight.VISIBLE, "0")
    monkeypatch.setenv(preflight.FLASHINFER, "0")
    assert environment() == {preflight.FLASHINFER: "0"}


def test_every_failed_check_says_what_to_do(
    tmp_path: Path, gpus: list[GpuState], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus[:] = [gpu(0, busy=50)]
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv(preflight.FLASHINFER, "0")
    monkeypatch.setattr(preflight, "ROOM_GB", 1e9)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = checks(tmp_path / "new" / "out")
    assert [check.name for check in found if check.ok] == []
    assert all(check.remedy for check in found)
    with pytest.raises(MissingRequirement) as refused:
        demand_passed(found)
    for text in ("idle GPUs: 0 of 1", f"write access to {tmp_path}", "export FLASHINFER", "GB there", "Hub cache"):
        assert text in str(refused.value), text


def test_a_machine_that_has_everything(tmp_path: Path, gpus: list[GpuState], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus[:] = [gpu(0, busy=50), gpu(1)]
    install(tmp_path, KNOWN[0])
    program = tmp_path / "sglang-bin" / "sglang"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(preflight, "ROOM_GB", 0)
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    found = checks(tmp_path / "out")
    demand_passed(found)
    assert next(check for check in found if check.name == "sglang").found == f"{KNOWN[0]}, {tmp_path / 'sglang'}"
    assert next(check for check in found if check.name == "idle GPUs").found == "1 of 2"


def test_a_python_that_is_asked_does_not_count() -> None:
    from kda_tools.models.apply_hook import COUNTS

    assert preflight.HOOK == COUNTS


def test_python_that_cannot_be_asked() -> None:
    with pytest.raises(MissingRequirement, match="cannot be asked for sglang"):
        find_sglang("/bin/false")
