"""Make `docs/grid.md`: how much of the grid agrees with the oracle, by GPU. A pure function of `docs/grid.jsonl`."""

from __future__ import annotations

from itertools import groupby

from kda_judge.contract.tasks import Task
from kda_tools.lab.grid.grid_record import GridRecord, runs
from kda_tools.lab.grid.join_runs import Coverage, Failure, join, state_of
from kda_tools.publish.report import HEADER, line, pin_name, table_md
from kda_tools.publish.staleness import changed, commit_md

SHOWN = 100
"""Most rows that a list on the page names; all of them are in `docs/grid.jsonl`."""
INTRODUCTION = """Every frozen row and every row of `bench/grid.py`, at full size: one draw of each input family by the
solution and by its first opponent, each call compared in full with the oracle. Runs add up where files, pins, compilers
and the kind of GPU are the same. A row agrees when no run of that state found a wrong result and the latest check of it
ended well. An opponent that is outside the tolerance or refuses fails rows of production only. `kda validate {op}
--record --rest` checks the rows that are not checked yet.
"""
ELSEWHERE = "Every run: [grid.jsonl](grid.jsonl), and as a table on this page of the site (`kda site`).\n"


def digest_md(task: Task, whole: bool = False) -> str | None:
    """The text of `docs/grid.md`, what agrees and what does not; None for a task without a run.

    With `whole` it is the site's page, which also has a table of every run.

    Raises:
        LedgerError: `docs/grid.jsonl` holds a line that is no grid run.
    """
    records = runs(task)
    if not records:
        return None
    since = {record.run_id: changed(task, record.provenance) for record in records}
    parts = [f"{HEADER}\n# Regression grid of {task.folder}\n"]
    states = sorted(join(records), key=lambda one: one.state.gpu)  # in the order of their latest runs for each GPU
    for gpu, several in groupby(states, lambda one: one.state.gpu):
        newest_first = list(several)[::-1]
        shown = next((one for one in newest_first if not since[one.records[-1].run_id]), newest_first[0])
        parts.append(f"## {gpu}\n\n{headline(shown)}{_since(since[shown.records[-1].run_id])}.\n")
        parts += [part for part in (_failures(shown.failures), _opponents(shown), _worst(shown)) if part]
    parts.append(f"## What was checked\n\n{INTRODUCTION.format(op=task.op)}")
    return "\n".join([*parts, _runs(records, since) if whole else ELSEWHERE])


def headline(coverage: Coverage) -> str:
    """How much of the grid agrees, in one sentence without a full stop at its end."""
    total, failed, not_compared = coverage.state.total, coverage.failed, coverage.not_compared
    parts = [f"{len(coverage.checked) - failed - not_compared} of {total} rows agree with the oracle"]
    if failed:
        parts.append(f"{failed} {'does' if failed == 1 else 'do'} not")
    if not_compared:
        verb = "is" if not_compared == 1 else "are"
        parts.append(f"{not_compared} {verb} not compared, since an opponent failed there")
    if missing := total - len(coverage.checked):
        parts.append(f"{missing} {'is' if missing == 1 else 'are'} not checked yet")
    commits = dict.fromkeys(commit_md(record.provenance) for record in coverage.records)
    days = dict.fromkeys((coverage.records[0].utc[:10], coverage.records[-1].utc[:10]))
    return (
        f"**{', '.join(parts)}** ({coverage.calls} calls compared in full) on {coverage.state.gpu}, "
        f"in {_count(len(coverage.records), 'run')} of {', '.join(commits)}, {' to '.join(days)}"
    )


def _since(parts: list[str]) -> str:
    return f"; **changed since: {', '.join(parts)}**" if parts else ""


def _failures(failures: tuple[Failure, ...]) -> str:
    if not failures:
        return ""
    lines = []
    for failure in failures[:SHOWN]:
        row = failure.row
        later = ("agreed" if failure.stands else "agreed, which counts") if failure.agreed_later else "-"
        reason = f"`{row.reason.replace('`', chr(39))}`"
        lines.append((f"`{row.id}`", row.verdict.value, reason, failure.record.run_id, later))
    return table_md(("row that failed", "verdict", "reason", "run", "later"), lines) + _more(len(failures))


def _opponents(coverage: Coverage) -> str:
    """A paragraph for each opponent that is outside the tolerance or refuses on some row."""
    pins = coverage.records[-1].provenance.pins
    found = []
    for arm, ids in coverage.opponents.items():
        name = " ".join(filter(None, (arm, f"({pin})" if (pin := pin_name(pins.get(arm))) else "")))
        named = ", ".join(f"`{one}`" for one in ids[:SHOWN])
        found.append(
            f"<details><summary>On {_count(len(ids), 'row')} {name} itself is outside the tolerance or refuses."
            f"</summary>\n\n{named}\n{_more(len(ids))}\n</details>\n"
        )
    return "\n".join(found)


def _worst(coverage: Coverage) -> str:
    if not coverage.worst:
        return ""
    lines = [line("output dtype", "largest share of the tolerance", "where", "largest relative L2 error")]
    lines.append("|---|---:|---|---:|\n")
    for dtype, worst in coverage.worst.items():
        lines.append(line(dtype, f"{worst.used:.3f}", f"`{worst.output}` of `{worst.row}`", f"{worst.rel_l2:.2e}"))
    return "".join(lines)


def _runs(records: list[GridRecord], since: dict[str, list[str]]) -> str:
    """Every run, the newest first. Runs of the same state have the same state number."""
    states = list(dict.fromkeys(state_of(record) for record in records))
    head = ("run", "state", "rows checked", "failed", "calls", "s", "where", "of what", "changed since")
    lines = [f"## Runs\n\nThose of one state add up.\n\n{line(*head)}", "|---|---|---:|---:|---:|---:|---|---|---|\n"]
    for record in reversed(records):
        versions = record.provenance.versions
        known = (f"{name} {versions[name]}" for name in ("driver", "torch", "triton") if name in versions)
        left = record.asked - record.rows
        why = f", {left} left out: {'interrupted' if record.interrupted else '`--limit-s`'}" if left else ""
        lines.append(
            line(
                record.run_id,
                str(states.index(state_of(record)) + 1),
                f"{record.rows} of {record.total}{why}",
                str(len(record.failed)),
                str(record.calls),
                f"{record.seconds:.0f}",
                ", ".join([record.gpu, *known]),
                f"{commit_md(record.provenance)}, `{record.command}`",
                ", ".join(since[record.run_id]) or "-",
            )
        )
    return "".join(lines)


def _more(number: int) -> str:
    return f"\n{number - SHOWN} more are in `grid.jsonl`.\n" if number > SHOWN else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
