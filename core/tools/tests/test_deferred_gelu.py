"""A GELU that waits for `torch.cat`: what the op gets, what anything else gets, and both ways into a model."""

import json
from pathlib import Path

import pytest
import torch

from core.tools.tests.every_task import ROOT
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_hook, apply_site
from kda_tools.models.apply_counts import Counts, gather
from kda_tools.models.chain_sites import blocks, sites_of
from kda_tools.models.deferred_gelu import DeferredGelu, chain, defer, original

K08 = Task(ROOT / "diffusion" / "k08_gelu_cat")
MODULE = """
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.act = torch.nn.GELU(approximate="tanh")

    def forward(self, attn, mlp):
        activated = self.act(mlp)
        return torch.cat((attn, activated), dim=-1)
"""


class Block(torch.nn.Module):
    """A block's tail; `forward` says what it does with the GELU."""

    def __init__(self, forward, act=None):
        super().__init__()
        self.act = act or torch.nn.GELU(approximate="tanh")
        self.tail = forward

    def forward(self, attn, mlp):
        return self.tail(attn, self.act(mlp))


def last(attn, activated):
    return torch.cat((attn, activated), dim=-1)


ATTN, MLP = torch.randn(2, 3, 4), torch.randn(2, 3, 10)[..., 4:]


def deferred(forward):
    """A block with the op in it, and what the op was called with."""
    seen = []
    block = Block(forward)
    defer(block, "act", "op", lambda attn, mlp: seen.append((attn, mlp)) or chain(attn, mlp))
    return block, seen


@pytest.mark.parametrize(
    "forward",
    [
        last,
        lambda a, b: torch.cat([a, b], dim=2),
        lambda a, b: torch.cat((a, b), 2),
        lambda a, b: torch.cat(tensors=(a, b), dim=-1),
    ],
)
def test_the_op_gets_both_tensors_as_they_lie(forward):
    block, seen = deferred(forward)
    assert torch.equal(block(ATTN, MLP), Block(forward)(ATTN, MLP))
    ((attn, mlp),) = seen
    assert attn is ATTN
    assert mlp is MLP


@pytest.mark.parametrize(
    "forward",
    [
        lambda a, b: torch.cat((b, a), dim=-1),
        lambda a, b: torch.cat((a, b, a), dim=-1),
        lambda _, b: torch.cat((b, b), dim=-1),
        lambda _, b: torch.cat((MLP, b), dim=1),
        lambda _, b: torch.add(b, 1),
        lambda _, b: b.sum(),
        lambda _, b: torch.nn.functional.linear(b, torch.ones(5, 6)),
    ],
)
def test_anything_else_gets_the_gelu(forward):
    block, seen = deferred(forward)
    assert torch.equal(block(ATTN, MLP), Block(forward)(ATTN, MLP))
    assert seen == []


def test_deferred_again_the_last_one_counts():
    block, seen = deferred(last)
    own = original(block, "act")
    defer(block, "act", "op", lambda *_: "second")
    assert block(ATTN, MLP) == "second"
    assert seen == []
    assert original(block, "act") is own


def test_another_activation_is_named():
    with pytest.raises(ValueError, match=r"Block\.act: expected a GELU with approximate='tanh', got GELU\("):
        defer(Block(last, torch.nn.GELU()), "act", "op", chain)


def test_torch_compile_sees_the_gelu():
    block, seen = deferred(last)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ATTN, MLP), chain(ATTN, MLP))
    assert seen == []


# ---- kda apply


def test_sites_are_in_the_plan_and_the_file_is_copied(tmp_path):
    sites = apply_site.sites([K08])
    assert {site.version for site in sites} == set(
        json.loads((plan := written(tmp_path, sites)).read_text())["releases"]
    )
    assert all(site.block and site.kind == "activation" for site in sites)
    assert (plan.parent / apply_site.COPIED / "deferred_gelu.py").is_file()


def written(folder, sites):
    apply_site.write(folder / "site", sites, {}, runtime=False)
    return folder / "site" / apply_hook.PLAN


@pytest.fixture
def solution(keep_ops):
    """The public function of k08; what the hook changes about its op is taken back."""
    function = K08.load("solution").fused_gelu_tanh_cat
    keep_ops(function)
    return function


def test_blocks_that_are_made_later_call_the_solution(tmp_path, monkeypatch, solution):
    (tmp_path / "model_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import model_of_a_test as model

    counts = Counts(tmp_path)
    entry = {"block": "Block", "kind": "activation", "place": "act", "function": "fused_gelu_tanh_cat"}
    place = apply_hook.defer_in(model, entry, solution, counts)
    assert place == "model_of_a_test.Block.act"
    block = model.Block()
    assert isinstance(block.act, DeferredGelu)
    assert torch.equal(block(ATTN, MLP), chain(ATTN, MLP))
    ((counted, number),) = ((one, number) for one, number in gather(tmp_path).calls.items() if number)
    assert (counted.function, counted.outcome, number) == ("fused_gelu_tanh_cat", "fell_back", 1)
    assert "is on cpu" in counted.reason


# ---- models that are loaded


def test_blocks_are_found_by_their_class():
    site = sites_of(K08)[0].model_copy(update={"module": __name__, "class_": "Block"})
    model = torch.nn.Sequential(Block(last), torch.nn.Linear(1, 1), torch.nn.Sequential(Block(last)))
    assert len(list(blocks(model, site))) == 2
    assert list(blocks(model, site.model_copy(update={"module": "another"}))) == []


def test_a_task_without_sites():
    assert sites_of(Task(Path(ROOT) / "diffusion" / "k03_qknorm_rope")) == ()
