"""Define every session a user needs: `nox -l` lists them, and each does its own set-up.

All sessions share one virtual environment, made once under `.nox/shared/`, so that torch is not installed for each
task. With `nox --no-venv` the sessions run in the interpreter that already has torch, and torch is never installed.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "typecheck", "tests"]

ROOT = Path(__file__).resolve().parent
CORE = [ROOT / "core" / name for name in ("runtime", "judge", "tools")]
"""The packages, each after those that it depends on."""
EXTRAS = {
    "runtime": ("torch", "cutedsl"),
    "judge": ("torch", "upstream"),
    "tools": ("fleet", "llm", "models", "plots", "site"),
}
"""Package of core -> its optional extras that the shared environment has."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""The last release of each minor version that `kda_runtime.bound` knows."""
TASKS = {re.sub(r"^[a-z]\d+_", "", path.parent.name): path.parent for path in sorted(ROOT.glob("*/*/config.toml"))}
SHARED = ROOT / ".nox" / "shared" / "{}.{}".format(*sys.version_info)
DEVELOPMENT = [
    "build",
    "hatchling",
    "hypothesis",
    "import-linter",
    "jsonschema",
    "kernels==0.17.2",
    "mypy",
    "nox",
    "playwright",
    "pytest",
    "pytest-cov",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "uv",
]
LLM_TOOLS = ["guidellm==0.8.1", "transformers[serving]==5.17.0"]
"""The server and the load generator of `kda llm`. guidellm needs another version of click than constraints.txt has."""
PYTHONPATH = os.pathsep.join(filter(None, [*(str(core / "src") for core in CORE), os.environ.get("PYTHONPATH")]))
WORKERS = ("-n", "0" if shutil.which("nvidia-smi") else str(min(len(os.sched_getaffinity(0)), 8)), "--dist=worksteal")
"""pytest's options for processes: on a GPU only one test may run at a time; elsewhere memory limits their number."""
GRACE_S = 20
"""Seconds after Ctrl-C to end the workers and to keep what was measured."""


def run(session: nox.Session, *args: str, tools: tuple[str, ...] = (), ahead: str = "") -> None:
    """Run the session's Python with `args`; the checkout is first on its path, after the folder `ahead` if given."""
    python = python_of(session, tools)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [ahead, PYTHONPATH]))}
    session.run(python, *args, env=env, external=True, interrupt_timeout=GRACE_S, terminate_timeout=GRACE_S)


def python_of(session: nox.Session, tools: tuple[str, ...]) -> str:
    """The interpreter for a session: the shared environment's, or with --no-venv the one that has torch."""
    backend = session._runner.global_config.force_venv_backend  # nox has no public API for --no-venv
    return current_python(session, tools) if backend == "none" else shared_python(session)


def shared_python(session: nox.Session) -> str:
    """Python of the shared environment, which is made, or updated if its `fingerprint` has changed."""
    python, stamp = SHARED / "bin" / "python", SHARED / "stamp"
    if is_current(python, stamp):
        return str(python)
    SHARED.parent.mkdir(parents=True, exist_ok=True)
    with (SHARED.parent / f"{SHARED.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current(python, stamp):  # another nox made it meanwhile
            return str(python)
        session.log(f"Making {SHARED.relative_to(ROOT)}: torch and the rest, once for all sessions")
        afresh = [] if stamp.is_file() and python.exists() else ["--clear"]
        session.run(sys.executable, "-m", "virtualenv", "-q", *afresh, str(SHARED), external=True)
        stamp.unlink(missing_ok=True)
        packages = [part for core in CORE for part in ("-e", f"{core}[{','.join(EXTRAS[core.name])}]")]
        wanted = [*packages, *DEVELOPMENT, *task_requirements()]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        session.run(str(python), "-m", "pip", "install", *constraints, *wanted, external=True)
        stamp.write_text(fingerprint())
    return str(python)


def is_current(python: Path, stamp: Path) -> bool:
    """Whether the environment is complete, matches the files' current `fingerprint`, and still has its interpreter."""
    return python.exists() and stamp.is_file() and stamp.read_text() == fingerprint()


def fingerprint() -> str:
    """Digest of everything that decides what is in the shared environment."""
    sources = [ROOT / "constraints.txt", *(folder / "pyproject.toml" for folder in (*CORE, *TASKS.values()))]
    digest = hashlib.sha256(f"{sys.version} {EXTRAS} {DEVELOPMENT}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def current_python(session: nox.Session, tools: tuple[str, ...]) -> str:
    """The interpreter that already has torch; installs core's light dependencies and `tools` if they are missing."""
    candidates = [sys.executable, *filter(None, (shutil.which("python3"), shutil.which("python")))]
    has_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    for python in candidates:
        if subprocess.run([python, "-c", has_torch], check=False).returncode == 0:
            break
    else:
        session.error(f"--no-venv: no torch in {', '.join(candidates)}; leave --no-venv out to have it installed")
    light = missing(python, [*requirements(CORE), *task_requirements(), *tools])
    if light:
        session.run(python, "-m", "pip", "install", *light, external=True)
    upstream = missing(python, list(extra("judge", "upstream")))
    if upstream and shutil.which("nvidia-smi"):
        # A failed install is no reason to stop: only the upstream arms fail without these, and the report says so.
        session.run(python, "-m", "pip", "install", *upstream, external=True, success_codes=range(256))
    return python


def missing(python: str, requirements: list[str]) -> list[str]:
    """The `requirements` that `python` lacks or has in a version that does not fit."""
    script = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps([(d.metadata['Name'] or '', d.version) for d in m.distributions()]))"
    )
    answer = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    have: dict[str, str] = {}
    for name, version in json.loads(answer):
        have.setdefault(canonicalize_name(name), version)  # Python imports the first one on the path
    needs = [need for need in map(Requirement, requirements) if need.marker is None or need.marker.evaluate()]
    found = [(need, have.get(canonicalize_name(need.name))) for need in needs]
    return [str(n) for n, version in found if version is None or not n.specifier.contains(version, prereleases=True)]


def task_requirements() -> list[str]:
    """The dependencies of the tasks, without core's packages."""
    return requirements(TASKS.values())


def requirements(folders: Iterable[Path]) -> list[str]:
    """The dependencies of the packages in these folders, without this project's own packages."""
    projects = [nox.project.load_toml(folder / "pyproject.toml")["project"] for folder in folders]
    return sorted({need for project in projects for need in project["dependencies"] if not need.startswith("kda-")})


def extra(core: str, name: str) -> tuple[str, ...]:
    """The requirements of an optional extra of one of core's packages."""
    project = nox.project.load_toml(ROOT / "core" / core / "pyproject.toml")["project"]
    return tuple(project["optional-dependencies"][name])


def kda(session: nox.Session, *args: str, tools: tuple[str, ...] = ()) -> None:
    """Run a kda command. If its session is the only one, nox exits with the command's exit code instead of 1."""
    try:
        run(session, "-m", "kda_tools", *args, tools=tools)
    except nox.command.CommandFailed as failed:
        code = getattr(failed, "return_code", None)  # older releases of nox do not keep it
        if code and len(session._runner.manifest) == 1:
            sys.exit(code)
        raise


def kda_session(name: str, command: str, op: str, description: str) -> None:
    """One session that runs `kda COMMAND OP` with the arguments after `--`."""

    def run_command(session: nox.Session) -> None:
        kda(session, *command.split(), op, *session.posargs)

    define(name, description, run_command)


def define(name: str, description: str, function: Callable[[nox.Session], None]) -> None:
    """Register `function` as a session that takes its interpreter from `python_of`."""
    function.__doc__ = description
    nox.session(function, name=name, venv_backend="none")


for _op, _task in TASKS.items():
    kda_session(f"bench-{_op}", "bench", _op, f"Verify and measure {_op} against upstream (no GPU: verify, compile)")
    kda_session(f"validate-{_op}", "validate", _op, f"Check {_op}: files, oracle, regression grid, published numbers")
    kda_session(f"compile-{_op}", "compile", _op, f"Compile {_op} ahead of time for every target GPU")
    kda_session(f"profile-{_op}", "profile", _op, f"Nsight Compute on baseline and solution of {_op}: -- --row ID")
    kda_session(f"sanitize-{_op}", "sanitize", _op, f"compute-sanitizer on representative rows of {_op}")
    if (_task / "bench" / "tune.py").is_file():
        kda_session(f"tune-{_op}", "tune", _op, f"Choose configurations of {_op} by a recorded sweep (no GPU: compile)")
    kda_session(
        f"launch-{_op}", "campaign launch", _op, f"Launch an agent on {_op} in a worktree of its own (-- --agent NAME)"
    )


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests of core and of every task"""
    tools = ("jsonschema", "pytest", "pytest-timeout", "pytest-xdist")
    run(session, "-m", "pytest", *WORKERS, *session.posargs, tools=tools)


@nox.session(name="tests-ptx", venv_backend="none")
def tests_ptx(session: nox.Session) -> None:
    """Run every task's kernel tests on the compiled PTX, executed on the CPU"""
    tests = map(str, sorted(ROOT.glob("*/*/tests/test_kernel.py")))
    run(
        session,
        "-m",
        "pytest",
        "-p",
        "kda_tools.lab.ptx.plugin",
        *WORKERS,
        *tests,
        *session.posargs,
        tools=("pytest", "pytest-timeout", "pytest-xdist"),
    )


@nox.session(venv_backend="none")
def pythons(session: nox.Session) -> None:
    """Find wheels of all that constraints.txt pins for each supported Python, installing none (-- 3.14)"""
    extras = [need for core, names in EXTRAS.items() for name in names for need in extra(core, name)]
    wanted = [*requirements(CORE), *extras, *task_requirements(), *DEVELOPMENT]
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "wanted.txt"
        listed.write_text("\n".join(wanted))
        for python in session.posargs or PYTHONS:
            args = ["--only-binary=:all:", "--python-platform=x86_64-manylinux_2_28", f"--python-version={python}"]
            args += ["-c", str(ROOT / "constraints.txt"), "--output-file", f"{folder}/{python}.txt", "--quiet"]
            run(session, "-m", "uv", "pip", "compile", *args, str(listed), tools=("uv",))


@nox.session(venv_backend="none")
def versions(session: nox.Session) -> None:
    """Test interpreter, compiler and launchers on other releases (-- triton==3.8.0, -- torch==2.15.0, -- -k NAME)"""
    places = ("core/runtime/tests", "core/judge/tests/test_triton_interpreter.py")
    places += ("core/tools/tests/test_aot.py", "core/tools/tests/test_interpreted.py")
    tools = ("pytest", "pytest-timeout", "pytest-xdist")
    releases = [arg for arg in session.posargs if "==" in arg]
    rest = [arg for arg in session.posargs if "==" not in arg]
    SHARED.parent.mkdir(parents=True, exist_ok=True)
    for release in releases or [f"triton=={version}" for version in TRITONS]:
        with tempfile.TemporaryDirectory(prefix=f"{release}-", dir=SHARED.parent) as folder:
            run(session, "-m", "pip", "install", "-q", "--target", folder, release)
            shown = "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)"
            run(session, "-c", shown, ahead=folder)
            run(session, "-m", "pytest", *WORKERS, *places, *rest, tools=tools, ahead=folder)


@nox.session(name="llm-tools", venv_backend="none")
def llm_tools(session: nox.Session) -> None:
    """Install transformers' server and guidellm into .nox/llm, for `kda llm serve` and `kda llm bench`"""
    python = python_of(session, ())
    place = ROOT / ".nox" / "llm" / SHARED.name
    wanted = f"{LLM_TOOLS} {python} {fingerprint()}"
    stamp = place / "stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    session.run(sys.executable, "-m", "virtualenv", "-q", "--clear", "-p", python, str(place), external=True)
    # torch and other installed packages come from the shared environment; they are not installed again
    asked = [python, "-c", "import sysconfig, torch; print(sysconfig.get_path('purelib')); print(torch.__version__)"]
    behind, torch = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    (site,) = place.glob("lib/python*/site-packages")
    (site / "behind.pth").write_text(f"{behind}\n")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write(f"torch=={torch.partition('+')[0]}\n")
        pins.flush()
        session.run(
            str(place / "bin" / "python"), "-m", "pip", "install", "-q", "-c", pins.name, *LLM_TOOLS, external=True
        )
    stamp.write_text(wanted)


@nox.session(venv_backend="none")
def llm(session: nox.Session) -> None:
    """Try `kda llm` end to end on this machine: a tiny model, a real server, guidellm, capture, inventory, cards"""
    llm_tools(session)
    tests = str(ROOT / "core" / "tools" / "tests" / "test_llm_end_to_end.py")
    run(session, "-m", "pytest", "-n", "0", tests, *session.posargs, tools=("pytest", "pytest-timeout", "pytest-xdist"))


@nox.session(venv_backend="none")
def adversaries(session: nox.Session) -> None:
    """Run the arms that cheat or fail through the judge and show the table (-- NAME..., --record FILE)"""
    run(session, "-m", "kda_tools.lab.adversaries", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check rules and format with ruff (-- --fix mends what it can), and which package imports which"""
    run(session, "-m", "ruff", "check", *session.posargs, tools=("ruff",))
    run(session, "-m", "ruff", "format", *([] if "--fix" in session.posargs else ["--check"]), tools=("ruff",))
    run(session, "-c", "from importlinter.cli import lint_imports_command as run; run()", tools=("import-linter",))


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check the types of all packages, strictly"""
    run(session, "-m", "mypy", *session.posargs, tools=("mypy",))


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Build the wheels of core and of every task into dist/"""
    python = python_of(session, ("build", "hatchling"))
    for project in (*CORE, *TASKS.values()):
        args = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(ROOT / "dist"), str(project)]
        session.run(python, *args, external=True)


@nox.session(venv_backend="none")
def publish(session: nox.Session) -> None:
    """Generate results, plots and tables from the ledgers, and the site (-- --check compares all but the site)"""
    kda(session, "publish", *session.posargs, tools=extra("tools", "plots"))
    if not session.posargs:
        site(session)


@nox.session(venv_backend="none")
def site(session: nox.Session) -> None:
    """Build the static site into _site/: open _site/index.html"""
    kda(session, "site", *session.posargs, tools=(*extra("tools", "plots"), *extra("tools", "site")))


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """Compare another SGLang release with the pinned ones: -- 0.5.23, or -- latest"""
    kda(session, "upstream", "check", *session.posargs)


@nox.session(venv_backend="none")
def doctor(session: nox.Session) -> None:
    """Show what this machine has, what is missing, and the command that brings it"""
    kda(session, "doctor", *session.posargs)
