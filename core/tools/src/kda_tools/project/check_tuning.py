"""Check that a task's tuned tables, and the page about them, follow from its recorded sweeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kda_judge.contract.errors import KdaError
from kda_judge.contract.tasks import Task
from kda_tools.lab.tune import tuning_files as tune
from kda_tools.lab.tune.choose_lines import unrecorded_lines
from kda_tools.publish.tuning_page import page, page_problems

CHECK_TIMEOUT_S = 300


def problems(task: Task) -> list[str]:
    """What is wrong with the task's tuned tables, one line each; a task without sweeps and tables is fine.

    The sweeps name configurations of the solution, so the check imports the solution. It does so in a separate process,
    because the current process may judge the solution afterwards.
    """
    if not tune.has_sweeps(task):
        return [
            f"{path}: there is no bench/tune.py that it follows from"
            for path in (tune.tuned_path(task), tune.log(task), page(task))
            if path.exists()
        ]
    code = "import sys; from kda_tools.project import check_tuning; check_tuning.answer(sys.argv[1])"
    command = [sys.executable, "-c", code, str(task.path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=CHECK_TIMEOUT_S)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [f"{task.path / 'bench' / 'tune.py'}: cannot be checked: {why}"]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(path: str) -> None:
    """Run in the separate process of `problems`: print what is wrong as JSON."""
    task = Task(Path(path))
    try:
        found = check(task)
    except KdaError as error:
        found = [str(error)]
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def check(task: Task) -> list[str]:
    """As `problems`, in this process."""
    sweeps, path = tune.load(task), tune.tuned_path(task)
    current = tune.read_tables(path)
    found = [f"{path}: {problem}" for problem in unrecorded_lines(sweeps, tune.deciding_sweeps(task), current)]
    if found:
        return found
    tables = tune.derive_tables(task, sweeps)
    for name in [*tables, *(current.keys() - tables.keys())]:
        if list(tables.get(name, ())) != list(current.get(name, ())):
            found.append(f"{path}: [[{name}]]: not what {tune.log(task)} gives; run `kda tune {task.op} --derive`")
    if not found and path.read_text(encoding="utf-8") != tune.text_of(task.op, tables):
        found.append(f"{path}: not as `kda tune {task.op} --derive` writes it; run that")
    return found or page_problems(task, sweeps)
