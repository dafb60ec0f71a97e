"""The process of one piece: `python -m kda_tools.fleet.piece_process JOB DESCRIPTOR`.

It imports what the job needs, reads its question from standard input, and writes its answer, one line, to the file that
is open as DESCRIPTOR.
The judge and its workers are those of the command that does the work on one GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from kda_judge.arms.process_tree import die_with_parent
from kda_judge.contract.errors import KdaError, MissingRequirement
from kda_judge.evidence import gpu_state
from kda_tools.fleet.gpu_worker import ACTOR
from kda_tools.fleet.node_facts import node_facts
from kda_tools.fleet.pieces import Answer, Job, Question

SHOWN = 4000
"""Most characters that are kept of an unexpected error; what torch says when memory is short has hundreds."""

NEEDS: Mapping[Job, tuple[str, ...]] = {
    Job.BENCH: ("kda_judge.bench", "kda_tools.project.export.portable"),
    Job.VALIDATE: ("kda_judge.bench", "kda_tools.lab.grid.run_grid"),
    Job.TUNE: ("triton", "cutlass.cute", "kda_tools.lab.tune.run_sweep"),
}
"""Job -> modules besides PyTorch whose imports take long. They are imported while another piece has the GPU."""


def main(job: str, descriptor: str) -> None:
    """Import, wait for the question, do the work, and write the answer."""
    end_with_actor()
    for name in ("torch", *NEEDS.get(Job(job), ())):
        with suppress(ImportError):
            import_module(name)
    question = Question.model_validate_json(sys.stdin.buffer.read())
    keep_to_share(question.slot, question.slots)
    text = answer_question(question).model_dump_json(exclude_defaults=True)
    with open(int(descriptor), "w", encoding="utf-8") as answer:  # noqa: PTH123  # it has no path
        answer.write(f"{text}\n")


def end_with_actor() -> None:
    """End when the actor ends, and accept its SIGINT whatever signal mask was inherited."""
    die_with_parent(signal.SIGKILL)
    if (actor := os.environ.get(ACTOR)) and os.getppid() != int(actor):
        sys.exit("the actor has ended")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def keep_to_share(slot: int, slots: int) -> None:
    """Keep to an equal share of the cores, so that no two workers of a node share one; with too few cores, use all."""
    cores = sorted(os.sched_getaffinity(0))
    if each := len(cores) // slots:
        os.sched_setaffinity(0, cores[slot * each : (slot + 1) * each])
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(each)  # it counted all cores when it was imported


def answer_question(question: Question) -> Answer:
    """Do the work; the answer holds the record, or why there is none."""
    from kda_tools.fleet import piece_jobs

    try:
        if question.piece is None:
            return Answer(line=node_facts(question.order).model_dump_json())
        before = gpu_state.read_state(0).uuid if question.order.kind == "cuda" else None
        made = piece_jobs.JOBS[question.order.job](question, question.piece)
        if before is not None and (after := gpu_state.read_state(0).uuid) != before:
            return Answer(failed=f"GPU 0 was {before}, is {after}: what was found in between may be of either")
    except MissingRequirement as error:
        return Answer(failed=str(error))
    except KdaError as error:
        return Answer(refused=str(error), exit_code=error.exit_code)
    except KeyboardInterrupt:
        return Answer(failed="interrupted, with nothing to keep")
    except Exception as error:  # noqa: BLE001  # perhaps this machine's fault: the piece is tried elsewhere
        traceback.print_exc()
        *_, last = traceback.extract_tb(error.__traceback__)
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Answer(failed=f"{where}: {type(error).__name__}: {error}"[:SHOWN])
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
