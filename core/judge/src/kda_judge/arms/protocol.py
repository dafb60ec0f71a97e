"""What the judge and an arm's worker say to each other: one JSON object a line over a socket pair.

The judge trusts nothing that comes back. Replies are parsed as data (never unpickled), must answer
the command that is open, and must fit the reply's model. Tensors never travel: both sides map one
**arena** that the judge allocates, and commands name places in it.
"""

import json
import select
import socket
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from kda_judge.contract.strict_models import Strict

HOT, COLD, CHANGED = "hot", "cold", "changed"
"""Inputs of a CUDA graph: in the caches, in no cache, or replaced by other values before one of its calls."""
MAX_LINE = 8 << 20
"""Longest accepted line in bytes; a worker that floods the channel is cut off here."""


class Place(Strict):
    """A strided view in the arena: `offset` in bytes, strides in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class ArmSpec(Strict):
    """What a worker is started with."""

    name: str
    folder: str
    """The task's folder, or that of a package which a request brings as an arm."""
    module: str
    """The arm's module in that folder, for example `solution`."""
    device: str
    """`cuda:0` or `cpu`."""
    upstream_root: str | None = None
    upstream_version: str | None = None
    upstream_module: str = "sglang"
    """The package that is imported from `upstream_root`."""
    compiled: bool = False
    limit: bool = False
    """The worker measures the machine's limits instead of an arm."""
    replayed: bool = False
    """The callables run under upstream's own launcher of Triton functions."""


class Traffic(Strict):
    """Bytes that an op must move through the GPU's memory."""

    read: int
    written: int
    in_place: bool = False
    """Whether most of what is written lies where it was read."""

    @property
    def moved(self) -> int:
        """Bytes read and bytes written together."""
        return self.read + self.written


class RowSpec(Strict):
    """One row as the worker sees it: where its inputs are and how to call the op."""

    op: str
    sets: tuple[dict[str, Place | None], ...]
    """Input sets: name -> place, in positional order; None for an input that is passed as None."""
    hot: int
    """How many sets timed calls rotate through; calls with cold inputs rotate through all."""
    flush: int = 0
    """Bytes, more than the caches hold, to read before every replay with cold inputs; 0 where there are sets enough."""
    canary: dict[str, Place | None] | None
    """In-place ops: a further input set. One call of a timed loop, which the judge draws, works on it."""
    slices: dict[str, Place | None] | None
    """Inputs that are aligned to one element and no further; None for ops that take no slices."""
    scalars: dict[str, bool | int | float | str]
    inplace: tuple[str, ...]
    outputs: tuple[Place, ...]
    """Where the worker copies returned tensors, as the op's contract says they must look."""
    returns_none: bool
    by_name: bool = False
    """Tensors are passed by keyword."""
    traffic: Traffic


Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Ready(Strict):
    """Reply to `hello`, `attach`, `row`, `warm`, `pin` and `close`."""


class Chosen(Strict):
    """Reply of the limits' worker to `choose`."""

    streams: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """Which of the streams won the trials."""


class Output(Strict):
    """What the worker saw of one returned tensor."""

    type: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    in_arena: bool
    """Its storage lies inside the arena: it aliases an input."""
    shared: bool = False
    """Its storage is another output's, of this call or of an earlier one that is still held."""


class Called(Strict):
    """Reply to `verify` and `collect`: what the last call returned."""

    returned: str
    """`None`, `tensor`, `tuple of N` or the type's name."""
    outputs: tuple[Output, ...] = ()
    copied: bool = False
    """Every output fitted and was copied to its place."""
    overrun: bool = False
    """`verify`: a guard around what the call allocated was written."""


class Timed(Strict):
    """Reply to `wall`, `latency` and `replay`: totals of one sample.

    Nothing else happens in these commands, so that the judge can check the totals by its own clock.
    """

    calls: Annotated[int, Field(gt=0)]
    total_us: Time
    """By the worker's host clock, around the timed region."""
    events_us: Time | None = None
    """Between two CUDA events around the same calls."""


class Counted(Strict):
    """Reply to `profile`: kernels the profiler saw."""

    calls: Annotated[int, Field(gt=0)]
    kernels: Annotated[int, Field(ge=0)]


class Captured(Strict):
    """Reply to `capture`: whether the calls could be captured into a CUDA graph."""

    ok: bool
    note: str = ""


class Failure(Strict):
    """Reply instead of any other: the arm raised."""

    error: str
    traceback: str


Reply = TypeVar("Reply", bound=Strict)


class ChannelError(Exception):
    """The other side broke the protocol: garbage, a wrong id, an oversized line."""


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelTimeout(Exception):
    """No complete line came in time."""


class ArmFailure(Exception):
    """The arm raised; carries the worker's `Failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


class Channel:
    """Line-framed JSON over one end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._sequence = 0

    def send(self, message: dict[str, Any]) -> None:
        """Send one object; ChannelClosed when nobody listens."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float | None) -> dict[str, Any]:
        """Next object; blocks for ever with None."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE:
                raise ChannelError(f"a line longer than {MAX_LINE} bytes")
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], wait)[0]:
                raise ChannelTimeout(f"no answer within {timeout_s:g} s")
            try:
                part = self._socket.recv(1 << 16)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not part:
                raise ChannelClosed("end of stream")
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ChannelError(f"not JSON: {line[:80]!r}") from None
        if not isinstance(message, dict):
            raise ChannelError(f"expected an object, got {line[:80]!r}")
        return message

    def post(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting."""
        self._sequence += 1
        self.send({"id": self._sequence, "command": command, **arguments})

    def ask(
        self,
        command: str,
        reply: type[Reply],
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
        posted: bool = False,
        **arguments: Any,
    ) -> tuple[Reply, float]:
        """Send a command, unless it was `posted`, and wait for its answer.

        Returns the answer and the seconds that passed by our own clock. `meanwhile` is called before the waiting.
        """
        start = time.perf_counter()
        if not posted:
            self.post(command, **arguments)
        if meanwhile is not None:
            meanwhile()
        answer = self.receive(timeout_s)
        elapsed = time.perf_counter() - start
        if answer.pop("id", None) != self._sequence:
            raise ChannelError(f"an answer to no open command ({command} is open)")
        model: type[Strict] = Failure if "error" in answer else reply
        try:
            parsed = model.model_validate_json(json.dumps(answer))
        except ValidationError as error:
            raise ChannelError(f"answer to {command} has the wrong form: {error.errors()[0]['msg']}") from None
        if isinstance(parsed, Failure):
            raise ArmFailure(parsed)
        assert isinstance(parsed, reply)
        if self.pending():
            raise ChannelError(f"more than one answer to {command}")
        return parsed, elapsed

    def pending(self) -> bool:
        """Whether bytes wait that no command asked for."""
        return bool(self._buffer) or bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
