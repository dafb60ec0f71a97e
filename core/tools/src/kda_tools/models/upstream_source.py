"""For tasks' tests: upstream's own text out of a pinned wheel, and an op whose calls are written down."""

from __future__ import annotations

import ast
import hashlib
import zipfile
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import pytest

from kda_judge.arms.upstream import cache_folder
from kda_judge.contract.tasks import checkout_root
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


def counted(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The same function, and a list that gets the arguments of each of its calls."""
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return call(*args, **kwargs)

    return counting, calls
