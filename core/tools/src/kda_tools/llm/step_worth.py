"""What a step should save by the recorded rows of the tasks it calls, and what it did save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kda_judge.contract.tasks import Task
from kda_judge.evidence import ledger, stats
from kda_judge.evidence.derive import MEASURED
from kda_judge.evidence.run_record import Metric, RunRecord
from kda_tools.llm.step_protocol import PhaseStep
from kda_tools.models.calls import Call
from kda_tools.publish import report

OPERATIONS = {
    "fused_inplace_qknorm_rope_kv_store": ("qknorm", "rope_kv_store", "qknorm_rope_kv_store"),
    "moe_align_block_size": ("moe_align",),
    "moe_topk_sum": ("topk_sum",),
    "softmax": ("softmax_temperature",),
}
"""A task's op -> the step's operations that it stands for, if these have other names."""


@dataclass(frozen=True)
class Saving:
    """The expected and the measured saving of a step, in microseconds."""

    by_op: Mapping[str, float]
    """Op -> sum over its calls with a recorded row: (upstream's device time - the solution's) * number of calls."""
    unknown: tuple[Call, ...]
    """Calls without a row, or whose row was not recorded on this GPU."""
    low: float
    high: float
    """`low` and `high` are the interval of the measured saving."""

    @property
    def by_rows(self) -> float:
        """The sum over all ops."""
        return sum(self.by_op.values())

    @property
    def agrees(self) -> bool | None:
        """Whether the sum lies within the interval; None where calls that are not in it may add what it lacks."""
        return None if self.unknown and self.by_rows <= self.high else self.low <= self.by_rows <= self.high


class RecordedRows:
    """Device times of rows on one GPU, from the newest record that has them."""

    def __init__(self, tasks: Sequence[Task], gpu: str, kernels: str) -> None:
        self._gpu, self._pin = gpu, " ".join(kernels.split()[:2])
        self._records = {
            task.folder: sorted(ledger.read(task.ledger), key=report.by_age, reverse=True) for task in tasks
        }

    def saved_us(self, call: Call) -> float | None:
        """Microseconds that one call saves; None if no record has its row with both arms."""
        for record in self._records.get(call.task, ()):
            if record.machine.before is None or record.machine.before.name != self._gpu:
                continue
            for row in record.rows:
                if row.id == call.row and row.verdict in MEASURED:
                    arm = self._upstream(record)
                    theirs = report.median(row, arm, Metric.DEVICE) if arm else None
                    ours = report.median(row, record.settings.subject, Metric.DEVICE)
                    if theirs is not None and ours is not None:
                        return theirs - ours
        return None

    def _upstream(self, record: RunRecord) -> str | None:
        """The arm of the release whose kernels the step ran."""
        against = record.settings.against
        return next((arm for arm in against if report.pin_name(record.provenance.pins.get(arm)) == self._pin), None)


def saving(phase: PhaseStep, rows: RecordedRows) -> Saving | None:
    """The saving of a phase as a CUDA graph, which the GPU's time decides; None if it was not timed as one."""
    mode = phase.modes.get("graph")
    if mode is None or mode.speedup is None:
        return None
    by_op, unknown = defaultdict[str, float](float), []
    for call in phase.checked.calls:
        one = rows.saved_us(call)
        if one is None:
            unknown.append(call)
        else:
            by_op[call.op] += one * call.count
    before = stats.summarise(mode.upstream).median
    low, high = (before * (1 - 1 / bound) for bound in (mode.speedup.low, mode.speedup.high))
    return Saving(by_op, tuple(unknown), low, high)
