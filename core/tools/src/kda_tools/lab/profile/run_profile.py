"""`kda profile`: runs one row under Nsight Compute, by an opponent and the subject, each alone in its process.

Only the last of a few calls on the same hot inputs is profiled, because the first ones compile and make plans. The
numbers explain results but are not results: ncu runs each kernel several times by itself and leaves the clocks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload
from kda_judge.evidence import gpu_state, provenance
from kda_judge.judge.open_row import traffic
from kda_judge.judge.oracle import load_reference
from kda_judge.session import Request, Session, arm_spec, fit, offered, open_session
from kda_tools.lab.inspect import cuda_tools
from kda_tools.lab.inspect.arm_alone import Job
from kda_tools.lab.profile import nsight
from kda_tools.lab.profile.profile_record import Kernel, ProfileRecord

WARM_UPS = 3
"""Calls before the profiled one: the first compiles, the second may still fill a plan or a pool of memory."""


def open_profile(task: Task, arm: str, against: str, allow_busy: bool) -> Session:
    """The two arms on this machine's GPU.

    Raises:
        MissingRequirement: no GPU, or a busy one without `allow_busy`.
    """
    if not gpu_state.has_gpu():
        raise MissingRequirement("profile needs an NVIDIA GPU, and none is visible here; `kda doctor` says more")
    # This imports torch, for seconds. A job that ran just before is then out of NVML's sampling period: no busy GPU.
    session = open_session(Request(task=task, subject=arm, against=[against], device="cuda", allow_busy=allow_busy))
    reason = gpu_state.busy(gpu_state.read_state(session.gpu or 0))
    if reason is not None and not allow_busy:
        raise MissingRequirement(f"the GPU is busy: {reason}. Wait, or profile anyway with --allow-busy")
    return session


def find_rows(task: Task, ids: Sequence[str]) -> tuple[Workload, ...]:
    """The frozen rows with these ids, in the order asked for."""
    known = {row.id: row for row in task.workloads}
    for wanted in ids:
        if wanted not in known:
            raise UsageError(f"--row {wanted!r}: no such row; nearest: {', '.join(nearest(wanted, list(known)))}")
    return tuple(known[wanted] for wanted in ids)


def profile(session: Session, row: Workload, reports: Path, command: str) -> ProfileRecord:
    """Profile one call of `row` by each arm; ncu's own reports stay in the folder `reports`.

    Raises:
        MissingRequirement: no ncu, or it may not or cannot read the counters here.
        ArmFailed: an arm raised, or launched nothing.
    """
    task, settings = session.request.task, session.settings
    (row,) = fit(session, offered(session, (row,)), task.path / "bench" / "workloads.toml")
    ncu = cuda_tools.find("ncu", nsight.INSTALL)
    started = datetime.now(timezone.utc)
    state = gpu_state.read_state(session.gpu or 0)
    arms = tuple(dict.fromkeys((*settings.against, settings.subject)))
    source = provenance.collect(task, arms, state.driver)
    run_id = provenance.run_id(started)
    captured = {arm: _capture(session, row, arm, ncu, reports / f"{row.id}-{arm}-{run_id}.ncu-rep") for arm in arms}
    return ProfileRecord(
        run_id=run_id,
        utc=provenance.utc(started),
        command=command,
        task=task.op,
        row=row.id,
        op=row.op,
        bytes_moved=traffic(session.config.ops[row.op], row, load_reference(task)).moved,
        provenance=source,
        gpu=state,
        ncu=cuda_tools.version(ncu),
        arms=captured,
    )


def _capture(session: Session, row: Workload, arm: str, ncu: Path, report: Path) -> tuple[Kernel, ...]:
    report.parent.mkdir(parents=True, exist_ok=True)
    job = Job(
        arm=arm_spec(session, arm),
        visits=cuda_tools.visits(session, [row]),
        order=(0,) * (WARM_UPS + 1),
        draw_on=session.device,
        mark_last=True,
    )
    ran = cuda_tools.run_below(nsight.capture_command(ncu, report), session, job, {})
    nsight.check(ran, arm, row.id, report)
    # The locale C, because in others numbers may have points for commas.
    printed = cuda_tools.run_tool(nsight.import_command(ncu, report), {"LC_ALL": "C"})
    if printed.code:
        raise MissingRequirement(f"ncu: cannot read its own report {report} (exit code {printed.code}){printed.tail}")
    try:
        return nsight.kernels(printed.output)
    except MissingRequirement as error:
        raise MissingRequirement(f"{report}: {error}") from None
