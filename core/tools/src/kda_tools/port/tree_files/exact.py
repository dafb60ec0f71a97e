"""The tier `exact`: a signature is the kernels' after its first call gave the bits of SGLang's own function.

That first call runs both and returns what SGLang's own gave. One call with other bits turns the kernels off for good.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

logger = logging.getLogger(__name__)


class NotTakenError(Exception):
    """The kernels do not take a call; nothing has been written."""


class Own(threading.local):
    """Whether this thread is inside SGLang's own function, for a comparison with it."""

    active = False


own = Own()


def checked(gate: Any, solution: Any, host: str, kernels: Callable[..., Any]) -> Callable[..., Any]:
    """`kernels` (a call of `solution`, or None) behind `gate`, compared with the function of its name in `host`."""
    name, op, signature = solution.__name__, solution.kda_op, inspect.signature(solution)
    written = [*op.mutates, *([op.into] if op.into else [])]

    def call(*args: Any, **kwargs: Any) -> Any:
        sig = (name, *map(_described, args), *((key, _described(value)) for key, value in kwargs.items()))
        if gate.is_verified(sig):
            return kernels(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        given = signature.bind(*args, **kwargs).arguments
        names = [one for one in written if isinstance(given.get(one), torch.Tensor)]
        copies = {one: _copy(given[one]) for one in names}  # what both write, each has of its own
        results: list[Any] = []

        def fused() -> tuple[torch.Tensor, ...]:
            result = kernels(**given | copies)
            if result is None:
                raise NotTakenError
            return (*(_leaves(result) if op.outputs else ()), *copies.values())

        def reference() -> tuple[torch.Tensor, ...]:
            public = getattr(import_module(host), name)
            known = inspect.signature(public).parameters
            own.active = True
            try:
                results.append(public(**{key: value for key, value in given.items() if key in known}))
            finally:
                own.active = False
            return (*(_leaves(results[0]) if op.outputs else ()), *(given[one] for one in names))

        try:
            gate.run(fused, reference, sig=sig, equal=_same, reraise=(NotTakenError,))
        except NotTakenError:
            return None
        if gate.disabled:
            logger.warning("%s: off from now on: %s gave other bits than SGLang's own, or failed", gate.name, sig)
        return True if results[0] is None else results[0]

    return call


def _described(value: Any) -> Any:
    """What of an argument chooses a kernel."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16


def _copy(value: torch.Tensor) -> torch.Tensor:
    """The same values with the same strides, elsewhere."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _leaves(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
