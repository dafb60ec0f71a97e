"""Explain an exception that no command handles: a task's file, the machine or kda itself may be at fault."""

from __future__ import annotations

import errno
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from kda_judge.contract.errors import ArmFailed, KdaError, MissingRequirement, UsageError

PACKAGES = {"torch": "torch", "triton": "triton", "cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
"""Import name -> distribution, of packages that core leaves to the user to install."""
REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Error numbers of a full or broken disk, or of missing permission."""
NO_FILES = frozenset({errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG})
"""Error numbers of a path that cannot be a file. Other numbers, even ENOENT, may well be a bug in kda."""


def explained(error: Exception) -> KdaError | None:
    """The error as one that the user can act on; None if the fault is in kda."""
    return (
        _missing_package(error) or _bad_file(error) or _fault_of_a_task(error) or _unreadable(error) or _refused(error)
    )


def _missing_package(error: Exception) -> KdaError | None:
    if not isinstance(error, ModuleNotFoundError) or error.name not in PACKAGES:
        return None
    from kda_tools.project.doctor import REMEDIES

    return MissingRequirement(
        f"{error.name} is not installed for {sys.executable}: {REMEDIES[PACKAGES[error.name]]}, or use the Python that "
        "has it, or let nox bring what is needed, for example with `nox -s bench-qknorm_rope`"
    )


def _bad_file(error: Exception) -> KdaError | None:
    from kda_runtime.cuda_cpp import BuildError
    from kda_runtime.tuned_table import TableError

    if isinstance(error, BuildError):
        return ArmFailed(str(error))
    return UsageError(str(error)) if isinstance(error, TableError) else None


def _unreadable(error: Exception) -> KdaError | None:
    """For a file that is not text or is nested too deeply for Python: these errors do not name the file."""
    if (file := _file_at_hand(error)) is None:
        return None
    if isinstance(error, UnicodeError):
        return UsageError(f"{file}: expected text in UTF-8: {error}")
    if isinstance(error, RecursionError) and not _inside_kda(error):
        return UsageError(f"{file}: nested too deeply: {error}")
    return None


def _refused(error: BaseException) -> KdaError | None:
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # `Path.resolve` on a link to itself, before Python 3.13
    if not isinstance(error, OSError):
        return None
    file = error.filename if isinstance(error.filename, str) else _file_at_hand(error)
    where = f"{file}: " if file else ""
    if error.errno in NO_FILES:
        return UsageError(f"{where}expected a file or folder, or a place for one, got: {error.strerror}")
    return MissingRequirement(f"{where}{error.strerror}") if error.errno in REFUSALS else None


def _file_at_hand(error: BaseException) -> Path | None:
    """The first path among the variables of the innermost call that has one: the file read or written there."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if isinstance(value, Path):
                return value
            if isinstance(value, SourceFileLoader):
                return Path(value.path)
    return None


def _inside_kda(error: Exception) -> bool:
    """Whether kda's own code raised the error, not a library that it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("kda_")


def _fault_of_a_task(error: Exception) -> KdaError | None:
    """For an error raised while a task's file was imported or its function ran: an arm failed, or `bench/` is wrong.

    The message names the task's last line in the traceback, then lists the calls from the task's first one on.
    """
    if isinstance(error, SyntaxError):
        file = error.filename or str(_file_at_hand(error) or "")  # unset if the file has zero bytes or is not UTF-8
        if folder := _task_folder(file):
            return _of(folder, f"{file}:{error.lineno or 1}", f"{type(error).__name__}: {error.msg}")
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
    """The folder of a file's task: the nearest one upwards with a config.toml and a bench folder."""
    for folder in Path(filename or "").parents:
        if (folder / "config.toml").is_file() and (folder / "bench").is_dir():
            return folder
    return None


def _module_file(name: str) -> Path | None:
    """The path where a task's module of this name should be; None if the name is not of a task."""
    package, _, module = name.partition(".")
    for place in getattr(sys.modules.get(package), "__path__", ()):
        if (Path(place) / "config.toml").is_file():
            return Path(place).joinpath(*module.split(".")).with_suffix(".py")
    return None
