"""Errors that reach the user, and the exit codes of every command."""

from collections.abc import Callable
from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, the same for every ``kda`` command."""

    OK = 0
    """Every row was verified, or the command did what it was asked."""
    UNFIT_ROWS = 1
    """At least one row is INCORRECT or INVALID, or a published number does not hold."""
    USAGE = 2
    """Bad argument, unknown task or row, or a TOML file that breaks its schema."""
    REQUIREMENT = 3
    """Something this command needs is missing: a GPU, a compiler, the network, a pinned file."""
    LEDGER = 4
    """A ledger holds a line that cannot be read, or was offered one that it must not accept."""
    ARM_FAILED = 5
    """At least one row ended as ERROR or TIMEOUT, or is missing."""
    INTERNAL = 70
    """A bug in the harness itself; the traceback is printed."""
    INTERRUPTED = 130
    """Ctrl-C, or SIGTERM; what was measured is kept and marked partial."""
    UNREAD = 141
    """The output's reader left early, as `head -1` does; the command ran to its end. Shells' code for SIGPIPE."""


class KdaError(Exception):
    """A problem the user can act on: printed as one message, without a traceback."""

    exit_code = ExitCode.USAGE


class UsageError(KdaError):
    """Bad input: the message names the file, key or argument, what was expected and what was given."""


class MissingRequirement(KdaError):
    """The machine lacks something (GPU, compiler, network); the message names the remedy."""

    exit_code = ExitCode.REQUIREMENT


class UpstreamError(KdaError):
    """Upstream source is not what the pin says: wheel, file or version."""

    exit_code = ExitCode.REQUIREMENT


class LedgerError(KdaError):
    """A ledger line that is broken, of an unknown schema version, or of a run that does not belong there."""

    exit_code = ExitCode.LEDGER


class ArmFailed(KdaError):
    """An arm raised, crashed, or launched no kernel that a tool could inspect."""

    exit_code = ExitCode.ARM_FAILED


def expecting(op: str = "") -> Callable[[bool, str, str, object], None]:
    """Return `expect(fits, argument, expected, got)`, which raises a ValueError for a wrong call or row of `op`."""
    where = f"{op}: " if op else ""

    def expect(fits: bool, argument: str, expected: str, got: object) -> None:
        if not fits:
            raise ValueError(f"{where}{argument}: expected {expected}, got {got}")

    return expect
