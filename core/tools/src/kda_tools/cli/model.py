"""Commands on whole models: the time of a step with upstream's ops and with the solutions, its calls and dataflow."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kda_judge.contract.errors import ExitCode, UsageError
from kda_tools.cli.base import MOST, command_line, recordable, relative, writable
from kda_tools.cli.base import app as kda

app = typer.Typer(help="Whole models: what a step is made of, and how our kernels change it.", no_args_is_help=True)
kda.add_typer(app, name="model")


@app.command("list")
def list_models() -> None:
    """List the models whose step can be run, with layers, tokens, releases and sources."""
    from kda_tools.models.known_models import load_models
    from kda_tools.models.views import print_models

    print_models(load_models())


@app.command()
def step(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that `kda model list` shows.")],
    arm: Annotated[
        Literal["upstream", "solution", "portable", "exact"],
        typer.Option(
            "--arm",
            help="What to compare with upstream: the solutions, their plain exports, "
            "those that can give upstream's bits, or nothing.",
        ),
    ] = "solution",
    release: Annotated[
        str | None,
        typer.Option(
            "--release", metavar="VERSION", help="Release of SGLang; by default the first that has the model."
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers", min=0, max=MOST, help="Number of layers, all kinds together; 0: as many as the real model has."
        ),
    ] = None,
    denoise: Annotated[
        int | None,
        typer.Option(
            "--denoise",
            min=0,
            max=MOST,
            help="Denoising steps over which the outputs are compared; by default 50, without a GPU 2.",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option("--mode", metavar="MODE", help="eager, graph, compile; may be repeated.")
    ] = None,
    processes: Annotated[int, typer.Option("--processes", max=MOST, help="Number of processes to time.")] = 3,
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=MOST, help="Samples of each mode, arm and process.")
    ] = 12,
    seed: Annotated[int, typer.Option("--seed", min=0, max=1 << 30, help="Seed of weights and inputs.")] = 0,
    offline: Annotated[bool, typer.Option("--offline", help="Use only the wheel in the cache.")] = False,
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Measure although the GPU is busy.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Append the run to the models' ledger.")] = False,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the run's record there.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Keep a profile of upstream's step, for `kda model trace`; --record also records its hotspots.",
        ),
    ] = None,
) -> None:
    """Run one denoising step with random weights, with upstream's ops and ours. Without a GPU: tiny, not timed."""
    from kda_judge.contract.tasks import checkout_root
    from kda_judge.evidence.record_log import append
    from kda_tools.models import step_hotspots
    from kda_tools.models.known_models import folder, load_models
    from kda_tools.models.run_step import MODES, Plan, run
    from kda_tools.models.step_record import log
    from kda_tools.models.views import print_step
    from kda_tools.terminal import say

    writable(json)
    if trace is not None and (trace.exists() or not trace.name.endswith((".json", ".json.gz"))):
        raise UsageError(f"--trace {trace}: expected a new file, named NAME.json or NAME.json.gz")
    writable(trace, "--trace")
    recordable(log(folder()) if record else None)
    known_models = load_models()
    plan = Plan(
        model=model,
        release=release or known_models.releases_of(model)[0],
        arm=arm,
        layers=layers,
        seed=seed,
        processes=processes,
        samples=samples,
        denoise=denoise,
        modes=tuple(mode or MODES),
        offline=offline,
        allow_busy=allow_busy,
        command=command_line(),
        trace=trace,
    )
    try:
        found = run(plan, known_models, folder(), say)
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing is kept of a run that did not end", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if record:
        append(log(folder()), found)
    if record and trace is not None:
        root = checkout_root()
        assert root is not None, "the known models were read from it"
        append(step_hotspots.log(folder()), step_hotspots.read_trace(trace, found, root))
    if json is not None:
        json.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print_step(found)
    if trace is not None:
        typer.echo(f"{relative(trace.absolute())}: upstream's step; next: kda model trace {trace}")


@app.command()
def calls(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Names that `kda model list` shows; none: all.")
    ] = None,
    release: Annotated[
        str | None, typer.Option("--release", metavar="VERSION", help="Release of SGLang; by default all.")
    ] = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Write `calls_a_step` into each row, from the latest release that calls it."),
    ] = False,
) -> None:
    """Count a step's calls of the tasks' ops, at real sizes with all layers. Computes nothing and needs no GPU."""
    from kda_judge.contract.tasks import find_tasks
    from kda_tools.models.census import by_row, with_calls
    from kda_tools.models.known_models import folder, load_models
    from kda_tools.models.run_step import find_calls
    from kda_tools.models.views import print_calls

    known = load_models()
    latest_first = [release] if release else list(reversed(known.releases))
    found = []
    for version in latest_first:
        for name in models or known.models:
            if release or version in known.releases_of(name):
                requests = find_calls(name, version, known, folder())
                print_calls(f"{name}, sglang {version}", requests)
                found += [answer.calls for answer in requests]
    counts = by_row(found)
    for task in find_tasks() if write else ():
        path = task.path / "bench" / "workloads.toml"
        if own := {row: count for (of, row), count in counts.items() if of == task.folder}:
            path.write_text(with_calls(path.read_text(encoding="utf-8"), own), encoding="utf-8")
            typer.echo(f"{relative(path)}: calls_a_step of {len(own)} rows")


@app.command()
def flow(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that `kda model list` shows.")],
    release: Annotated[
        str | None, typer.Option("--release", metavar="VERSION", help="Release of SGLang; by default the latest.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, max=MOST, help="Layers, all kinds together; by default all.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Append it to the models' ledger of flows.")] = False,
) -> None:
    """Say how many bytes a step must move if it is fused as far as its dataflow allows. Needs no GPU."""
    from kda_judge.evidence.record_log import append
    from kda_tools.models import step_flow
    from kda_tools.models.known_models import folder, layers_of, load_models
    from kda_tools.models.run_step import find_flow

    known = load_models()
    recordable(step_flow.log(folder()) if record else None)
    found = find_flow(model, release or known.releases_of(model)[-1], layers, known, folder(), command_line())
    if record:
        append(step_flow.log(folder()), found)
    typer.echo(
        f"{model}, sglang {found.release}, layers: {layers_of(found.layers, found.layers_of_model)}; "
        f"{len(found.kernels)} kernels between products, convolutions and attention, {sum(found.kernels) / 1e9:.2f} GB"
    )


@app.command()
def lock() -> None:
    """List the upstream files that the models may read, with their sha256."""
    from kda_judge.arms import upstream
    from kda_judge.contract.tasks import checkout_root
    from kda_tools.models.known_models import folder, load_models
    from kda_tools.models.lock_wheels import write_lock

    known_models = load_models()
    for release, pin in known_models.releases.items():
        wheel = upstream.obtain(pin, upstream.cache_folder(checkout_root()), offline=False)
        path = folder() / pin.files
        typer.echo(f"{relative(path)}: {write_lock(known_models.lock[release], wheel, path)} files")
