"""Wheels that work where there is no checkout and no torch, and a noxfile that lists and runs what it says."""

import importlib.util
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from kda_core import __version__
from kda_core.tasks import find_tasks

ROOT = Path(__file__).resolve().parents[2]
TASK = ROOT / "diffusion" / "k03_qknorm_rope"


def run(*command: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KDA_", "PYTHONPATH"))}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, check=False, timeout=240
    )


def build(project: Path, out: Path, **env: str) -> Path:
    made = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, project, **env)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    return re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheels")
    core = build(ROOT / "core", out / "core")
    return core, build(TASK, out / "task", KDA_CORE_REQUIREMENT=f"~={__version__}")


def test_core_needs_no_torch(wheels: tuple[Path, Path]) -> None:
    always = [line for line in requirements(wheels[0]) if "extra ==" not in line]
    assert "pydantic>=2.9" in always
    assert not [line for line in always if line.startswith(("torch", "triton", "nvidia-cutlass"))]
    with zipfile.ZipFile(wheels[0]) as archive:
        assert "kda_core/py.typed" in archive.namelist()


def test_task_wheel_holds_the_task(wheels: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(wheels[1]) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    inside = {name.removeprefix("diffusion/k03_qknorm_rope/") for name in names}
    assert {"config.toml", "prompt.md", "bench/workloads.toml", "bench/reference.py", "solution/__init__.py"} <= inside
    assert "baseline/sglang-0.5.12.post1.sha256" in inside
    assert ("docs/ledger.jsonl" in inside) == (TASK / "docs" / "ledger.jsonl").is_file()
    assert all(name.startswith("diffusion/k03_qknorm_rope/") for name in names)
    assert not [name for name in inside if name.startswith("tests/")]


def test_task_wheel_names_no_folder_of_this_machine(wheels: tuple[Path, Path]) -> None:
    assert requirements(wheels[1]) == [f"kda-core~={__version__}"]


def test_task_alone_brings_core_from_the_checkout(tmp_path: Path) -> None:
    """What `pip install -e TASK` sees."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    assert requirements(build(TASK, tmp_path)) == [f"kda-core @ {(ROOT / 'core').as_uri()}"]


def test_wheels_work_in_an_empty_environment(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    core, task = wheels
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q")
    light = [line for line in requirements(core) if "extra ==" not in line]
    got = run(*pip, "-c", ROOT / "constraints.txt", *light)
    if got.returncode:
        pytest.skip(f"core's dependencies cannot be installed here: {got.stderr.strip().splitlines()[-1]}")
    installed = run(*pip, "--no-index", core, task)
    assert installed.returncode == 0, installed.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(python, "-c", "import torch", cwd=empty).returncode == 1
    listed = run(tmp_path / "venv" / "bin" / "kda", "list", cwd=empty, COLUMNS="200")
    assert listed.returncode == 0, listed.stderr
    assert "qknorm_rope" in listed.stdout
    same = run(python, "-m", "kda_core", "list", cwd=empty, COLUMNS="200")
    assert same.stdout == listed.stdout


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    pytest.importorskip("nox")
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nox_lists_every_session() -> None:
    pytest.importorskip("nox")
    listed = run(sys.executable, "-m", "nox", "-l").stdout
    sessions = re.findall(r"^[*-] (\S+) -> \S", listed, re.MULTILINE)
    commands = ("bench", "validate", "compile", "profile", "sanitize")
    tuned = {task.op for task in find_tasks() if (task.path / "bench" / "tune.py").is_file()}
    of_tasks = [
        f"{command}-{task.op}"
        for task in find_tasks()
        for command in (*commands, *(["tune"] if task.op in tuned else []))
    ]
    of_the_project = ("tests", "tests-ptx", "adversaries", "lint", "typecheck", "build", "publish", "site", "doctor")
    assert sessions == [*of_tasks, *of_the_project]


@pytest.mark.parametrize(("more", "code"), [((), 2), (("validate-norm_infer",), 1)], ids=["alone", "beside another"])
def test_nox_ends_with_the_exit_code_of_its_only_command(more: tuple[str, ...], code: int) -> None:
    pytest.importorskip("nox")
    pytest.importorskip("torch")
    sessions = ("bench-qknorm_rope", *more)
    done = run(sys.executable, "-m", "nox", "--no-venv", "-s", *sessions, "--", "--rows", "no-such-row")
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("'no-such-row': no such row") == len(sessions)


def test_workflows_and_documents_name_sessions_that_exist(noxfile: ModuleType) -> None:
    """What stands behind `nox ... -s` in them; a task's op may be left open."""
    listed = set(re.findall(r"^[*-] (\S+)", run(sys.executable, "-m", "nox", "-l").stdout, re.MULTILINE))
    files = [ROOT / ".ci" / "run", ROOT / "README.md", *(ROOT / ".github").rglob("*.yml")]
    named = {
        name
        for path in files
        for words in re.findall(r"\bnox[\" ](?:--no-venv )?-s ([^`\n]+)", path.read_text(encoding="utf-8"))
        for name in words.split(" -- ")[0].split()
    }
    assert {"bench-qknorm_rope", "doctor", "tests"} <= named
    assert not {name for name in named if "$OP" not in name} - listed


def test_the_gpu_workflow_hands_back_the_run(noxfile: ModuleType) -> None:
    """One file, which the run writes and the last step uploads; a diff would not show a task's first ledger."""
    text = (ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8")
    (written,) = re.findall(r"--record --json (\S+)", text)
    (uploaded,) = re.findall(r"^ +path: \|\n((?: {12}.+\n)+)", text, re.MULTILINE)
    assert uploaded.split() == [written, "diffusion/*_${{", "inputs.op", "}}/docs/*.jsonl"]
    assert "git diff" not in text


def test_no_venv_takes_this_interpreter_and_no_network() -> None:
    """Arguments pass through, and pip would fail: there is no index."""
    pytest.importorskip("nox")
    pytest.importorskip("torch")
    env = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    asked = run(sys.executable, "-m", "nox", "--no-venv", "-s", "bench-qknorm_rope", "--", "--help", **env)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert f"{sys.executable} -m kda_core bench qknorm_rope --help" in asked.stdout + asked.stderr
    assert "--against" in asked.stdout
    assert "pip install" not in asked.stdout + asked.stderr


def test_missing_requirements(noxfile: ModuleType) -> None:
    here = ["pydantic>=2", "pytest", "typing.extensions", 'no-such-package; python_version < "3"']
    absent = ["no-such-package>=1", "no-such-package", "pydantic>=999"]
    assert noxfile.missing(sys.executable, [*here, *absent]) == absent


def test_changed_pins_change_the_fingerprint(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = noxfile.fingerprint()
    assert noxfile.fingerprint() == before
    monkeypatch.setattr(noxfile, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_bytes((ROOT / "constraints.txt").read_bytes() + b"one-more==1.0\n")
    assert noxfile.fingerprint() != before
