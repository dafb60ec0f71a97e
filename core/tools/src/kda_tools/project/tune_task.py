"""`kda tune`: run a sweep, record it, and write the tables and the page that follow from it."""

from kda_judge.contract.errors import ExitCode
from kda_judge.contract.tasks import Task
from kda_judge.evidence import append_only, record_log
from kda_tools.lab.inspect.aot import check_targets
from kda_tools.lab.tune import run_sweep
from kda_tools.lab.tune import tuning_files as tune
from kda_tools.lab.tune.trials import compile_all
from kda_tools.publish import sweep_view, tuning_page
from kda_tools.terminal import say


def run(request: run_sweep.Request) -> ExitCode:
    """On a GPU: measure, record and choose. Without one: compile every candidate for the task's targets."""
    planned = run_sweep.plan(request)
    if planned.gpu is None:
        _compile(planned)
        return ExitCode.OK
    path = tune.log(request.task)
    append_only.demand_appendable(path)
    record = run_sweep.sweep(planned, sweep_view.print_row)
    record_log.append(path, record)
    say(f"recorded in {path}: {record.seconds:.0f} s")
    if record.usable:
        rederive(request.task)
        return ExitCode.OK
    why = ["some rows were not measured"] * record.partial + list(record.noisy)
    say(f"no table follows from it: {'; '.join(why)}")
    tuning_page.write_page(request.task, tune.load(request.task))
    return ExitCode.INTERRUPTED if record.partial and planned.whole and request.limit_s is None else ExitCode.OK


def rederive(task: Task, gpu: str | None = None) -> None:
    """Write `tuned.toml` and its page from the recorded sweeps, and show the tables; `gpu` as in `deciding_sweeps`."""
    sweeps = tune.load(task)
    tables = tune.derive_tables(task, sweeps, gpu)
    page = tuning_page.page(task)
    written = {tune.tuned_path(task): tune.write(task, tables), page: tuning_page.write_page(task, sweeps)}
    sweep_view.print_tables(tables)
    for path, changed in written.items():
        say(f"{path}: {'written' if changed else 'unchanged'}")
    records = tune.recorded(task)
    if not records:
        say("no sweep is recorded yet: the lines are what somebody wrote")
    elif records[-1].solution != run_sweep.solution_hash(task):
        say(f"the solution has changed since the sweep of {records[-1].utc}: `kda tune {task.op}` measures again")
    if records and records[-1] not in tune.deciding_sweeps(task):
        device = records[-1].device
        say(f"the lines stay those of another kind of GPU; `kda tune {task.op} --derive --gpu {device!r}` changes that")


def _compile(planned: run_sweep.Plan) -> None:
    targets = planned.request.task.config.capabilities
    check_targets(planned.request.task, targets)
    used = compile_all(planned.trials, targets)
    for target in targets:
        sweep_view.print_compiled(planned.trials, used, target)
    say("CORRECT: a GPU would check every candidate against the oracle, time it on every row, and choose.")
