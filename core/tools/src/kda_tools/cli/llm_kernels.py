"""`kda llm capture`, `step`, `inventory` and `cards`: what a model's steps run, and which kernels are worth a task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_judge.contract.errors import UsageError
from kda_tools.cli.base import MOST, command_line, relative, writable
from kda_tools.cli.llm import JsonFile, ModelName, Record, app

if TYPE_CHECKING:
    from kda_tools.llm.inventory import Inventory
    from kda_tools.traces.catalogue import Entry
    from kda_tools.traces.copy_limit import CopyLimit

LONGEST = 1 << 20
"""Most tokens of a sequence."""
Layers = Annotated[int | None, typer.Option("--layers", min=1, max=MOST, help="Layers; by default all.")]
Prefill = Annotated[
    list[int] | None,
    typer.Option(
        "--prefill", min=1, max=LONGEST, help="Tokens of a prompt; may be repeated. 4096 if --decode is left out, too."
    ),
]
Decode = Annotated[
    list[int] | None,
    typer.Option(
        "--decode",
        min=1,
        max=MOST,
        help="Sequences in a step; may be repeated. 1, 16, 64 if --prefill is left out, too.",
    ),
]
Kv = Annotated[
    int | None,
    typer.Option("--kv", min=2, max=LONGEST, help="Tokens of each sequence in decode steps; by default 2048."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=1 << 30)]
Offline = Annotated[bool, typer.Option("--offline", help="Take the wheel from the cache only.")]
AllowBusy = Annotated[bool, typer.Option("--allow-busy", help="Measure on a GPU that others use.")]


@app.command()
def capture(
    model: ModelName,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder for traces and capture.json.")],
    layers: Layers = None,
    prefill: Prefill = None,
    decode: Decode = None,
    kv: Kv = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=MOST, help="Steps in a trace.")] = 3,
    samples: Annotated[int, typer.Option("--samples", min=1, max=MOST, help="Samples of a step.")] = 20,
    seed: Seed = 0,
    offline: Offline = False,
    allow_busy: AllowBusy = False,
) -> None:
    """Run a model's steps here, with random weights, in a server's structure. Without a GPU: tiny, untimed."""
    from kda_judge.evidence import gpu_state
    from kda_tools.llm.known_llms import folder, load_llms
    from kda_tools.traces.cards import empty_folder

    known = load_llms()
    known.model(model)
    empty_folder(out, "DIR")
    from kda_tools.llm import capture as capturing
    from kda_tools.llm.llm_views import capture_lines

    prefills, decodes, tokens = _asked(prefill, decode, kv, gpu=gpu_state.has_gpu())
    plan = capturing.CapturePlan(
        model=model,
        layers=layers,
        prefill=prefills,
        decode=decodes,
        kv=tokens,
        steps=steps,
        samples=samples,
        seed=seed,
        folder=out,
        offline=offline,
        allow_busy=allow_busy,
        command=command_line(),
    )
    pin = known.kernels.pin
    found = capturing.run(plan, known, pin, folder() / pin.files, typer.echo)
    typer.echo("\n".join(capture_lines(found)))
    typer.echo(f"{relative(out.absolute())}: the traces and the record; next: kda llm inventory {out}")


@app.command()
def step(
    model: ModelName,
    layers: Layers = None,
    prefill: Prefill = None,
    decode: Decode = None,
    kv: Kv = None,
    mode: Annotated[list[str] | None, typer.Option("--mode", help="graph, eager; may be repeated.")] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, max=MOST, help="Processes to time.")] = 3,
    samples: Annotated[int, typer.Option("--samples", min=1, max=MOST, help="Samples an arm, process, mode.")] = 12,
    seed: Seed = 0,
    offline: Offline = False,
    allow_busy: AllowBusy = False,
    record: Record = False,
    json: JsonFile = None,
) -> None:
    """Run a model's step with upstream's kernels and with ours, interleaved. Without a GPU: tiny, not timed."""
    from kda_judge.evidence import gpu_state, record_log
    from kda_tools.llm import run_step, step_protocol
    from kda_tools.llm.known_llms import folder, load_llms
    from kda_tools.llm.llm_views import step_lines
    from kda_tools.llm.served_phase import phases

    writable(json)
    plan = run_step.StepPlan(
        model=model,
        layers=layers,
        phases=phases(*_asked(prefill, decode, kv, gpu=gpu_state.has_gpu())),
        modes=tuple(mode or run_step.MODES),
        processes=processes,
        samples=samples,
        seed=seed,
        offline=offline,
        allow_busy=allow_busy,
        command=command_line(),
    )
    found = run_step.run(plan, load_llms(), folder(), typer.echo)
    if record and not gpu_state.has_gpu():
        typer.echo("nothing is recorded: without a GPU nothing was timed")
    elif record:
        record_log.append(step_protocol.log(folder()), found)
    if json is not None:
        json.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    typer.echo("\n".join(step_lines(found)))


@app.command()
def inventory(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="The folder of a capture, or a server's traces.")
    ],
    model: Annotated[str | None, typer.Option("--model", help="Model of a server's traces.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="Name and release, for a server's traces.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, max=MOST, help="Steps of a server's trace.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the inventory there.")] = None,
    threshold: Annotated[float, typer.Option(min=0, max=100, help="Least share of GPU time to show, in per cent.")] = 1,
    record: Record = False,
) -> None:
    """Say what the steps of a model spend the GPU's time on, phase by phase."""
    from kda_judge.evidence import provenance, record_log
    from kda_tools.llm import inventory as inventories
    from kda_tools.llm.kernel_cards import judge, worth
    from kda_tools.llm.known_llms import folder, load_llms
    from kda_tools.llm.llm_views import inventory_lines

    writable(out, "--out")
    now = (provenance.run_id(), provenance.utc(), command_line())
    for path in traces:
        if not path.exists():
            raise UsageError(f"TRACE {path}: expected the folder of a capture, or a server's trace, got nothing there")
    folders = [path for path in traces if path.is_dir()]
    if folders:
        if len(traces) > 1:
            raise UsageError(f"{folders[0]}: expected one folder of a capture, or a server's traces, got several paths")
        if (model, engine, steps) != (None, None, None):
            raise UsageError(f"{traces[0]}: a capture knows them: leave --model, --engine and --steps out")
        found = inventories.of_capture(traces[0], *now)
    else:
        if model is None or engine is None:
            raise UsageError("kda llm inventory: traces of a server need --model and --engine, as 'sglang 0.5.23'")
        load_llms().model(model)
        found = inventories.of_traces(traces, steps, model, engine, *now)
    lines = worth(judge(found, _catalogue()), threshold / 100)
    if out is not None:
        out.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if record:
        record_log.append(inventories.log(folder()), found)
    typer.echo("\n".join(inventory_lines(found, lines)))


@app.command()
def cards(
    file: Annotated[Path, typer.Argument(metavar="INVENTORY", help="A file of `kda llm inventory --out`.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    threshold: Annotated[float, typer.Option(min=0, max=100, help="Least share of GPU time, in per cent.")] = 1,
) -> None:
    """Write a task card for every kernel of an inventory that is worth one; `kda new --from-trace` takes it."""
    from kda_tools.llm import inventory as inventories
    from kda_tools.llm import kernel_cards
    from kda_tools.llm.llm_views import worth_lines
    from kda_tools.traces import cards as drafts
    from kda_tools.traces import trace_view

    found = inventories.read(file)
    made, lines = kernel_cards.cards(found, _catalogue(), _limits(found), threshold / 100)
    drafts.empty_folder(out, "DIR")
    paths = drafts.write(made, out)
    typer.echo("\n".join(worth_lines(lines)))
    typer.echo("")
    for line in trace_view.card_lines(made, [path.name for path in paths]):
        typer.echo(line)
    typer.echo(f"{kernel_cards.names(made)} in {relative(out.absolute())}")


def _catalogue() -> "tuple[Entry, ...]":
    from kda_tools import checkout_folder
    from kda_tools.traces import catalogue

    return catalogue.load(checkout_folder.root())


def _limits(found: "Inventory") -> "dict[str, CopyLimit | None]":
    from kda_judge.contract.tasks import find_tasks
    from kda_tools.traces.copy_limit import copy_limit

    return {gpu: copy_limit(gpu, find_tasks()) for gpu in {phase.gpu for phase in found.phases}}


@app.command()
def lock() -> None:
    """List the upstream files whose kernels a capture runs, with their sha256."""
    from kda_judge.arms import upstream
    from kda_judge.contract.tasks import checkout_root
    from kda_tools.llm.known_llms import folder, load_llms
    from kda_tools.models.known_models import Patterns
    from kda_tools.models.lock_wheels import write_lock

    kernels = load_llms().kernels
    wheel = upstream.obtain(kernels.pin, upstream.cache_folder(checkout_root()), offline=False)
    path = folder() / kernels.pin.files
    count = write_lock(Patterns(take=kernels.take, without=kernels.without), wheel, path)
    typer.echo(f"{relative(path)}: {count} files")


def _asked(
    prefill: list[int] | None, decode: list[int] | None, kv: int | None, *, gpu: bool
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Tokens of prefills, sequences of decodes, and tokens of each such sequence: those given, else the defaults."""
    kv = kv or (2048 if gpu else 32)
    if prefill or decode:
        return tuple(prefill or ()), tuple(decode or ()), kv
    return ((4096,), (1, 16, 64), kv) if gpu else ((24,), (1, 4), kv)
