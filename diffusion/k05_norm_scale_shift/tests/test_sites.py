"""The lines in `sites.toml`, in front of the pinned releases' own blocks: same results; other calls stay upstream's.

The blocks are upstream's, with small layers in place of theirs. Their numbers are integers, so that sums and products
have no rounding: all that the block gives to its layers is the same to the last bit, but for the norm's result.
"""

import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.deferred_lines import refuse
from kda_tools.models.upstream_source import counted, module_of

from .. import solution
from ..baseline import eager
from .cases import ORDER, RESIDUAL, normal

SITES = {site.release: site for site in sites_of(find_task("norm_scale_shift"))}
NEWER = "0.5.23"
B, S, D, EPS = 2, 4, 256, 1e-3
HALVES = [torch.bfloat16, torch.float16]
each_release = pytest.mark.parametrize("release", SITES)
each_arm = pytest.mark.parametrize("arm", [solution, eager], ids=["solution", "eager"])


class Layer(nn.Module):
    """Stands in for a layer of the block; it keeps what it was called with."""

    def __init__(self, *_args, **_kwargs):
        super().__init__()
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.result(*args, **kwargs)


class Norm(Layer):
    def result(self, x, shift, scale):
        return x * (1 + scale) + shift


class SelfAttention(Layer):
    dtype = None

    def result(self, x, _freqs, **_named):
        return x.flip(1).to(self.dtype or x.dtype)


class CrossAttention(Layer):
    """Its result does not depend on the norm's, which may differ by a rounding."""

    def result(self, _x, context):
        return context.flip(2)


class ResidualNorm(Layer):
    def result(self, residual, x, gate, shift, scale):
        total = residual + gate * x
        return total * (1 + scale) + shift, total


class Mlp(Layer):
    def result(self, x):
        return x.roll(1, dims=1)


LAYERS = {
    "SelfAttention": SelfAttention,
    "CrossAttention": CrossAttention,
    "LayerNormScaleShift": Norm,
    "ScaleResidualLayerNormScaleShift": ResidualNorm,
    "MLP": Mlp,
}
NAMES = ("norm1", "self_attn", "cross_attn", "cross_attn_residual_norm", "ffn")


def block_class(release, monkeypatch):
    """Upstream's block, with its own `MulAdd`, out of the pinned wheel."""
    site = SITES[release]
    module = module_of(site, (site.class_, "MulAdd"), torch=torch, nn=nn, **LAYERS)
    monkeypatch.setitem(sys.modules, site.module, module)
    return getattr(module, site.class_)


def integers(*shape, most=2, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape) + most)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


class Pair:
    """Two equal blocks of a release: `own` is upstream's, `block` has the lines in front of it."""

    def __init__(self, monkeypatch, release, call, dtype=torch.bfloat16, weights=torch.float32):
        make = block_class(release, monkeypatch)
        self.own, self.block = make(D, 2, 8, EPS), make(D, 2, 8, EPS)
        for one in (self.own, self.block):
            one.modulation.data = integers(1, 6, D, most=1, dtype=dtype)
            one.self_attn_norm.weight.data = normal(D, dtype=weights, seed=1)
            one.self_attn_norm.bias.data = normal(D, dtype=weights, seed=2)
            one.requires_grad_(False)
        deferred_lines.put(sys.modules[make.__module__], SITES[release].ported, (self.block,), RESIDUAL, call)
        self.release = release

    def run(self, given):
        """The outputs of the block and of upstream's."""
        named = {"attn_mask_meta": "a mask"} if self.release == NEWER else {}
        return self.block(*given, **named), self.own(*given, **named)

    def assert_same_calls(self, but=()):
        """Every layer was called with the same arguments as upstream's, `but` for the first ones of some."""
        for name in NAMES:
            [(got, named)], [(want, want_named)] = getattr(self.block, name).calls, getattr(self.own, name).calls
            assert named == want_named
            assert len(got) == len(want)
            for number, (one, other) in enumerate(zip(got, want, strict=True)):
                if not isinstance(one, torch.Tensor):
                    assert one is other or one == other
                elif number or name not in but:
                    assert same(one, other), name


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


def arguments(batch=B, mods=None, dtype=torch.bfloat16):
    """x, context, t_mod and freqs."""
    x, context = integers(batch, S, D, dtype=dtype), integers(batch, S, D, most=3, dtype=dtype)
    return x, context, integers(mods or batch, 6, D, most=1, dtype=dtype), "freqs"


@each_arm
@each_release
@pytest.mark.parametrize("weights", [torch.float32, None], ids=["float32 weights", "own weights"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("batch", "mods"), [(1, 1), (B, B), (B, 1)])
def test_the_lines_give_upstreams_result(monkeypatch, release, batch, mods, dtype, weights, arm):
    call, calls = counted(getattr(arm, RESIDUAL))
    pair = Pair(monkeypatch, release, call, dtype, weights or dtype)
    given = arguments(batch, mods, dtype)
    before = [one.clone() for one in given[:3]]
    got, want = pair.run(given)
    assert same(got, want), "nothing but the norm's result depends on a rounding"
    assert all(map(torch.equal, given, before))
    pair.assert_same_calls(but=["cross_attn"])
    # The norm's result: float32 arithmetic and one rounding here as there, so at most one step of the dtype apart.
    own, y = (one.cross_attn.calls[0][0][0] for one in (pair.own, pair.block))
    assert y.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), own.double(), rtol=1.01 * step, atol=4e-6)
    # The op's arguments.
    [((residual, x, gate, weight, bias, scale, shift, norm_type, eps), named)] = calls
    assert (norm_type, eps, named) == ("layer", EPS, {})
    assert residual is given[0]
    assert torch.equal(x, pair.block.self_attn.result(*pair.block.self_attn.calls[0][0]))
    assert torch.equal(gate, (pair.block.modulation + given[2])[:, 2:3])
    assert (weight is pair.block.self_attn_norm.weight, bias is pair.block.self_attn_norm.bias) == (True, True)
    for null in (scale, shift):
        assert (null.shape, null.dtype, null.item()) == ((1,), dtype, 0)
    tensors = dict(zip(ORDER, calls[0][0][:7], strict=True))
    assert solution.launches(RESIDUAL, tensors, {"norm_type": norm_type, "eps": eps}), "the kernel takes the call"


@each_release
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_sum_is_upstreams_but_for_the_products_rounding(monkeypatch, release, dtype):
    """With numbers that are no integers: upstream rounds gate * x, then the sum, the op the sum alone.

    Each rounding is half a step of what is rounded.
    """
    pair = Pair(monkeypatch, release, solution.fused_scale_residual_norm_scale_shift, dtype)
    given = normal(B, S, D, dtype=dtype), *arguments(dtype=dtype)[1:]
    given = (*given[:2], normal(B, 6, D, dtype=dtype, seed=3), given[3])
    pair.run(given)
    own, total = (one.cross_attn_residual_norm.calls[0][0][0] for one in (pair.own, pair.block))
    attended = pair.own.self_attn.result(*pair.own.self_attn.calls[0][0])
    product = attended.double() * (pair.own.modulation + given[2])[:, 2:3].double()
    half = 0.505 * torch.finfo(dtype).eps
    bound = half * (product.abs() + 2 * (given[0].double() + product).abs()) + 1e-6
    assert ((total.double() - own.double()).abs() <= bound).all()
    y = pair.block.cross_attn.calls[0][0][0]
    norm = pair.block.self_attn_norm
    want = layer_norm(total.double(), (D,), norm.weight.double(), norm.bias.double(), EPS)
    torch.testing.assert_close(y.double(), want, rtol=half, atol=4e-6)


def test_under_autocast_upstreams_norm_is_float32_and_the_ops_result_is_not(monkeypatch):
    """The linear layer that comes next rounds upstream's to bfloat16. On the CPU the norm has to be cast by hand."""
    pair = Pair(monkeypatch, NEWER, solution.fused_scale_residual_norm_scale_shift)
    norm = pair.own.self_attn_norm
    norm.forward = lambda x: layer_norm(x.float(), (D,), norm.weight, norm.bias, EPS)
    got, want = pair.run(arguments())
    assert same(got, want)
    own, y = (one.cross_attn.calls[0][0][0] for one in (pair.own, pair.block))
    assert (own.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y.double(), own.bfloat16().double(), rtol=1.01 * torch.finfo(y.dtype).eps, atol=4e-6)


def without(name):
    def change(pair, given):
        for one in (pair.own, pair.block):
            setattr(one.self_attn_norm, name, None)
        return given

    return change


def parts(change):
    return lambda _pair, given: (*given[:2], change(given[2]), given[3])


def attention_in(dtype):
    def change(pair, given):
        pair.own.self_attn.dtype = pair.block.self_attn.dtype = dtype
        return given

    return change


LEFT = {
    "a part for every token": parts(lambda t_mod: t_mod[:, None].repeat(1, S, 1, 1)),
    "float32 parts": parts(lambda t_mod: t_mod.float()),
    "parts of more clips than x": lambda _pair, given: (given[0][:1], given[1], *given[2:]),
    "float32": lambda _pair, given: (given[0].float(), given[1].float(), given[2].float(), given[3]),
    "a float32 x": lambda _pair, given: (given[0].float(), *given[1:]),
    "no weight": without("weight"),
    "no bias": without("bias"),
}


@each_release
@pytest.mark.parametrize("case", LEFT)
def test_other_calls_are_upstreams_own(monkeypatch, release, case):
    call, calls = counted(getattr(solution, RESIDUAL))
    pair = Pair(monkeypatch, release, call)
    given = LEFT[case](pair, arguments())
    try:
        want = pair.run(given)[1]
    except (RuntimeError, ValueError):
        with pytest.raises((RuntimeError, ValueError)):
            pair.own(*given)
    else:
        pair.assert_same_calls()
        assert same(pair.block(*given), want)
    assert calls == []


@each_release
@pytest.mark.parametrize("columns", [264, 8448])
def test_a_width_that_the_op_does_not_take(monkeypatch, release, columns):
    call, calls = counted(getattr(solution, RESIDUAL))
    monkeypatch.setitem(globals(), "D", columns)
    pair = Pair(monkeypatch, release, call)
    assert same(*pair.run(arguments()))
    pair.assert_same_calls()
    assert calls == []


@each_release
def test_an_attention_of_another_dtype_leaves_the_call_to_upstream(monkeypatch, release):
    """It runs twice: only its result tells."""
    call, calls = counted(getattr(solution, RESIDUAL))
    pair = Pair(monkeypatch, release, call)
    assert same(*pair.run(attention_in(torch.float32)(pair, arguments())))
    assert calls == []
    assert len(pair.block.self_attn.calls) == 2


@each_release
def test_a_refused_call_is_upstreams_own(monkeypatch, release):
    pair = Pair(monkeypatch, release, refuse)
    assert same(*pair.run(arguments()))
    assert len(pair.block.self_attn.calls) == 2
    for name in ("norm1", "self_attn"):
        del getattr(pair.block, name).calls[0]
    pair.assert_same_calls()


def test_the_sites_are_these():
    assert {release: (site.class_, site.op) for release, site in SITES.items()} == dict.fromkeys(
        ("0.5.12.post1", NEWER), ("DiTBlock", RESIDUAL)
    )
