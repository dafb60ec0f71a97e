"""Padding and upsampling before a convolution: which calls go to the op, what anything else gets, both ways in."""

import json
from types import ModuleType

import pytest
import torch
from torch.nn.functional import interpolate, pad

from core.tools.tests.every_task import ROOT
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_hook, apply_site, deferred_pads, deferred_slices
from kda_tools.models.apply_counts import Counts, gather
from kda_tools.models.chain_sites import SiteFile, sites_of

K12 = Task(ROOT / "diffusion" / "k12_causal_pad")
NAME = "time_causal_padding"
MODULE = ModuleType("model_of_a_test")
CLIP = torch.randn(1, 4, 3, 6, 5)


class Convolution(torch.nn.Module):
    """Upstream's class, as far as the padding goes."""

    def __init__(self, kernel=3, pad_mode="replicate", padding=None, spatial_parallel=False):
        super().__init__()
        half = kernel // 2
        self.pad_mode, self.spatial_parallel = pad_mode, spatial_parallel
        self.time_causal_padding = padding or (half, half, half, half, kernel - 1, 0)
        self.conv = torch.nn.Conv3d(4, 2, kernel)

    def forward(self, x):
        if any(self.time_causal_padding):
            x = pad(x, self.time_causal_padding, mode=self.pad_mode)
        return self.conv(x)


class Upsample(torch.nn.Module):
    """The same for upsampling."""

    def __init__(self, factors=(2, 2, 2), **convolution):
        super().__init__()
        self.upsample_factor, self.conv = factors, Convolution(**convolution)

    def forward(self, x):
        first, others = x.split((1, x.shape[2] - 1), dim=2)
        first = interpolate(first.squeeze(2), scale_factor=self.upsample_factor[1:], mode="nearest").unsqueeze(2)
        others = interpolate(others.contiguous(), scale_factor=self.upsample_factor, mode="nearest")
        return self.conv(torch.cat((first, others), dim=2))


OPS = {Convolution: "causal_pad", Upsample: "upsample_causal_pad"}
EXPECTED = {Convolution: (2, 1, 1), Upsample: (2, 2, 2, 1, 1)}
each = pytest.mark.parametrize("kind", [Convolution, Upsample])


def deferred(block, calls, call=None):
    """The block with the solution's op in it, which writes down its numbers."""
    op = OPS[type(block)]
    call = call or getattr(K12.load("solution"), op)
    deferred_pads.put(MODULE, NAME, (block,), op, lambda x, *numbers: calls.append(numbers) or call(x, *numbers))
    return block


@each
def test_the_op_pads(kind):
    block, calls = kind(), []
    want = block(CLIP)
    for _ in range(2):  # again, as at every change of an arm
        deferred(block, calls)
    assert torch.equal(block(CLIP), want)
    assert calls == [EXPECTED[kind]]
    deferred_pads.take_back(MODULE, NAME, (block,))
    assert "forward" not in vars(block)
    assert torch.equal(block(CLIP), want)
    assert len(calls) == 1


def test_an_upsampling_whose_op_refuses_still_pads_by_the_other_op():
    block, calls = Upsample(), []
    want = block(CLIP)
    deferred(block, [], deferred_slices.refuse)
    deferred(block.conv, calls)
    assert torch.equal(block(CLIP), want)
    assert calls == [EXPECTED[Convolution]]


@each
@pytest.mark.parametrize(
    "other",
    [
        {"pad_mode": "constant"},
        {"kernel": 1},
        {"padding": (1, 0, 1, 1, 2, 0)},
        {"padding": (1, 1, 1, 1, 2, 1)},
        {"spatial_parallel": True},
    ],
    ids=str,
)
def test_another_padding_is_the_models_own(kind, other):
    block, calls = kind(**other), []
    want = block(CLIP)
    assert torch.equal(deferred(block, calls)(CLIP), want)
    assert calls == []


def test_pixels_that_are_no_squares_are_the_models_own():
    block, calls = Upsample((2, 2, 1)), []
    want = block(CLIP)
    assert torch.equal(deferred(block, calls)(CLIP), want)
    assert calls == []


@each
def test_torch_compile_sees_the_models_own(kind):
    block, calls = kind(), []
    want = block(CLIP)
    compiled = torch.compile(deferred(block, calls), backend="eager", fullgraph=True)
    assert torch.equal(compiled(CLIP), want)
    assert calls == []


def test_an_unknown_attribute_is_named():
    site = sites_of(K12)[0].model_dump(by_alias=True)
    with pytest.raises(ValueError, match="key 'pads': expected one of time_causal_padding, got 'padding'"):
        SiteFile.model_validate({"site": (site | {"pads": "padding"},)})


# ---- kda apply


@each
def test_blocks_that_are_made_later_call_the_solution(kind, tmp_path, keep_ops):
    apply_site.write(tmp_path / "site", apply_site.sites([K12]), {}, runtime=False)
    plan = json.loads((tmp_path / "site" / apply_hook.PLAN).read_text())
    assert (tmp_path / "site" / apply_site.COPIED / "deferred_pads.py").is_file()
    (entry,) = [one for one in plan["releases"]["0.5.23"] if one["function"] == OPS[kind]]
    MODULE.Block = type("Block", (kind,), {})
    counts, function = Counts(tmp_path), getattr(K12.load("solution"), OPS[kind])
    keep_ops(function)
    place = apply_hook.defer_in(MODULE, entry | {"block": "Block"}, function, counts)
    assert place == f"model_of_a_test.Block.{NAME}"
    block = MODULE.Block()
    got = block(CLIP)
    deferred_pads.take_back(MODULE, NAME, (block,))
    assert torch.equal(got, block(CLIP))
    found = {(one.function, one.outcome): number for one, number in gather(tmp_path).calls.items() if number}
    assert found == {(OPS[kind], "fell_back"): 1}, "without a GPU the kernel takes no call"
