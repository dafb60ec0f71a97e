"""The presets of `kda model denoise`, and the command line that each becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from pydantic import Field

from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.strict_models import Strict, read_toml, validate

QUANTISED = ("-4bit", "-awq", "-gptq")
"""In a model's name these make SGLang take the diffusers backend, whatever --backend says."""
WARMUP = {"0.5.12.post1": ["--warmup"], "0.5.23": ["--warmup-mode", "request"]}
"""Release -> its options for a warm-up: the request runs twice, and only the second run is counted."""


class Preset(Strict):
    """One model with the settings of its request. None: the model's own default."""

    model: str
    prompt: str
    negative_prompt: str | None = None
    width: int | None = Field(default=None, gt=0)
    height: int | None = Field(default=None, gt=0)
    frames: int | None = Field(default=None, gt=0)
    fps: int | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, gt=0)
    guidance: float | None = None
    seed: int = 42
    gpus: int = Field(default=1, gt=0)
    pipeline: str | None = None
    image: bool = False
    gated: bool = False
    only: str | None = None
    """The only pinned release that has the model; None: all have it."""
    says_what_it_loaded: bool = True
    """Whether the log has a line for the transformer that says which version of it was loaded."""
    config: dict[str, bool | int | float | str] = {}
    """What only a configuration file can say."""
    options: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()
    """The request's models in `kda model step`; empty: that of the preset's name, if there is one."""


class Choice(Strict):
    """What a user chose beside the preset."""

    model_path: str | None = None
    """Instead of the preset's model: a folder, or another name on the Hub."""
    transformer_path: str | None = None
    prompt_path: str | None = None
    image: str | None = None
    warmup: bool = True
    compiled: bool = True
    sync_steps: bool = False
    """Whether SGLang synchronises with the GPU around every step; if not, its step times are only the host's."""
    profiled: bool = False


def presets() -> dict[str, Preset]:
    """Every preset by its name."""
    path = Path(str(files("kda_tools.models") / "presets.toml"))
    return {name: validate(Preset, table, path) for name, table in read_toml(path).items()}


def step_names() -> dict[str, tuple[str, ...]]:
    """A serving model -> the names of its parts in `kda model step`, if it has others than its own."""
    return {name: preset.timed for name, preset in presets().items() if preset.timed}


def find_preset(name: str) -> Preset:
    """The preset of this name.

    Raises:
        UsageError: there is none; the message has the nearest names.
    """
    known = presets()
    if name not in known:
        raise UsageError(f"unknown preset {name!r}; nearest: {', '.join(nearest(name, known))}")
    return known[name]


def check(name: str, preset: Preset, choice: Choice, environment: Mapping[str, str]) -> None:
    """Refuse what cannot become a run of SGLang's own transformer, before anything is started.

    Raises:
        UsageError: names the argument, what was expected and what came.
    """
    model = choice.model_path or preset.model
    if any(part in model.lower() for part in QUANTISED):
        raise UsageError(
            f"--model {model}: expected a model without {', '.join(QUANTISED)} in its name: with one SGLang takes the "
            "diffusers backend"
        )
    for option, value in (("--model", choice.model_path), ("--transformer-path", choice.transformer_path)):
        if value is not None and value.startswith(("/", ".", "~")) and not Path(value).expanduser().exists():
            raise UsageError(f"{option} {value}: expected a folder, got none")
    if choice.prompt_path is not None:
        _check_prompt(Path(choice.prompt_path))
    if preset.image and choice.image is None:
        raise UsageError(f"--image: {name} starts from an image: expected a file")
    if not preset.image and choice.image is not None:
        raise UsageError(f"--image {choice.image}: {name} starts from no image")
    if choice.image is not None and not Path(choice.image).is_file():
        raise UsageError(f"--image {choice.image}: expected a file, got none")
    if preset.gated and not is_local(model) and not environment.get("HF_TOKEN"):
        raise UsageError(f"{name}: {model} is gated: set HF_TOKEN in the environment, or give its folder with --model")


def check_release(name: str, preset: Preset, installed: str) -> None:
    """Refuse a model that the installed release does not have.

    Raises:
        UsageError: names the release that has it and the one that is installed.
    """
    if preset.only not in (None, installed):
        raise UsageError(f"{name}: expected SGLang {preset.only}, which has this model, got {installed}")


def _check_prompt(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"--prompt-path {path}: expected a file, got none")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(lines) != 1:  # SGLang's dump holds the first request alone
        raise UsageError(f"--prompt-path {path}: expected one line, the prompt, got {len(lines)}")


def is_local(model: str) -> bool:
    """Whether the model is a folder here, so that the Hub need not be asked."""
    return Path(model).expanduser().is_dir()


def arguments(preset: Preset, choice: Choice, version: str) -> list[str]:
    """The arguments of `sglang generate`, all but the paths of what it writes."""
    values: dict[str, object] = {
        "model-path": choice.model_path or preset.model,
        "backend": "sglang",
        "log-level": "info",
        "seed": preset.seed,
        "num-gpus": preset.gpus,
        "width": preset.width,
        "height": preset.height,
        "num-frames": preset.frames,
        "fps": preset.fps,
        "num-inference-steps": preset.steps,
        "guidance-scale": preset.guidance,
        "pipeline-class-name": preset.pipeline,
        "image-path": choice.image,
        "transformer-path": choice.transformer_path,
        "prompt-path": choice.prompt_path,
        "prompt": None if choice.prompt_path else preset.prompt,
        "negative-prompt": preset.negative_prompt,
    }
    made = [f"--{name}={value}" for name, value in values.items() if value is not None]
    made += preset.options
    made += WARMUP[version] if choice.warmup else []
    made += ["--enable-torch-compile", "true" if choice.compiled else "false"]
    return [*made, *(["--profile"] if choice.profiled else []), "--save-output"]


def write_config(preset: Preset, folder: Path) -> list[str]:
    """Write the preset's configuration file into `folder`; returns the arguments that name it, if it has one."""
    if not preset.config:
        return []
    path = folder / "config.json"
    path.write_text(json.dumps(preset.config), encoding="utf-8")
    return [f"--config={path}"]
