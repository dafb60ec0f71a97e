"""Calls functions that a task's Python files define."""

import inspect
from types import ModuleType
from typing import Any

from kda_judge.contract.errors import KdaError, UsageError


def call_checked(module: ModuleType, name: str, *arguments: object, error: type[KdaError] = UsageError) -> Any:
    """What the module's function of this name returns; raises `error` if it does not take these arguments."""
    function = getattr(module, name)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as why:
        raise error(f"{module.__file__}: {name}: expected a function of {len(arguments)} arguments: {why}") from None
    return function(*arguments)
