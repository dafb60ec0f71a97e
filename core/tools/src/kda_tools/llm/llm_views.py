"""Make lines for the terminal from models, loads, captures, inventories and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kda_tools.llm import load_record
from kda_tools.llm.capture_record import CaptureRecord
from kda_tools.llm.inventory import Inventory
from kda_tools.llm.kernel_cards import Worth
from kda_tools.llm.known_llms import KnownLlms
from kda_tools.llm.load_record import LoadRecord
from kda_tools.llm.served_phase import Phase
from kda_tools.llm.step_protocol import LlmStepRecord, PhaseStep
from kda_tools.models.views import timing

UNTIMED = "without a GPU nothing was timed: what follows is what operations are called with"


def list_lines(known: KnownLlms) -> Iterator[str]:
    """One line for each model, and where its figures come from."""
    for name, model in known.models.items():
        gpus = ", ".join(f"{target} x {count}" for target, count in model.gpus.items()) or "made on this machine"
        sizes = f"{model.config.layers} layers of {model.config.hidden_size}"
        experts = f", {model.config.experts} experts" if model.config.experts else ""
        yield f"{name}: {model.title}, {sizes}{experts}; {gpus}{'; captured here' if model.captured else ''}"
        yield f"  {model.source}"


def load_lines(record: LoadRecord) -> Iterator[str]:
    """What a load found: requests, times, failures."""
    yield (
        f"{record.model} ({record.engine}), load {record.load}: {record.concurrency} at once, {record.data}; "
        f"{len(record.succeeded)} of {record.requests} requests succeeded, {record.errored} failed, "
        f"{record.incomplete} incomplete"
    )
    for text, count in record.errors.items():
        yield f"  {count} x {text}"
    if record.partial:
        yield "  partial: the server died" if record.died else "  partial: less came back than was asked for"
    if record.gpu is None:
        yield "  there is no GPU: these times say that the pipeline works, and nothing about a model"
    for label, interval, unit in (
        ("time to first token", load_record.first_token_ms(record), "ms, median"),
        ("time between tokens", load_record.inter_token_ms(record), "ms, median"),
        ("output tokens", load_record.tokens_per_s(record), "a second"),
    ):
        yield f"  {label}: {load_record.interval_text(interval)} {unit}"


def capture_lines(record: CaptureRecord) -> Iterator[str]:
    """The phases of a capture and its stand-ins."""
    yield (
        f"{record.model}: {record.layers} of {record.layers_of_model} layers, {record.dtype}, "
        f"{record.gpu or 'no GPU'}, kernels of {record.kernels.rpartition(' ')[0] or record.kernels}"
    )
    if record.device == "cpu":
        yield UNTIMED
    for phase in record.phases:
        names = len({call.name for call in phase.calls})
        yield f"  {phase.name}: {phase.left_out or f'{names} operations, {phase.steps} steps'}"
    yield f"stand-ins, never carded: {', '.join(record.stand_ins) or 'none'}"


def inventory_lines(found: Inventory, lines: Sequence[Worth]) -> Iterator[str]:
    """The phases, then every operation above the threshold; of an untimed capture the calls."""
    yield f"{found.model}, {found.engine}"
    if not found.timed:
        yield UNTIMED
        for phase in found.phases:
            yield f"{phase.name}:"
            for call in phase.calls:
                tensors = "; ".join(f"{one.dtype} {list(one.shape)}" for one in call.tensors)
                yield f"  {call.calls_a_step:g} a step  {call.name}: {tensors}"
        return
    for phase in found.phases:
        yield (
            f"{phase.name}: {phase.gpu_us:.1f} us of GPU time a step of {phase.step_us:.1f} us, "
            f"{phase.unattributed:.1%} unattributed"
        )
    yield from worth_lines(lines)


def worth_lines(lines: Sequence[Worth]) -> Iterator[str]:
    """One line for each operation: its shares, and whether it gets a card."""
    for one in lines:
        shares = ", ".join(f"{each.phase.name} {each.share:.1%}" for each in one.phases)
        where = f" in {one.module}" if one.module else ""
        yield f"{one.largest.share:6.1%}  {one.name}{where} ({one.largest.spot.kind.value}): {one.what}; {shares}"


def tokens_per_s(phase: Phase, us: float) -> float:
    """New tokens per second if a step takes `us` microseconds."""
    return phase.batch * phase.new_tokens / us * 1e6


def step_lines(record: LlmStepRecord) -> Iterator[str]:
    """A run of `kda llm step`: times of every phase, then what was called and how far the outputs are apart."""
    gpu = record.machine.before.name if record.machine.before else "no GPU"
    yield (
        f"{record.model}: {record.layers} of {record.layers_of_model} layers, {record.dtype}, {gpu}, "
        f"kernels of {record.kernels.rpartition(' ')[0] or record.kernels} against ours"
    )
    if record.machine.before is None:
        yield UNTIMED
    for phase in record.phases:
        yield f"{phase.name}:"
        for name, mode in phase.modes.items():
            yield f"  {name}: {timing(mode)}"
        yield from (f"  {line}" for line in step_facts(phase))
    yield from (f"noisy: {reason}" for reason in record.noisy)


def step_facts(phase: PhaseStep) -> Iterator[str]:
    """The facts of one phase: its calls and their rows, fallbacks, numerics, and GPU time by operation."""
    if phase.left_out is not None:
        yield f"left out: {phase.left_out}"
        return
    found = phase.checked
    known = sum(call.count for call in found.calls if call.row)
    yield f"calls of the tasks' ops: {sum(call.count for call in found.calls)}, {known} of them with a row's shapes"
    yield from fallback_lines(phase)
    for whose, apart, same in (
        ("ours", found.difference, found.same_token),
        ("PyTorch's", found.plain_difference, found.plain_same_token),
    ):
        if apart is not None and same is not None:
            yield (
                f"probabilities, {whose} to upstream's: relative error {apart:.2e}; the likeliest token is the same in "
                f"{same:.0%} of the sequences"
            )
    if (profile := found.profile) is not None:
        yield f"GPU time of all kernels: {profile.upstream.total_us:.1f} -> {profile.subject.total_us:.1f} us"
        changed = {
            kind: (profile.upstream.by_kind.get(kind, 0.0), profile.subject.by_kind.get(kind, 0.0))
            for kind in sorted({*profile.upstream.by_kind, *profile.subject.by_kind})
        }
        parts = (f"{kind} {before:.1f} -> {after:.1f}" for kind, (before, after) in changed.items())
        yield f"by operation, us: {', '.join(parts)}"


def fallback_lines(phase: PhaseStep) -> Iterator[str]:
    """Calls for which a solution takes its plain path."""
    for one in phase.checked.fallbacks:
        yield f"fallback: {one.task} {one.op}, {one.count} calls: {one.reason}"
