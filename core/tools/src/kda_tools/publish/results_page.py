"""Make a task's `docs/results.md`: one screen for each GPU, and below it folded details for a careful reader."""

from collections.abc import Iterable, Iterator, Sequence

from kda_judge.contract.config import Target
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import (
    PORTABLE_ARM,
    REPLAYED_ARM,
    Basis,
    Distance,
    Metric,
    RowResult,
    RunRecord,
    Verdict,
)
from kda_tools.publish.other_opponents import other_opponents_line
from kda_tools.publish.plots import ATTAINED, FOLDER, HISTORY, SPEEDUP, SUMMARY, Plot, file_name
from kda_tools.publish.report import (
    COMMAND,
    HEADER,
    LEAST_SHARE,
    NONE,
    PORTABLE_LOSS,
    UPSTREAM,
    WHOSE,
    WORDS,
    arm_name,
    by_age,
    goals,
    interval,
    median,
    microseconds,
    misses,
    portable_losses,
    published,
    ratio,
    share_words,
    shown_ids,
    slower_rows,
    speedup,
    stale,
    step_gain,
    table_md,
)
from kda_tools.publish.rows_data import CSV_NAME, JSON_NAME
from kda_tools.publish.run_facts import facts, state
from kda_tools.publish.tables import bound_groups, details_block, geometric_means_md, target_words

NAMED = 3
"""Most rows named in a line; the folded table has all."""
FAR = 128
"""Ulps: the number of values of bfloat16 between a power of two and the next. Larger distances are not stated."""
UNMEASURED = "Compiled ({capability}). The ledger holds no run on this GPU that can be published."


def results_md(task: Task, records: Sequence[RunRecord]) -> str:
    """The whole text of `docs/results.md`."""
    latest = published(task, records)
    parts = [f"{HEADER}\n# Results of {task.folder}\n\n{task.config.task.title}\n"]
    for target, goal in goals(task, latest).items():
        if target in latest:
            parts.append(_measured(task, target, goal, latest[target], records))
        else:
            parts.append(
                f"## {target}\n\n{UNMEASURED.format(capability=goal.capability)} On such a machine, from a clean "
                f"checkout, `kda bench {task.op} --record` adds one and `{COMMAND}` makes this page from it.\n"
            )
    parts.append(_history(task, records, latest))
    return "\n".join(parts)


def _measured(task: Task, target: str, goal: Target, record: RunRecord, records: Sequence[RunRecord]) -> str:
    gpu = record.machine.before
    assert gpu is not None
    assert record.headline is not None
    return (
        f"## {target}\n\n{_picture(SUMMARY, target)}\n"
        f"{gpu.name}, {record.utc[:10]}, geometric means over {record.headline.rows} production rows with 95% "
        f"intervals. {WHOSE}\n\n{geometric_means_md(record)}\n"
        + "".join(f"- **{name}**: {words}\n" for name, words in summary_lines(task, record, goal, records))
        + f"\nEvery row: [{CSV_NAME}]({CSV_NAME}), [{JSON_NAME}]({JSON_NAME}), and with every sample this page of the "
        f"site (`kda site`).\n"
        + _exceptions(record, goal)
        + details_block("Rows as pictures", f"{_picture(SPEEDUP, target)}\n{_picture(ATTAINED, target)}")
        + details_block("Provenance", "".join(f"- {name}: {fact}\n" for name, fact in facts(record).items()))
    )


def summary_lines(task: Task, record: RunRecord, goal: Target, records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """What a reader needs besides the means: name -> one line each. `records` are all runs of the task."""
    rows = len(record.rows)
    faster = sum(row.verdict is Verdict.FASTER for row in record.rows)
    found = [
        *(("In use", words) for words in _in_use(task, record)),
        ("Limit", _limit(record)),
        ("Numerics", numerics(record, task.config.task.numerics)),
        ("Models", ", ".join(models_of(task, record)) or "no row names one"),
        *(("Other opponents", words) for words in other_opponents_line(task, record, records)),
    ]
    clock, opponent = WORDS[record.settings.decides], arm_name(record, record.settings.against[0])
    parts = [f"{faster} of {rows} rows are FASTER than {opponent} by {clock}"]
    by_verdict, by_device = slower_rows(record)
    slower = {f"slower by {clock}": by_verdict, "slower on the device": by_device}
    if record.settings.decides is Basis.DEVICE:  # the same clock, by its interval or by its median
        slower = {"slower on the device": [*by_verdict, *by_device]}
    parts += [f"{words}: {_names(pairs)}" for words, pairs in slower.items() if pairs]
    if words := target_words(record, goal):
        parts.append(words)
    if slow := portable_losses(record):
        parts.append(
            f"by wall the portable form is more than {1 - PORTABLE_LOSS:.0%} slower than the newest release on "
            f"{len(slow)} row{'s'[: len(slow) != 1]}: there, keep SGLang's own function in eager code without "
            "kda-runtime"
        )
    if stale(task, record):
        parts.append("**stale**: the code has changed since; `kda validate` says which part")
    return [*found, ("Exceptions", "; ".join(parts))]


def _in_use(task: Task, record: RunRecord) -> Iterator[str]:
    """The gain weighted by each row's calls in a step of its model; nothing if no row has such a count."""
    calls = {row.id: row.calls_a_step for row in task.workloads if row.calls_a_step is not None}
    gains = {arm: step_gain(record, calls, arm) for arm in record.settings.against}
    if known := [f"{interval(gain)} over {arm_name(record, arm)}" for arm, gain in gains.items() if gain]:
        counted = sum(row.id in calls for row in record.rows)
        yield (
            f"on the device {', '.join(known)}, every row weighted by its calls in a step of its model "
            f"({counted} of {len(record.rows)} rows have them)"
        )


def models_of(task: Task, record: RunRecord) -> list[str]:
    """The models whose traffic the measured production rows come from."""
    measured = {row.id for row in record.rows if row.production}
    return list(dict.fromkeys(model for row in task.workloads if row.id in measured for model in row.models))


def numerics(record: RunRecord, contract: str) -> str:
    """What the solution promises of its numerics, and how close its outputs were to those of each other arm.

    A largest distance above `FAR` is left out. In bfloat16 it means a factor of two or another sign, which the
    tolerance allows only near 0. In float32 it reaches millions near 0, where one value may be subnormal and the other
    0. Between integers, such as token ids, it is no rounding. The tolerance says whether such outputs are right.
    """
    parts = [f"*{contract}*, every output within the tolerance of the float64 oracle"]
    for name in dict.fromkeys(arm for row in record.rows for arm in row.arms):
        found = [one for row in record.rows if name in row.arms for one in row.arms[name].distance]
        if found and name not in (PORTABLE_ARM, REPLAYED_ARM):
            parts.append(f"beside {arm_name(record, name)} {_beside(found)}")
    return "; ".join(parts)


def _beside(found: Sequence[Distance]) -> str:
    """How close the outputs of all rows are to one arm's, in words."""
    mean = sum(one.equal for one in found) / len(found)
    least, near, most = min(o.equal for o in found), min(o.near for o in found), max(o.ulps for o in found)
    if least == 1:
        return "all elements have equal bits"
    words = f"{share_words(mean)} of the elements have equal bits ({share_words(least)} in the worst row), "
    if near == 1:
        return f"{words}all are within 1 ulp"
    some = near >= LEAST_SHARE
    words += (
        f"{'at least' if some else 'in the worst row'} {share_words(near)} are within 1 ulp{' in every row' * some}"
    )
    return words + (f", the furthest is {most} ulp away" if most <= FAR else "")


def _limit(record: RunRecord) -> str:
    attained = interval(record.headline.attained if record.headline else None)
    parts = [f"{attained} of what the machine's memory allows (limit / device time)"]
    for group in bound_groups(record):
        rows = f"{group.rows} row{'s'[: group.rows != 1]}"
        parts.append(f"{rows} bound by the {group.name}, {group.over} times its floor")
    return "; ".join(parts)


def _exceptions(record: RunRecord, goal: Target) -> str:
    """The rows that miss the target, are not FASTER, or are slower than an opponent, if only in the portable form.

    The table shows the verdict beside the speedup that decided it: not every run was decided on the device.
    """
    by_verdict, by_device = slower_rows(record)
    losses = portable_losses(record)
    slow = {*losses, *(row for row, _ in (*by_verdict, *by_device))}
    missed = set(misses(record, goal)) if goal.stated else None
    shown = [row for row in record.rows if row.id in (missed or set()) | slow or row.verdict is not Verdict.FASTER]
    if not shown:
        return ""
    arms = (record.settings.subject, *record.settings.against)
    decided = f"speedup over {record.settings.against[0]}, {WORDS[record.settings.decides]}"
    head = ["row", "verdict", decided, "target", *(f"device us, {arm}" for arm in arms), "limit us", "attained"]
    head += ["portable wall, newest release"] * bool(losses)
    lines = []
    for row in shown:
        portable = [interval(losses[row.id]) if row.id in losses else NONE] * bool(losses)
        lines.append([*_exception_cells(row, record, missed), *portable])
    return details_block(f"Rows to look at: {len(shown)}", table_md(head, lines))


def _exception_cells(row: RowResult, record: RunRecord, missed: set[str] | None) -> list[str]:
    settings = record.settings
    decided = interval(speedup(row, settings.decides, settings.against[0]))
    target = NONE if missed is None else "missed" if row.id in missed else "met"
    times = [microseconds(median(row, arm, Metric.DEVICE)) for arm in (settings.subject, *settings.against)]
    limit = microseconds(row.limit.device_us if row.limit else None)
    return [row.id, row.verdict.value, decided, target, *times, limit, ratio(row.attained)]


def _names(pairs: Iterable[tuple[str, str]]) -> str:
    """The first rows, each with the opponents that are faster, and how many more rows there are."""
    rows: dict[str, dict[str, None]] = {}
    for row, arm in pairs:
        rows.setdefault(row, {})[arm] = None
    named = [f"{row} ({', '.join(arms)})" for row, arms in rows.items()]
    return ", ".join(named[:NAMED]) + (f" and {len(named) - NAMED} more" if len(named) > NAMED else "")


def _picture(kind: Plot, target: str) -> str:
    return f"![{kind.says}]({FOLDER}/{file_name(kind, target)})\n"


def _history(task: Task, records: Sequence[RunRecord], latest: dict[str, RunRecord]) -> str:
    if not records:
        return "## Runs\n\nThe ledger is empty.\n"
    means = [(basis, arm) for basis in (Basis.DEVICE, Basis.WALL) for arm in UPSTREAM]
    head = ["run", "GPU", "commit", "rows", *(f"{WORDS[basis]} vs {arm}" for basis, arm in means), "attained", "state"]
    shown = shown_ids(latest)
    lines = [
        (
            f"`{record.run_id}`",
            record.machine.before.name if record.machine.before else NONE,
            f"`{record.provenance.commit[:10]}`",
            str(len(record.rows)),
            *(interval(speedup(record.headline, basis, arm)) for basis, arm in means),
            interval(record.headline.attained if record.headline else None),
            state(task, record, shown),
        )
        for record in sorted(records, key=by_age, reverse=True)
    ]
    pictures = "".join(f"\n{_picture(HISTORY, target)}" for target in latest)
    return details_block(f"Runs: {len(records)}", table_md(head, lines) + pictures)
