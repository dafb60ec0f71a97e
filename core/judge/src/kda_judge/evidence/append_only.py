"""Files that only ever grow, by whole lines: how they are read, locked and appended to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kda_judge.contract.errors import LedgerError, MissingRequirement


def content(path: Path) -> bytes:
    """The file's bytes, read while no writer is at work; none when it does not exist.

    Raises:
        LedgerError: something is there that is no file, such as a link to nowhere.
    """
    if not os.path.lexists(path):
        return b""
    _demand_file(path)
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        return all_of(file)
    finally:
        os.close(file)


def all_of(file: int) -> bytes:
    """The bytes of an open file."""
    with os.fdopen(os.dup(file), "rb") as stream:
        stream.seek(0)
        return stream.read()


def demand_appendable(path: Path) -> None:
    """Refuse a file that cannot be appended to, before a long run and not after it.

    Raises:
        LedgerError: it is no file.
        MissingRequirement: it, or the folder that it is to be made in, may not be written to.
    """
    there = os.path.lexists(path)
    if there:
        _demand_file(path)
    place = path if there else next(folder for folder in path.absolute().parents if folder.exists())
    if not os.access(place, os.W_OK):
        raise MissingRequirement(f"{path}: expected a file to append to, got one that may not be written: {place}")


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """The file opened for appending, exclusively locked; makes it and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    created = not path.exists()
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
        if created:
            _sync_folder(path.parent)
    finally:
        os.close(file)


def write(file: int, lines: bytes) -> None:
    """Append all of `lines` and wait until they are on disk, or append none of them: a partial write is cut off.

    A last line that some crash left unfinished is not continued: the new ones start on a line of their own, so that
    they are kept and a reader names the broken one.
    """
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        lines = b"\n" + lines
    written = 0
    try:
        while written < len(lines):
            written += os.write(file, lines[written:])
        os.fsync(file)
    except BaseException as error:
        if isinstance(error, OSError) or written < len(lines):  # Ctrl-C after the last byte loses no line
            os.ftruncate(file, size)
        raise


def _demand_file(path: Path) -> None:
    if not path.is_file():
        raise LedgerError(f"{path}: expected a file, got {'a link to none' if path.is_symlink() else 'something else'}")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
