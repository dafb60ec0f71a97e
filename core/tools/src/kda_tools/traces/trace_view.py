"""Show a profile as plain text, with times in microseconds a step, and make its data for `--json`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kda_tools.traces.cards import Card, wants_card
from kda_tools.traces.catalogue import Finding, Status
from kda_tools.traces.ceiling import Ceiling
from kda_tools.traces.hotspots import Hotspot
from kda_tools.traces.kernel_classes import KernelClass, short_name
from kda_tools.traces.trace_profile import UNATTRIBUTED, Attribution, Profile

WIDEST = 48
"""Characters of a name in a table; `--json` has them whole."""
SHOWN_GAPS = 3
NUMERIC = re.compile(r"[\d.e+]*( us|%)?|unknown")
Judged = Sequence[tuple[Hotspot, Finding]]


def lines(profile: Profile, judged: Judged, top: int) -> Iterator[str]:
    """The report: the step, the classes, the kernels, the hotspots, the longest gaps."""
    yield from _summary(profile)
    yield ""
    yield from _table(("class", "us a step", "share", "launches"), list(_classes(profile)))
    yield ""
    yield from _table(("kernel", "us a step", "share", "launches"), list(_kernels(profile, top)))
    yield ""
    head = ("operator", "module", "class", "calls", "us a step", "share", "status", "what is known")
    yield from _table(head, list(_hotspots(profile, judged, top)))
    yield ""
    for gap in profile.gaps[:SHOWN_GAPS]:
        cause = f"{gap.host_us:.1f} us of it before the launch returned" if gap.known else "no launch in the trace"
        between = f"{_cut(short_name(gap.before)) or 'the start'} -> {_cut(short_name(gap.after)) or 'the end'}"
        yield f"idle {gap.us:.1f} us at {gap.at_us:.1f} us, {cause}: {between}"


def _summary(profile: Profile) -> Iterator[str]:
    counted = f"{profile.recorded_steps} recorded" if profile.recorded_steps else "none is marked in it"
    step, steps, name = profile.step_us, profile.steps, profile.gpu or "GPU unnamed"
    yield f"{profile.file}: {name}, {steps} step{'s'[: steps != 1]} ({counted}), streams: {profile.streams}"
    busy, work = profile.busy_us / steps, profile.gpu_us / steps
    yield f"step {step:.1f} us: GPU busy {busy:.1f} us; sum over kernels {work:.1f} us, the 100% of the shares below"
    idle, host, unknown = (us / profile.span_us for us in (profile.idle_us, profile.host_us, profile.unknown_us))
    yield (
        f"idle {idle:.1%} of the step: host-bound {host:.1%}, launch unknown {unknown:.1%}, "
        f"launched and waiting {idle - host - unknown:.1%}"
    )
    shares = {how: f"{how.value} {profile.share(profile.attributed_us(how)):.1%}" for how in Attribution}
    known = ", ".join(text for how, text in shares.items() if how not in UNATTRIBUTED)
    lost = ", ".join(shares[how] for how in UNATTRIBUTED)
    yield f"attributed to: {known}; unattributed {profile.share(profile.unattributed_us):.1%} ({lost})"
    if profile.communication_us:
        talk, alone = profile.communication_us / steps, profile.exposed_us / steps
        yield f"communication: {talk:.1f} us a step, alone on the GPU {alone:.1f} us"
    if profile.before_us:
        yield f"before the first step, left out: {profile.before_us:.1f} us of GPU time"


def _classes(profile: Profile) -> Iterator[tuple[str, ...]]:
    sums = {kind: [cost for cost in profile.costs if cost.source.kind is kind] for kind in KernelClass}
    for kind, costs in sorted(sums.items(), key=lambda item: (-sum(cost.us for cost in item[1]), item[0].value)):
        if costs:
            yield _row(profile, (kind.value,), sum(cost.us for cost in costs), sum(cost.launches for cost in costs))
    yield _total(profile)


def _kernels(profile: Profile, top: int) -> Iterator[tuple[str, ...]]:
    sums: dict[str, list[float]] = {}
    for cost in profile.costs:
        one = sums.setdefault(short_name(cost.source.kernel), [0.0, 0])
        one[0] += cost.us
        one[1] += cost.launches
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    for name, (us, launches) in ordered[:top]:
        yield _row(profile, (_cut(name),), us, launches)
    if rest := ordered[top:]:
        yield _row(profile, (f"{len(rest)} more",), sum(one[0] for _, one in rest), sum(one[1] for _, one in rest))
    yield _total(profile)


def _hotspots(profile: Profile, judged: Judged, top: int) -> Iterator[tuple[str, ...]]:
    for spot, found in judged[:top]:
        numbers = (f"{spot.calls / profile.steps:g}", f"{spot.us / profile.steps:.1f}", f"{profile.share(spot.us):.1%}")
        names = (_cut(spot.name), _cut(spot.module) or "-", spot.kind.value)
        yield (*names, *numbers, found.status.value, _why(profile, spot, found))
    if rest := judged[top:]:
        us, calls = sum(spot.us for spot, _ in rest), sum(spot.calls for spot, _ in rest)
        yield (
            f"{len(rest)} more",
            "",
            "",
            f"{calls / profile.steps:g}",
            f"{us / profile.steps:.1f}",
            f"{profile.share(us):.1%}",
            "",
            "",
        )
    yield ("total", "", "", "", f"{profile.gpu_us / profile.steps:.1f}", "100.0%", "", "")


def _why(profile: Profile, spot: Hotspot, found: Finding) -> str:
    if not spot.attributed:
        return f"{found.why}; unattributed"
    if wants_card(profile, spot, found):
        return f"{found.why}; a card"
    if found.status is Status.NEW and not spot.bound_by_bytes:
        return f"{found.why}; no card, as bytes are not its limit"
    return found.why


def _row(profile: Profile, names: tuple[str, ...], us: float, launches: float) -> tuple[str, ...]:
    return (*names, f"{us / profile.steps:.1f}", f"{profile.share(us):.1%}", f"{launches / profile.steps:g}")


def _total(profile: Profile) -> tuple[str, ...]:
    return _row(profile, ("total",), profile.gpu_us, sum(cost.launches for cost in profile.costs))


def card_lines(made: Sequence[Card], names: Sequence[str]) -> Iterator[str]:
    """The cards by rank, with what a kernel at its limit would give the step."""
    head = ("card", "share", "us a step", "saves at most", "step speedup at most")
    found = []
    for card, name in zip(made, names, strict=True):
        saved, speedup = card.saved_us_per_step, card.step_speedup_at_most
        gain = ("unknown", "unknown") if saved is None or speedup is None else (f"{saved:.1f} us", f"{speedup:.4f}")
        found.append((name, f"{card.share:.1%}", f"{card.us_per_step:.1f}", *gain))
    yield from _table(head, found)


def ceiling_lines(found: Ceiling, top: int) -> Iterator[str]:
    """A table of the hotspots that are bound by bytes, largest gain at the limit first, and the step's ceiling."""
    head = ("at the device limit", "module", "class", "status", "us a step", "bytes unknown", "limit", "gain", "step")
    body: list[tuple[str, ...]] = []
    for spot in found.spots[:top]:
        names = (_cut(spot.name), _cut(spot.module) or "-", spot.kind.value, spot.status.value)
        gain = (f"{spot.limit_us:.1f}", f"{spot.gain_us:.1f}", _speedup(found.step_us, spot.gain_us))
        known = gain if spot.limit_us else ("unknown",) * 3
        body.append((*names, f"{spot.us:.1f}", f"{spot.unknown_us:.1f}", *known))
    if rest := found.spots[top:]:
        sums = (sum(getattr(spot, name) for spot in rest) for name in ("us", "unknown_us", "limit_us", "gain_us"))
        body.append((f"{len(rest)} more", "", "", "", *(f"{us:.1f}" for us in sums), ""))
    yield from _table(head, body)
    yield ""
    for what, us in (("GPU time", found.gpu_us), ("step", found.step_us)):
        yield f"ceiling: {what} {us:.1f} -> {us - found.gain_us:.1f} us at least, {_speedup(us, found.gain_us)} at most"
    share = found.unknown_us / found.gpu_us if found.gpu_us else 0.0
    yield f"bytes unknown, counted as they are: {found.unknown_us:.1f} us a step, {share:.1%} of GPU time"
    yield "fusions are not counted: a trace does not say which kernel reads what another one wrote"
    yield f"limits: measured by the judge on this GPU, runs {', '.join(found.runs)}"


def _speedup(us: float, gain: float) -> str:
    """The speedup by Amdahl's law; "unknown" if overlapping work gains more than the whole time."""
    return f"{us / (us - gain):.4f}" if gain < us else "unknown"


def _table(head: tuple[str, ...], body: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns by spaces: numbers to the right, words to the left."""
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    right = [all(NUMERIC.fullmatch(row[i]) for row in body) for i in range(len(head))]
    for row in (head, *body):
        cells = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        yield "  ".join(cells).rstrip()


def _cut(name: str) -> str:
    return name if len(name) <= WIDEST else name[: WIDEST - 3] + "..."


def data(profile: Profile, judged: Judged, made: Iterable[Card] | None, highest: Ceiling | None) -> dict[str, Any]:
    """All data for `--json`: full names, times in microseconds over the whole window, shares from 0 to 1."""
    window = ("file", "sha256", "gpu", "steps", "recorded_steps", "span_us", "gpu_us", "busy_us", "idle_us", "host_us")
    rest = ("unknown_us", "before_us", "streams", "communication_us", "exposed_us", "unattributed_us")
    return {
        **{name: getattr(profile, name) for name in (*window, *rest)},
        "idle_share": profile.idle_us / profile.span_us,
        "host_bound_share": profile.host_us / profile.span_us,
        "unattributed_share": profile.share(profile.unattributed_us),
        "attribution_us": {how.value: profile.attributed_us(how) for how in Attribution},
        "sources": [
            {
                "kernel": cost.source.kernel,
                "class": cost.source.kind.value,
                "attribution": cost.source.attribution.value,
                "operator": cost.source.operator,
                "module": cost.source.module,
                "frame": cost.source.frame,
                "inputs": None if cost.source.inputs is None else [vars(tensor) for tensor in cost.source.inputs],
                "us": cost.us,
                "share": profile.share(cost.us),
                "launches": cost.launches,
                "calls": cost.calls,
                "bytes_reported": cost.moved,
            }
            for cost in profile.costs
        ],
        "hotspots": [
            {
                "name": spot.name,
                "module": spot.module,
                "class": spot.kind.value,
                "us": spot.us,
                "share": profile.share(spot.us),
                "calls": spot.calls,
                "status": found.status.value,
                "attributed": spot.attributed,
                "why": found.why,
                "entry": found.entry.id if found.entry else None,
            }
            for spot, found in judged
        ],
        "gaps": [gap._asdict() for gap in profile.gaps],
        "cards": None if made is None else [card.model_dump(mode="json") for card in made],
        "ceiling": None if highest is None else highest.data(),
    }
