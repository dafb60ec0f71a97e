"""What exactly ran: commit, content hashes, pins, versions, and the machine's processor."""

import ast
import hashlib
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import kda_core
from kda_core.config import Config
from kda_core.errors import UsageError
from kda_core.records import Machine, Provenance
from kda_core.sources import parsed
from kda_core.tasks import Task, checkout_root

HARNESS = (
    "arena",
    "bench",
    "case",
    "config",
    "correctness",
    "derive",
    "gpu",
    "idle",
    "inputs",
    "interpreter",
    "judge",
    "launch",
    "limits",
    "native",
    "notes",
    "oracle",
    "protocol",
    "standins",
    "stats",
    "timing",
    "upstream",
    "verdict",
    "watch",
    "watcher",
    "worker",
    "workers",
    "workloads",
)
"""Modules of kda_core that can change a number or a verdict. Those that only find, show or store are not here."""
HARNESS_SOURCES = ("native.c",)
"""What else they are built from."""

COMMIT_VARIABLE = "KDA_GIT_COMMIT"
DIRTY_VARIABLE = "KDA_GIT_DIRTY"
UNKNOWN_COMMIT = "unknown"
NOT_IN_LIBRARY = frozenset({"errors", "toml"})
"""Modules that solutions import, if only through others, and that can change neither a result nor a time."""
NOT_CODE = (":(exclude,glob)*/*/docs/*.jsonl", ":(exclude,glob)*/*/docs/plots/*.svg", ":(exclude)*.md")
"""Logs grow with every recorded run, and tables, pages and plots follow them; none can change a number."""
DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "cutlass-dsl": "nvidia-cutlass-dsl",
    "tvm-ffi": "apache-tvm-ffi",
    "numpy": "numpy",
}
ABSENT = "absent"
CACHES = frozenset({"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store"})
"""Left out of content hashes; other hidden files count, because a solution could read them."""


@dataclass(frozen=True)
class GitState:
    """The checkout's commit (40 hex digits, or `unknown`), and whether its code differs from it."""

    commit: str
    dirty: bool


def collect(task: Task, arms: Iterable[str], driver: str | None) -> Provenance:
    """Everything about a run of `arms`, read now; call it before the first worker starts."""
    git = git_state(checkout_root())
    return Provenance(
        commit=git.commit,
        dirty=git.dirty,
        hashes=hashes(task),
        pins={arm: pin for arm, pin in pins(task.config).items() if arm in set(arms)},
        versions=versions(driver),
    )


def git_state(root: Path | None) -> GitState:
    """Commit and dirty flag of the checkout; untracked files count, ledgers and Markdown do not.

    A copy that git knows nothing of (a GPU machine often gets one, without a `.git` or with an empty one) is told by
    `KDA_GIT_COMMIT` (40 hex digits) and `KDA_GIT_DIRTY` (0 or 1), set by whoever copied it. Where git answers they are
    ignored. With neither, the commit is `unknown` and the state dirty, so such a run cannot be published.
    """
    if root is not None and (root / ".git").exists():
        commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", ".", *NOT_CODE)
        if commit is not None and status is not None:
            return GitState(commit.strip(), dirty=bool(status.strip()))
    commit, dirty = os.environ.get(COMMIT_VARIABLE), os.environ.get(DIRTY_VARIABLE)
    if commit is None and dirty is None:
        return GitState(UNKNOWN_COMMIT, dirty=True)
    if commit is None or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise UsageError(f"{COMMIT_VARIABLE}: expected 40 lower-case hex digits, got {commit!r}")
    if dirty not in ("0", "1"):
        raise UsageError(f"{DIRTY_VARIABLE}: expected 0 or 1 beside {COMMIT_VARIABLE}, got {dirty!r}")
    return GitState(commit, dirty=dirty == "1")


def hashes(task: Task) -> dict[str, str]:
    """sha256 of what decides the task's numbers, by part.

    Each is `content_hash` over: `solution` and `baseline` the whole folder, `workloads` the frozen rows,
    `reference` the Python files of `bench/` but for `tune.py` (what it decides is in the solution), `config` the
    contract, `harness` the modules in `HARNESS` and `HARNESS_SOURCES`, `library` the other modules of `kda_core` that
    the solution imports (no part where there are none).
    """
    core = Path(kda_core.__file__).parent
    found = {
        "solution": content_hash(task.path / "solution", ["**/*"]),
        "baseline": content_hash(task.path / "baseline", ["**/*"]),
        "workloads": content_hash(task.path / "bench", ["workloads.toml"]),
        "reference": content_hash(task.path / "bench", ["*.py"], without=["tune.py"]),
        "config": content_hash(task.path, ["config.toml"]),
        "harness": content_hash(core, [*(f"{module}.py" for module in HARNESS), *HARNESS_SOURCES]),
    }
    modules = library(task.path / "solution")
    return found | ({"library": content_hash(core, [f"{module}.py" for module in modules])} if modules else {})


def library(solution: Path) -> list[str]:
    """Modules of `kda_core` that a solution's files import, directly or through one another, without the harness."""
    core = Path(kda_core.__file__).parent
    found: set[str] = set()
    todo = [path for path in solution.glob("**/*.py") if not _is_cache(path.relative_to(solution))]
    while todo:
        new = _core_imports(todo.pop()) - found - NOT_IN_LIBRARY.union(HARNESS)
        new = {module for module in new if (core / f"{module}.py").is_file()}
        found |= new
        todo += [core / f"{module}.py" for module in new]
    return sorted(found)


def _core_imports(path: Path) -> set[str]:
    """Names that may be modules of `kda_core`, from the import statements of one file, type checking's included.

    None of a file that is no Python: its arm cannot be imported, and the row says why.
    """
    try:
        tree = parsed(path)
    except (SyntaxError, ValueError):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.split(".")[1] for name in names if name.startswith("kda_core.")}


def content_hash(folder: Path, patterns: Iterable[str], without: Collection[str] = ()) -> str:
    """sha256 of lines `<sha256 of the file>  <path in the folder>`, sorted by path, as sha256sum would print them.

    CRLF counts as LF in text, so a checkout's line endings do not matter; `CACHES` and the paths in `without` are left
    out.

    Raises:
        UsageError: a pattern without a file.
    """
    lines = {}
    for pattern in patterns:
        files = [path for path in folder.glob(pattern) if path.is_file() and not _is_cache(path.relative_to(folder))]
        if not files:
            raise UsageError(f"{folder}: expected files {pattern!r} to take a hash of, got none")
        for path in files:
            content = path.read_bytes()
            if b"\0" not in content:
                content = content.replace(b"\r\n", b"\n")
            lines[path.relative_to(folder).as_posix()] = hashlib.sha256(content).hexdigest()
    kept = sorted(lines.keys() - set(without))
    return hashlib.sha256("".join(f"{lines[name]}  {name}\n" for name in kept).encode()).hexdigest()


def drop_bytecode(task: Task) -> None:
    """Delete what Python compiled of the arms earlier: it prefers bytecode to the source, and no hash covers it."""
    for path in _bytecode(task):
        with suppress(OSError):  # an installed task's may be another user's, for arms too
            path.unlink()


def on_disk(task: Task) -> dict[str, str]:
    """`hashes`, and under `bytecode` a hash of what is compiled beside the arms' sources; workers compile nothing."""
    compiled = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n" for path in _bytecode(task))
    return hashes(task) | {"bytecode": hashlib.sha256(compiled.encode()).hexdigest()}


def changed(task: Task, before: Mapping[str, str]) -> list[str]:
    """The parts that are not as `on_disk` found them; all of them where files are missing."""
    try:
        now = on_disk(task)
    except (UsageError, OSError):
        return list(before)
    return [part for part, digest in before.items() if now.get(part) != digest]


def _bytecode(task: Task) -> list[Path]:
    return [path for part in ("baseline", "solution") for path in sorted((task.path / part).rglob("*.pyc"))]


def _is_cache(path: Path) -> bool:
    return path.suffix == ".pyc" or not CACHES.isdisjoint(path.parts)


def pins(config: Config) -> dict[str, str]:
    """Arm -> `package version sha256-of-the-wheel`, for the arms that stand on an upstream release."""
    found = {}
    for name, arm in config.arms.items():
        if arm.upstream is not None:
            pin = config.upstream[arm.upstream]
            found[name] = f"{pin.package} {pin.version} {pin.wheel_sha256}"
    return found


def versions(driver: str | None) -> dict[str, str]:
    """Versions of what runs the kernels, from metadata alone: nothing is imported. `absent` where there is none."""
    found = {"python": platform.python_version(), "kda-core": kda_core.__version__, "driver": driver or ABSENT}
    found |= {name: _version(distribution) for name, distribution in DISTRIBUTIONS.items()}
    found["cuda"] = _torch_cuda()
    found["nvcc"] = _nvcc()
    return found


def _nvcc() -> str:
    """Version of the compiler that builds upstream's CUDA kernels."""
    try:
        ran = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ABSENT
    match = re.search(r"\bV(\d[\d.]*)", ran.stdout)
    return match.group(1) if match else ABSENT


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ABSENT


def _torch_cuda() -> str:
    """The CUDA version that torch was built for, read from the text of `torch/version.py`."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "version.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
        if match:
            return match.group(1)
    return ABSENT


def utc(moment: datetime | None = None) -> str:
    """ISO 8601 to the second with Z; now when no moment is given."""
    return (moment or datetime.now(timezone.utc)).astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def run_id(moment: datetime | None = None) -> str:
    """UTC time and six random hex digits: sorts by time, and two machines do not collide."""
    return f"{utc(moment).replace('-', '').replace(':', '')}-{secrets.token_hex(3)}"


def processor() -> str:
    """The CPU's model name."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def host(pinned_core: int | None) -> Machine:
    """The machine without its GPU; the judge completes it with `model_copy(update={...})`."""
    return Machine(
        kind="cpu", cpu=processor(), cores=os.cpu_count() or 1, pinned_core=pinned_core, platform=platform.platform()
    )


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, or None when git is missing or refuses."""
    command = ["git", "-C", str(root), "-c", f"safe.directory={root}", *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None
