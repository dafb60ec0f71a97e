"""How an engine is found on this machine, and the command that serves a model with it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import checkout_root
from kda_tools.llm import tiny_model
from kda_tools.llm.known_llms import EngineName, KnownLlms, Target

TOOLS = Path(".nox") / "llm"
"""Folder in the checkout: the environment with transformers and guidellm that `nox -s llm-tools` makes."""


def tools_bin() -> Path | None:
    """The folder of programs of that environment, for this Python version; None if it was not made."""
    root = checkout_root()
    place = root / TOOLS / "{}.{}".format(*sys.version_info) / "bin" if root is not None else None
    return place if place is not None and place.is_dir() else None


def find_program(name: str, install: str) -> str:
    """The program of this name on PATH, else in the environment of `llm-tools`.

    Raises:
        MissingRequirement: there is none; says how it is installed.
    """
    own = tools_bin()
    found = shutil.which(name) or (shutil.which(name, path=str(own)) if own else None)
    if found is None:
        raise MissingRequirement(
            f"{name}: expected it on PATH or in {TOOLS} of the checkout, got none; install it: {install}"
        )
    return found


def cache() -> Path:
    """The folder of the tiny model and of its server's Hub cache."""
    root = checkout_root()
    return root / ".cache" / "llm" if root is not None else Path.home() / ".cache" / "kda" / "llm"


def model_path(known: KnownLlms, name: str) -> str:
    """What the engine is told to load: a name on the Hub, or the folder of the tiny model, which is made now.

    Raises:
        UsageError: the model is unknown, or has no weights to serve.
    """
    model = known.model(name)
    if model.hub is not None:
        return model.hub
    if name != tiny_model.NAME:
        raise UsageError(f"{name}: expected a model with weights to serve, got one that only `kda llm capture` builds")
    return str(tiny_model.write(cache() / name))


def command(
    known: KnownLlms,
    name: str,
    engine: EngineName,
    target: Target | None,
    host: str,
    port: int,
    traces: str,
    path: str | None = None,
) -> list[str]:
    """The words that start `engine` on the model.

    `target` None: a machine without a GPU. `path`: the model to load; None: the result of `model_path`.

    Raises:
        UsageError: no number of GPUs is known for the target, a GPU is needed, or the engine can only use one.
    """
    known_engine, model = known.engine(engine), known.model(name)
    path = path or model_path(known, name)
    if target is None and (known_engine.on_cpu is None or (model.gpus and min(model.gpus.values()) > 1)):
        what = f"--engine {engine}" if known_engine.on_cpu is None else name
        some = " or ".join(get_args(Target))
        raise UsageError(f"--target: expected {some}: there is no GPU here, and {what} needs one")
    gpus = 1 if target is None or model.hub is None else model.gpus.get(target)
    if gpus is None:
        raise UsageError(
            f"--target {target}: expected {' or '.join(model.gpus) or 'none'} for {name}: llm/models.toml knows no "
            "degree of parallelism for another one"
        )
    if known_engine.one_gpu and gpus > 1:
        raise UsageError(f"--engine {engine}: expected one that serves on {gpus} GPUs, which {name} needs")
    values = {"model": path, "host": host, "port": str(port), "gpus": str(gpus), "traces": traces}
    words = [*known_engine.command, *model.serve.get(engine, ())]
    words += known_engine.on_cpu or () if target is None else ()
    return [_filled(word, values) for word in words]


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def environment(local: bool) -> dict[str, str]:
    """The engine's environment; with a `local` model the Hub is never asked."""
    if not local:
        return dict(os.environ)
    hub = cache() / "huggingface"
    (hub / "hub").mkdir(parents=True, exist_ok=True)  # transformers answers /v1/models with 500 where it is missing
    return {**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
