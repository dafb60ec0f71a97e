"""The part of a language model's page that shows its step with upstream's kernels and with ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kda_judge.contract.errors import LedgerError
from kda_judge.evidence import record_log, stats
from kda_tools.llm import step_protocol
from kda_tools.llm.llm_views import step_facts, tokens_per_s
from kda_tools.llm.run_step import hashes
from kda_tools.llm.solution_ops import step_tasks
from kda_tools.llm.step_protocol import LlmStepRecord, PhaseStep
from kda_tools.llm.step_worth import RecordedRows, saving
from kda_tools.publish import report

NOT_MEASURED = "Not measured: no step on a GPU is recorded for this model.\n"
STALE = {"step": "the code or the settings of the run"}
"""What a record's hash is of, where its name does not say it."""
INTRODUCTION = """One step with random weights, once with upstream's kernels and once with our solutions at the same
calls. Both arms are interleaved in each of several processes; brackets hold 95% intervals. A/A is upstream against
itself in the same processes. *By rows* is the sum of what each call saves by our recorded rows, for rows that were
recorded on such a GPU. All else is the same in both arms.

"""


def read(folder: Path) -> list[LlmStepRecord]:
    """Every recorded run.

    Raises:
        LedgerError: a broken line, or one whose intervals do not follow from its samples.
    """
    records = record_log.read(step_protocol.log(folder), LlmStepRecord)
    for record in records:
        for phase in record.phases:
            for name, mode in phase.modes.items():
                if mode.refused is None and (
                    mode.speedup != stats.speedup(mode.upstream, mode.subject)
                    or mode.noise != stats.speedup(mode.upstream, mode.again)
                ):
                    raise LedgerError(
                        f"{step_protocol.log(folder)}: run {record.run_id}: {phase.name}, modes.{name}: its intervals "
                        "are not those of its samples"
                    )
    return records


def chosen(records: Sequence[LlmStepRecord]) -> list[LlmStepRecord]:
    """Of each GPU the newest timed run; a disturbed one never stands in a clean one's place."""
    found: dict[str, LlmStepRecord] = {}
    for record in sorted(records, key=lambda one: (not (one.noisy or one.dirty), one.utc)):
        if record.machine.before is not None:
            found[record.machine.before.name] = record
    return list(found.values())


def section(records: Sequence[LlmStepRecord], folder: Path) -> Iterator[str]:
    """The heading, then a table for each GPU."""
    yield "## The step with our kernels\n\n"
    shown = chosen(records)
    if not shown:
        yield NOT_MEASURED
        return
    yield INTRODUCTION
    for record in shown:
        yield from _run(record, folder)


def _run(record: LlmStepRecord, folder: Path) -> Iterator[str]:
    assert record.machine.before is not None
    gpu, tasks = record.machine.before.name, step_tasks()
    yield f"{gpu}, {record.utc[:10]}, commit `{record.commit[:10]}`, `{record.command}`\n\n"
    calls = [call for phase in record.phases for call in phase.checked.calls]
    now = hashes(tasks, calls, folder)
    if outdated := [STALE.get(part, part) for part, digest in record.hashes.items() if now.get(part) != digest]:
        yield f"- **stale**: {', '.join(outdated)} changed since\n"
    if record.dirty:
        yield "- **from a checkout with changes that no commit holds**\n"
    if record.layers != record.layers_of_model:
        yield f"- **{record.layers} of {record.layers_of_model} layers**\n"
    yield from (f"- **disturbed**: {reason}\n" for reason in record.noisy)
    yield f"- stand-ins, the same in both arms: {', '.join(record.stand_ins)}\n"
    rows = RecordedRows(tasks, gpu, record.kernels)
    yield "\n| phase | mode | upstream, us | ours, us | speedup | A/A | tokens/s | saved, us | by rows, us |\n"
    yield "|---|---|---|---|---|---|---|---|---|\n"
    for phase in record.phases:
        yield from _times(phase, rows)
    yield "\n"
    for phase in record.phases:
        yield from (f"- {phase.name}: {line}\n" for line in _notes(phase, rows))
    yield "\n"


def _times(phase: PhaseStep, rows: RecordedRows) -> Iterator[str]:
    for name, mode in phase.modes.items():
        if mode.speedup is None or mode.noise is None:
            yield f"| {phase.name} | {name} | does not run: {mode.refused} | | | | | | |\n"
            continue
        before, after = (stats.summarise(samples).median for samples in (mode.upstream, mode.subject))
        saved = by_rows = report.NONE
        if name == "graph" and (found := saving(phase, rows)) is not None:
            saved, by_rows = f"[{found.low:.1f}, {found.high:.1f}]", f"{found.by_rows:.1f}"
        rates = " -> ".join(f"{tokens_per_s(phase, us):.0f}" for us in (before, after))
        ratios = f"{report.interval(mode.speedup)} | {report.interval(mode.noise)}"
        yield f"| {phase.name} | {name} | {before:.1f} | {after:.1f} | {ratios} | {rates} | {saved} | {by_rows} |\n"


def _notes(phase: PhaseStep, rows: RecordedRows) -> Iterator[str]:
    yield from step_facts(phase)
    found = saving(phase, rows)
    if found is None:
        return
    if found.unknown:
        names = ", ".join(sorted({call.row or f"{call.op}, a new shape" for call in found.unknown}))
        yield f"without a record on this GPU, and so not in the sum by rows: {names}"
    if not found.agree:
        apart = "more" if found.low > found.by_rows else "less"
        why = _elsewhere(phase)
        yield f"the step saves {apart} than the sum by rows{why}"


def _elsewhere(phase: PhaseStep) -> str:
    """What the profile says of the difference: operations that no task replaces, and what they took."""
    profile = phase.checked.profile
    if profile is None:
        return ""
    same = set(profile.upstream.by_kind) & set(profile.subject.by_kind)
    ours = {call.op for call in phase.checked.calls}
    changes = {
        kind: profile.subject.by_kind[kind] - profile.upstream.by_kind[kind] for kind in same if kind not in ours
    }
    worst = max(changes, key=lambda kind: abs(changes[kind]), default=None)
    total = profile.upstream.total_us - profile.subject.total_us
    text = f"; by the profiles, all kernels together save {total:.1f} us"
    return text if worst is None else f"{text}, and `{worst}` changes by {changes[worst]:+.1f} us"
