"""Fit calls of a later release to a solution that lacks some of its arguments.

If such an argument has upstream's default value, it changes nothing, so it is dropped. With any other value the
solution cannot answer the call, and upstream's own function does.
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
    """The function whose signature names upstream's arguments: `function` if upstream shows only `*args, **kwargs`."""
    kinds = {parameter.kind for parameter in parameters(upstream).values()}
    anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return function if kinds & anything else upstream


def unknown(function: Callable[..., Any], upstream: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why `function` cannot answer a call that upstream can: it lacks an argument. None if it can."""
    known, theirs = parameters(function), parameters(upstream)
    for name, value in kwargs.items():
        if name not in known and not (name in theirs and value == theirs[name].default):
            return f"it has no argument {name}, which is {value!r} here; upstream's own op stays"
    return None


def fitted(function: Callable[..., Any], upstream: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called without extra arguments at their defaults; calls that it cannot answer go to `upstream`."""
    theirs, known = named(upstream, function), parameters(function)
    if set(parameters(theirs)) <= set(known):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown(function, theirs, kwargs) is not None:
            return upstream(*args, **kwargs)
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call
