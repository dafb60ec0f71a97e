"""Calls that a later release makes with arguments which a solution does not have.

Such an argument at upstream's default means what it meant before it was added: it is dropped. With any other value the
call is one that the solution does not know, and upstream's own function answers it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


@functools.cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The function's parameters by name."""
    return inspect.signature(function).parameters


def named(upstream: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The one of both whose signature names upstream's arguments: a decorator may have left `*args, **kwargs`."""
    kinds = {parameter.kind for parameter in parameters(upstream).values()}
    anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return function if kinds & anything else upstream


def unknown(function: Callable[..., Any], upstream: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """Which argument keeps `function` from answering a call that upstream answers; None if nothing does."""
    known, theirs = parameters(function), parameters(upstream)
    for name, value in kwargs.items():
        if name not in known and not (name in theirs and value == theirs[name].default):
            return f"it has no argument {name}, which is {value!r} here; upstream's own op stays"
    return None


def fitted(function: Callable[..., Any], upstream: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without arguments at upstream's defaults, or upstream for calls that it does not know."""
    theirs, known = named(upstream, function), parameters(function)
    if set(parameters(theirs)) <= set(known):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown(function, theirs, kwargs) is not None:
            return upstream(*args, **kwargs)
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call
