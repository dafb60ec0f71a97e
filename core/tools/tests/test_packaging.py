"""Wheels that work where there is no checkout and no torch, and a noxfile that lists and runs what it says."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from kda_judge.contract.tasks import find_tasks
from kda_tools.project import doctor

ROOT = Path(__file__).resolve().parents[3]
TASK = ROOT / "diffusion" / "k01_norm_infer"


def run(*command: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KDA_", "PYTHONPATH"))}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, check=False, timeout=240
    )


def build(project: Path, out: Path, **env: str) -> Path:
    made = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, project, **env)
    assert made.returncode == 0, made.stdout + made.stderr
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    return re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)


CORE = ("runtime", "judge", "tools")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `nox -s build` makes of the three packages and of one task."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    for project in (*(ROOT / "core" / name for name in CORE), TASK):
        build(project, out)
    return out


def wheel(dist: Path, name: str) -> Path:
    (found,) = dist.glob(f"kda_{name}-*.whl")
    return found


@pytest.mark.parametrize("name", CORE)
def test_core_needs_no_torch(dist: Path, name: str) -> None:
    always = [line for line in requirements(wheel(dist, name)) if "extra ==" not in line]
    assert not [line for line in always if line.startswith(("torch", "triton", "nvidia-cutlass"))]
    with zipfile.ZipFile(wheel(dist, name)) as archive:
        assert f"kda_{name}/py.typed" in archive.namelist()


def test_the_runtime_needs_nothing_on_a_python_of_today(dist: Path) -> None:
    always = [line for line in requirements(wheel(dist, "runtime")) if "extra ==" not in line]
    assert always == ["tomli>=2; python_version < '3.11'"]


def test_task_wheel_holds_the_task(dist: Path) -> None:
    with zipfile.ZipFile(wheel(dist, "norm_infer")) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        text = b"".join(archive.read(name) for name in archive.namelist()).decode()
    inside = {name.removeprefix("k01_norm_infer/") for name in names}
    assert {"config.toml", "prompt.md", "bench/workloads.toml", "bench/reference.py", "solution/__init__.py"} <= inside
    assert "baseline/sglang-0.5.12.post1.sha256" in inside
    assert all(name.startswith("k01_norm_infer/") for name in names)
    assert not [name for name in inside if name.startswith(("tests/", "docs/"))], "no ledger"
    assert str(ROOT) not in text


def test_task_wheel_depends_on_no_folder(dist: Path) -> None:
    assert requirements(wheel(dist, "norm_infer")) == ["kda-runtime~=0.2.0"]
    version = (ROOT / "core" / "runtime" / "src" / "kda_runtime" / "__init__.py").read_text()
    assert '__version__ = "0.2.' in version


def test_the_wheel_of_a_copied_folder_follows_its_name(tmp_path: Path) -> None:
    folder = shutil.copytree(TASK, tmp_path / "k08_other", ignore=shutil.ignore_patterns("__pycache__"))
    with zipfile.ZipFile(build(folder, tmp_path / "dist")) as archive:
        assert "k08_other/solution/norm.py" in archive.namelist()


def test_wheels_work_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "-c", ROOT / "constraints.txt")
    got = run(*pip, "--find-links", dist, "kda-tools", "kda-norm-infer")
    if got.returncode:
        pytest.skip(f"dependencies cannot be installed here: {got.stderr.strip().splitlines()[-1]}")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(python, "-c", "import torch", cwd=empty).returncode == 1
    listed = run(tmp_path / "venv" / "bin" / "kda", "list", cwd=empty, COLUMNS="200")
    assert listed.returncode == 0, listed.stderr
    assert "norm_infer" in listed.stdout
    same = run(python, "-m", "kda_tools", "list", cwd=empty, COLUMNS="200")
    assert same.stdout == listed.stdout


def test_a_task_folder_works_outside_of_the_checkout_with_the_wheels_alone(dist: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # torch and the rest come from here; what is installed in place is not, because its .pth files are not followed.
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = (
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("-q", "--no-index", "--no-deps", "--ignore-installed"),
    )
    installed = run(*pip, *(wheel(dist, name) for name in CORE))
    assert installed.returncode == 0, installed.stderr
    folder = shutil.copytree(TASK, tmp_path / "some-where" / TASK.name, ignore=shutil.ignore_patterns("__pycache__"))
    where = run(python, "-c", "import kda_tools; print(kda_tools.__file__)", cwd=folder).stdout
    assert where.startswith(str(site)), where
    bench = ("-m", "kda_tools", "bench", ".", "--rows", "zimage-rms-4096*", "--device", "cpu", "--generations", "1")
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "one_pass or every_row")
    assert "CORRECT" in passed(python, *bench, cwd=folder)
    assert "files and published numbers: ok" in passed(
        python, "-m", "kda_tools", "validate", ".", "--static", cwd=folder
    )
    assert " passed" in passed(python, *tests, cwd=folder, TRITON_INTERPRET="1")


def passed(*command: object, cwd: Path, **env: str) -> str:
    ran = run(*command, cwd=cwd, **env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


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
        for command in (*commands, *(["tune"] if task.op in tuned else []), "launch")
    ]
    of_the_project = ("tests", "tests-ptx", "pythons", "versions", "llm-tools", "llm", "adversaries", "lint")
    assert sessions == [*of_tasks, *of_the_project, "typecheck", "build", "publish", "site", "upstream", "doctor"]


def test_the_same_versions_are_named_everywhere(noxfile: ModuleType) -> None:
    named = [f'"{python}"' for python in noxfile.PYTHONS]
    assert f"python: [{', '.join(named)}]" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert tuple(f"{major}.{minor}" for major, minor in doctor.TESTED) == (noxfile.PYTHONS[0], noxfile.PYTHONS[-1])
    assert f"Python {noxfile.PYTHONS[0]} to {noxfile.PYTHONS[-1]} " in (ROOT / "README.md").read_text(encoding="utf-8")
    for core in noxfile.CORE:
        project = noxfile.nox.project.load_toml(core / "pyproject.toml")["project"]
        listed = [one.removeprefix("Programming Language :: Python :: ") for one in project["classifiers"]]
        assert tuple(one for one in listed if one.startswith("3.")) == noxfile.PYTHONS
    workflow = (ROOT / ".github" / "workflows" / "versions.yml").read_text(encoding="utf-8")
    assert all(f"triton=={version}" in workflow for version in noxfile.TRITONS)
    bound = pytest.importorskip("kda_runtime.bound")
    assert [version.split(".")[:2] for version in noxfile.TRITONS] == list(bound.KNOWN)


@pytest.mark.parametrize(("more", "code"), [((), 2), (("validate-norm_infer",), 1)], ids=["alone", "beside another"])
def test_nox_ends_with_the_exit_code_of_its_only_command(more: tuple[str, ...], code: int) -> None:
    pytest.importorskip("nox")
    pytest.importorskip("torch")
    sessions = ("bench-qknorm_rope", *more)
    done = run(sys.executable, "-m", "nox", "--no-venv", "-s", *sessions, "--", "--rows", "no-such-row")
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("'no-such-row': no such row") == len(sessions)


def test_workflows_and_documents_name_sessions_that_exist(noxfile: ModuleType) -> None:
    """What stands behind `nox ... -s`, up to arguments, a redirection or a comment; the op may be left open."""
    listed = set(re.findall(r"^[*-] (\S+)", run(sys.executable, "-m", "nox", "-l").stdout, re.MULTILINE))
    files = [ROOT / ".ci" / "run", ROOT / "README.md", *(ROOT / ".github").rglob("*.yml")]
    named = {
        name
        for path in files
        for words in re.findall(r"\bnox[\" ](?:--no-venv )?-s ([^`\n]+)", path.read_text(encoding="utf-8"))
        for name in re.split(r" (?:--|#|\d?>)", words)[0].split()
    }
    assert {"bench-qknorm_rope", "doctor", "tests"} <= named
    assert not {name for name in named if "$OP" not in name} - listed


def test_the_gpu_workflow_hands_back_the_run(noxfile: ModuleType) -> None:
    """One file, which the run writes and the last step uploads; a diff would not show a task's first ledger."""
    text = (ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8")
    (written,) = re.findall(r"--record --json (\S+)", text)
    (uploaded,) = re.findall(r"^ +path: \|\n((?: {12}.+\n)+)", text, re.MULTILINE)
    assert uploaded.split() == [written, "*/[a-z]*[0-9]_${{", "inputs.op", "}}/docs/*.jsonl"]
    assert "git diff" not in text


def test_no_venv_takes_this_interpreter_and_no_network() -> None:
    """Arguments pass through, and pip would fail: there is no index."""
    pytest.importorskip("nox")
    pytest.importorskip("torch")
    env = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    asked = run(sys.executable, "-m", "nox", "--no-venv", "-s", "bench-qknorm_rope", "--", "--help", **env)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert f"{sys.executable} -m kda_tools bench qknorm_rope --help" in asked.stdout + asked.stderr
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
