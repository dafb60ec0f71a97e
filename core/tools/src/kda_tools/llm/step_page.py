"""The part of a language model's page that shows its step with upstream's kernels and with ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kda_judge.contract.errors import LedgerError
from kda_judge.evidence import record_log, stats
from kda_tools import checkout_folder
from kda_tools.llm import step_protocol
from kda_tools.llm.known_llms import load_llms
from kda_tools.llm.llm_views import fallback_lines, tokens_per_s
from kda_tools.llm.run_step import hashes
from kda_tools.llm.served_names import SAME_IN_BOTH
from kda_tools.llm.solution_ops import step_tasks
from kda_tools.llm.step_protocol import LlmStepRecord, PhaseStep
from kda_tools.llm.step_worth import OPERATIONS, RecordedRows, Saving, saving
from kda_tools.publish import report
from kda_tools.publish.staleness import CHANGES, LOST, is_lost

HEADING = "The step with our kernels"
NOT_MEASURED = "Not measured: no step on a GPU is recorded for this model.\n"
STALE = {"step": "the code or the settings of the run"}
"""Name of a hash in a record -> words for what it covers, if the name does not say that."""
MOST_NAMES = 8
"""Most names of rows in one line."""
INTRODUCTION = """One step with random weights, once with upstream's kernels and once with our solutions at the
same calls. Both arms are interleaved in each of several processes; brackets hold 95% intervals. A/A is upstream against
itself in the same processes. *By rows* is the sum of what every call saves by our recorded rows.

"""
HOW_TO_READ = """How to read these tables:

- GPU times by operation come from profiles of single steps, launched one kernel after the other. In a CUDA graph a
  kernel may begin while the one before it ends, so a step can save more than the profiles say. Such a kernel's own time
  holds what it waits for. So a kernel of either arm may look many times slower than it is, and all kernels together may
  take longer than the step.
- With random weights a single rounding can send a token to other experts. So compare how far our probabilities are from
  upstream's with how far those of PyTorch's own norms, activations and rope are.
"""


def read(folder: Path) -> list[LlmStepRecord]:
    """Every recorded run.

    Raises:
        LedgerError: a broken line, or one whose intervals do not follow from its samples.
    """
    log = step_protocol.log(folder)
    records = record_log.read(log, LlmStepRecord)
    for record in records:
        for phase in record.phases:
            for name, mode in phase.modes.items():
                if wrong := mode.wrong():
                    raise LedgerError(f"{log}: run {record.run_id}: {phase.name}, modes.{name}: {wrong}")
    return records


def is_unclean(record: LlmStepRecord, folder: Path) -> bool:
    """Whether a run was disturbed, or made from files that nobody has: shown only if there is no clean one."""
    return bool(record.noisy) or is_lost(record.dirty, outdated(record, folder))


def chosen(records: Sequence[LlmStepRecord], folder: Path) -> list[LlmStepRecord]:
    """For each GPU the newest timed run; a disturbed one only if there is no clean one."""
    found: dict[str, LlmStepRecord] = {}
    for record in sorted(records, key=lambda one: (not is_unclean(one, folder), one.utc)):
        if record.machine.before is not None:
            found[record.machine.before.name] = record
    return list(found.values())


def outdated(record: LlmStepRecord, folder: Path) -> list[str]:
    """Names of the hashes of a record that are different now."""
    model = load_llms(folder / checkout_folder.FILE).models.get(record.model)
    now = hashes(step_tasks(), [call for phase in record.phases for call in phase.checked.calls], model)
    return [part for part, digest in record.hashes.items() if now.get(part) != digest]


def section(records: Sequence[LlmStepRecord], folder: Path) -> Iterator[str]:
    """The heading, then a table for each GPU."""
    yield f"## {HEADING}\n\n"
    shown = chosen(records, folder)
    if not shown:
        yield NOT_MEASURED
        return
    yield INTRODUCTION
    for record in shown:
        yield from _run(record, folder)
    yield HOW_TO_READ


def _run(record: LlmStepRecord, folder: Path) -> Iterator[str]:
    assert record.machine.before is not None
    gpu, tasks = record.machine.before.name, step_tasks()
    yield f"{gpu}, {record.utc[:10]}, commit `{record.commit[:10]}`{CHANGES * record.dirty}, `{record.command}`\n"
    parts = outdated(record, folder)
    flags = [f"**stale**: {', '.join(STALE.get(part, part) for part in parts)} changed since"] * bool(parts)
    flags += [LOST] * is_lost(record.dirty, parts)
    flags += [f"**{record.layers} of {record.layers_of_model} layers**"] * (record.layers != record.layers_of_model)
    flags += [f"**disturbed**: {reason}" for reason in record.noisy]
    yield "\n" * bool(flags) + "".join(f"- {flag}\n" for flag in flags)
    rows = RecordedRows(tasks, gpu, record.kernels)
    yield "\n| phase | mode | upstream, us | ours, us | speedup | A/A | tokens/s | saved, us | by rows, us |\n"
    yield "|---|---|---|---|---|---|---|---|---|\n"
    for phase in record.phases:
        yield from _times(phase, rows)
    yield "\n"
    yield f"- stand-ins, the same in both arms: {', '.join(record.stand_ins)}\n"
    unknown = [call for phase in record.phases if (found := saving(phase, rows)) for call in found.unknown]
    if unknown:
        names = dict.fromkeys(call.row or f"a new shape of {call.op}" for call in unknown)
        listed = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} rows and shapes"
        yield f"- not in the sums by rows, since no run on such a GPU has them: {listed}\n"
    for phase in record.phases:
        yield from (f"- {phase.name}: {line}\n" for line in _notes(phase, rows))
    yield from _operations(record)
    yield from _numerics(record)
    yield "\n"


def _times(phase: PhaseStep, rows: RecordedRows) -> Iterator[str]:
    for name, mode in phase.modes.items():
        if mode.speedup is None or mode.noise is None:
            yield f"| {phase.name} | {name} | does not run: {mode.refused} | | | | | | |\n"
            continue
        before, after = (stats.summarise(samples).median for samples in (mode.upstream, mode.subject))
        saved = by_rows = report.NONE
        if name == "graph" and (found := saving(phase, rows)) is not None:
            saved = f"[{found.low:.1f}, {found.high:.1f}]"
            if len(found.unknown) < len(phase.checked.calls):
                by_rows = f"{found.by_rows:.1f}{' of some calls' if found.unknown else ''}"
        rates = " -> ".join(f"{tokens_per_s(phase, us):.0f}" for us in (before, after))
        ratios = f"{report.interval(mode.speedup)} | {report.interval(mode.noise)}"
        yield f"| {phase.name} | {name} | {before:.1f} | {after:.1f} | {ratios} | {rates} | {saved} | {by_rows} |\n"


def _notes(phase: PhaseStep, rows: RecordedRows) -> Iterator[str]:
    """Notes on a phase: left out, fallbacks, or a saving that differs from the sum by rows."""
    if phase.left_out is not None:
        yield f"left out: {phase.left_out}"
    yield from fallback_lines(phase)
    found = saving(phase, rows)
    if found is not None and found.agrees is False:
        apart = "more" if found.low > found.by_rows else "less"
        yield f"the step saves {apart} than the sum by rows{_elsewhere(phase, found)}"


def _elsewhere(phase: PhaseStep, found: Saving) -> str:
    """Text from the profiles: what all kernels save, and which operation that no task replaces changes most.

    Between them stands the op that differs most from its rows, more or less as the step does.
    """
    profile = phase.checked.profile
    if profile is None:
        return ""
    before, after = profile.upstream.by_kind, profile.subject.by_kind
    changes = {kind: after[kind] - before[kind] for kind in SAME_IN_BOTH if kind in before and kind in after}
    text = f"; by the profiles, all kernels together save {profile.upstream.total_us - profile.subject.total_us:.1f} us"
    saved = {
        op: sum(before.get(kind, 0.0) - after.get(kind, 0.0) for kind in OPERATIONS.get(op, (op,)))
        for op in found.by_op
    }
    sign = 1 if found.low > found.by_rows else -1
    far = max(saved, key=lambda op: sign * (saved[op] - found.by_op[op]), default=None)
    text += "" if far is None else f", `{far}` {saved[far]:.1f} us where its rows say {found.by_op[far]:.1f} us"
    worst = max(changes, key=lambda kind: abs(changes[kind]), default=None)
    return text if worst is None else f"{text}, and `{worst}` changes by {changes[worst]:+.1f} us"


def _operations(record: LlmStepRecord) -> Iterator[str]:
    """GPU time by operation, a column for each phase."""
    profiles = {phase.name: phase.checked.profile for phase in record.phases if phase.checked.profile}
    if not profiles:
        return
    yield f"\n| GPU time, us: upstream -> ours | {' | '.join(profiles)} |\n|---|{'---|' * len(profiles)}\n"
    kinds = dict.fromkeys(
        kind for profile in profiles.values() for kind in (*profile.upstream.by_kind, *profile.subject.by_kind)
    )
    for kind in sorted(kinds):
        pairs = ((one.upstream.by_kind.get(kind), one.subject.by_kind.get(kind)) for one in profiles.values())
        cells = (" -> ".join(report.NONE if us is None else f"{us:.1f}" for us in pair) for pair in pairs)
        yield f"| {kind} | {' | '.join(cells)} |\n"
    totals = (f"{one.upstream.total_us:.1f} -> {one.subject.total_us:.1f}" for one in profiles.values())
    yield f"| all kernels | {' | '.join(totals)} |\n"


def _numerics(record: LlmStepRecord) -> Iterator[str]:
    """How far the probabilities are from upstream's."""
    shown = [phase for phase in record.phases if phase.checked.difference is not None]
    if not shown:
        return
    columns = (
        "probabilities to upstream's",
        "relative error: ours, PyTorch's",
        "same likeliest token: ours, PyTorch's",
    )
    yield f"\n| {' | '.join(columns)} |\n"
    yield "|---|---|---|\n"
    for phase in shown:
        found = phase.checked
        errors = (report.NONE if one is None else f"{one:.2e}" for one in (found.difference, found.plain_difference))
        same = (report.NONE if one is None else f"{one:.0%}" for one in (found.same_token, found.plain_same_token))
        yield f"| {phase.name} | {', '.join(errors)} | {', '.join(same)} |\n"
