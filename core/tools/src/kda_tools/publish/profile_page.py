"""Make `docs/profile.md`: each row's latest profile, its arms side by side. Pure functions of `docs/profile.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from kda_judge.contract.errors import LedgerError
from kda_judge.contract.tasks import Task
from kda_judge.evidence.record_log import read
from kda_tools.lab.profile.profile_record import Kernel, ProfileRecord, log
from kda_tools.publish.report import HEADER, SUBJECT
from kda_tools.publish.staleness import described, is_outdated
from kda_tools.publish.task_claims import contradicted

BUSY_PCT = 60.0
"""Per cent of a unit's peak. A kernel with a unit at or above this share is bound by it; otherwise by waiting."""
SHOWN_STALLS = 3
NONE = "-"
ISSUING = "selected"
"""The one state of a warp that is not a stall: it issues an instruction."""
LIMITERS = {"shared_mem": "shared memory", "blocks": "blocks per multiprocessor"}
LONGEST_NAME = 60
"""Most characters shown of a kernel's name; `profile.jsonl` has the whole name."""
STALLS = {
    "barrier": "at a barrier of the block",
    "branch_resolving": "for a branch target",
    "dispatch_stall": "for the dispatcher",
    "drain": "for stores to leave before the end",
    "gmma": "for the matrix unit",
    "imc_miss": "for a constant",
    "lg_throttle": "for room in the queue of global memory",
    "long_scoreboard": "for data of global or local memory",
    "math_pipe_throttle": "for a busy arithmetic pipe",
    "membar": "at a memory fence",
    "mio_throttle": "for room in the queue of shared memory",
    "misc": "for other reasons",
    "no_instruction": "for the next instruction to be fetched",
    "not_selected": "while another warp issues",
    "short_scoreboard": "for data of shared memory or special functions",
    "sleeping": "asleep",
    "tex_throttle": "for room in the queue of textures",
    "wait": "a fixed time after an instruction",
}
"""Stall reasons in words; any other reason is shown by ncu's name."""

INTRODUCTION = f"""Nsight Compute on one call of each arm, after warm-up calls on the same inputs, each arm alone in its
process. The numbers explain results; they are not results: ncu runs every kernel several times by itself, with caches
as its passes left them and clocks as they were.

- Durations and bytes are sums over the kernels of the call; percentages are means weighted by duration.
- Throughputs are shares of the peak of the busiest unit of their kind.
- **bound** follows from a rule: the larger of memory and compute throughput from {BUSY_PCT:.0f}% on (memory with its
  busiest level, of whose units ncu counts more where it stands alone); below that `size` where the longest kernel has
  less than one wave of blocks, else `latency`.
- Stalls are shares of the time that warps are resident, of the kernels together.
"""


HELD = {
    "memory": "memory throughput",
    "compute": "arithmetic",
    "size": "too few blocks to fill the GPU",
    "latency": "waiting, with no unit busy",
}
"""What each word of the rule means."""
CONCLUSIONS = """What slows the kernels of each profiled row, as Nsight Compute (ncu) sees it on one call of each
arm. ncu repeats a kernel, which changes what is cached, so its durations are no benchmark results. All numbers are in
[profile.jsonl](profile.jsonl) and, as tables, on this page of the site (`kda site`).
"""


def digest_md(task: Task, whole: bool = False) -> str | None:
    """The text of `docs/profile.md`, the conclusions from the profiles; None for a task without a profile.

    With `whole` it is the site's page, which also has every number.

    Raises:
        LedgerError: `docs/profile.jsonl` holds a line that is no profile.
    """
    latest = _latest(task)
    if not latest:
        return None
    first = f"{HEADER}\n# Profiles of {task.folder}\n\n{_conclusions(task, latest)}"
    if not whole:
        return first
    sections = [section_md(record, is_outdated(task, record.provenance)) for record in latest]
    return "\n".join([first, f"## How to read the tables\n\n{INTRODUCTION}", *sections])


def _latest(task: Task) -> list[ProfileRecord]:
    """The latest profile of every row, in the order of the task's rows."""
    latest = {record.row: record for record in read(log(task), ProfileRecord)}
    for record in latest.values():
        claimed = {"op": record.op, "limit.bytes_moved": record.bytes_moved}
        if wrong := contradicted(task, record.provenance, record.row, claimed):
            raise LedgerError(f"{log(task)}: run {record.run_id}: {wrong[0]}")
    order = {row.id: place for place, row in enumerate(task.workloads)}
    return sorted(latest.values(), key=lambda record: order.get(record.row, len(order)))


def _conclusions(task: Task, latest: Sequence[ProfileRecord]) -> str:
    """How often each kind of bound limits the solution, then a line for each row."""
    kinds: dict[str, int] = {}
    for record in latest:
        for arm, kernels in record.arms.items():
            if arm == SUBJECT:
                kind = bound(kernels).partition(",")[0].partition(":")[0]
                kinds[kind] = kinds.get(kind, 0) + 1
    several = len(latest) > 1
    counted = ", ".join(f"{HELD.get(kind, kind)}{f' on {count}' * several}" for kind, count in kinds.items())
    arms = list(dict.fromkeys(arm for record in latest for arm in record.arms))
    head = ["row", *(f"what limits {arm}" for arm in arms), *(f"{arm} us" for arm in arms), "profiled"]
    lines = []
    for record in latest:
        found = [record.arms.get(arm, ()) for arm in arms]
        held = [bound(one) if one else NONE for one in found]
        times = [_round(_sum(one, "duration_us"), 2) if one else NONE for one in found]
        since = ", the solution has changed since" if is_outdated(task, record.provenance) else ""
        lines.append([record.row, *held, *times, f"{record.utc[:10]}{since}"])
    rows = f"{len(latest)} profiled rows" if several else "the profiled row"
    conclusion = f"**What limits the solution on {rows}: {counted or 'nothing that ncu names'}.**"
    return f"{conclusion}\n\n{CONCLUSIONS}\n{_table(head, lines)}"


def section_md(record: ProfileRecord, outdated: bool = False) -> str:
    """One profiled row: where it ran, its arms side by side, then every kernel."""
    facts = [
        f"{record.gpu.name}, driver {record.gpu.driver}, ncu {record.ncu}, {record.utc[:10]}",
        described(record.provenance, record.command),
        f"the op must move {_megabytes(record.bytes_moved)} MB",
    ]
    if outdated:
        facts.append("**the solution has changed since**")
    summary = [[label, *(cell(kernels, record) for kernels in record.arms.values())] for label, cell in SUMMARY]
    launches = [
        [arm, *(cell(kernel) for _, cell in PER_KERNEL)] for arm, kernels in record.arms.items() for kernel in kernels
    ]
    return (
        f"## {record.row}\n\n"
        + "".join(f"- {fact}\n" for fact in facts)
        + f"\n{_table(['', *record.arms], summary)}"
        + f"\n{_table(['arm', *(label for label, _ in PER_KERNEL)], launches)}"
    )


def bound(kernels: Sequence[Kernel]) -> str:
    """What limits these kernels, in words; the rule is in `INTRODUCTION`."""
    memory, compute = mean(kernels, "memory_pct"), mean(kernels, "compute_pct")
    if memory is None or compute is None:
        return NONE
    if max(memory, compute) >= BUSY_PCT:
        if compute > memory:
            return f"compute, {compute:.0f}% of peak"
        levels = {"DRAM": "dram_pct", "L2": "l2_pct", "L1": "l1_pct"}
        shares = [(share, level) for level, field in levels.items() if (share := mean(kernels, field)) is not None]
        busiest = "".join(f" ({level} {share:.0f}%)" for share, level in sorted(shares)[-1:])
        return f"memory, {memory:.0f}% of peak{busiest}"
    longest = max(kernels, key=lambda kernel: kernel.duration_us)
    if longest.waves is not None and longest.waves < 1:
        return f"size: {longest.waves:.2f} waves of blocks leave the GPU partly idle"
    reasons = top_stalls(kernels)
    waiting = f"; warps wait {STALLS.get(reasons[0][0], reasons[0][0])}" if reasons else ""
    return f"latency: no unit reaches {BUSY_PCT:.0f}% of its peak{waiting}"


def mean(kernels: Sequence[Kernel], field: str) -> float | None:
    """The field's mean over kernels, weighted by duration; None if no kernel has it."""
    known = [(kernel.duration_us, getattr(kernel, field)) for kernel in kernels if getattr(kernel, field) is not None]
    weight = sum(duration for duration, _ in known)
    return sum(duration * value for duration, value in known) / weight if weight else None


def top_stalls(kernels: Sequence[Kernel]) -> list[tuple[str, float]]:
    """The largest stall reasons and their shares of the warps' time, weighted by duration."""
    shares: dict[str, float] = {}
    weight = 0.0
    for kernel in kernels:
        cycles = sum(kernel.stalls.values())
        if cycles:
            weight += kernel.duration_us
            for reason, value in kernel.stalls.items():
                shares[reason] = shares.get(reason, 0.0) + kernel.duration_us * value / cycles
    found = [(reason, share / weight) for reason, share in shares.items() if reason != ISSUING and share > 0]
    return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:SHOWN_STALLS]


def _sum(kernels: Sequence[Kernel], field: str) -> float | None:
    values = [getattr(kernel, field) for kernel in kernels]
    return None if None in values else sum(values)


def _limited_by(kernel: Kernel) -> str:
    """The limiters that let a multiprocessor hold the fewest blocks."""
    least = min(kernel.blocks_per_sm.values(), default=None)
    found = [LIMITERS.get(name, name) for name, blocks in kernel.blocks_per_sm.items() if blocks == least]
    return f"{', '.join(found)} ({least} blocks)" if found else NONE


def _range(kernels: Sequence[Kernel], field: str) -> str:
    values = sorted({getattr(kernel, field) for kernel in kernels if getattr(kernel, field) is not None})
    return " to ".join(str(value) for value in dict.fromkeys((values[0], values[-1]))) if values else NONE


def _moved(kernels: Sequence[Kernel], record: ProfileRecord) -> str:
    read_bytes, written = _sum(kernels, "dram_read_bytes"), _sum(kernels, "dram_written_bytes")
    if read_bytes is None or written is None:
        return NONE
    share = (read_bytes + written) / record.bytes_moved
    return f"{_megabytes(read_bytes)} + {_megabytes(written)} MB, {share:.2f} of what must move"


def _percent(field: str) -> Callable[[Sequence[Kernel], ProfileRecord], str]:
    return lambda kernels, _: _round(mean(kernels, field), 1, "%")


def _stalls(kernels: Sequence[Kernel], _: ProfileRecord) -> str:
    return ", ".join(f"{reason} {share:.0%}" for reason, share in top_stalls(kernels)) or NONE


def _limits(kernels: Sequence[Kernel], _: ProfileRecord) -> str:
    return "; ".join(dict.fromkeys(_limited_by(kernel) for kernel in kernels))


SUMMARY: tuple[tuple[str, Callable[[Sequence[Kernel], ProfileRecord], str]], ...] = (
    ("**bound**", lambda kernels, _: bound(kernels)),
    ("kernels", lambda kernels, _: str(len(kernels))),
    ("duration", lambda kernels, _: _round(_sum(kernels, "duration_us"), 2, " us")),
    ("memory throughput", _percent("memory_pct")),
    ("... DRAM", _percent("dram_pct")),
    ("... L2", _percent("l2_pct")),
    ("... L1", _percent("l1_pct")),
    ("compute throughput", _percent("compute_pct")),
    ("DRAM read + written", _moved),
    ("L2 hit rate", _percent("l2_hit_pct")),
    ("occupancy", _percent("occupancy_pct")),
    ("... at most", _percent("theoretical_occupancy_pct")),
    ("... limited by", _limits),
    ("registers per thread", lambda kernels, _: _range(kernels, "registers")),
    ("shared bytes per block", lambda kernels, _: _range(kernels, "shared_bytes")),
    ("local memory (spills)", lambda kernels, _: _round(_sum(kernels, "local_bytes"), 0, " bytes")),
    ("top stalls", _stalls),
)
"""Lines of a row's summary table: label, and the function that makes a cell."""


def _round(value: float | None, digits: int, unit: str = "") -> str:
    # A weighted mean of equal numbers may differ from them in the last bit; it must still round as they do.
    return NONE if value is None else f"{round(value, 9):.{digits}f}{unit}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3f}"


def _size(triple: tuple[int, int, int]) -> str:
    return "x".join(str(number) for number in triple)


def short(name: str) -> str:
    """A kernel's name without return type, unnamed namespaces, template arguments and parameters; cut if it is long."""
    bare = re.sub(r"^(void )?((<unnamed>|\(anonymous namespace\))::)*", "", name)
    found = re.split(r"[<(]", bare, maxsplit=1)[0].strip() or name
    return found if len(found) <= LONGEST_NAME else f"{found[: LONGEST_NAME - 3]}..."


PER_KERNEL: tuple[tuple[str, Callable[[Kernel], str]], ...] = (
    ("kernel", lambda kernel: f"`{short(kernel.name)}`"),
    ("grid", lambda kernel: _size(kernel.grid)),
    ("block", lambda kernel: _size(kernel.block)),
    ("waves", lambda kernel: _round(kernel.waves, 2)),
    ("us", lambda kernel: _round(kernel.duration_us, 2)),
    ("memory", lambda kernel: _round(kernel.memory_pct, 1, "%")),
    ("compute", lambda kernel: _round(kernel.compute_pct, 1, "%")),
    ("occupancy", lambda kernel: _round(kernel.occupancy_pct, 1, "%")),
    ("registers", lambda kernel: NONE if kernel.registers is None else str(kernel.registers)),
    ("shared bytes", lambda kernel: NONE if kernel.shared_bytes is None else str(kernel.shared_bytes)),
    ("local bytes", lambda kernel: _round(kernel.local_bytes, 0)),
    ("bound", lambda kernel: bound([kernel])),
)
"""Columns of the table of kernels: label, and the function that makes a cell."""


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, padded so that it also reads on a terminal."""
    rows = [list(header), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    rule = ["-" * width for width in widths]
    return "".join(f"| {' | '.join(row)} |\n" for row in (padded[0], rule, *padded[1:]))
