"""`kda llm`: serve a language model, load it, profile it, and say which of its kernels are worth a task."""

from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from kda_judge.contract.errors import ArmFailed, UsageError
from kda_tools.cli.base import MOST, command_line, relative, seconds, writable
from kda_tools.cli.base import app as kda

app = typer.Typer(help="Language models in serving: from a server to task cards.", no_args_is_help=True)
kda.add_typer(app, name="llm")
Url = Annotated[str, typer.Argument(metavar="URL", help="A running server: http://HOST:PORT.")]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A name that `kda llm list` shows.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record there.")]
Record = Annotated[bool, typer.Option("--record", help="Append it to the checkout's records.")]


Engine = Literal["transformers", "sglang", "vllm"]
Profiled = Literal["sglang", "vllm"]
"""Engines with a profiler."""
Target = Literal["h200", "b200"]
"""Kinds of GPU that a serving command can be for."""


@app.command("list")
def list_llms() -> None:
    """List the models, how they are served, and where their figures come from."""
    from kda_tools.llm.known_llms import load_llms
    from kda_tools.llm.llm_views import list_lines

    typer.echo("\n".join(list_lines(load_llms())))


@app.command()
def serve(
    model: ModelName = "tiny",
    engine: Annotated[Engine, typer.Option("--engine", help="The server.")] = "transformers",
    target: Annotated[
        Target | None, typer.Option("--target", help="GPUs that the command is for; without it: this machine's.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    traces: Annotated[Path, typer.Option("--traces", metavar="DIR", help="Where vLLM's profiler is to write.")] = Path(
        "traces"
    ),
    show: Annotated[bool, typer.Option("--print", help="Print the command, and start nothing.")] = False,
) -> None:
    """Serve MODEL until Ctrl-C. Without arguments: a tiny random model on this machine, by transformers."""
    import shlex

    from kda_judge.evidence import gpu_state
    from kda_tools.llm import engines
    from kda_tools.llm import serve as serving
    from kda_tools.llm.known_llms import load_llms

    known = load_llms()
    if target is None and gpu_state.has_gpu():
        target = _this_gpu(known.model(model).hub is None)
    words = engines.command(known, model, engine, target, host, port, str(traces.absolute()))
    if show:
        typer.echo(shlex.join(words))
        return
    words[0] = engines.find_program(known.engines[engine].program, known.engines[engine].install)
    serving.demand_free(host, port)
    local = known.model(model).hub is None
    if local:
        typer.echo(f"model: {words[words.index(engines.model_path(known, model))]}")
    named = f"[{host}]" if ":" in host else host
    code = serving.run(words, engines.environment(local), f"http://{named}:{port}", typer.echo)
    if code:
        raise ArmFailed(f"{words[0]}: ended with exit code {code}; what it said is above")


def _this_gpu(local: bool) -> Target:
    """The target of this machine's GPU; for a `local` model, which is small, any GPU will do."""
    from kda_judge.evidence import gpu_state

    known: tuple[Target, ...] = get_args(Target)
    gpu = gpu_state.read_state(0).name
    found = next((target for target in known if target in gpu.lower()), known[0] if local else None)
    if found is None:
        raise UsageError(f"--target: expected {' or '.join(known)}: this machine's {gpu} is none of them")
    return found


@app.command()
def bench(
    url: Url,
    load: Annotated[Literal["low", "mid", "high"], typer.Option("--load", help="How many requests at once.")] = "low",
    data: Annotated[
        str, typer.Option("--data", metavar="random|FILE", help="Random tokens, or JSON lines with a key `prompt`.")
    ] = "random",
    model: Annotated[
        str | None, typer.Option("--model", help="Its name on the server; by default the first listed.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder or Hub's name; by default the model's.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, max=MOST, help="Requests to send, in place of the load's.")
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", min=1, help="Tokens of a random prompt.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", min=1, help="Tokens to ask for at most.")
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s",
            metavar="SECONDS",
            min=1,
            callback=seconds,
            help="Time after which the load ends, as partial.",
        ),
    ] = 3600.0,
    record: Record = False,
    json: JsonFile = None,
) -> None:
    """Load a server with guidellm: time to first token, time between tokens, tokens a second, failures."""
    from kda_judge.evidence.record_log import append
    from kda_tools.llm import engines, guidellm_load, load_record, server_client
    from kda_tools.llm.known_llms import folder, load_llms
    from kda_tools.llm.llm_views import load_lines

    writable(json)
    if tokenizer is not None and tokenizer.startswith(("/", ".", "~")) and not Path(tokenizer).is_dir():
        raise UsageError(f"--tokenizer {tokenizer}: expected a folder or a name on the Hub, got no folder there")
    known = load_llms()
    url = server_client.check_url(url)
    listed = server_client.served_models(url) if model is None else []
    name = model or (listed[0] if listed else engines.model_path(known, "tiny"))
    chosen = known.loads[load]
    plan = guidellm_load.LoadPlan(
        url=url,
        model=name,
        tokenizer=tokenizer or name,
        load=load,
        concurrency=chosen.concurrency,
        requests=requests or chosen.requests,
        input_tokens=input_tokens or known.tokens.input,
        output_tokens=output_tokens or known.tokens.output,
        data=None if data == "random" else Path(data),
        local=Path(tokenizer or name).is_dir(),
        timeout_s=timeout_s,
        command=command_line(),
    )
    found = guidellm_load.run(plan, typer.echo)
    if record:
        append(load_record.log(folder()), found)
    if json is not None:
        json.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    typer.echo("\n".join(load_lines(found)))
    if not found.succeeded:
        raise ArmFailed(f"{url}: none of {found.requests} requests succeeded; the record says why")
    if found.partial:
        raise ArmFailed(f"{url}: {'the server died' if found.died else 'the load ended early'}: a partial record")


@app.command()
def profile(
    url: Url,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the server writes; for vLLM its own folder.")],
    engine: Annotated[Profiled | None, typer.Option("--engine", help="By default what the server says it is.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=MOST, help="Steps to profile with SGLang.")] = 10,
    duration: Annotated[
        float, typer.Option("--seconds", callback=seconds, help="Seconds to profile with vLLM, which counts no steps.")
    ] = 2.0,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="With operators, shapes and frames, which slow the host down.")
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", callback=seconds, help="Seconds to wait for a steady load, then for the trace.")
    ] = 60.0,
) -> None:
    """Have a loaded server of SGLang or vLLM write a trace, once its load is steady."""
    from kda_tools.llm import profile_server, server_client
    from kda_tools.llm.known_llms import load_llms

    url = server_client.check_url(url)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: expected the folder where the server writes, got a file")
    name = engine or server_client.owner(url)
    if name not in get_args(Profiled):
        raise UsageError(f"--engine: {url} does not say that it is SGLang or vLLM, it says {name!r}; name the engine")
    plan = profile_server.ProfilePlan(
        url=url, engine=cast("Profiled", name), folder=out, steps=steps, seconds=duration, shapes=shapes, wait_s=wait
    )
    for path in profile_server.run(plan, load_llms().engine(plan.engine), typer.echo):
        typer.echo(relative(path.absolute()))
