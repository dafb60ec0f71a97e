"""Add the solution's plain export to a run, which measures it beside the solution."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.contract.tasks import Task
from kda_judge.evidence.gpu_state import has_gpu
from kda_judge.evidence.run_record import PORTABLE_ARM
from kda_tools.project.export.write import write_arm
from kda_tools.publish.report import SUBJECT


@contextmanager
def portable(task: Task, subject: str, ports: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """`ports`, plus the solution's export as `portable` if it is measured on a GPU and no port has that name."""
    if subject != SUBJECT or PORTABLE_ARM in ports or not has_gpu():
        yield dict(ports)
        return
    with TemporaryDirectory(prefix="kda-portable-") as folder:
        yield {**ports, PORTABLE_ARM: write_arm(task, Path(folder) / f"kda_{task.op}")}
