"""Clips in channels-last order from one convolution to the next: which blocks use the ops, and what the others run."""

import json
from types import ModuleType

import pytest
import torch
from torch.nn.functional import interpolate, pad

from core.tools.tests.every_task import ROOT
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_hook, apply_site, deferred_layouts, deferred_lines
from kda_tools.models.apply_counts import Counts, gather
from kda_tools.models.chain_sites import SiteFile, sites_of

K12, K13 = Task(ROOT / "diffusion" / "k12_causal_pad"), Task(ROOT / "diffusion" / "k13_group_norm_silu_pad")
MODULE = ModuleType("model_of_a_test")
LAST = torch.channels_last_3d
CLIP = torch.randn(1, 4, 3, 6, 5, generator=torch.Generator().manual_seed(0))


class Convolution(torch.nn.Module):
    """Upstream's class, as far as the padding goes."""

    def __init__(self, kernel=3, pad_mode="replicate", padding=None, spatial_parallel=False):
        super().__init__()
        half = kernel // 2
        self.pad_mode, self.spatial_parallel = pad_mode, spatial_parallel
        self.time_causal_padding = padding or (half, half, half, half, kernel - 1, 0)
        self.conv = torch.nn.Conv3d(4, 2, kernel)

    def forward(self, hidden_states):
        if any(self.time_causal_padding):
            hidden_states = pad(hidden_states, self.time_causal_padding, mode=self.pad_mode)
        return self.conv(hidden_states)


class Upsample(torch.nn.Module):
    """The same for upsampling."""

    def __init__(self, factors=(2, 2, 2), **convolution):
        super().__init__()
        self.upsample_factor, self.conv = factors, Convolution(**convolution)

    def forward(self, hidden_states):
        first, others = hidden_states.split((1, hidden_states.shape[2] - 1), dim=2)
        first = interpolate(first.squeeze(2), scale_factor=self.upsample_factor[1:], mode="nearest").unsqueeze(2)
        others = interpolate(others.contiguous(), scale_factor=self.upsample_factor, mode="nearest")
        return self.conv(torch.cat((first, others), dim=2))


class Residual(torch.nn.Module):
    """Upstream's class, as far as its ops go."""

    def __init__(self, channels=2, dropout=0.0, activation=torch.nn.SiLU, spatial_parallel=False, **convolution):
        super().__init__()
        self.nonlinearity, self.dropout = activation(), torch.nn.Dropout(dropout)
        self.spatial_parallel = spatial_parallel
        self.norm1, self.conv1 = torch.nn.GroupNorm(2, 4), Convolution(**convolution)
        self.norm2, self.conv2 = torch.nn.GroupNorm(1, 2), Convolution(**convolution)
        self.conv2.conv = torch.nn.Conv3d(2, channels, self.conv1.conv.kernel_size)
        self.conv_shortcut = Convolution(kernel=1)
        self.conv_shortcut.conv = torch.nn.Conv3d(4, channels, 1)

    def forward(self, hidden_states):
        y = self.conv1(self.nonlinearity(self.norm1(hidden_states)))
        y = self.conv2(self.dropout(self.nonlinearity(self.norm2(y))))
        return y + self.conv_shortcut(hidden_states)


class Decoder(torch.nn.Module):
    """The same for the whole decoder."""

    def __init__(self, activation=torch.nn.SiLU, spatial_parallel=False, **convolution):
        super().__init__()
        self.conv_in, self.mid_block, self.up_blocks = torch.nn.Conv3d(4, 4, 1), torch.nn.Identity(), [Residual(4)]
        self.conv_norm_out, self.conv_act = torch.nn.GroupNorm(2, 4), activation()
        self.conv_out = Convolution(**convolution)
        self.spatial_parallel, self.gradient_checkpointing = spatial_parallel, False

    def forward(self, hidden_states):
        return self.conv_out(self.conv_act(self.conv_norm_out(self.up_blocks[0](self.conv_in(hidden_states)))))


KINDS = {Residual: ("residual", "group_norm_silu_pad"), Upsample: ("upsampling", "upsample_pad")}
TIMES = {Residual: 2, Upsample: 1}
SUM = "bias_residual"
each = pytest.mark.parametrize("kind", [Residual, Upsample])


def put(block, calls, call=None):
    """The block with the solution's op in it, which is counted."""
    name, op = KINDS[type(block)]
    call = call or getattr(K13.load("solution"), op)
    deferred_layouts.put(MODULE, name, (block,), op, lambda *args: calls.append(args) or call(*args))
    return block


def close(got, want):
    return got.shape == want.shape and (got - want).abs().max() < 1e-5


@each
@torch.no_grad()
def test_the_op_is_called_and_weights_stay(kind):
    block, calls = kind(), []
    want = block(CLIP)
    weights = {name: (value.data_ptr(), value.stride()) for name, value in block.named_parameters()}
    for _ in range(2):  # again, as at every change of an arm
        put(block, calls)
    for clip in (CLIP, CLIP.contiguous(memory_format=LAST)):
        assert close(block(clip), want)
    assert len(calls) == 2 * TIMES[kind]
    assert all(args[0].is_contiguous() for args in calls), "[B, T, H, W, C]"
    assert weights == {name: (value.data_ptr(), value.stride()) for name, value in block.named_parameters()}
    deferred_layouts.take_back(MODULE, KINDS[kind][0], (block,))
    assert deferred_lines.lines_of(block) is None
    assert torch.equal(block(CLIP), want)


@each
@torch.no_grad()
def test_a_second_op_adds_the_biases(kind):
    block, sums = kind(), []
    want = block(CLIP)
    add = getattr(K13.load("solution"), SUM)
    deferred_layouts.put(MODULE, KINDS[kind][0], (block,), SUM, lambda *args: sums.append(args) or add(*args))
    assert torch.equal(block(CLIP), want), "alone, the second op has nothing to add to"
    assert sums == []
    put(block, [])
    assert close(block(CLIP), want)
    ((_, bias, other, other_bias),) = sums
    convolution = block.conv2.conv if kind is Residual else block.conv.conv
    assert bias is convolution.bias
    assert (other is None, other_bias is None) == (kind is Upsample, kind is Upsample)
    deferred_layouts.put(MODULE, KINDS[kind][0], (block,), SUM, deferred_lines.refuse)
    assert close(block(CLIP), want), "PyTorch adds what the op refuses"
    assert len(sums) == 1
    deferred_layouts.take_back(MODULE, KINDS[kind][0], (block,))
    assert torch.equal(block(CLIP), want)


@each
@torch.no_grad()
def test_convolutions_without_a_bias(kind):
    block, sums = kind(), []
    for convolution in [one for one in block.modules() if isinstance(one, torch.nn.Conv3d)]:
        convolution.bias = None
    want = block(CLIP)
    deferred_layouts.put(MODULE, KINDS[kind][0], (block,), SUM, lambda *args: sums.append(args))
    assert close(put(block, [])(CLIP), want)
    assert sums == []


@torch.no_grad()
@pytest.mark.parametrize(
    "other", [{}, {"spatial_parallel": True}, {"activation": torch.nn.GELU}, {"pad_mode": "constant"}], ids=str
)
def test_a_decoder_whose_last_norm_is_not_the_ops(other):
    block, calls = Decoder(**other), []
    want = block(CLIP)
    refused = [] if other else [deferred_lines.refuse]
    deferred_layouts.put(MODULE, "decoder", (block,), "group_norm_silu_pad", *(refused or [calls.append]))
    assert torch.equal(block(CLIP), want)
    assert calls == []


@torch.no_grad()
def test_a_weight_that_changes_is_converted_again():
    block = put(Upsample(), [])
    block(CLIP)
    block.conv.conv.weight.mul_(2)
    got = block(CLIP)
    deferred_layouts.take_back(MODULE, "upsampling", (block,))
    assert close(got, block(CLIP))


@torch.no_grad()
def test_where_the_op_refuses_another_tasks_op_still_runs():
    block, calls, op = Upsample(), [], "upsample_causal_pad"
    want = block(CLIP)
    (lines,) = {one.ported for one in sites_of(K12) if (one.op, one.release) == (op, "0.5.23")}
    pads = K12.load("solution").upsample_causal_pad

    def counted(x, *numbers):
        calls.append(numbers)
        return pads(x, *numbers)

    for times in (1, 2):  # again, as at every change of an arm
        deferred_lines.put(MODULE, lines, (block,), op, counted)
        put(block, [], deferred_lines.refuse)
        assert torch.equal(block(CLIP), want)
        assert len(calls) == times
        deferred_lines.take_back(MODULE, lines, (block,))
        assert torch.equal(block(CLIP), want)
        assert len(calls) == times
        deferred_layouts.take_back(MODULE, "upsampling", (block,))
        assert deferred_lines.lines_of(block) is None


@torch.no_grad()
@pytest.mark.parametrize(
    "other",
    [
        {"pad_mode": "constant"},
        {"padding": (2, 0, 1, 1, 2, 0)},
        {"padding": (1, 1, 1, 1, 1, 1)},
        {"spatial_parallel": True},
        {"activation": torch.nn.GELU},
    ],
    ids=str,
)
@each
def test_another_block_is_the_models_own(kind, other):
    if kind is Upsample and "activation" in other:
        other = {"factors": (2, 2, 1)}
    block, calls = kind(**other), []
    want = block(CLIP)
    assert torch.equal(put(block, calls)(CLIP), want)
    assert calls == []


@torch.no_grad()
def test_dropout_in_training_is_the_models_own():
    block, calls = Residual(dropout=0.5), []
    put(block, calls).train()(CLIP)
    assert calls == []
    want = block.eval()(CLIP)
    assert len(calls) == 2
    deferred_layouts.take_back(MODULE, "residual", (block,))
    assert close(block(CLIP), want)


@each
def test_torch_compile_sees_the_models_own(kind):
    block, calls = kind(), []
    want = block(CLIP)
    compiled = torch.compile(put(block, calls), backend="eager", fullgraph=True)
    assert torch.equal(compiled(CLIP), want)
    assert calls == []


def test_an_unknown_layout_is_named():
    site = sites_of(K13)[0].model_dump(by_alias=True)
    with pytest.raises(
        ValueError, match="key 'layout': expected one of residual, upsampling, padding, decoder, got 'last'"
    ):
        SiteFile.model_validate({"site": (site | {"layout": "last"},)})


# ---- kda apply


@each
@torch.no_grad()
def test_blocks_that_are_made_later_call_the_solution(kind, tmp_path, keep_ops):
    name, op = KINDS[kind]
    apply_site.write(tmp_path / "site", apply_site.sites([K12, K13]), {}, runtime=False)
    plan = json.loads((tmp_path / "site" / apply_hook.PLAN).read_text())
    assert (tmp_path / "site" / apply_site.COPIED / "deferred_layouts.py").is_file()
    (entry,) = [one for one in plan["releases"]["0.5.23"] if (one["function"], one["place"]) == (op, name)]
    MODULE.Block = type("Block", (kind,), {})
    counts, function = Counts(tmp_path), getattr(K13.load("solution"), op)
    keep_ops(function)
    assert apply_hook.defer_in(MODULE, entry | {"block": "Block"}, function, counts) == f"model_of_a_test.Block.{name}"
    block = MODULE.Block()
    got = block(CLIP)
    deferred_layouts.take_back(MODULE, name, (block,))
    assert torch.equal(got, block(CLIP))
    found = {(one.function, one.outcome): number for one, number in gather(tmp_path).calls.items() if number}
    assert found == {(op, "fell_back"): 1}, "without a GPU the kernel takes no call"
