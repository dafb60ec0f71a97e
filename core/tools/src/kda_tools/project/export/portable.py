"""The solution as a port: its plain export, made afresh for a run that measures it beside the solution."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.contract.tasks import Task
from kda_judge.evidence.gpu_state import has_gpu
from kda_judge.evidence.run_record import PORTABLE_ARM
from kda_tools.project.export.write import export
from kda_tools.publish.report import SUBJECT


@contextmanager
def portable(task: Task, subject: str, ports: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """`ports`, and for a measured solution its export under the name `portable`, unless one of that name is there."""
    if subject != SUBJECT or PORTABLE_ARM in ports or not has_gpu():
        yield dict(ports)
        return
    with TemporaryDirectory(prefix="kda-portable-") as folder:
        yield {**ports, PORTABLE_ARM: export(task, Path(folder) / f"kda_{task.op}", "plain", runtime=False)}
