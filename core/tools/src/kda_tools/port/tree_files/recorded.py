"""A solution for `replay_launches`: what the recorder sees of a call are allocations and launches.

The recorder runs a signature once, inside a dispatch mode, and repeats its launches from then on. A signature that
launches nothing and returns None is remembered, too. Inside a dispatch mode `op.call` would call the registered op,
which no recorder sees through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .launch import MISS


def kernels_only(public: Any) -> Callable[..., Any]:
    """A function of `public`'s arguments: its result (in place the tensor written), or None for a call that is left."""
    op = public.kda_op

    def run(*args: Any, **kwargs: Any) -> Any:
        call = public.kda_call(*args, **kwargs)
        try:
            op.check_call(call)
        except ValueError:
            return None  # SGLang's own function has its own words for it
        result = op.attempt(call)
        return None if result is MISS else _returned(op, call, result)

    return run


def whole(public: Any) -> Callable[..., Any]:
    """A function of `public`'s arguments, with the plain path: what the recorder finds there it leaves alone."""
    op = public.kda_op

    def run(*args: Any, **kwargs: Any) -> Any:
        call = public.kda_call(*args, **kwargs)
        return _returned(op, call, op.run(call))

    return run


def _returned(op: Any, call: Any, result: Any) -> Any:
    return getattr(call, op.into or op.mutates[0]) if result is None else result
