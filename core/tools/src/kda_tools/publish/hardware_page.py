"""Make the hardware guide's table from the latest record of each kind of GPU. All but `publish` are pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kda_judge.evidence.record_log import read
from kda_tools.lab.measure.hardware_record import LOG, Copy, HardwareRecord
from kda_tools.publish.report import NONE, table_md
from kda_tools.publish.tables import replace_block
from kda_tools.publish.write_pages import write_pages

PAGE = Path("docs/skills/diffusion-kernel/references/hardware.md")
BLOCK = "measured"
NOTHING = "\nNothing is recorded yet: `kda doctor --measure` on an idle GPU adds a line to `docs/hardware.jsonl`.\n"


def _provenance(one: HardwareRecord) -> str:
    marks = f"; noisy: {', '.join(one.noise)}" * bool(one.noise) + "; uncommitted changes" * one.dirty
    versions = f"{one.gpu.driver}, {one.versions['torch']}, {one.versions['triton']}"
    return f"{one.utc}, commit {one.commit[:10]}; {versions}{marks}"


ROWS: tuple[tuple[str, Callable[[HardwareRecord], str]], ...] = (
    ("capability", lambda one: one.capability),
    ("multiprocessors", lambda one: str(one.multiprocessors)),
    ("L2, MB", lambda one: f"{one.l2_bytes / 1e6:.0f}"),
    ("registers, warps of a multiprocessor", lambda one: f"{one.registers_per_sm}, {one.warps_per_sm}"),
    (
        "shared memory of a multiprocessor, of a block, KiB",
        lambda one: f"{one.shared_bytes_per_sm / 1024:.0f}, {one.shared_bytes_per_block / 1024:.0f}",
    ),
    ("empty kernel behind another, us", lambda one: f"{one.empty_us:.2f}"),
    ("... with dependent launch, us", lambda one: NONE if one.empty_pdl_us is None else f"{one.empty_pdl_us:.2f}"),
    (
        "copy of 1 MB behind another; the next starts at once, behind the loads, at its end, us",
        lambda one: ", ".join(f"{time:.2f}" for time in one.next_grid_us.values()) or NONE,
    ),
    (
        "kernel of all multiprocessors, in clusters of 1, 2, 4, 8 blocks, us",
        lambda one: ", ".join(f"{cluster.kernel_us:.2f}" for cluster in one.clusters) or NONE,
    ),
    (
        "... a barrier of such a cluster, us",
        lambda one: ", ".join(f"{cluster.barrier_us:.2f}" for cluster in one.clusters) or NONE,
    ),
    ("host: a launch, with one output, us", lambda one: f"{one.host_launch_us:.2f}, {one.host_output_us:.2f}"),
    (
        "copy of 256 MB by 4, 8, 16 bytes a thread, us",
        lambda one: ", ".join(f"{one.widths_us[width]:.1f}" for width in ("4", "8", "16")),
    ),
    ("run, driver, torch, triton", _provenance),
)


def publish(root: Path, check: bool) -> list[str]:
    """Write the table again; returns the page if it changed, or with `check` where it differs."""
    path = root / PAGE
    if not path.is_file():
        return []
    old = path.read_text(encoding="utf-8")
    return write_pages({path: replace_block(old, BLOCK, table(read(root / LOG, HardwareRecord)))}, check)


def table(records: Sequence[HardwareRecord]) -> str:
    """One column for every kind of GPU, from its latest clean record, or from its latest if none is clean."""
    latest: dict[str, HardwareRecord] = {}
    for record in records:
        held = latest.get(record.gpu.name)
        if held is None or _clean(record) or not _clean(held):
            latest[record.gpu.name] = record
    if not latest:
        return NOTHING
    kinds = [latest[name] for name in sorted(latest)]
    lines = [[title, *map(cell, kinds)] for title, cell in ROWS]
    for size in sorted({copy.bytes for one in kinds for copy in one.copies}):
        found = [next((copy for copy in one.copies if copy.bytes == size), None) for one in kinds]
        cells = [_copied(copy) if copy else NONE for copy in found]
        lines.append([f"copy, {size / 1e6:g} MB read and written", *cells])
    return "\n" + table_md(("", *(one.gpu.name for one in kinds)), lines)


def _copied(copy: Copy) -> str:
    engine = "" if copy.bulk_us is None else f"; by the copy engine {copy.bulk_us:.2f} us"
    return f"{copy.us:.2f} us, {copy.terabytes_a_second:.2f} TB/s{engine}"


def _clean(record: HardwareRecord) -> bool:
    return not record.noise and not record.dirty
