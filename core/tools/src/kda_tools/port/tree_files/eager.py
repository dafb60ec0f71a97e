"""A solution without its plain PyTorch path: a call that its kernels do not take is SGLang's own again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .op import Op


class NotTakenError(Exception):
    """The kernels do not take a call; nothing has been written."""


Op.refusal = NotTakenError  # of all ops that such a function may end in


def kernels_only(public: Any) -> Callable[..., Any]:
    """A function of `public`'s arguments: its result (True in place), or None for a call that its kernels leave."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = public(*args, **kwargs)
        except NotTakenError:
            return None
        except ValueError:
            if _has_meaning(args, kwargs):
                raise
            return None  # SGLang's own function has its own words for it
        return True if result is None else result

    def _has_meaning(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            public.kda_op.check_call(public.kda_call(*args, **kwargs))
        except ValueError:
            return False
        return True

    return run
