"""What exactly ran: commit, content hashes, pins, versions, and the machine's processor."""

import hashlib
import os
import platform
import re
import secrets
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import kda_judge
from kda_judge.contract.config import Config
from kda_judge.contract.errors import UsageError
from kda_judge.contract.solution_imports import imports
from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.evidence.run_record import Machine, Provenance

NOT_DECIDING = frozenset(
    {
        "__init__.py",
        "contract/errors.py",
        "contract/near_names.py",
        "contract/solution_imports.py",
        "contract/strict_models.py",
        "contract/task_import.py",
        "contract/tasks.py",
        "evidence/append_only.py",
        "evidence/ledger.py",
        "evidence/ledger_migrations.py",
        "evidence/provenance.py",
        "evidence/record_log.py",
        "evidence/run_record.py",
    }
)
"""Files of kda_judge that only find, show or store. All others can change a number or a verdict, new ones too."""
RUNTIME = "kda_runtime"
"""The package that solutions share; the judge never imports it, and hashes what a solution imports of it."""
NOT_IN_LIBRARY = frozenset({"__init__.py", "errors.py"})
"""Files of kda_runtime that can change neither a result nor a time."""

PORT = "port "
"""Prefix of the name of a run's hash, if it is the hash of an arm which the run brought."""
COMMIT_VARIABLE = "KDA_GIT_COMMIT"
DIRTY_VARIABLE = "KDA_GIT_DIRTY"
UNKNOWN_COMMIT = "unknown"
NOT_CODE = (":(exclude,glob)**/docs/*.jsonl", ":(exclude,glob)**/docs/plots/*.svg", ":(exclude)*.md")
"""Logs grow with every recorded run, and tables, pages and plots follow them; none can change a number."""
DISTRIBUTIONS = {
    "kda-runtime": "kda-runtime",
    "torch": "torch",
    "triton": "triton",
    "cutlass-dsl": "nvidia-cutlass-dsl",
    "tvm-ffi": "apache-tvm-ffi",
    "numpy": "numpy",
}
ABSENT = "absent"
MOVED = "moved.sha256"
"""File in `baseline/`: sha256 and path of files that lay there when runs were recorded. They decide no row, so they lie
elsewhere now. Their lines still count, so that those runs stay comparable."""
ARMS = ("baseline", "solution")
"""Folders of a task from which arms are imported."""


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

    Each is `content_hash` over: `solution` and `baseline` the whole folder (`MOVED`), `workloads` the frozen rows,
    `reference` the Python files of `bench/` but for `tune.py` (what it decides is in the solution), `config` the
    contract, `harness` all of kda_judge but `NOT_DECIDING`, `library` what the solution imports of kda_runtime (no part
    where that is nothing).
    """
    judge = Path(kda_judge.__file__).parent
    found = {
        "solution": content_hash(task.path / "solution", ["**/*"]),
        "baseline": _baseline_hash(task.path / "baseline"),
        "workloads": content_hash(task.path / "bench", ["workloads.toml"]),
        "reference": content_hash(task.path / "bench", ["**/*.py"], without=["tune.py"]),
        "config": content_hash(task.path, ["config.toml"]),
        "harness": content_hash(judge, ["**/*"], without=NOT_DECIDING),
    }
    shared = library(task.path / "solution")
    return found | ({"library": content_hash(_runtime(), shared)} if shared else {})


def own(recorded: Mapping[str, str]) -> dict[str, str]:
    """The parts of a record's hashes that are the task's own: without the arms that the run brought."""
    return {part: digest for part, digest in recorded.items() if not part.startswith(PORT)}


def library(solution: Path) -> list[str]:
    """Files of kda_runtime that a solution's files import, directly or through one another, as paths in that package.

    Files with a module's name count too, since the module is built from them (`native.py`, `native.c`).

    Raises:
        UsageError: an import that leads to no file: a hash without it would miss a change of it.
    """
    runtime = _runtime()
    own = [path for path in solution.glob("**/*.py") if not _is_bytecode(path)]
    todo, found = [(path, solution, "solution") for path in own], set[Path]()
    while todo:
        for path in _runtime_imports(*todo.pop(), runtime) - found:
            found.add(path)
            todo.append((path, runtime, RUNTIME))
    names = {
        other.relative_to(runtime).as_posix()
        for path in found
        for other in (path, *path.parent.glob(f"{path.stem}.*"))
        if not _is_bytecode(other)
    }
    return sorted(names - NOT_IN_LIBRARY)


def _runtime() -> Path:
    """The folder of kda_runtime, which is not imported; a UsageError where there is none."""
    spec = find_spec(RUNTIME)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{RUNTIME}, which solutions import, is not installed for {sys.executable}")
    return Path(spec.submodule_search_locations[0])


def _runtime_imports(path: Path, folder: Path, package: str, runtime: Path) -> set[Path]:
    """Files of kda_runtime that a file of the package in `folder` imports, for type checking or not.

    None of a file that is no Python: its arm cannot be imported, and the row says why.
    """
    try:
        imported = imports(path, folder, package)
    except (SyntaxError, ValueError):
        return set()
    files = set()
    for line, name in imported:
        first, *parts = name.split(".")
        if first != RUNTIME:
            continue
        places = (runtime.joinpath(*parts[:end]) for end in (len(parts), len(parts) - 1) if end > 0)
        candidates = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
        file = next(filter(Path.is_file, candidates), None)
        if file is None:
            raise UsageError(f"{path}:{line}: expected an import of a module of {RUNTIME}, got {name}: no such file")
        files.add(file)
    return files


def content_hash(folder: Path, patterns: Iterable[str], without: Collection[str] = ()) -> str:
    """sha256 of lines `<sha256 of the file>  <path in the folder>`, sorted by path, as sha256sum would print them.

    CRLF counts as LF in text, so a checkout's line endings do not matter. The paths in `without` are left out, and
    Python's bytecode, which no run keeps. All else counts, hidden or in a cache's folder: a solution could read it.

    Raises:
        UsageError: a pattern without a file, or a link to a folder, whose files no hash would cover.
    """
    lines = _lines(folder, patterns)
    return _joined({name: lines[name] for name in lines.keys() - set(without)})


def _baseline_hash(folder: Path) -> str:
    """`content_hash` of a baseline's folder, with the lines in `MOVED` in place of that file.

    Raises:
        UsageError: a line of `MOVED` has another form, or names a file that the folder still has.
    """
    lines = _lines(folder, ["**/*"])
    if lines.pop(MOVED, None):
        for number, text in enumerate((folder / MOVED).read_text(encoding="utf-8").splitlines(), start=1):
            if not (line := re.fullmatch(r"([0-9a-f]{64})  (\S+)", text)):
                raise UsageError(f"{folder / MOVED}:{number}: expected sha256, two spaces and a path, got {text!r}")
            if line[2] in lines:
                raise UsageError(f"{folder / MOVED}:{number}: expected a file that is no longer there, got {line[2]}")
            lines[line[2]] = line[1]
    return _joined(lines)


def _joined(lines: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{lines[name]}  {name}\n" for name in sorted(lines)).encode()).hexdigest()


def _lines(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Path in the folder -> sha256 of the file, for `content_hash`."""
    lines = {}
    for pattern in patterns:
        files = [path for path in folder.glob(pattern) if _counts(path) and not _is_bytecode(path)]
        if not files:
            raise UsageError(f"{folder}: expected files {pattern!r} to take a hash of, got none")
        for path in files:
            if path.is_dir():
                raise UsageError(f"{path}: expected a folder of its own, got a link")
            content = path.read_bytes()
            if b"\0" not in content:
                content = content.replace(b"\r\n", b"\n")
            lines[path.relative_to(folder).as_posix()] = hashlib.sha256(content).hexdigest()
    return lines


def drop_bytecode(task: Task, *parts: str) -> None:
    """Delete what Python compiled in these folders earlier: it prefers that to the source, and no hash covers it."""
    for path in _bytecode(task, parts):
        with suppress(OSError):  # an installed task's may belong to another user; then arms cannot change it either
            path.unlink()


def on_disk(task: Task) -> dict[str, str]:
    """`hashes`, and under `bytecode` a hash of what is compiled beside the arms' sources; workers compile nothing."""
    compiled = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n" for path in _bytecode(task, ARMS))
    return hashes(task) | {"bytecode": hashlib.sha256(compiled.encode()).hexdigest()}


def changed(task: Task, before: Mapping[str, str]) -> list[str]:
    """The parts that are not as `on_disk` found them; all of them where files are missing."""
    try:
        now = on_disk(task)
    except (UsageError, OSError):
        return list(before)
    return [part for part, digest in before.items() if now.get(part) != digest]


def _bytecode(task: Task, parts: Iterable[str]) -> list[Path]:
    return [path for part in parts for path in sorted((task.path / part).rglob("*.pyc*")) if _is_bytecode(path)]


def _counts(path: Path) -> bool:
    """A file, or a link to a folder: that can be imported from, and no pattern looks behind it."""
    return path.is_file() or (path.is_symlink() and path.is_dir())


def _is_bytecode(path: Path) -> bool:
    """Whether Python made the file, or is about to: it writes `a.pyc.123`, and renames that."""
    return re.search(r"\.pyc(\.\d+)?$", path.name) is not None


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
    found = {"python": platform.python_version(), "kda-judge": kda_judge.__version__, "driver": driver or ABSENT}
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


def host() -> Machine:
    """The machine without its GPU; the judge completes it with `model_copy(update={...})`."""
    cores = os.cpu_count() or 1
    return Machine(kind="cpu", cpu=processor(), cores=cores, pinned_core=None, platform=platform.platform())


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, or None when git is missing or refuses."""
    command = ["git", "-C", str(root), "-c", f"safe.directory={root}", *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None
