"""`kda port artifacts`: what a pull request needs, in one folder; a number that no record has is said to be missing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import ledger, provenance, record_log
from kda_judge.evidence.run_record import Basis, Metric, RowResult, RunRecord
from kda_tools.lab.profile.profile_record import Kernel, ProfileRecord
from kda_tools.lab.profile.profile_record import log as profile_log
from kda_tools.models import denoise_compare
from kda_tools.port.package_files import TIERS
from kda_tools.port.package_files import tier as tier_of
from kda_tools.port.port_record import PortRecord, records
from kda_tools.port.ported_arm import NAME
from kda_tools.port.ports_page import section_md
from kda_tools.project.export.readme import origin_json
from kda_tools.publish.profile_page import section_md as profile_md
from kda_tools.publish.report import BASELINE, SUBJECT, line, microseconds, published, stale

WHAT_CHANGES = """## What changes

The public functions keep their names and arguments. Their bodies first ask the new kernels; a call that these do not
take goes on as before. On NPU, ROCm and CPU nothing changes.
"""
METHOD = """## How it was measured

Both arms ran interleaved in one session, each in a process of its own, verified against a float64 oracle before and
after timing. Times are of CUDA graphs; intervals are 95%. Tables: microbench.md, models.md.
"""


@dataclass(frozen=True)
class Given:
    """What the user hands over."""

    denoise: tuple[Path, Path] | None = None
    """Two runs of `kda model denoise`: before, after."""
    pictures: tuple[Path, ...] = ()
    overlapping: tuple[int, ...] = ()
    """Numbers of open pull requests that touch the same."""


@dataclass
class Artifacts:
    """Files of the folder, and what is missing of them."""

    files: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def write(task: Task, folder: Path, given: Given) -> Artifacts:
    """Fill the new or empty folder.

    Raises:
        UsageError: the folder holds something, a picture is not there, or the two runs cannot be compared.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: expected a new or an empty folder")
    for picture in given.pictures:
        if not picture.is_file():
            raise UsageError(f"--picture {picture}: expected an image or a clip, got no file")
    made = collect(task, given)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    for picture in given.pictures:
        shutil.copy(picture, folder / picture.name)
    return made


def collect(task: Task, given: Given) -> Artifacts:
    """The texts."""
    made = Artifacts()
    port = records(task)[-1] if records(task) else None
    run = port.run if port else next(iter(published(task, ledger.read(task.ledger)).values()), None)
    if port is None:
        made.missing.append("no port was measured: `kda port TASK --sglang PATH --record`, on a GPU")
    made.files["microbench.md"] = _microbench(task, port, run, made)
    profile = _profile(task, made)
    if profile is not None:
        made.files["profile.md"] = profile_md(profile)
    made.files["models.md"] = _models(given, made)
    made.files["numerics.md"] = _numerics(_tier(task), run)
    made.files["provenance.json"] = origin_json(task, {})
    if not given.pictures:
        made.missing.append("no generated image or clip was given: --picture FILE")
    made.files["description.md"] = _description(task, given, run, profile, made)
    return made


def _microbench(task: Task, port: PortRecord | None, run: RunRecord | None, made: Artifacts) -> str:
    if port is not None:
        return section_md(port)
    if run is None:
        made.missing.append("no run of the solution is published")
        return "Not measured.\n"
    if told := stale(task, run):
        made.missing.append(f"the published run is stale: {told[0]}")
    head = "Not of the port: the solution as it was published, GPU time as a CUDA graph.\n\n"
    return head + rows_md(run, SUBJECT, BASELINE)


def rows_md(run: RunRecord, subject: str, opponent: str) -> str:
    """Markdown: microseconds of GPU time of both, and the speedup with its interval, of every row."""
    gpu = run.machine.before.name if run.machine.before else "unknown GPU"
    text = (
        f"{gpu}, run `{run.run_id}`.\n\n"
        + line("row", f"{opponent} us", f"{subject} us", "speedup")
        + "|---|---|---|---|\n"
    )
    for row in run.rows:
        ratio = row.speedup.get(Basis.DEVICE, {}).get(opponent)
        shown = f"{ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]" if ratio else "-"
        text += line(row.id, _time(row, opponent), _time(row, subject), shown)
    return text


def _time(row: RowResult, arm: str) -> str:
    summary = row.arms[arm].summary.get(Metric.DEVICE) if arm in row.arms else None
    return microseconds(summary.median if summary else None)


def _profile(task: Task, made: Artifacts) -> ProfileRecord | None:
    """The profiled row that moves the most: before and after, one pair."""
    found = record_log.read(profile_log(task), ProfileRecord)
    pairs = [one for one in found if len(one.arms) > 1]
    if not pairs:
        made.missing.append(f"no pair of profiles: `kda profile {task.op} --row ID`, on a GPU")
        return None
    chosen = max(pairs, key=lambda one: (one.utc[:10], one.bytes_moved))
    if chosen.provenance.hashes.get("solution") != provenance.hashes(task)["solution"]:
        made.missing.append(f"the profile of {chosen.utc[:10]} is of another version of the solution")
    return chosen


def _models(given: Given, made: Artifacts) -> str:
    if given.denoise is None:
        made.missing.append("no whole requests: `kda model denoise` twice, then --denoise BEFORE AFTER")
        return "Whole requests were not measured.\n"
    one, other, lines = denoise_compare.compare(*given.denoise)
    return "```\n" + "\n".join(denoise_compare.text(one, other, lines)) + "\n```\n"


def _tier(task: Task) -> str:
    """That of the last port that was measured, else the contract's."""
    return tier_of(task, exact=any(one.exact for one in records(task)[-1:]))


def _numerics(tier: str, run: RunRecord | None) -> str:
    text = f"Declared: **{tier}**, {TIERS[tier]}.\n"
    if run is None:
        return text
    text += (
        "\nLeast share of equal elements, and of those within one unit in the last place, over all draws of a row.\n\n"
    )
    text += line("row", "beside", "output", "equal", "within one unit") + "|---|---|---|---|---|\n"
    return text + "".join(
        line(row.id, arm, one.output, f"{one.equal:.4%}", f"{one.near:.4%}")
        for row in run.rows
        for arm, result in row.arms.items()
        for one in result.distance
    )


def _description(
    task: Task, given: Given, run: RunRecord | None, profile: ProfileRecord | None, made: Artifacts
) -> str:
    ops = ", ".join(f"`{op}`" for op in task.config.ops)
    parts = [
        f"# Faster {ops}\n",
        f"{task.config.task.title}. Models: {', '.join(task.config.task.models)}.\n",
        WHAT_CHANGES,
        f"## Numerics\n\n{_numerics(_tier(task), None)}",
        f"## Why it is faster\n\n{causes(profile) if profile else 'Not profiled.'}\n",
        METHOD,
    ]
    if run is not None and (rows := [r.speedup[Basis.DEVICE] for r in run.rows if r.speedup.get(Basis.DEVICE)]):
        best = [one[BASELINE].estimate for one in rows if BASELINE in one]
        subject = NAME if run.settings.subject == NAME else "the solution (not yet the port)"
        if best:
            parts.append(f"Speedups of {subject} over the code before: {min(best):.2f} to {max(best):.2f}.\n")
    if given.overlapping:
        numbers = ", ".join(f"#{number}" for number in given.overlapping)
        parts.append(f"## Overlapping open pull requests\n\n{numbers}, as far as the author knows.\n")
    if made.missing:
        parts.append("## Missing\n\n" + "".join(f"- {one}\n" for one in made.missing))
    return "\n".join(parts)


def causes(profile: ProfileRecord) -> str:
    """Measured differences between before and after on the profiled row, one sentence each."""
    sides = list(profile.arms.items())
    (before, old), (after, new) = sides[0], sides[-1]
    told = [f"On row {profile.row} ({profile.gpu.name}), {before} and {after} as Nsight Compute counted them:\n"]
    moved = [_total(side, "dram_read_bytes", "dram_written_bytes") for side in (old, new)]
    for what, values, unit in (
        ("Kernels of a call", [float(len(old)), float(len(new))], ""),
        ("Bytes to and from memory", moved, ""),
        ("Registers of a thread, at most", [_most(side, "registers") for side in (old, new)], ""),
        ("Occupancy, at least", [_least(side, "occupancy_pct") for side in (old, new)], "%"),
        ("Bytes of spilled registers", [_total(side, "local_bytes") for side in (old, new)], ""),
    ):
        if values[0] is not None and values[1] is not None:
            same = " (no difference)" if values[0] == values[1] else ""
            told.append(f"- {what}: {values[0]:,.0f}{unit} before, {values[1]:,.0f}{unit} after{same}.")
    told.append(f"- The op must move {profile.bytes_moved:,} bytes.")
    return "\n".join(told)


def _values(kernels: Sequence[Kernel], name: str) -> list[float]:
    return [float(value) for kernel in kernels if (value := getattr(kernel, name)) is not None]


def _total(kernels: Sequence[Kernel], *names: str) -> float | None:
    found = [value for name in names for value in _values(kernels, name)]
    return sum(found) if len(found) == len(names) * len(kernels) else None


def _most(kernels: Sequence[Kernel], name: str) -> float | None:
    return max(_values(kernels, name), default=None)


def _least(kernels: Sequence[Kernel], name: str) -> float | None:
    return min(_values(kernels, name), default=None)
