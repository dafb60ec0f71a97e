"""The lines in `sites.toml` give what FLUX's own blocks give, which come out of the wheel's text.

Upstream's layers are small stand-ins; the norms are diffusers' own.
"""

import copy
import sys

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.lab.beside_upstream import stand_ins
from kda_tools.models import deferred_gelu, deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.deferred_lines import refuse
from kda_tools.models.upstream_source import assert_lines_ask, module_of

from .. import solution
from .cases import OP

norms = pytest.importorskip("diffusers.models.normalization")

SINGLE, DOUBLE = "FluxSingleTransformerBlock", "FluxTransformerBlock"
SITES = {site.class_: site for site in sites_of(find_task("layernorm_modulate"))}
SUMS = "sglang.jit_kernel.diffusion.triton.scale_shift"
PICTURE, TEXT, WIDTH = 7, 3, 512
HALF = 0.505 * torch.finfo(torch.bfloat16).eps
"""Half a step of bfloat16, relative to the number that is rounded."""
each = pytest.mark.parametrize("name", [SINGLE, DOUBLE])


# --- upstream's module


class Linear(torch.nn.Module):
    def __init__(self, wide, width, **_):
        super().__init__()
        self.linear = torch.nn.Linear(wide, width)

    def forward(self, x):
        return self.linear(x), None


class Attention(torch.nn.Module):
    """It keeps what it is given. The streams that it gives back are parts of one tensor, as upstream's are."""

    def __init__(self, query_dim, **_):
        super().__init__()
        self.given, self.layer = [], torch.nn.Linear(query_dim, query_dim)

    def forward(self, x, encoder_hidden_states=None, **others):
        self.given.append((x, encoder_hidden_states, others))
        if encoder_hidden_states is None:
            return self.layer(x.flip(1))
        joint = self.layer(torch.cat([encoder_hidden_states, x], dim=1).flip(1))
        n = encoder_hidden_states.shape[1]
        return joint[:, n:], joint[:, :n]


class FeedForward(torch.nn.Sequential):
    def __init__(self, dim, **_):
        super().__init__(torch.nn.Linear(dim, dim), torch.nn.GELU(approximate="tanh"))


class Nunchaku:
    """A class that no object here has."""


def upstream():
    """The module with both blocks."""
    return module_of(
        SITES[SINGLE],
        (SINGLE, DOUBLE),
        torch=torch,
        nn=torch.nn,
        LayerNorm=torch.nn.LayerNorm,
        AdaLayerNormZero=norms.AdaLayerNormZero,
        AdaLayerNormZeroSingle=norms.AdaLayerNormZeroSingle,
        ColumnParallelLinear=Linear,
        FluxAttention=Attention,
        FeedForward=FeedForward,
        NunchakuConfig=Nunchaku,
        is_nunchaku_available=lambda: False,
        _nunchaku_fused_ops_available=False,
    )


def once(x, gate, shift):
    """The sum alone is rounded, as SGLang's kernel does."""
    return (x.double() * gate.double()[:, None] + shift.double()).to(x.dtype)


def twice(x, gate, shift):
    """The product is rounded too, as the statements do."""
    return x * gate[:, None] + shift


# --- a block and its call


def normal(*shape):
    return torch.randn(shape).bfloat16()


class Case:
    """A block of upstream's module, its arguments, the calls of the op and of SGLang's function for gated sums."""

    def __init__(self, module, name, batch=2, width=WIDTH, dtype=torch.bfloat16):
        torch.manual_seed(0)
        self.module, self.site = module, SITES[name]
        block = getattr(module, name)(width, num_attention_heads=4, attention_head_dim=width // 4)
        self.block = block.requires_grad_(False).to(dtype)
        self.arguments = {
            "hidden_states": normal(batch, PICTURE, width).to(dtype),
            "encoder_hidden_states": normal(batch, TEXT, width).to(dtype),
            "temb": normal(batch, width).to(dtype),
            "freqs_cis": (torch.rand(3), torch.rand(3)),
            "joint_attention_kwargs": None,
        }
        self.calls, self.sums, self.rounding = [], [], twice

    def give(self, **changes):
        self.arguments |= changes
        return self

    def sum(self, x, scale, shift, scale_constant=1.0):
        """SGLang's `fuse_scale_shift_kernel`."""
        assert x.is_contiguous()
        assert x.dim() == shift.dim() == 3
        assert scale.dim() == 2
        assert scale_constant == 0
        self.sums.append((x, scale, shift))
        return self.rounding(x, scale, shift)

    def put(self, refused=()):
        """Put the lines there. `refused`: numbers of calls that the op does not take."""

        def op(*given):
            assert given[0].is_contiguous()
            self.calls.append(given)
            return (refuse if len(self.calls) - 1 in refused else getattr(solution, OP))(*given)

        deferred_lines.put(self.module, self.site.ported, (self.block,), self.site.op, op)

    def run(self):
        """The block's output, and what attention got."""
        self.block.attn.given.clear()
        given = {**self.arguments, "joint_attention_kwargs": copy.copy(self.arguments["joint_attention_kwargs"])}
        return self.block(**given), [*self.block.attn.given]

    def outcome(self):
        """The block's output, or what it raises."""
        try:
            return self.run()[0]
        except (ValueError, RuntimeError, AttributeError, TypeError) as error:
            return repr(error)


@pytest.fixture
def made(monkeypatch):
    """Makes a case."""

    def make(name, **sizes):
        module = upstream()
        case = Case(module, name, **sizes)
        known = {SUMS: {"fuse_scale_shift_kernel": case.sum}}
        for key, one in (stand_ins(known) | {case.site.module: module}).items():
            monkeypatch.setitem(sys.modules, key, one)
        return case

    return make


def assert_equal(got, want):
    assert type(got) is type(want)
    assert got == want if isinstance(got, str) else all(map(torch.equal, got, want))


# --- tests


@each
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("named", [None, {}, {"num_replicated_prefix": 5}, {"other": 1}], ids=str)
def test_all_bits_but_those_of_the_gated_sums_are_upstreams(made, name, batch, named):
    """Here the sums round as upstream's statements do."""
    case = made(name, batch=batch).give(joint_attention_kwargs=named)
    want, (theirs,) = case.run()
    before = {key: x.clone() for key, x in case.arguments.items() if isinstance(x, torch.Tensor)}
    case.put()
    got, (ours,) = case.run()
    assert_equal(got, want)
    for x, y in zip(ours[:2], theirs[:2], strict=True):
        assert x is y is None or torch.equal(x, y)
    assert ours[2].keys() == theirs[2].keys()
    assert all(ours[2][key] is one or ours[2][key] == one for key, one in theirs[2].items())
    assert (len(case.calls), len(case.sums)) == ((1, 1) if name == SINGLE else (4, 4))
    assert all(torch.equal(case.arguments[key], x) for key, x in before.items())


@each
def test_the_callers_arguments_of_attention_are_not_written(made, name):
    case, named = made(name), {"other": 1}
    case.put()
    case.block(**{**case.arguments, "joint_attention_kwargs": named})
    assert named == {"other": 1}
    assert len(case.block.attn.given) == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_a_sum_that_is_rounded_once_in_a_single_block(made, batch):
    """Upstream rounds the product and the sum, the lines the sum alone: half a step each."""
    case = made(SINGLE, batch=batch)
    case.rounding = once
    want, _ = case.run()
    case.put()
    got, _ = case.run()
    ((x, gate, shift),) = case.sums
    product = x.double() * gate.double()[:, None]
    bound = HALF * (product.abs() + 2 * (product + shift.double()).abs()) + 1e-6
    got, want = (torch.cat(one, dim=1).double() for one in (got, want))
    assert ((got - want).abs() <= bound).all()


def test_a_sum_that_is_rounded_once_in_a_double_block(made):
    """The first sums differ by a step, hence the norms behind them and what the MLP makes of these."""
    case = made(DOUBLE)
    case.rounding = once
    want, _ = case.run()
    case.put()
    for x, y in zip(case.run()[0], want, strict=True):
        torch.testing.assert_close(x, y, rtol=4 * HALF, atol=8 * HALF)


@each
def test_the_op_gets_the_chunks_and_the_norms_eps(made, name):
    case = made(name)
    block, temb = case.block, case.arguments["temb"]
    layers = [block.norm] if name == SINGLE else [block.norm1, block.norm1_context]
    for number, layer in enumerate(layers):
        layer.norm.eps = 0.01 * (number + 1)
    if name == DOUBLE:
        block.norm2.eps, block.norm2_context.eps = 0.03, 0.04
    want, _ = case.run()
    case.put()
    assert_equal(case.run()[0], want)
    assert [call[3] for call in case.calls] == ([0.01] if name == SINGLE else [0.01, 0.02, 0.03, 0.04])
    a, *b = [layer.linear(layer.silu(temb)).chunk(3 if name == SINGLE else 6, dim=1) for layer in layers]
    used = [(a[1], a[0])] if name == SINGLE else [(a[1], a[0]), (b[0][1], b[0][0]), (a[4], a[3]), (b[0][4], b[0][3])]
    gates = [a[2]] if name == SINGLE else [a[2], a[5], b[0][2], b[0][5]]
    for (_, scale, shift, _), expected in zip(case.calls, used, strict=True):
        assert_equal((scale, shift), expected)
        assert scale.stride() == (WIDTH * len(a), 1), "read where it lies"
    assert_equal(tuple(gate for _, gate, _ in case.sums), tuple(gates))


def with_gaps(x):
    return torch.cat((x, x), dim=1)[:, : x.shape[1]]


@each
def test_streams_with_gaps(made, name):
    """As parts of a joint tensor have, of several pictures."""
    case = made(name)
    for key in ("hidden_states", "encoder_hidden_states"):
        case.give(**{key: with_gaps(case.arguments[key])})
        assert not case.arguments[key].is_contiguous()
    want, _ = case.run()
    case.put()
    assert_equal(case.run()[0], want)
    assert len(case.calls) == len(case.sums) == (1 if name == SINGLE else 4)


def test_the_gelu_is_joined_as_k08_expects_it(made):
    case, joined = made(SINGLE), []
    want, _ = case.run()
    fused = lambda attn, mlp: joined.append(mlp.shape) or deferred_gelu.chain(attn, mlp)  # noqa: E731
    deferred_gelu.defer(case.block, "act_mlp", "", fused)
    case.put()
    assert_equal(case.run()[0], want)
    assert joined == [(2, PICTURE + TEXT, 4 * WIDTH)]
    assert len(case.calls) == 1


@pytest.mark.parametrize(("name", "refused"), [(SINGLE, 0), *((DOUBLE, number) for number in range(4))])
def test_a_refused_call_leaves_the_block_to_upstream(made, name, refused):
    case = made(name).give(joint_attention_kwargs={"other": 1})
    case.rounding = lambda x, *_: x
    want, _ = case.run()
    case.put(refused={refused})
    assert_equal(case.run()[0], want)
    assert len(case.calls) == refused + 1


def affine(layer):
    layer.weight, layer.bias = torch.nn.Parameter(normal(WIDTH)), torch.nn.Parameter(normal(WIDTH))


def bias(layer):
    layer.bias = torch.nn.Parameter(normal(WIDTH))


def weight(layer):
    layer.weight = torch.nn.Parameter(normal(WIDTH))


def other(layer):
    layer.__class__ = type("Other", (type(layer),), {})


def embedded(layer):
    layer.emb = lambda timestep, labels, hidden_dtype: normal(2, WIDTH)


def on(path, change):
    """Change a layer of the block."""
    return lambda case: change(case.block.get_submodule(path))


def argument(name, change):
    return lambda case: case.give(**{name: change(case.arguments[name])})


def nunchaku(case):
    """The norms of such a block give x times a scale that includes the one, and its single blocks have two layers."""
    case.block.use_nunchaku_structure = True
    case.block.mlp_fc1, case.block.mlp_fc2 = Linear(WIDTH, WIDTH).bfloat16(), Linear(WIDTH, WIDTH).bfloat16()


LAYERS = {SINGLE: ["norm.norm"], DOUBLE: ["norm1.norm", "norm1_context.norm", "norm2", "norm2_context"]}
MODULES = {SINGLE: ["norm"], DOUBLE: ["norm1", "norm1_context"]}
EITHER = {
    "nunchaku": nunchaku,
    "float32 picture": argument("hidden_states", torch.Tensor.float),
    "float32 text": argument("encoder_hidden_states", torch.Tensor.float),
    "one temb for all": argument("temb", lambda temb: temb[:1]),
    "a temb of several rows": argument("temb", lambda temb: temb[:, None]),
}
UNUSUAL = [
    *((name, what, change) for name in LAYERS for what, change in EITHER.items()),
    *(
        (name, f"{layer} {change.__name__}", on(layer, change))
        for name, layers in LAYERS.items()
        for layer in layers
        for change in (other, affine, weight, bias)
    ),
    *((name, f"{layer} other", on(layer, other)) for name, layers in MODULES.items() for layer in layers),
    *((DOUBLE, f"{layer} embedded", on(layer, embedded)) for layer in MODULES[DOUBLE]),
    (DOUBLE, "one text for all", argument("encoder_hidden_states", lambda text: text[:1])),
]


@pytest.mark.parametrize(
    ("name", "change"), [(one[0], one[2]) for one in UNUSUAL], ids=[f"{a} {b}" for a, b, _ in UNUSUAL]
)
def test_an_unusual_call_is_upstreams(made, name, change):
    case = made(name)
    change(case)
    torch.manual_seed(1)
    want = case.outcome()
    case.put()
    torch.manual_seed(1)
    assert_equal(case.outcome(), want)
    assert not case.calls


@each
@pytest.mark.parametrize("sizes", [{"dtype": torch.float32}, {"dtype": torch.float16}, {"width": 768}], ids=str)
def test_what_the_kernel_does_not_take_is_upstreams(made, name, sizes):
    case = made(name, **sizes)
    want = case.outcome()
    assert not isinstance(want, str)
    case.put()
    assert_equal(case.outcome(), want)
    assert not case.calls


@each
@pytest.mark.parametrize(("width", "number"), [(6144, 1), (6656, 0)])
def test_the_widest_rows(made, name, width, number):
    with torch.device("meta"):
        case = made(name, width=width)
        case.put()
        case.run()
    assert len(case.calls) == number * (1 if name == SINGLE else 4)


@each
def test_calls_under_autocast_are_upstreams(made, monkeypatch, name):
    """There layer_norm gives float32."""
    case = made(name)
    want, _ = case.run()
    case.put()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert_equal(case.run()[0], want)
    assert not case.calls


@each
@pytest.mark.parametrize("compiling", [False, True])
def test_the_lines_ask_whether_the_kernels_run(made, monkeypatch, name, compiling):
    case = made(name)
    assert_lines_ask(monkeypatch, case.site, case.block, case.arguments, "hidden_states", compiling)


def test_a_block_has_the_sites_of_its_release():
    assert set(SITES) == {SINGLE, DOUBLE}
    assert {(site.op, site.release) for site in SITES.values()} == {(OP, "0.5.12.post1")}
