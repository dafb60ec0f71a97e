"""Read `sites.toml` of a task: places where a model runs an op's computation without calling the op's function.

    [[site]]
    op = "fused_gelu_tanh_cat"
    release = "0.5.23"
    module = "sglang.multimodal_gen.runtime.models.dits.hunyuanvideo"
    sha256 = "..."
    class = "MMSingleStreamBlock"
    activation = "mlp_act"

The block's module `activation` is a tanh GELU, and `torch.cat` takes its result: `deferred_gelu` puts the op there.
Instead of `activation` a site may have `layout`, what a block that keeps channels-last order computes, or only
`ported`, lines for the head of the block's `forward`. `deferred_ways` says which module puts the op there. With
`ported` a site may name a `function` of the module in place of a class. `ops` in place of `op` lists several ops, each
of which then has a site. A table `sha256`, release by release, stands for `release` and `sha256` of several sites. If
two tasks have a site for one class, the later task's op is asked first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field, model_validator

from kda_judge.contract.config import SHA256
from kda_judge.contract.strict_models import Strict, read_toml, validate
from kda_judge.contract.tasks import Task
from kda_tools.models import deferred_layouts, deferred_lines
from kda_tools.models.deferred_ways import WAYS

FILE = "sites.toml"


class Site(Strict):
    """One class, or one function, of one release."""

    op: str
    """Public function of the task."""
    release: str
    """Version of the framework."""
    module: str
    """Dotted name of the module."""
    sha256: str = Field(pattern=f"^{SHA256}$")
    """sha256 of the module's file."""
    class_: str = Field(alias="class", default="")
    function: str = ""
    """In place of a class: a function of the module that other functions of the module call."""
    activation: str = ""
    """The class's attribute that holds the GELU."""
    layout: str = ""
    """What the block computes, one of `deferred_layouts.WAYS`."""
    ported: str = ""
    """Python that `kda port` puts at the head of the class's `forward`, or of the function. It calls the task's ops,
    and what the module has, by their names, behind `kda_runs(x)`: whether x is on an NVIDIA GPU and the ports are on.
    Empty: a port does not change the class."""
    rounds: bool = False
    """Whether the lines round elsewhere than the model's statements, although the task's ops have upstream's bits."""

    @property
    def kind(self) -> str:
        """The key that says how the op gets into the block."""
        return next(key for key in WAYS if getattr(self, key))

    def keeps_bits(self, task: Task) -> bool:
        """Whether the block has the bits of the model's statements."""
        return task.config.task.numerics == "exact" and not self.rounds

    @property
    def holder(self) -> str:
        """The class or the function."""
        return self.class_ or self.function

    @property
    def place(self) -> str:
        """The value of that key."""
        return str(getattr(self, self.kind))

    @model_validator(mode="after")
    def _one_kind(self) -> Site:
        given = [key for key in WAYS if getattr(self, key)]
        given = [key for key in given if key != "ported"] or given
        if len(given) != 1:
            raise ValueError(f"expected one of {', '.join(WAYS)}, got {' and '.join(given) or 'none'}")
        if bool(self.class_) == bool(self.function):
            raise ValueError(f"expected either class or function, got {'both' if self.class_ else 'neither'}")
        if self.function and given != ["ported"]:
            raise ValueError(f"key 'function': expected it with 'ported' alone, got {given[0]!r}")
        if self.layout and self.layout not in deferred_layouts.WAYS:
            raise ValueError(f"key 'layout': expected one of {', '.join(deferred_layouts.WAYS)}, got {self.layout!r}")
        return self


class SiteFile(Strict):
    """The whole file."""

    site: tuple[Site, ...] = Field(min_length=1)


def sites_of(task: Task) -> tuple[Site, ...]:
    """The task's sites; none if it has no such file.

    Raises:
        UsageError: the file is broken; names the file and the key.
    """
    path = task.path / FILE
    return validate(SiteFile, _each(read_toml(path)), path).site if path.is_file() else ()


def _each(data: dict[str, Any]) -> dict[str, Any]:
    """The data with a site for each release and op of a site; what has another form stays as it is."""
    entries = data.get("site")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return data
    return {**data, "site": [one for entry in entries for named in _by_release(entry) for one in _by_op(named)]}


def _by_release(entry: dict[str, Any]) -> list[dict[str, Any]]:
    hashes = entry.get("sha256")
    if "release" in entry or not isinstance(hashes, dict):
        return [entry]
    return [entry | {"release": release, "sha256": digest} for release, digest in hashes.items()]


def _by_op(entry: dict[str, Any]) -> list[dict[str, Any]]:
    ops = entry.get("ops")
    if "op" in entry or not isinstance(ops, list) or not ops:
        return [entry]
    shared = {key: value for key, value in entry.items() if key != "ops"}
    return [shared | {"op": op} for op in ops]


def blocks(model: torch.nn.Module, site: Site) -> Iterator[Any]:
    """The blocks of a loaded model that are of the site's class; of a function what stands for it as a block."""
    if site.function and site.module in sys.modules:
        yield deferred_lines.block_of(sys.modules[site.module], site.function)
    for block in model.modules():
        if (type(block).__module__, type(block).__name__) == (site.module, site.class_):
            yield block
