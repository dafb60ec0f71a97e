"""Read `diffusion/models/models.toml`: the models whose step can be run."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kda_judge.contract.config import Pin
from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.strict_models import Strict, read_toml, validate
from kda_tools import checkout_folder

Size = Annotated[int, Field(gt=0, le=1 << 20)]
FOLDER = Path("diffusion") / "models"
"""Folder in the checkout with the known models, the lists of upstream files, and `docs/`: the ledger and its pages."""


class Patterns(Strict):
    """Which files of a wheel are listed in its lock file; fnmatch patterns of paths inside the wheel."""

    take: tuple[str, ...]
    without: tuple[str, ...] = ()


class Sizes(Strict):
    """What one request asks for."""

    height: Size
    """Pixels."""
    width: Size
    frames: Size
    text: Size
    """Text tokens."""
    audio: Size | None = None
    """Tokens of sound, of models that make some."""
    batch: Size = 1
    """Clips in one call, as guidance makes two of one; only `ltx2` may have more than 1."""


class Model(Strict):
    """One model: its class in SGLang, its widths, and the sizes of its production requests."""

    build: str
    """Function of `kda_tools.models.builders`."""
    class_: str = Field(alias="class")
    """Dotted name of the class."""
    config: str
    """Dotted name of its configuration."""
    arch: dict[str, bool | int | float | str] = {}
    """Keys of the configuration that are not its defaults."""
    blocks: dict[str, Size] = {}
    """Key of the configuration -> blocks of that kind in the real model."""
    autocast: bool | dict[str, bool] = False
    """Whether the pipeline runs the class under autocast; a value for each release if they differ."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    sizes: Sizes
    """Sizes of the request that gives production rows."""
    more: tuple[Sizes, ...] = ()
    """More requests that give production rows: other text lengths, or the part that each of several GPUs holds."""
    tiny: Sizes
    """Sizes for a machine without a GPU."""
    tokens: Size
    """Tokens of the latent that `sizes` gives; for a decoder its elements of one channel."""
    source: str
    """Where the figures come from."""
    releases: tuple[str, ...] = ()
    """Releases that have the class; empty: all of them."""
    blocks_from: tuple[str, ...] = ()
    """Modules of the classes of its blocks, where these are not in the module of its own class."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of its classes."""
        return (self.class_.rpartition(".")[0], *self.blocks_from)

    @property
    def layers(self) -> int:
        """Blocks of the real model, all kinds together; 0 for one that cannot be shortened."""
        return sum(self.blocks.values())

    def shortened(self, layers: int) -> dict[str, int]:
        """Blocks of each kind for `layers` in all (0: the real number), in the real proportion, at least one each."""
        if not layers or layers >= self.layers:
            return dict(self.blocks)
        return {key: max(1, round(layers * count / self.layers)) for key, count in self.blocks.items()}

    @property
    def dtype_on_cpu(self) -> str:
        """The dtype of a run without a GPU: a decoder's convolutions are far slower there in bfloat16."""
        return "bfloat16" if self.blocks else "float32"

    def under_autocast(self, release: str) -> bool:
        """Whether this release's pipeline runs the class under autocast."""
        return self.autocast if isinstance(self.autocast, bool) else self.autocast[release]


class KnownModels(Strict):
    """The whole file."""

    releases: dict[str, Pin] = Field(min_length=1)
    lock: dict[str, Patterns]
    models: dict[str, Model] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_resolve(self) -> "KnownModels":
        known = set(self.releases)
        if set(self.lock) != known:
            raise ValueError(
                f"lock: expected one table for each of the releases {sorted(known)}, got {list(self.lock)}"
            )
        for name, model in self.models.items():
            if model.build != "ltx2" and any(sizes.batch > 1 for sizes in (model.sizes, *model.more)):
                raise ValueError(f"models.{name}: batch: expected 1, since {model.build} builds no other")
            by_release = set() if isinstance(model.autocast, bool) else set(model.autocast)
            if not set(model.releases) <= known or by_release not in (set(), known):
                raise ValueError(f"models.{name}: releases, autocast: expected {sorted(known)}")
        return self

    def model(self, name: str) -> Model:
        """The model of this name, or a UsageError that names the nearest ones."""
        if name not in self.models:
            near = ", ".join(nearest(name, self.models))
            raise UsageError(f"unknown model {name!r}; nearest: {near}; `kda model list` shows all")
        return self.models[name]

    def releases_of(self, name: str) -> tuple[str, ...]:
        """The releases that have the model's class."""
        return self.model(name).releases or tuple(self.releases)

    def pin(self, name: str, release: str) -> Pin:
        """The wheel of a release; a UsageError if the release is not known or lacks the model."""
        if release not in (known := self.releases_of(name)):
            raise UsageError(f"--release {release}: expected {' or '.join(known)} for {name}")
        return self.releases[release]


def layers_of(layers: int, of_model: int) -> str:
    """For example `6 of 60`; `whole` for a model that is not built with fewer layers."""
    return f"{layers} of {of_model}" if of_model else "whole"


find_folder = partial(checkout_folder.find, FOLDER)
folder = partial(checkout_folder.demand, FOLDER)


def load_models(path: Path | None = None) -> KnownModels:
    """The known models at `path`, by default the checkout's; a UsageError names file and key."""
    path = path or folder() / checkout_folder.FILE
    return validate(KnownModels, read_toml(path), path)
