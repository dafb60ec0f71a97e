"""The plots of `diffusion/models/docs/`: where a step's GPU time goes, and how far the arms drift apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kda_judge.evidence.run_record import Interval
from kda_tools.models.step_record import StepRecord
from kda_tools.publish import figures
from kda_tools.publish.report import gpu_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = (
    ("tasks", "the tasks' ops", figures.ORANGE),
    ("attention", "attention", figures.MUTED),
    ("gemm", "GEMM, convolution", figures.GRID),
    ("copy", "copies", figures.BLUE),
    ("other", "all else", figures.TEXT),
)
"""Part of a step -> its words and colour."""


def drift_name(record: StepRecord) -> str:
    """`drift-qwen-image-0.5.23-solution-h200.svg`."""
    where = "tiny" if record.tiny else re.sub(r"[^a-z0-9]+", "-", gpu_of(record.machine).lower())
    return f"drift-{record.model}-{record.release}-{record.arm}-{where}.svg"


def drift_svg(record: StepRecord) -> str:
    """Relative error and PSNR of the latents after each step, four pairs of arms."""
    found = record.drift
    assert found is not None
    lines = (
        (found.solution_eager, "solution to eager", figures.BLUE),
        (found.upstream_eager, "upstream to eager", figures.ORANGE),
        (found.rounding, "one rounding", figures.MUTED),
        (found.solution_upstream, "solution to upstream", figures.TEXT),
    )

    def draw(axes: Axes) -> None:
        figure = axes.get_figure()
        assert figure is not None
        left, bottom, width, height = axes.get_position().bounds
        axes.set_position((left, bottom + 0.48 * height, width, 0.52 * height))
        signal = figure.add_axes((left, bottom, width, 0.36 * height), sharex=axes)
        for curve, label, colour in lines:
            for part, values in ((axes, curve.relative), (signal, curve.psnr_db)):
                points = [(number, value) for number, value in enumerate(values, start=1) if value]
                part.plot([x for x, _ in points], [y for _, y in points], color=colour, linewidth=1.4, label=label)
        if any(curve_value for curve, _, _ in lines for curve_value in curve.relative):
            axes.set_yscale("log")
        signal.set_xlabel("denoising step")
        axes.set_ylabel("relative error\n(logarithmic)")
        signal.set_ylabel("PSNR, dB")
        axes.legend(loc="best", fontsize=8)

    return figures.figure_svg(draw, 4.0, 0.75)


def shares_svg(records: Sequence[StepRecord]) -> str:
    """One bar for each run: where upstream's GPU time of a step goes."""
    names = [f"{record.model} {record.release} {gpu_of(record.machine)}" for record in records]
    parts = ((label, colour, [_part(record, part) for record in records]) for part, label, colour in PARTS)
    return figures.shares_svg(names, parts, "share of a step's GPU time with upstream's ops")


def speedups_svg(points: Sequence[tuple[str, Interval]], where: str) -> str:
    """A line for each step: its name, and its speedup with the interval; `where` they were timed."""
    names = [name for name, _ in points]

    def draw(axes: Axes) -> None:
        figures.whiskers(axes, [value for _, value in points], range(len(points)), figures.BLUE, "o", None)
        figures.ratio_lanes(axes, names, f"speedup of a step, {where} (logarithmic)")

    return figures.figure_svg(draw, len(names) * figures.ROW, max(map(len, names)) * figures.LETTER, top=0.1)


def _part(record: StepRecord, part: str) -> float:
    """Share of one of `PARTS`; kinds that are no other part are tasks."""
    assert record.profile is not None
    share = record.profile.upstream
    named = {"attention": ("attention",), "gemm": ("gemm",), "copy": ("copy",), "other": ("other",)}
    others = {kind for kinds in named.values() for kind in kinds}
    kinds = named.get(part) or tuple(kind for kind in share.by_kind if kind not in others)
    return sum(share.by_kind.get(kind, 0.0) for kind in kinds) / share.total_us if share.total_us else 0.0
