"""How a capture names its operations, for modules that must not import torch."""

from kda_tools.traces.trace_places import NUMBER

PREFIX = "kda|"
"""Of the profiler's ranges that name an operation."""
STAND_IN = "stand-in"
"""In the name of what no server runs like this."""
STAND_INS = (f"attention ({STAND_IN})", f"{STAND_IN} multinomial")
"""All of them."""
SAME_IN_BOTH = (*STAND_INS, "gemm", "moe_gemm", "embedding")
"""Operations that no task of ours replaces."""


def is_stand_in(name: str) -> bool:
    """Whether the operation of this name stands in for a server's."""
    return STAND_IN in name


def spoken(name: str) -> str:
    """An operation's name as the trace reader gives it back: numbers in a range's name count something."""
    return NUMBER.sub("#", name)


def operation(module: str) -> str:
    """The operation whose range is innermost in a path of modules and ranges; "" where that is no capture's."""
    leaf = module.rpartition("/")[2]
    return leaf.removeprefix(PREFIX) if leaf.startswith(PREFIX) else ""
