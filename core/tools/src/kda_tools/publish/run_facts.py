"""Describe a run: code, machine, versions, settings, and whether pages show it."""

from kda_judge.contract.tasks import Task
from kda_judge.evidence.gpu_state import GpuState
from kda_judge.evidence.run_record import MachineWatch, RunRecord
from kda_tools.publish.report import noise_floor, publishable
from kda_tools.publish.staleness import CHANGES


def facts(record: RunRecord) -> dict[str, str]:
    """Name of a fact -> its Markdown: what ran, on which machine, and how."""
    host, settings, source = record.machine, record.settings, record.provenance
    gpu = host.before
    assert gpu is not None
    pins = (f"{arm} {' '.join(pin.split()[:2])} (wheel `{pin.split()[-1][:12]}`)" for arm, pin in source.pins.items())
    during = {"GPU during the run": _watched(record.machine_watch)} if record.machine_watch else {}
    return {
        "run": f"`{record.run_id}`, {record.seconds:.0f} s: `{record.command}`{_joined(record)}",
        "commit": f"`{source.commit}`{CHANGES * source.dirty}",
        "sha256": ", ".join(f"{part} `{digest[:12]}`" for part, digest in source.hashes.items()),
        "upstream": ", ".join(pins),
        "GPU": f"{gpu.name}, driver {gpu.driver}; before {_state(gpu)}; after {_state(host.after)}",
        **during,
        "host": f"{host.cpu}, {host.cores} cores, workers mostly on core {host.pinned_core}, {host.platform}",
        "versions": ", ".join(f"{name} {number}" for name, number in sorted(source.versions.items())),
        "settings": f"{settings.generations} generations of {settings.samples} samples of at least "
        f"{settings.target_sample_us} us, seeds {', '.join(map(str, settings.seeds))}, inputs "
        f"{', '.join(settings.families)}, isolate {settings.isolate}",
        "noise floor (A/A)": noise_floor(record),
    }


def _joined(record: RunRecord) -> str:
    return f", joined from the parts {', '.join(record.parts)}" if len(record.parts) > 1 else ""


def _state(gpu: GpuState | None) -> str:
    """Clock, temperature and power of one reading, and why its clock was lowered."""
    if gpu is None:
        return "not read"
    read = {"MHz": gpu.sm_mhz, "C": gpu.temperature_c, "W": gpu.power_w}
    shown = [f"{value:.0f} {unit}" for unit, value in read.items() if value is not None]
    return ", ".join([*shown, *gpu.throttle])


def _watched(watch: MachineWatch) -> str:
    """Lowest, median and highest clock, temperature and power of all readings during the run."""
    spreads = {"MHz": watch.sm_mhz, "C": watch.temperature_c, "W": watch.power_w}
    shown = [f"{s.low:.0f}, {s.median:.0f}, {s.high:.0f} {unit}" for unit, s in spreads.items() if s]
    shown += [f"{reason} {seconds:.1f} s" for reason, seconds in watch.throttle_s.items()]
    return (
        f"{watch.readings} readings in {watch.seconds:.0f} s (lowest, median, highest): {'; '.join(shown)}; "
        f"foreign processes: {len(watch.foreign)}"
    )


def state(task: Task, record: RunRecord, shown: set[str]) -> str:
    """Whether the run is published, is superseded, or why it cannot be published; `shown` comes from `shown_ids`."""
    if record.run_id in shown:
        return "published above"
    problems = publishable(task, record)
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        return f"not published: {'; '.join(problems[:3])}{more}"
    return "superseded"
