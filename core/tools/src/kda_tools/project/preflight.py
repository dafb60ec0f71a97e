"""Check what a run of an installed SGLang needs: its place and release, an idle GPU, and disk space."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.errors import KdaError, MissingRequirement
from kda_judge.contract.tasks import find_tasks
from kda_judge.evidence import gpu_state
from kda_tools.project.check import Check

NEEDED_FOR = "kda apply and kda model denoise"
ROOM_GB: float = 20
"""Least free disk space to begin a run, in GB of 10**9 bytes: for builds, traces, and a clip of each run."""
FLASHINFER = "FLASHINFER_DISABLE_VERSION_CHECK"
"""Variable without which FlashInfer refuses to import if the build of its kernels has another version."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
HOOK = "KDA_APPLY_COUNTS"
"""Variable that makes Python processes count calls for `kda apply`; removed for a Python that only looks for SGLang."""
# `find_spec` of a package without a dot in its name imports nothing.
FIND = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps({"file": spec and spec.origin, "version": version}))
"""


@dataclass(frozen=True)
class Installed:
    """An SGLang that a Python would import."""

    root: Path
    """The folder of the package."""
    version: str | None
    """None if the package has no metadata."""


def python_of(program: str) -> str | None:
    """The Python that runs `program`: itself, or the one its first line names; None if that is no Python."""
    path = Path(program)
    if path.name.startswith("python"):
        return program
    try:
        with path.open("rb") as file:
            first = file.readline(4096).decode("utf-8", "replace")
    except OSError:
        return None
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [found for word in words[1:2] if (found := shutil.which(word))]
    return words[0] if words and Path(words[0]).name.startswith("python") else None


def find_sglang(python: str) -> Installed | None:
    """The SGLang that this Python would import, found without importing it."""
    try:
        env = {name: value for name, value in os.environ.items() if name != HOOK}
        command = [python, "-c", FIND]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        answer = json.loads(ran.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise MissingRequirement(f"{python}: cannot be asked for sglang: {error}") from None
    return Installed(Path(answer["file"]).parent, answer["version"]) if answer["file"] else None


def commit(installed: Installed) -> str:
    """Which SGLang it is: the commit of its own checkout, with `+dirty` if that has changes, else its wheel."""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(installed.root), *words]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return ran.stdout.strip() if ran.returncode == 0 else None

    # A virtual environment may lie in somebody else's checkout.
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (head := git("rev-parse", "HEAD")) is None:
        return f"wheel {installed.version}"
    return f"{head}{'+dirty' if git('status', '--porcelain') else ''}"


def demand_release(program: str, known: Sequence[str], absent_ok: bool = False) -> Installed | None:
    """The SGLang that `program` would import, of a release in `known`; None if `python_of` finds no Python.

    With `absent_ok` also None if that Python has no SGLang: the program may start another Python.

    Raises:
        MissingRequirement: the Python has no SGLang, or one of another release.
    """
    if (python := python_of(program)) is None:
        return None
    expected = " or ".join(known)
    if (installed := find_sglang(python)) is None:
        if absent_ok:
            return None
        raise MissingRequirement(f"{python} has no sglang, expected {expected}: {remedy(known)}")
    if installed.version not in known:
        raise MissingRequirement(
            f"{installed.root}: expected sglang {expected}, got {installed.version or 'a version that is not written'};"
            f" {remedy(known)}"
        )
    return installed


def remedy(known: Sequence[str]) -> str:
    """The command that installs the newest of the known releases."""
    newest = max(known, key=numbers, default=None)
    return f"pip install 'sglang[diffusion]=={newest}'" if newest else "no task is pinned to a release"


def numbers(release: str) -> list[int]:
    """The numbers in a release, by which releases are ordered."""
    return [int(number) for number in re.findall(r"\d+", release)]


def releases() -> list[str]:
    """The releases of sglang that the tasks are pinned to."""
    pins = [pin for task in find_tasks() for pin in task.config.upstream.values() if pin.package == "sglang"]
    return list(dict.fromkeys(pin.version for pin in pins))


def environment(gpus: int = 1) -> dict[str, str]:
    """Environment variables for the run: FlashInfer's, and `gpus` idle GPUs if the machine has more.

    No GPU is chosen if `CUDA_VISIBLE_DEVICES` is set, if `gpus` is 0, or if there is no GPU.

    Raises:
        MissingRequirement: fewer than `gpus` GPUs are idle.
    """
    extra = {FLASHINFER: os.environ.get(FLASHINFER, "1")}
    states = _states()
    if not gpus or VISIBLE in os.environ or not states:
        return extra
    idle = choose(gpus)
    return extra | ({VISIBLE: ",".join(state.uuid for state in idle)} if gpus < len(states) else {})


def choose(gpus: int) -> list[gpu_state.GpuState]:
    """The first `gpus` GPUs: of those that `CUDA_VISIBLE_DEVICES` names if it is set, else of the idle ones.

    Raises:
        MissingRequirement: there are fewer.
    """
    states = _states()
    chosen = [state for state in states if VISIBLE in os.environ or gpu_state.busy(state) is None]
    if len(chosen) < gpus:
        why = "; ".join(filter(None, map(gpu_state.busy, states)))
        raise MissingRequirement(
            f"expected {gpus} idle of {len(states)} GPUs, got {len(chosen)}{f': {why}' if why else ''}; wait, end what "
            f"holds them, or choose yourself with {VISIBLE}"
        )
    return chosen[:gpus]


def _states() -> list[gpu_state.GpuState]:
    """One reading of every GPU that CUDA would see; none without a driver."""
    states: list[gpu_state.GpuState] = []
    try:
        while True:
            states.append(gpu_state.read_state(len(states)))
    except MissingRequirement:
        return states


def checks(out: Path) -> list[Check]:
    """The checks for `kda doctor`; `out` is the folder to which a run would write."""
    return [_sglang(), _flashinfer(), _idle(), _writable("output folder", out), _disk(out), *_caches()]


def _sglang() -> Check:
    try:
        known = releases()
    except KdaError as error:
        return Check("sglang", False, str(error), NEEDED_FOR, "mend what it names")
    program = shutil.which("sglang") or sys.executable
    try:
        installed = demand_release(program, known)
    except MissingRequirement as error:
        return Check("sglang", False, str(error), NEEDED_FOR, remedy(known))
    if installed is None:
        return Check("sglang", False, f"{program} names no Python", NEEDED_FOR, remedy(known))
    return Check("sglang", True, f"{installed.version}, {installed.root}", NEEDED_FOR, remedy(known))


def _flashinfer() -> Check:
    value = os.environ.get(FLASHINFER)
    found = "not set; kda sets it to 1 for what it runs" if value is None else f"{value!r}"
    return Check(FLASHINFER, value in (None, "1"), found, NEEDED_FOR, f"export {FLASHINFER}=1")


def _idle() -> Check:
    states = _states()
    idle = [state for state in states if gpu_state.busy(state) is None]
    chosen = os.environ.get(VISIBLE)
    found = f"{len(idle)} of {len(states)}" + (f", {VISIBLE}={chosen}" if chosen is not None else "")
    advice = f"wait, end what holds them, or choose one with {VISIBLE}" if states else "use a machine with a GPU"
    return Check("idle GPUs", bool(idle), found, NEEDED_FOR, advice)


def _writable(name: str, folder: Path) -> Check:
    place = _existing(folder)
    ok = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    found = f"{folder}" if ok else f"{place}: cannot be written to"
    return Check(name, ok, found, NEEDED_FOR, f"give yourself write access to {place}, or name another folder")


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(_existing(folder)).free / 1e9
    remedy = f"free {ROOM_GB} GB there, or write to another disk"
    return Check("disk", free >= ROOM_GB, f"{free:.0f} GB free in {folder}", NEEDED_FOR, remedy)


def _caches() -> list[Check]:
    """The folders that SGLang, Triton and the Hub write to, wherever the environment has moved them."""
    home = Path.home()
    places = {
        "Hub cache": os.environ.get("HF_HOME") or home / ".cache" / "huggingface",
        "Triton cache": os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache",
        "FlashInfer cache": Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
    }
    return [_writable(name, Path(place)) for name, place in places.items()]


def _existing(folder: Path) -> Path:
    """The folder, or the nearest existing folder above it, in which it would be made."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def demand_passed(found: Sequence[Check]) -> None:
    """Refuse to begin if a check failed.

    Raises:
        MissingRequirement: names every failed check and what to do.
    """
    if failed := [f"{check.name}: {check.found}\n  {check.remedy}" for check in found if not check.ok]:
        raise MissingRequirement("\n".join(failed))
