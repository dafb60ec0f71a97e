"""What `kda model` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from kda_tools.models.calls import Call
from kda_tools.models.known_models import KnownModels
from kda_tools.models.protocol import Answer
from kda_tools.models.step_record import BOUND, Curve, Mode, StepRecord
from kda_tools.publish.run_view import gpu_seen
from kda_tools.terminal import console, say

UNTIMED = "No GPU: tiny token counts, and nothing was timed."


def print_models(known_models: KnownModels) -> None:
    """One line for each model, and where its figures come from."""
    table = Table(box=None, pad_edge=False)
    for column in ("model", "layers", "tokens", "size", "releases", "source"):
        table.add_column(column, justify="right" if column in ("layers", "tokens") else "left")
    for name, model in known_models.models.items():
        size = f"{model.sizes.width}x{model.sizes.height}" + (
            f"x{model.sizes.frames}" if model.sizes.frames > 1 else ""
        )
        layers = str(model.layers) if model.layers else "-"
        table.add_row(name, layers, str(model.tokens), size, ", ".join(known_models.releases_of(name)), model.source)
    console().print(table)


def print_calls(name: str, requests: Sequence[Answer]) -> None:
    """The calls of a step of a model, for each of its requests."""
    for number, answer in enumerate(requests, start=1):
        lacking = "" if answer.as_on_gpu else "; without the ops that it calls for tensors on a GPU alone"
        say(f"{name}, request {number} of {len(requests)}{lacking}")
        console().print(_calls(answer.calls))


def _calls(calls: Iterable[Call]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("task", "op", "calls", "inputs", "row"):
        table.add_column(column, justify="right" if column == "calls" else "left", overflow="fold")
    for call in calls:
        inputs = ", ".join(f"{name} {shape}" for name, shape in call.inputs.items())
        table.add_row(call.task, call.op, str(call.count), inputs, row_of(call))
    return table


def row_of(call: Call) -> str:
    """The row that has the call's inputs, with a note if it is no production row."""
    return f"{call.row}{'' if call.production else ' (no production row)'}" if call.row else "a new shape"


def print_step(record: StepRecord) -> None:
    """A run: what ran, the calls and their rows, numerics, times."""
    out = console()
    say(heading(record))
    out.print(_calls(record.calls))
    for line in [*facts(record), *timings(record)]:
        out.print(Text(line))


def heading(record: StepRecord) -> str:
    """The model, its release, layers and sizes, and the device."""
    layers = f"{record.layers} of {record.layers_of_model} layers, " if record.layers_of_model else ""
    where = record.machine.before.name if record.machine.before else "CPU"
    sizes = record.sizes
    return (
        f"{record.model}, sglang {record.release}, {layers}{record.parameters / 1e9:.2f} G parameters, "
        f"{sizes.width}x{sizes.height}x{sizes.frames}, {sizes.text} text tokens, {where}"
    )


def facts(record: StepRecord) -> list[str]:
    """Calls without a production row, fallbacks, and the numerics, one line each."""
    rows: Counter[str] = Counter()
    for call in record.calls:
        rows["production" if call.production else "another" if call.row else "new"] += call.count
    lines = [f"calls of the tasks' ops: {rows.total()}, {rows['production']} of them with a production row's shapes"]
    if rows["another"]:
        lines[0] += f", {rows['another']} with those of a frozen row outside production"
    if not record.calls:
        lines.append("no call of a task's op was reached" + (": these calls need a GPU" if record.tiny else ""))
    lines += [f"fallback: {one.task} {one.op}, {one.count} calls: {one.reason}" for one in record.fallbacks]
    lines += [f"one step, {pair}: relative error {value:.2e}" for pair, value in record.difference.items()]
    if (drift := record.drift) is not None:
        last = {
            "solution to upstream": drift.solution_upstream,
            "upstream to eager": drift.upstream_eager,
            "solution to eager": drift.solution_eager,
            "one rounding of each output": drift.rounding,
        }
        distances = ", ".join(f"{name} {_error(curve.relative[-1])}" for name, curve in last.items())
        signals = ", ".join(f"{name} {_signal(curve)}" for name, curve in last.items())
        after = f"after {drift.steps} step{'s'[: drift.steps != 1]}"
        lines += [f"{after}: {distances}", f"{after}, PSNR: {signals}"]
        ratio = "-" if drift.ratio is None else f"{drift.ratio:.2f}"
        verdict = "within" if drift.within else "BEYOND"
        if drift.within and drift.upstream_eager.relative[-1] == 0 != drift.solution_eager.relative[-1]:
            verdict = "upstream is bit-exact to eager, this arm is not"
        lines.append(f"bound: {ratio} of at most {BOUND}: {verdict}")
        lines.append("random weights: this says how rounding spreads, not how pictures look")
    return lines


def timings(record: StepRecord) -> list[str]:
    """The steps' times; without a GPU the one line that says there are none."""
    if not record.modes:
        return [UNTIMED]
    from kda_tools.models.fastest_modes import fastest

    lines = [f"{name}: {timing(mode)}" for name, mode in record.modes.items()]
    if len(record.modes) > 1 and (best := fastest(record, [], [])):
        lines.append(f"each arm in its fastest mode: {best}")
    return lines + on_gpu(record)


def on_gpu(record: StepRecord) -> list[str]:
    """Lines: the GPU time of a step by kind, longest first; peak memory; the GPU during the run; what disturbed it."""
    lines = [f"GPU time of {kind}: {old / 1e3:.3f} -> {new / 1e3:.3f} ms" for kind, old, new in by_kind(record)]
    return lines + run_notes(record)


def by_kind(record: StepRecord) -> list[tuple[str, float, float]]:
    """Kind of kernel, its GPU time of a step with upstream's ops and the arm's, in us: all, then the longest first."""
    if (profile := record.profile) is None:
        return []
    before, after = profile.upstream, profile.subject
    times = [
        (kind, before.by_kind.get(kind, 0.0), after.by_kind.get(kind, 0.0))
        for kind in {*before.by_kind, *after.by_kind}
    ]
    times.sort(key=lambda time: (-time[1], -time[2], time[0]))  # several kinds may be the subject's alone
    return [("all kernels", before.total_us, after.total_us), *times]


def run_notes(record: StepRecord) -> list[str]:
    """Lines: peak memory, the GPU during the run, what disturbed it."""
    lines = [f"{arm}: peak memory {size / 2**30:.1f} GiB" for arm, size in record.peak_bytes.items()]
    if record.machine_watch is not None:
        lines.append(f"the GPU during the run: {gpu_seen(record.machine_watch)}")
    return lines + [f"noisy: {reason}" for reason in record.noisy]


def timing(mode: Mode) -> str:
    """Medians of both arms, the speedup and A/A, each with its interval."""
    before, after, speedup, noise = cells(mode)
    return f"{before} ms -> {after} ms, {speedup}; A/A {noise}" if after else before


def cells(mode: Mode) -> tuple[str, str, str, str]:
    """Milliseconds of both arms, the speedup and A/A; of a mode that does not run the reason and nothing."""
    from kda_judge.evidence.stats import summarise
    from kda_tools.publish.report import interval

    if mode.refused is not None or mode.speedup is None or mode.noise is None:
        return f"does not run: {mode.refused}", "", "", ""
    before, after = (f"{summarise(samples).median / 1e3:.3f}" for samples in (mode.upstream, mode.subject))
    return before, after, interval(mode.speedup), interval(mode.noise)


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def _signal(curve: Curve) -> str:
    """PSNR after the last step, as text."""
    if (value := curve.psnr_db[-1]) is not None:
        return f"{value:.1f} dB"
    return "equal" if curve.relative[-1] == 0 else "not finite"
