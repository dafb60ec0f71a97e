"""What to say of an exception that no command foresaw: a task's file, the machine or kda itself may be at fault."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path
from types import ModuleType

from kda_core.errors import ArmFailed, KdaError, MissingRequirement, UsageError

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "cutlass": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
}
"""Import name -> distribution, of what core leaves to the user to install."""
REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR})
"""What a disk, a path or the owner of a file answers. Others may well be a bug."""


def explained(error: Exception) -> KdaError | None:
    """The error as one the user can act on; None where the fault is none but ours."""
    return _missing_package(error) or _fault_of_a_task(error) or _refused(error)


def _missing_package(error: Exception) -> KdaError | None:
    if not isinstance(error, ModuleNotFoundError) or error.name not in PACKAGES:
        return None
    from kda_core.doctor import REMEDIES

    return MissingRequirement(
        f"{error.name} is not installed for {sys.executable}: {REMEDIES[PACKAGES[error.name]]}, or use the Python that "
        "has it, or let nox bring what is needed, for example with `nox -s bench-qknorm_rope`"
    )


def _refused(error: Exception) -> KdaError | None:
    return MissingRequirement(str(error)) if isinstance(error, OSError) and error.errno in REFUSALS else None


def _fault_of_a_task(error: Exception) -> KdaError | None:
    """For what was raised while a task's file was imported or its function ran: an arm failed, or `bench/` is wrong.

    Names the last line of the task on the way, and below it the calls from the task's first one on.
    """
    if isinstance(error, SyntaxError) and (folder := _task_folder(error.filename)):
        return _of(folder, f"{error.filename}:{error.lineno}", f"{type(error).__name__}: {error.msg}")
    calls = traceback.extract_tb(error.__traceback__)
    on_the_way = [(place, call, folder) for place, call in enumerate(calls) if (folder := _task_folder(call.filename))]
    if on_the_way:
        _, last, folder = on_the_way[-1]
        shown = "".join(traceback.format_list(calls[on_the_way[0][0] :])).rstrip()
        return _of(folder, f"{last.filename}:{last.lineno}", f"{type(error).__name__}: {error}\n{shown}")
    if isinstance(error, ModuleNotFoundError) and (absent := _module_file(error.name or "")):
        return UsageError(f"{absent}: file not found")
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        file = error.obj.__file__ or ""
        if folder := _task_folder(file):
            return _of(folder, file, f"expected {error.name!r} in it, found none")
    return None


def _of(folder: Path, where: str, what: str) -> KdaError:
    inside = Path(where).relative_to(folder).parts[0]
    return (UsageError if inside == "bench" else ArmFailed)(f"{where}: {what}")


def _task_folder(filename: str | None) -> Path | None:
    """The task that a file belongs to: the nearest folder upwards with a contract and rows."""
    for folder in Path(filename or "").parents:
        if (folder / "config.toml").is_file() and (folder / "bench").is_dir():
            return folder
    return None


def _module_file(name: str) -> Path | None:
    """Where a task's module of this name should be; None for a name that is no task's."""
    from kda_core.tasks import find_tasks

    try:
        tasks = find_tasks()
    except KdaError:
        return None
    for task in tasks:
        if name.startswith(f"{task.package}."):
            return task.path.joinpath(*name.removeprefix(f"{task.package}.").split(".")).with_suffix(".py")
    return None
