"""Store facts about the fused ops of upstream releases: one TOML file per pin, extracted by `extract_ops`.

Facts are names, signatures, conditions and hashes; upstream's source is not kept. What an op computes, its numerics and
its task are written by hand in `docs/catalogue/*.toml`, whose entries name ops of these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Strict, read_toml, validate
from kda_tools.traces.catalogue import FOLDER

FACTS = FOLDER / "upstream"
HEAD = "# Written by `kda catalogue update` from the wheel of the pin; never by hand. op_facts.py has the schema.\n"


class Backend(Strict):
    """A line of upstream's own registry of kernels."""

    op: str
    backend: str
    target: str
    requires: str
    """The backend's capability requirement, by upstream's name or expression."""


class OpFacts(Strict):
    """The facts of one public callable, the op."""

    name: str
    path: str
    """Path of the defining file in the wheel."""
    signature: str
    language: Annotated[tuple[str, ...], Field(min_length=1)]
    """Languages of the kernels that it can launch: triton, cuda, cute, flydsl, sycl, or library (another package's).
    torch: it launches no kernel of its own; site: a quality tier mounts it on modules of a model."""
    kernels: tuple[str, ...] = ()
    """Names of Triton functions, CuTe DSL kernels and C++ launchers that its code reaches."""
    sources: tuple[str, ...] = ()
    """Files of CUDA C++ that it builds."""
    custom_op: tuple[str, ...] = ()
    """Functions that it reaches and that upstream registers as custom ops, so that torch.compile sees them."""
    guards: tuple[str, ...] = ()
    """Predicates that decide whether a call may use the op."""
    needs: tuple[str, ...] = ()
    """Conditions in Python, of the op, its guards and their callees: if one does not hold, the call falls back."""
    raises: tuple[str, ...] = ()
    """Further conditions: if one does not hold, the call raises."""
    host_checks: tuple[str, ...] = ()
    """Conditions that its C++ launcher checks."""
    falls_back: tuple[str, ...] = ()
    """What runs instead if a call breaks one of `needs` or is on another platform, as far as the code names it."""
    backends: tuple[Backend, ...] = ()
    quality: str | None = None
    """Lowest quality tier of a request that mounts the op; None if upstream does not gate it by quality."""
    callers: tuple[str, ...] = ()
    """Modules of `sglang/multimodal_gen/runtime` that name it."""
    models: tuple[str, ...] = ()
    """Modules of models that reach the op by names in the source; which of them call it depends on the request."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Hash of the defining file."""


class Release(Strict):
    """The facts of one release: the content of one file."""

    release: Annotated[str, Field(pattern=r"^\S+ \S+$")]
    wheel_sha256: str
    helpers: tuple[str, ...] = ()
    """Files in the folders of diffusion kernels that define no public op: parts of ops, fallbacks, packages."""
    op: tuple[OpFacts, ...]

    def find_op(self, name: str) -> OpFacts | None:
        """The op of that name."""
        return next((one for one in self.op if one.name == name), None)


def facts_files(root: Path) -> list[Path]:
    """The files of facts of a checkout."""
    return sorted((root / FACTS).glob("*.toml"))


def load_facts(root: Path) -> tuple[Release, ...]:
    """Every release of the checkout, oldest pin first as the files are named.

    Raises:
        UsageError: there is none, or a file breaks the schema.
    """
    files = facts_files(root)
    if not files:
        raise UsageError(f"{root / FACTS}: expected files of facts, got none; `kda catalogue update` writes them")
    return tuple(validate(Release, read_toml(path), path) for path in files)


def to_toml(release: Release) -> str:
    """The file's text. Its form is fixed, so that two files differ only if upstream does."""
    lines = [HEAD, f"release = {_text(release.release)}", f"wheel_sha256 = {_text(release.wheel_sha256)}"]
    lines += _field("helpers", release.helpers)
    for op in release.op:
        lines += ["", "[[op]]"]
        for name, value in op:
            if name == "backends":
                if value:
                    lines += ["backends = [", *(f"  {_inline(one)}," for one in value), "]"]
            elif value not in (None, ()):
                lines += _field(name, value)
    return "\n".join(lines) + "\n"


def _field(name: str, value: str | tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, str):
        yield f"{name} = {_text(value)}"
        return
    one_line = f"{name} = [{', '.join(map(_text, value))}]"
    if len(one_line) <= 120:
        yield one_line
    else:
        yield f"{name} = ["
        yield from (f"  {_text(item)}," for item in value)
        yield "]"


def _inline(one: Backend) -> str:
    return f"{{ {', '.join(f'{name} = {_text(value)}' for name, value in one)} }}"


def _text(value: str) -> str:
    """A basic string of TOML, whose escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False)
