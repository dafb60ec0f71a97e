"""The names of a capture's operations, in a file of their own for modules that must not import torch."""

from kda_tools.traces.trace_places import NUMBER

PREFIX = "kda|"
"""Prefix of the profiler's ranges that name an operation."""
STAND_IN = "stand-in"
"""Part of the name of every operation that no server runs in this form."""
STAND_INS = (f"attention ({STAND_IN})", f"{STAND_IN} multinomial")
"""Names of all stand-ins."""
SAME_IN_BOTH = (*STAND_INS, "gemm", "moe_gemm", "embedding")
"""Operations that no task of ours replaces."""


def is_stand_in(name: str) -> bool:
    """Whether the operation of this name stands in for a server's."""
    return STAND_IN in name


def trace_name(name: str) -> str:
    """An operation's name as the trace reader gives it, with `#` for numbers, as these count something."""
    return NUMBER.sub("#", name)


def operation(module: str) -> str:
    """The operation of the innermost range in a path of modules and ranges; "" if that range names no operation."""
    leaf = module.rpartition("/")[2]
    return leaf.removeprefix(PREFIX) if leaf.startswith(PREFIX) else ""
