"""`kda port artifacts`: writes what a pull request needs into one folder, and lists what no record has as missing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import record_log
from kda_judge.evidence.run_record import Basis, Metric, RunRecord
from kda_tools.lab.profile.profile_record import Kernel, ProfileRecord
from kda_tools.lab.profile.profile_record import log as profile_log
from kda_tools.llm.task_gain import gain_of_steps
from kda_tools.models import denoise_compare
from kda_tools.models.apply_site import PACKAGE, Replacement, replacements
from kda_tools.models.task_share import share_of_steps
from kda_tools.port.layouts import DIFFUSION, Layout, Tree, called_from
from kda_tools.port.package_files import SWITCH, TIERS, is_gated, is_gated_by_bits
from kda_tools.port.package_files import tier as tier_of
from kda_tools.port.port_record import PortRecord, records
from kda_tools.port.ports_page import section_md
from kda_tools.project.export.readme import origin_json
from kda_tools.publish.profile_page import section_md as profile_md
from kda_tools.publish.report import (
    BASELINE,
    LATEST,
    SUBJECT,
    arm_name,
    interval,
    median,
    microseconds,
    pin_name,
    published_runs,
    ratio,
    row_ratio,
    speedup,
    stale,
    table_md,
)
from kda_tools.publish.staleness import is_outdated

METHOD = """Both arms ran interleaved in one session, each in a process of its own, verified against a float64 oracle
before and after timing. Times are of CUDA graphs; intervals are 95%.
"""
WHO_DECIDES = {
    "level": "Off by default: a request's quality level `{tier}` mounts the kernels, `exact` keeps SGLang's own.",
    "bits": (
        "On by default for each call whose first run gave the bits of SGLang's own function; other bits switch the "
        "kernels off."
    ),
    "nobody": "On by default wherever the kernels can run.",
    "new": "New ops: no model calls them yet.",
}
CHECKLIST = """## Checklist

- [ ] Format the code: SGLang's pre-commit on the patch.
- [x] Unit tests: `test_kda_{op}.py`, which the patch brings.
- [ ] Documentation, where it names the functions.
- [ ] Throughput or latency, and accuracy, of a model.
"""


@dataclass(frozen=True)
class Given:
    """What the user gave on the command line."""

    denoise: tuple[Path, Path] | None = None
    """Two runs of `kda model denoise`: before, after."""
    pictures: tuple[Path, ...] = ()
    overlapping: tuple[int, ...] = ()
    """Numbers of open pull requests that touch the same code."""


@dataclass
class Artifacts:
    """Texts of the folder's files by name, and a line about each thing that is missing."""

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
    """Make the texts without writing them.

    Raises:
        UsageError: pictures, or whole requests of diffusion, for an op of another family.
    """
    if task.family != DIFFUSION and (given.denoise or given.pictures):
        raise UsageError(f"--denoise, --picture: expected with a task of {DIFFUSION}, got {task.folder}")
    made = Artifacts()
    measured = _measured(task, made)
    made.files["microbench.md"] = _microbench(measured)
    profile = _profile(task, measured, made)
    if profile is not None:
        made.files["profile.md"] = _outdated(task, profile) + profile_md(profile)
    if task.family == DIFFUSION:
        made.files["models.md"] = _models(task, given, made)
    else:
        made.missing.append("throughput and latency of a model: SGLang's own benchmarks, before and after the patch")
    made.files["numerics.md"] = _numerics(_tier(task, measured), measured.run, made)
    made.files["provenance.json"] = origin_json(task, {})
    if task.family == DIFFUSION and not given.pictures:
        made.missing.append("no generated image or clip was given: --picture FILE")
    made.files["description.md"] = _description(task, given, measured, profile, made)
    return made


@dataclass(frozen=True)
class Measured:
    """The run whose times are reported: a port's, or the solution's published run if no port was measured.

    Of the ports it is one of the present files if there is one, then of the newest release, then the last.
    """

    port: PortRecord | None
    run: RunRecord | None
    stale: str
    """Why the run does not describe the present files; empty if it does."""

    @property
    def opponent(self) -> str:
        """The arm to compare with: the one on the latest release if the run has it, else the baseline."""
        arms = {name for row in self.run.rows for name in row.arms} if self.run else set()
        return LATEST if LATEST in arms else BASELINE

    @property
    def ratios(self) -> list[float]:
        """Speedup over the opponent by device time, of each row that has one."""
        run = self.run
        found = [row_ratio(run, row, Basis.DEVICE, self.opponent) for row in run.rows] if run else []
        return [one for one in found if one is not None]


def _measured(task: Task, made: Artifacts) -> Measured:
    ports = reversed(records(task))
    newest = list(Layout)
    port = max(ports, key=lambda one: (not stale(task, one.run), newest.index(Layout(one.layout))), default=None)
    run = port.run if port else next(iter(published_runs(task).values()), None)
    if port is None:
        made.missing.append("no port was measured: `kda port TASK --sglang PATH --record`, on a GPU")
    if run is None:
        made.missing.append("no run of the solution is published")
    told = stale(task, run) if run else []
    if told:
        made.missing.append(f"the {'port' if port else 'published run'} is stale: {told[0]}")
    return Measured(port, run, next(iter(told), ""))


def _microbench(measured: Measured) -> str:
    old = f"Outdated: {measured.stale}.\n\n" if measured.stale else ""
    if measured.port is not None:
        return old + section_md(measured.port)
    if measured.run is None:
        return "Not measured.\n"
    head = "Not of the port: the solution as it was published, GPU time as a CUDA graph.\n\n"
    return head + old + rows_md(measured.run, SUBJECT, measured.opponent)


def rows_md(run: RunRecord, subject: str, opponent: str) -> str:
    """Markdown table: for every row the GPU time of both arms in microseconds, and the speedup.

    The speedup has an interval if the record has one; else it is the ratio of the medians.
    """
    gpu = run.machine.before.name if run.machine.before else "unknown GPU"
    lines = []
    for row in run.rows:
        found = speedup(row, Basis.DEVICE, opponent)
        shown = interval(found) if found else ratio(row_ratio(run, row, Basis.DEVICE, opponent))
        times = [microseconds(median(row, arm, Metric.DEVICE)) for arm in (opponent, subject)]
        lines.append((row.id, *times, shown))
    head = ("row", f"{arm_name(run, opponent)} us", f"{subject} us", "speedup")
    return f"{gpu}, run `{run.run_id}`.\n\n{table_md(head, lines)}"


def _profile(task: Task, measured: Measured, made: Artifacts) -> ProfileRecord | None:
    """The pair of profiles to show: preferably of the present files, then with this opponent, the latest, largest."""
    pairs = [one for one in record_log.read(profile_log(task), ProfileRecord) if len(one.arms) > 1]
    if not pairs:
        made.missing.append(f"no pair of profiles: `kda profile {task.op} --row ID`, on a GPU")
        return None

    def fit(one: ProfileRecord) -> tuple[bool, bool, str, int]:
        return not is_outdated(task, one.provenance), measured.opponent in one.arms, one.utc[:10], one.bytes_moved

    chosen = max(pairs, key=fit)
    if is_outdated(task, chosen.provenance):
        made.missing.append(f"the profile of {chosen.utc[:10]} is of another version of the solution")
    return chosen


def _outdated(task: Task, profile: ProfileRecord) -> str:
    if not is_outdated(task, profile.provenance):
        return ""
    return f"Outdated: of {profile.utc[:10]}, and of another version of the solution than the patch's.\n\n"


def _models(task: Task, given: Given, made: Artifacts) -> str:
    """Times of whole requests from the given runs, and the task's share of the recorded models' steps."""
    return f"{_requests(given, made)}\n{share_of_steps(task)}\n"


def _requests(given: Given, made: Artifacts) -> str:
    if given.denoise is None:
        made.missing.append("no whole requests: `kda model denoise` twice, then --denoise BEFORE AFTER")
        return "Whole requests were not measured.\n"
    one, other, lines = denoise_compare.compare(*given.denoise)
    return "```\n" + "\n".join(denoise_compare.text(one, other, lines)) + "\n```\n"


def _tier(task: Task, measured: Measured) -> str:
    """The tier of the measured port, else the contract's."""
    return tier_of(task, exact=measured.port is not None and measured.port.exact)


def _numerics(tier: str, run: RunRecord | None, made: Artifacts) -> str:
    text = _declared(tier)
    rows = [
        (row.id, arm_name(run, arm), one.output, f"{one.equal:.4%}", f"{one.near:.4%}")
        for row in (run.rows if run else ())
        for arm, result in row.arms.items()
        for one in result.distance
        if run is not None
    ]
    if run is None:
        return text + "\nNot measured.\n"
    if not rows:
        made.missing.append(f"run {run.run_id} did not count which outputs are equal to SGLang's")
        return text + f"\nHow many elements equal SGLang's was not counted in run `{run.run_id}`.\n"
    text += (
        "\nLeast share of equal elements, and of those within one unit in the last place, over all draws of a row.\n\n"
    )
    return text + table_md(("row", "beside", "output", "equal", "within one unit"), rows)


def _declared(tier: str) -> str:
    return f"Declared: **{tier}**, {TIERS[tier]}.\n"


def _description(task: Task, given: Given, measured: Measured, profile: ProfileRecord | None, made: Artifacts) -> str:
    """A draft under the headings of SGLang's template for pull requests."""
    ops = ", ".join(f"`{op}`" for op in task.config.ops)
    release, replaced = _replaced(task, measured)
    current, ratios = measured.run is not None and not measured.stale, measured.ratios
    faster = current and bool(ratios) and geometric_mean(ratios) > 1
    title = f"Faster {ops}" if faster else f"KDA-Pilot's kernels {'in front of' if replaced else 'for'} {ops}"
    parts = [f"# {title}\n", "## Motivation\n"]
    parts.append(f"{task.config.task.title}. Models: {', '.join(task.config.task.models)}.\n")
    if faster:
        parts.append(_speedups(measured))
    parts += ["## Modifications\n", _modifications(task, release, replaced, _tier(task, measured))]
    if given.overlapping:
        numbers = ", ".join(f"#{number}" for number in given.overlapping)
        parts.append(f"Open pull requests that touch the same, as far as the author knows: {numbers}.\n")
    parts += ["## Accuracy Tests\n", _declared(_tier(task, measured)), "Beside SGLang's own outputs: numerics.md.\n"]
    parts.append("## Benchmarking and Profiling\n")
    if not current:
        parts.append(f"Not measured{': the last times are outdated' if measured.run else ''}.\n")
    elif ratios:
        models = ", models.md" if "models.md" in made.files else ""
        parts += [*([] if faster else [_speedups(measured)]), METHOD, f"Tables: microbench.md{models}.\n"]
    if task.family == DIFFUSION:
        steps = f"Steps of models, with all kernels of KDA-Pilot at once:\n\n{share_of_steps(task, release.value)}\n"
    else:
        steps = f"{gain_of_steps(task, stale_too=False)}\n"
    parts.append(steps)
    profiled = profile is not None and not is_outdated(task, profile.provenance)
    parts.append(causes(profile) + "\n" if profile and profiled else "Not profiled.\n")
    parts.append(CHECKLIST.format(op=task.op))
    if made.missing:
        parts.append("## Missing (not for the pull request)\n\n" + "".join(f"- {one}\n" for one in made.missing))
    return "\n".join(parts)


def _speedups(measured: Measured) -> str:
    """What the speedups are, on the device and, of a port, with the host's part; the run must have some."""
    run, ratios = measured.run, measured.ratios
    subject = "the port" if measured.port else "the solution (not yet the port)"
    over = (run and pin_name(run.provenance.pins.get(measured.opponent))) or measured.opponent
    gpu = run.machine.before.name if run and run.machine.before else "unknown GPU"
    head = run.headline if run else None
    mean = speedup(head, Basis.DEVICE, measured.opponent)
    wall = speedup(head, Basis.WALL, measured.opponent) if measured.port else None
    return (
        f"Speedups of {subject} over {over}, GPU time on {gpu}: {min(ratios):.3f} to {max(ratios):.3f} over "
        f"{len(ratios)} rows, geometric mean {interval(mean) if mean else ratio(geometric_mean(ratios))}."
        + f" By wall time, in eager code, where the host launches each call: {interval(wall)}." * bool(wall)
        + " A first look, with few samples." * bool(run and run.settings.quick)
        + "\n"
    )


def _replaced(task: Task, measured: Measured) -> tuple[Layout, list[Replacement]]:
    """The release of the last port (the latest release if there is no port), and its functions that get kernels."""
    layout = Layout(measured.port.layout) if measured.port else list(Layout)[-1]
    return layout, [
        one for one in replacements([task]) if one.version == layout.value and one.function in task.config.ops
    ]


def _modifications(task: Task, layout: Layout, replaced: list[Replacement], tier: str) -> str:
    """What the patch does, and who decides whether the kernels run."""
    tree, new = Tree(Path(), Path(), layout), not replaced
    calling = dict.fromkeys(f"- `{one.module}.{one.holder}`\n" for one in called_from(task, layout, tier))
    who = "nobody" if replaced or calling else "new"
    if is_gated(tier, tree, task, new):
        who = "bits" if is_gated_by_bits(tier, tree, task, new) else "level"
    text = f"{PACKAGE} {layout.value} has no such functions; the patch adds them.\n\n"
    if replaced:
        text = (
            f"Kernels in front of these functions of {PACKAGE} {layout.value}:\n\n"
            + "".join(f"- `{one.module}.{one.function}`\n" for one in replaced)
            + "\nThe functions keep their names and arguments. Their bodies first ask the new kernels; a call that\n"
            "these do not take goes on as before. On NPU, ROCm and CPU nothing changes.\n\n"
        )
    if calling:
        text += (
            f"Lines at the head of these, which compute the same by statements, call the ops:\n\n{''.join(calling)}\n"
        )
    switch = f" `{SWITCH}=1` in the environment switches them off." if who != "new" else ""
    return text + WHO_DECIDES[who].format(tier=tier) + switch + "\n"


def causes(profile: ProfileRecord) -> str:
    """Measured differences between before and after on the profiled row, one sentence each."""
    sides = list(profile.arms.items())
    (before, old), (after, new) = sides[0], sides[-1]
    pin = pin_name(profile.provenance.pins.get(before))
    named = f"{before} ({pin})" if pin else before
    told = [f"On row {profile.row} ({profile.gpu.name}), {named} and {after} as Nsight Compute counted them:\n"]
    moved = [_total(side, "dram_read_bytes", "dram_written_bytes") for side in (old, new)]
    for what, values, unit in (
        ("Kernels of a call", [float(len(old)), float(len(new))], ""),
        ("Bytes to and from memory", moved, ""),
        ("Registers of a thread, at most", [max(_values(side, "registers"), default=None) for side in (old, new)], ""),
        ("Occupancy, at least", [min(_values(side, "occupancy_pct"), default=None) for side in (old, new)], "%"),
        ("Bytes of spilled registers", [_total(side, "local_bytes") for side in (old, new)], ""),
    ):
        if None not in values and values[0] != values[1]:
            told.append(f"- {what}: {values[0]:,.0f}{unit} before, {values[1]:,.0f}{unit} after.")
    cached = moved[1] is not None and moved[1] < profile.bytes_moved
    told.append(f"- The op must move {profile.bytes_moved:,} bytes{'; the rest stayed in L2' if cached else ''}.")
    return "\n".join(told)


def _values(kernels: Sequence[Kernel], name: str) -> list[float]:
    return [float(value) for kernel in kernels if (value := getattr(kernel, name)) is not None]


def _total(kernels: Sequence[Kernel], *names: str) -> float | None:
    found = [value for name in names for value in _values(kernels, name)]
    return sum(found) if len(found) == len(names) * len(kernels) else None
