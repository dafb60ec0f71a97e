"""`kda doctor`: what this machine has, what is missing, and the command that installs it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kda_judge.arms.upstream import cache_folder, fetch
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import KdaError, MissingRequirement
from kda_judge.contract.tasks import Task, checkout_root, find_tasks
from kda_judge.evidence import gpu_state
from kda_judge.evidence.provenance import git_state
from kda_tools import __version__
from kda_tools.knowledge.external import externals
from kda_tools.project import preflight
from kda_tools.project.check import Check

TESTED = ((3, 10), (3, 14))
"""First and last Python version of the matrix in .github/workflows/ci.yml."""
REMEDIES = {
    "torch": "pip install 'torch>=2.11'",
    "triton": "pip install 'triton>=3.6'",
    "nvidia-cutlass-dsl": "pip install 'nvidia-cutlass-dsl[cu13]>=4.8'",
    "apache-tvm-ffi": "pip install 'apache-tvm-ffi>=0.1.15'",
    "ninja": "pip install ninja",
}
"""Distribution -> the command that installs it; core itself needs none of them."""
LARGE = ("torch", "triton", "cutlass")
"""Packages whose import takes seconds where Python has to compile them each time."""
TOOLKIT = "install the CUDA toolkit of your driver's version and put its bin folder on PATH, or set CUDA_HOME"


def checks() -> list[Check]:
    """Check everything; nothing that is missing or broken makes this raise."""
    return [
        _kda(),
        _python(),
        _gpu(),
        _torch(),
        _package("triton", "Triton kernels, interpreted and compiled"),
        _package("nvidia-cutlass-dsl", "CuTe DSL kernels"),
        _package("apache-tvm-ffi", "JIT CUDA and CuTe DSL kernels"),
        _package("ninja", "JIT CUDA kernels of the upstream arms"),
        _byte_code(),
        _tool("nvcc", "JIT CUDA kernels of the upstream arms"),
        _tool("ncu", "profiling a kernel; not for results"),
        _tool("compute-sanitizer", "looking for races and stray accesses; not for results"),
        *preflight.checks(Path.cwd()),
        *_external(),
        *_upstream(),
    ]


def kernel_checks(tasks: Sequence[Task]) -> list[Check]:
    """What an agent that works on these tasks' kernels needs: the GPU, the tools around it, and the upstream files."""
    return [
        _gpu(),
        _tool("nvcc", "JIT CUDA kernels of the upstream arms"),
        _tool("ncu", "profiling a kernel; not for results"),
        *_upstream(tasks),
    ]


def _kda() -> Check:
    needed_for, remedy = "everything", "run it in a checkout"
    try:
        root = checkout_root()
        state = git_state(root)
    except KdaError as error:
        return Check("kda", False, f"{__version__}, {error}", needed_for, "mend what it names")
    where = f"commit {state.commit[:10]}{' with changes' * state.dirty}" if root else "no checkout"
    return Check("kda", True, f"{__version__}, {where}", needed_for, remedy)


def _external() -> list[Check]:
    """The collections of knowledge below `external/`; everything works without them."""
    try:
        root = checkout_root()
    except KdaError:  # `_kda` reports it
        return []
    needed_for = "more that `kda knowledge` searches; nothing else"
    try:
        known = externals(root) if root else []
    except KdaError as error:
        return [Check("external", False, str(error), needed_for, "mend what it names")]
    return [
        Check(one.path, one.present, "there" if one.present else "not fetched, optional", needed_for, one.command)
        for one in known
    ]


def _python() -> Check:
    now = sys.version_info[:2]
    first, last = (".".join(map(str, edge)) for edge in TESTED)
    ok = TESTED[0] <= now <= TESTED[1]
    return Check("python", ok, sys.version.split()[0], "everything", f"use Python {first} to {last}")


def _gpu() -> Check:
    needed_for = "measuring; without one, bench verifies and compiles"
    try:
        state = gpu_state.read_state()
    except KdaError as error:
        return Check("gpu", False, str(error), needed_for, "use a machine with an NVIDIA GPU and its driver")
    occupied = gpu_state.busy(state)
    found = f"{state.name}, driver {state.driver}, CUDA {state.cuda or 'unknown'}"
    return Check("gpu", occupied is None, f"{found}; {occupied or 'free'}", needed_for, "end the other processes")


def _torch() -> Check:
    needed_for, remedy = "every arm", REMEDIES["torch"]
    try:
        import torch

        usable = torch.cuda.is_available()
        found = f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if usable else "no CUDA device")
    except ImportError as error:
        return Check("torch", False, str(error), needed_for, remedy)
    except Exception as error:  # noqa: BLE001  # a broken installation may raise anything, and that is the finding
        return Check("torch", False, f"does not import: {error}", needed_for, remedy)
    return Check("torch", usable or not gpu_state.has_gpu(), found, needed_for, "install a torch built for CUDA")


def _package(name: str, needed_for: str) -> Check:
    try:
        return Check(name, True, version(name), needed_for, REMEDIES[name])
    except PackageNotFoundError:
        return Check(name, False, "not installed", needed_for, REMEDIES[name])


def _byte_code() -> Check:
    """Installers compile packages; images that set PYTHONDONTWRITEBYTECODE may have none, and never get any."""
    specs = [spec for name in LARGE if (spec := find_spec(name)) and spec.origin and spec.cached]
    without = [spec for spec in specs if not Path(str(spec.cached)).is_file()]
    found = f"none of {', '.join(spec.name for spec in without)}" if without else "there"
    folders = " ".join(shlex.quote(str(Path(str(spec.origin)).parent)) for spec in without or specs)
    needed_for = "starting a worker sooner, by seconds; not for results"
    return Check("byte code", not without, found, needed_for, f"python -m compileall -q -j 0 {folders}")


def _tool(name: str, needed_for: str) -> Check:
    folders = [os.environ.get("PATH", os.defpath)]
    folders += [f"{root}/bin" for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        return Check(name, False, "not found", needed_for, TOOLKIT)
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name, False, f"{path} does not run: {error}", needed_for, TOOLKIT)
    number = re.search(r"(?:release |[Vv]ersion )([\d.]+)", answer)
    return Check(name, True, f"{number[1].rstrip('.') if number else 'unknown version'}, {path}", needed_for, TOOLKIT)


def _upstream(tasks: Sequence[Task] | None = None) -> list[Check]:
    """One line per release: the tasks whose pinned files are cached; and one per task whose files do not verify."""
    found: list[Check] = []
    users: dict[str, list[tuple[Task, Pin]]] = {}
    try:
        cache = cache_folder(checkout_root())
        tasks = find_tasks() if tasks is None else tasks
    except KdaError as error:
        return [Check("tasks", False, str(error), "every command", "mend what it names")]
    for task in tasks:
        try:
            for name, pin in task.config.upstream.items():
                users.setdefault(name, []).append((task, pin))
        except KdaError as error:  # the rest of the report still helps
            found.append(Check(f"task {task.op}", False, str(error), "every command on it", "mend the file it names"))
    return [*found, *(check for name, pairs in users.items() for check in _release(name, pairs, cache))]


def _release(name: str, users: list[tuple[Task, Pin]], cache: Path) -> list[Check]:
    """What the cache has of one release, for the tasks whose arms are pinned to it."""
    fetched, absent, damaged = [], [], []
    for task, pin in users:
        try:
            fetch(pin, task.path / pin.files, cache, offline=True)
        except MissingRequirement:
            absent.append(task.op)
        except KdaError as error:
            remedy = f"kda fetch {task.op} --refresh"
            answer = str(error).splitlines()[0]
            damaged.append(Check(f"{name}, {task.op}", False, answer, f"the upstream arms of {task.op}", remedy))
        else:
            fetched.append(task.op)
    if absent:
        some = f", but for {', '.join(fetched)}" if fetched else ""
        summary = Check(name, False, f"not fetched{some}", f"the upstream arms of {', '.join(absent)}", "kda fetch")
    else:
        found = f"{_short(cache)}, for {', '.join(fetched)}"
        summary = Check(name, True, found, f"the upstream arms of {', '.join(fetched)}", "kda fetch")
    return [*([summary] if absent or fetched else []), *damaged]


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
