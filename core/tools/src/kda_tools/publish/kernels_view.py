"""Print what the compiler made of each kernel, grouped by kernel and variant, one line per target."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kda_tools.lab.inspect.occupancy import multiprocessor

if TYPE_CHECKING:
    from kda_tools.lab.inspect.aot import CompiledKernel
    from kda_tools.lab.inspect.sass import Widths

SHOWN_ROWS = 3
"""Most rows that are named for a variant."""
NONE = "-"
HEAD = ("target", "threads", "regs", "smem", "blocks", "warps", "limit", "code", "trips", "flight", "loads", "stores")
LEFT = ("target", "limit", "loads", "stores")
"""Columns of text, aligned left; columns of numbers are aligned right."""
NOTE = (
    "smem: shared memory of a block, bytes. blocks, warps: resident on a multiprocessor; limit: what keeps more out. "
    "code: instructions. trips: to memory, one behind the other. flight: KiB of loads under way on a multiprocessor at "
    "most, of what memory at its rate asks for: an estimate. loads, stores: of global memory, count x bytes a thread. "
    "How to read them: docs/profiling.md."
)


def print_kernels(console: Console, kernels: Sequence[CompiledKernel]) -> None:
    """Print what each variant uses and does. Nothing here was run."""
    _say(console, Text("compiled ahead of time, not run", style="bold"))
    if not kernels:
        _say(console, Text("no kernel: these rows take the plain path"))
        return
    _say(console, Text(NOTE, style="dim"))
    for name in dict.fromkeys(kernel.name for kernel in kernels):
        _print_kernel(console, [kernel for kernel in kernels if kernel.name == name])
    spill = sum(bool(_spills(kernel)) for kernel in kernels)
    console.print()
    _say(
        console,
        Text(f"{spill} of {len(kernels)} compilations spill registers" if spill else "no kernel spills registers"),
    )


def _print_kernel(console: Console, kernels: Sequence[CompiledKernel]) -> None:
    variants: dict[str, list[CompiledKernel]] = {}
    for kernel in kernels:
        variants.setdefault(kernel.variant, []).append(kernel)
    alike: dict[tuple[tuple[tuple[str, ...], str, str], ...], list[str]] = {}
    for variant, twins in variants.items():
        alike.setdefault(tuple((_cells(twin), _spills(twin), _others(twin)) for twin in twins), []).append(variant)
    usual, own = differences(list(variants))
    table = [HEAD, *(cells for shown in alike for cells, _, _ in shown)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    console.print()
    count = "1 variant" if len(variants) == 1 else f"{len(variants)} variants; unless said otherwise"
    _say(console, Text.assemble((kernels[0].name, "bold"), f", {count}: {' '.join(usual)}"))
    _say(console, Text(_line(HEAD, widths), style="bold"), 4)
    for shown, group in alike.items():
        ids = [row for variant in group for row in variants[variant][0].rows]
        _say(console, Text(_rows(list(dict.fromkeys(ids))), style="cyan"), 2)
        if parts := " ".join(part for part in own[group[0]] if all(part in own[other] for other in group)):
            _say(console, Text(f"{len(group)} variants alike, with {parts}" if len(group) > 1 else parts), 4)
        for cells, spills, others in shown:
            _say(console, Text(_line(cells, widths)), 4)
            if spills:
                _say(console, Text(spills, style="yellow"), 6)
            if others:
                _say(console, Text(others), 6)


def differences(variants: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The parts as most variants have them, and for each variant the parts in which it differs."""
    named = {variant: dict(map(_named, enumerate(variant.split()))) for variant in variants}
    usual = {}
    for name in next(iter(named.values())):
        values = Counter(parts.get(name, "") for parts in named.values())
        if "" not in values:
            usual[name] = values.most_common(1)[0][0]
    own = {
        variant: [part for name, part in parts.items() if usual.get(name) != part] for variant, parts in named.items()
    }
    return list(usual.values()), own


def _named(numbered: tuple[int, str]) -> tuple[str, str]:
    """The name of a variant's part, and the part: N for `N=3072`, x for `x:float32`, else its position."""
    place, part = numbered
    found = re.match(r"(\w+)[:=]", part)
    return (found[1] if found else str(place)), part


def _say(console: Console, text: Text, indent: int = 0) -> None:
    """Print to a terminal with wrapped lines indented alike, to a file or a pipe as one line."""
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)))
    else:
        console.print(" " * indent + text.plain.rstrip(), soft_wrap=True, markup=False, highlight=False)


def _cells(kernel: CompiledKernel) -> tuple[str, ...]:
    """The cells of a kernel's line, one for each column of HEAD."""
    sm, held = multiprocessor(kernel.target), kernel.occupancy
    resident = (NONE, NONE, NONE)
    if sm is not None and held is not None:
        limit = NONE if held.warps == sm.warps else held.limit.value
        resident = (str(held.blocks), f"{held.warps}/{sm.warps}", limit)
    in_flight = NONE
    if sm is not None and kernel.in_flight is not None:
        in_flight = f"{kernel.in_flight / 1024:.0f}/{sm.bytes_in_flight // 1024}"
    return (
        kernel.target,
        NONE if kernel.threads is None else str(kernel.threads),
        str(kernel.registers),
        str(kernel.shared_bytes),
        *resident,
        str(kernel.code.instructions),
        NONE if kernel.code.trips is None else str(kernel.code.trips),
        in_flight,
        _widths(kernel.code.loads),
        _widths(kernel.code.stores),
    )


def _spills(kernel: CompiledKernel) -> str:
    """The kernel's local memory, which holds what should be in registers, in words; empty if it uses none."""
    if not kernel.spill_bytes and not kernel.code.local:
        return ""
    return f"! {kernel.spill_bytes} bytes a thread in local memory, {kernel.code.local} accesses to it"


def _others(kernel: CompiledKernel) -> str:
    """The kernel's atomics, bulk and asynchronous copies and loops, in words."""
    code = kernel.code
    counts = {"atomics": code.atomics, "bulk copies": code.bulk, "loops, whose code counts once": code.loops}
    found = {what: str(count) for what, count in counts.items() if count}
    if code.copies:
        found["asynchronous copies"] = _widths(code.copies)
    return "; ".join(f"{what}: {count}" for what, count in found.items())


def _widths(widths: Widths) -> str:
    """'4x16 1x2': four accesses of 16 bytes a thread, one of 2."""
    return " ".join(f"{count}x{width}" for width, count in widths) or NONE


def _rows(rows: Sequence[str]) -> str:
    more = len(rows) - SHOWN_ROWS
    return ", ".join([*rows[:SHOWN_ROWS], *([f"+{more}"] if more > 0 else [])])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(HEAD, cells, widths, strict=True)
    return "".join(
        f"{cell:<{width}}  " if head in LEFT else f"{cell:>{width}} " for head, cell, width in pairs
    ).rstrip()
