"""Cache answers about a task's files while pages are made and the files do not change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from kda_judge.contract.tasks import Task

Answer = TypeVar("Answer")
Further = ParamSpec("Further")
_known: ContextVar[dict[tuple[object, ...], tuple[object, ...]] | None] = ContextVar("known", default=None)


@contextmanager
def unchanged_files() -> Iterator[None]:
    """Inside the block, `once_per_task` functions run once per task; the block must not change files they read.

    A block inside another one shares its answers.
    """
    known = _known.get()
    token = _known.set({} if known is None else known)
    try:
        yield
    finally:
        _known.reset(token)


def once_per_task(make: Callable[Concatenate[Task, Further], Answer]) -> Callable[Concatenate[Task, Further], Answer]:
    """Decorator for a function of a task's files, and of further objects; callers must not change its answer.

    Further arguments are the same if they are the same objects, and must not change inside the block.
    """

    @wraps(make)
    def cached(task: Task, /, *args: Further.args, **kwargs: Further.kwargs) -> Answer:
        known = _known.get()
        if known is None:
            return make(task, *args, **kwargs)
        more = (*args, *kwargs.values())
        key = (f"{make.__module__}.{make.__qualname__}", task.path, *map(id, more), *kwargs)
        if key not in known:
            known[key] = (make(task, *args, **kwargs), more)  # `more` stays alive, so that its ids stay its own
        return known[key][0]  # type: ignore[return-value]  # of the same function and arguments

    return cached
