"""`kda model denoise` and `kda model compare`: measure whole requests of an installed SGLang."""

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_tools.cli.base import command_line, relative
from kda_tools.cli.model import app

if TYPE_CHECKING:
    from kda_tools.models.denoise_presets import Choice
    from kda_tools.models.denoise_run import Plan

Text = str | None


@app.command()
def denoise(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="One of `kda model presets`.")],
    label: Annotated[str, typer.Option("--label", help="Names the run, beside the preset.")] = "baseline",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the folders of runs are.")] = Path("denoise"),
    repeats: Annotated[
        int, typer.Option(min=1, max=100, help="How often SGLang runs; three or more give intervals.")
    ] = 3,
    model: Annotated[
        Text, typer.Option("--model", help="A folder (then the Hub is not asked), or another name.")
    ] = None,
    transformer_path: Annotated[
        Text, typer.Option("--transformer-path", help="Other weights of the transformer.")
    ] = None,
    prompt_path: Annotated[Text, typer.Option("--prompt-path", help="A file with one line, the prompt.")] = None,
    image: Annotated[Text, typer.Option("--image", help="The image that the preset starts from.")] = None,
    warmup: Annotated[bool, typer.Option(help="Repeat the request, and count the second one.")] = True,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="With torch.compile.")] = True,
    sync_steps: Annotated[bool, typer.Option("--sync-steps", help="Wait for the GPU around every step.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="With SGLang's profiler; never compared.")] = False,
) -> None:
    """Run `sglang generate` with a preset, and keep its perf dumps, its log, and one image or clip.

    No number is kept if SGLang used diffusers for any component, failed, or wrote no dump.
    """
    from kda_tools.models import denoise_run
    from kda_tools.models.denoise_presets import Choice

    choice = Choice(
        model_path=model,
        transformer_path=transformer_path,
        prompt_path=prompt_path,
        image=image,
        warmup=warmup,
        compiled=compiled,
        sync_steps=sync_steps,
        profiled=profile,
    )
    made = _plan(preset, choice, label, out, repeats)
    typer.echo(f"{command_line()}: {repeats} times, {relative(made.folder.absolute())}")
    denoise_run.make(made, typer.echo)
    typer.echo(f"kept in {relative(made.folder.absolute())}; compare two: kda model compare A B")


def _plan(name: str, choice: "Choice", label: str, out: Path, repeats: int) -> "Plan":
    """The plan of the run; everything that the run needs is checked first."""
    from kda_judge.contract.errors import MissingRequirement, UsageError
    from kda_tools.models import denoise_presets
    from kda_tools.models.denoise_run import Plan
    from kda_tools.models.perf_dumps import Settings, sha256
    from kda_tools.project import preflight

    if not re.fullmatch(r"[\w.-]+", label):
        raise UsageError(f"--label {label!r}: expected letters, digits, '.', '_' and '-': it names a folder")
    preset = denoise_presets.find_preset(name)
    denoise_presets.check(name, preset, choice, os.environ)
    preflight.demand_passed(preflight.checks(out))
    program = shutil.which("sglang")
    installed = preflight.demand_release(program, preflight.releases()) if program else None
    if program is None or installed is None:
        raise MissingRequirement("sglang: expected the command of an installed SGLang on PATH, got none")
    denoise_presets.check_release(name, preset, str(installed.version))
    gpus = preflight.choose(preset.gpus)
    settings = Settings(
        preset=name,
        values=preset,
        choice=choice,
        release=str(installed.version),
        commit=preflight.commit(installed),
        gpu=", ".join(gpu.name for gpu in gpus),
        driver=gpus[0].driver,
        prompt_sha256=sha256(Path(choice.prompt_path)) if choice.prompt_path else None,
        image_sha256=sha256(Path(choice.image)) if choice.image else None,
    )
    return Plan(program, settings, label, out, repeats, preflight.environment(preset.gpus))


@app.command()
def presets() -> None:
    """List the presets of `kda model denoise`."""
    from kda_tools.models.denoise_presets import presets as all_presets

    for name, one in all_presets().items():
        size = f"{one.width}x{one.height}" if one.width else "the model's size"
        frames = f", {one.frames} frames" if one.frames else ""
        steps = f"{one.steps} steps" if one.steps else "the model's steps"
        notes = [f"{one.gpus} GPUs"] * (one.gpus > 1) + ["image"] * one.image + ["gated"] * one.gated
        notes += [f"SGLang {one.only} only"] if one.only else []
        typer.echo(f"{name}: {one.model}, {size}{frames}, {steps}{''.join(f', {note}' for note in notes)}")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run, as kda model denoise left it.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The run to compare with it.")],
) -> None:
    """Compare two runs of one preset: end to end, denoising, steps and stages, with intervals over repeats.

    It refuses runs with --profile, with fewer than three repeats, and of different settings or commits.
    """
    from kda_tools.models import denoise_compare

    typer.echo("\n".join(denoise_compare.text(*denoise_compare.compare(a, b))))
