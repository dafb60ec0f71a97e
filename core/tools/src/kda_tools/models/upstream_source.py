"""For tasks' tests of `sites.toml`: upstream's own text out of a pinned wheel, and what several of them ask."""

from __future__ import annotations

import ast
import hashlib
import zipfile
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

from kda_judge.arms.upstream import cache_folder
from kda_judge.contract.tasks import checkout_root
from kda_tools.models import deferred_lines
from kda_tools.models.chain_sites import Site
from kda_tools.models.known_models import load_models


def text_of(module: str, release: str) -> str:
    """The text of a module of SGLang; skips the test if the release's wheel is not in the cache."""
    wheel = cache_folder(checkout_root()) / "wheels" / load_models().releases[release].wheel
    if not wheel.is_file():
        pytest.skip(f"{wheel.name} is not in the cache")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{module.replace('.', '/')}.py").decode()


def source_of(site: Site) -> str:
    """The text of a site's module, whose sha256 must be the site's."""
    text = text_of(site.module, site.release)
    assert hashlib.sha256(text.encode()).hexdigest() == site.sha256
    return text


def module_of(site: Site, wanted: Collection[str], **needed: Any) -> ModuleType:
    """A module of the same name as a site's, with only those functions, classes and constants of it that are `wanted`.

    `needed`: what they find in their module under these names.
    """
    module = ModuleType(site.module)
    vars(module).update(needed)
    run(source_of(site), wanted, vars(module))
    return module


def run(text: str, wanted: Collection[str], into: dict[str, Any]) -> None:
    """Define `wanted` in a namespace, by the text of a module; names that the text does not have stay undefined."""
    tree = ast.parse(text)
    tree.body = [one for one in tree.body if _name(one) in wanted]
    tree.body.insert(0, ast.parse("from __future__ import annotations").body[0])  # they name what is not needed
    exec(compile(tree, "upstream.py", "exec", dont_inherit=True), into)


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return str(getattr(node, "name", ""))


def assert_lines_ask(
    patch: pytest.MonkeyPatch, site: Site, block: Any, arguments: Mapping[str, Any], asked: str, compiling: bool
) -> None:
    """A site's lines return nothing while torch.compile traces; else where kernels do not run for the argument `asked`.

    The lines run by themselves, and an op refuses.
    """
    own = deferred_lines.own_forward(type(block))
    made = deferred_lines.made_of(own, site.ported)
    if compiling:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        patch.setitem(made.run.__globals__, "kda_runs", lambda x: x is not arguments[asked])
    given = made.signature.bind(block, **arguments)
    given.apply_defaults()
    names = {name: own.__globals__.get(name, deferred_lines.refuse) for name in made.names}
    assert made.run(**given.arguments, **names) is deferred_lines.OWN


def counted(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The same function, and a list that gets the arguments of each of its calls."""
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return call(*args, **kwargs)

    return counting, calls
