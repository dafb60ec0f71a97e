"""Cache answers about a task's files while pages are made and the files do not change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TypeVar

from kda_judge.contract.tasks import Task

Answer = TypeVar("Answer")
_known: ContextVar[dict[tuple[str, Path], object] | None] = ContextVar("known", default=None)


@contextmanager
def unchanged_files() -> Iterator[None]:
    """Inside the block, `once_per_task` functions run once per task; the block must not change files they read."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def once_per_task(ask: Callable[[Task], Answer]) -> Callable[[Task], Answer]:
    """Decorator for a function that depends on a task's files alone; callers must not change its answer."""

    @wraps(ask)
    def asked(task: Task) -> Answer:
        known = _known.get()
        if known is None:
            return ask(task)
        key = (f"{ask.__module__}.{ask.__qualname__}", task.path)
        if key not in known:
            known[key] = ask(task)
        return known[key]  # type: ignore[return-value]  # of the same function and task

    return asked
