"""The baseline is what the pinned models run: the source of the classes in `sites.toml` says so.

There the op is no function of its own but two statements, a GELU module and `torch.cat` of the attention's columns and
what that returns.
"""

import ast

import pytest

from kda_judge.contract.tasks import find_task
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.upstream_source import source_of

SITES = sites_of(find_task("gelu_cat"))


def assigned(function):
    """Target and value of every assignment in a function, as text."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return [(ast.unparse(node.targets[0]), ast.unparse(node.value)) for node in nodes]


def concatenations(function):
    """The tensors of every `torch.cat` in a function that lists them, and its dimension."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cat":
            tensors, *dim = [*node.args, *(keyword.value for keyword in node.keywords)]
            yield [ast.unparse(one) for one in tensors.elts], ast.literal_eval(dim[0])


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.release}-{site.class_}")
def test_the_block_appends_its_gelu_to_the_attention(site):
    text = source_of(site)
    (block,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == site.class_)
    methods = {node.name: node for node in block.body if isinstance(node, ast.FunctionDef)}

    made = [value for target, value in assigned(methods["__init__"]) if target == f"self.{site.activation}"]
    assert made
    assert all(value.endswith("GELU(approximate='tanh')") for value in made)

    call = f"self.{site.activation}("
    activated = {target for target, value in assigned(methods["forward"]) if value.startswith(call)}
    cats = [
        (tensors, dim)
        for tensors, dim in concatenations(methods["forward"])
        if tensors[-1] in activated or tensors[-1].startswith(call)
    ]
    ((tensors, dim),) = cats
    assert len(tensors) == 2
    assert dim in (-1, 2), "the last of three dimensions"
