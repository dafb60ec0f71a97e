"""A solution without its plain PyTorch path, for `replay_launches`: a call that its kernels do not take gives None.

The recorder runs a signature once, inside a dispatch mode, and repeats its launches from then on. A signature that
launches nothing and returns None is remembered, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NotTakenError(Exception):
    """The kernels do not take a call; nothing has been written."""


def taken(public: Any) -> Callable[..., Any]:
    """A function of `public`'s arguments: its result (in place the tensor written), or None for a call that is left."""
    op = public.kda_op

    def leave(_call: Any) -> None:
        raise NotTakenError

    object.__setattr__(op, "plain", leave)  # the dataclass is frozen, for everybody but this

    def run(*args: Any, **kwargs: Any) -> Any:
        call = public.kda_call(*args, **kwargs)
        try:
            op._check(call)
        except ValueError:
            return None  # SGLang's own function has its own words for it
        try:
            return _result(op, call)
        except NotTakenError:
            return None

    return run


def whole(public: Any) -> Callable[..., Any]:
    """The same with the plain path: what the recorder finds there it leaves alone."""
    return lambda *args, **kwargs: _result(public.kda_op, public.kda_call(*args, **kwargs))


def _result(op: Any, call: Any) -> Any:
    # Not `op.call`: inside a dispatch mode that calls the registered op, which no recorder sees through.
    result = op.run(call)
    return getattr(call, op.into or op.mutates[0]) if result is None else result
