"""Read a Chrome trace of any size, event by event, in little memory.

A trace is one JSON document that may be gigabytes long. It is read in pieces of `PIECE` bytes, plain or gzip. A piece
is cut between two events and decoded by msgspec, which skips every key that is not needed. A candidate for a cut is
`},` followed by `{`. Such text may also be inside a string or a nested list, so the decoder decides: text that begins
at an event and parses as a list of whole values ends with an event.
"""

import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from kda_judge.contract.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE = 4 << 20
"""Bytes read at once: larger ones cost memory and save no time."""
LONGEST = 256 << 20
"""Bytes in which an event has to end: a file without such an end is no trace."""
MOST_TRIES = 100
"""Candidates looked at before more of the file is read."""
GZIP = b"\x1f\x8b"
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(rb"\},\s*(?=\{)")
Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Bytes = Annotated[int, msgspec.Meta(ge=-(2**40), le=2**40)]
Microseconds = Annotated[float, msgspec.Meta(ge=-1e20, le=1e20)]
"""Wide enough for nanoseconds since the epoch, and narrow enough for any sum of them."""


class Arguments(msgspec.Struct, gc=False):
    """The needed part of an event's `args`; lists stay undecoded JSON text."""

    correlation: Number | None = None
    device: Number | None = None
    moved: Bytes | None = msgspec.field(name="bytes", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=msgspec.Raw())


class Event(msgspec.Struct, gc=False):
    """One event; times in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0
    args: Arguments | None = None


class Device(msgspec.Struct):
    """One of `deviceProperties`."""

    id: int = 0
    name: str = ""


class Header(msgspec.Struct):
    """The part of the document outside the events."""

    devices: list[Device] = msgspec.field(name="deviceProperties", default_factory=list)


class TraceFile:
    """A trace on disk. After `batches`, `devices` (index -> name) and `sha256` (of the file as it is) are known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.devices: dict[int, str] = {}
        self._digest = hashlib.sha256()
        self._decoder = msgspec.json.Decoder(list[Event])
        self._complaint = ""
        self._array = False

    @property
    def sha256(self) -> str:
        """The sha256 of the bytes read so far."""
        return self._digest.hexdigest()

    def batches(self) -> Iterator[list[Event]]:
        """The events in file order, some thousands at a time.

        Raises:
            UsageError: no such file, a gzip stream that is cut off or damaged, no JSON, no `traceEvents`, an event
                with a field of a wrong type, or a file that ends inside its events.
        """
        try:
            with self.path.open("rb", buffering=0) as raw:
                file = io.BufferedReader(_Hashing(raw, self._digest), PIECE)
                packed = file.peek(2)[:2] == GZIP
                yield from self._events(gzip.GzipFile(mode="rb", fileobj=file) if packed else file)
        except EOFError:
            raise UsageError(f"{self.path}: the gzip stream ends before its end: the file was cut off") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(f"{self.path}: expected a gzip stream, got a damaged one: {error}") from None
        except OSError as error:
            raise UsageError(f"{self.path}: expected a trace to read, got: {error.strerror or error}") from None

    def _events(self, file: io.BufferedIOBase) -> Iterator[list[Event]]:
        text = self._begin(file)
        while piece := file.read(PIECE):
            text += piece
            events, end = self._whole(text)
            if end:
                text = text[end:]
                yield events
            elif len(text) > LONGEST:
                raise self._unreadable(f"no event ends within {LONGEST} bytes")
        yield self._last(text)

    def _begin(self, file: io.BufferedIOBase) -> bytes:
        """Read up to the first event; returns what was read beyond."""
        text = b""
        while piece := file.read(PIECE):
            text += piece
            if text.lstrip()[:1] == b"[":
                self._array = True
                return text.lstrip()[1:]
            for match in EVENTS.finditer(text):
                if self._around(text[: match.start()].rstrip().removesuffix(b",") + b"}"):
                    return text[match.end() :]
            if len(text) > LONGEST:
                break
        what = "an empty file" if not text else "none in it"
        raise UsageError(f"{self.path}: expected a Chrome trace, JSON with a list traceEvents, got {what}")

    def _whole(self, text: bytes) -> tuple[list[Event], int]:
        """The events that are complete in `text`, and where the next one begins; 0 when no end was found."""
        at = len(text)
        for _ in range(MOST_TRIES):
            if (at := text.rfind(b"},", 0, at)) < 0:
                break
            match = BETWEEN.match(text, at)
            if match and (events := self._decode(text[: at + 1])) is not None:
                return events, match.end()
        return [], 0

    def _last(self, text: bytes) -> list[Event]:
        """The events of `text`, which reaches to the file's end."""
        at = len(text)
        for _ in range(MOST_TRIES):
            if (at := text.rfind(b"]", 0, at)) < 0:
                break
            tail = text[at + 1 :].strip()
            fits = not tail if self._array else tail[:1] in b",}" and self._around(b"{" + tail.removeprefix(b","))
            if fits and (events := self._decode(text[:at])) is not None:
                return events
        raise self._unreadable("it was cut off, or holds what is not JSON")

    def _around(self, text: bytes) -> bool:
        """Whether `text` is the document's part before or after the events; keeps the devices that it names."""
        try:
            header = msgspec.json.decode(text, type=Header)
        except (msgspec.DecodeError, RecursionError):
            return False
        self.devices |= {device.id: device.name for device in header.devices}
        return True

    def _decode(self, text: bytes) -> list[Event] | None:
        try:
            return self._decoder.decode(b"[" + text + b"]")
        except msgspec.ValidationError as error:
            raise UsageError(f"{self.path}: an event is not as the trace format has it: {error}") from None
        except RecursionError:
            raise UsageError(f"{self.path}: an event is not as the trace format has it: nested too deeply") from None
        except msgspec.DecodeError as error:
            self._complaint = f" ({error})"
            return None

    def _unreadable(self, why: str) -> UsageError:
        return UsageError(f"{self.path}: expected a JSON list of events: {why}{self._complaint}")


class _Hashing(io.RawIOBase):
    """A file that is hashed as it is read."""

    def __init__(self, file: io.FileIO, digest: "hashlib._Hash") -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer", /) -> int:
        count = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        return count
