"""Keep a command's results when it gets a signal to end, its output's reader or terminal closes, or the disk is full.

`kda list | head -1` ends as other commands in a pipe do.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO, cast

from kda_judge.contract.errors import ExitCode


class Output:
    """Standard output or error; after the first write that fails, all output is thrown away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or throw away."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or throw away."""
        self._attempt(self._stream.flush)

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self.error = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # buffered text goes there too, also when Python ends
            os.close(nowhere)


def _hung_up(*_: object) -> None:
    """Act like Ctrl-C, but only once: a terminal that closes may send SIGHUP twice."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def outliving() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, and go on if output fails; its exit code then replaces the command's own."""
    for number, handler in ((signal.SIGTERM, signal.default_int_handler), (signal.SIGHUP, _hung_up)):
        if signal.getsignal(number) is signal.SIG_DFL:  # the parent, such as nohup, may have set it to be ignored
            signal.signal(number, handler)
    out, err = (Output(stream) if stream else None for stream in (sys.stdout, sys.stderr))  # None: closed by the shell
    streams = [stream for stream in (out, err) if stream is not None]
    try:
        with redirect_stdout(cast("TextIO", out)), redirect_stderr(cast("TextIO", err)):
            yield
    finally:
        for stream in streams:
            stream.flush()
        failed = [stream.error for stream in streams if stream.error is not None]
        if any(isinstance(error, BrokenPipeError) for error in failed):
            sys.exit(ExitCode.UNREAD)
        if failed:
            print(f"kda: the output cannot be written: {failed[0].strerror}", file=sys.stderr)
            sys.exit(ExitCode.REQUIREMENT)
