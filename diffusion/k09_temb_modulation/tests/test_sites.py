"""The lines in `sites.toml` for 0.5.12.post1, in front of the blocks of that release.

Blocks, attention and norms are upstream's own text, out of the pinned wheel. Linear layers, attention's core and the
function that rotates are simple ones. Upstream's norms are run as on other devices than NVIDIA's: in PyTorch.
"""

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.deferred_slices import refuse
from kda_tools.models.upstream_source import run, source_of, text_of

from .. import solution
from .cases import BOTH, NORM, RESIDUAL, normal

RELEASE = "0.5.12.post1"
SITES = [site for site in sites_of(find_task("temb_modulation")) if site.release == RELEASE]
RUNTIME = "sglang.multimodal_gen.runtime"
FOUND = {
    f"{RUNTIME}.models.dits.helios": (
        "HeliosSelfAttention",
        "HeliosCrossAttention",
        "HeliosTransformerBlock",
        "apply_rotary_emb_transposed",
    ),
    f"{RUNTIME}.models.dits.wanvideo": ("WanSelfAttention", "WanT2VCrossAttention", "WanTransformerBlock"),
    f"{RUNTIME}.layers.layernorm": (
        *("RMSNorm", "LayerNorm", "FP32LayerNorm", "_ScaleResidualNormScaleShift", "_NormScaleShift"),
        *("ScaleResidualLayerNormScaleShift", "LayerNormScaleShift"),
    ),
    f"{RUNTIME}.layers.elementwise": ("MulAdd",),
}
"""Module -> what is taken out of it; layers first, when sorted."""
HELIOS, WAN = "HeliosTransformerBlock", "WanTransformerBlock"
B, S, D, HEADS = 2, 6, 256, 2
EPS = {"norm1": 0.1, "self_attn_residual_norm": 0.2, "norm3": 0.3, "cross_attn_residual_norm": 0.4}
"""Large ones, all different, so that a wrong one shows."""
EXPECTED = {
    HELIOS: [
        (NORM, {"shift": 0, "scale": 1, "eps": 0.1}),
        (BOTH, {"gate": 2, "eps": 0.2, "affine": True}),
        (NORM, {"shift": 3, "scale": 4, "eps": 0.3}),
        (RESIDUAL, {"gate": 5}),
    ],
    WAN: [
        (NORM, {"shift": 0, "scale": 1, "eps": 0.1}),
        (BOTH, {"gate": 2, "eps": 0.2, "affine": True}),
        (BOTH, {"shift": 3, "scale": 4, "eps": 0.4, "affine": False}),
        (RESIDUAL, {"gate": 5}),
    ],
}
"""Block -> the calls of a forward: what is used of their numbers, and whether the norm has weight and bias."""
both_blocks = pytest.mark.parametrize("name", [HELIOS, WAN])
pytestmark = pytest.mark.usefixtures("_without_gradients")


@pytest.fixture
def _without_gradients():
    with torch.no_grad():
        yield


# --- upstream's text, and simple layers for what it asks for


class CustomOp(torch.nn.Module):
    """Upstream's class where there is no kernel."""

    def forward(self, *args):
        return self.forward_native(*args)

    @staticmethod
    def register(_name):
        return lambda kind: kind


class Linear(torch.nn.Linear):
    """It returns a bias too, as upstream's do, and counts its calls."""

    calls = 0

    def __init__(self, first, second, **_options):
        super().__init__(first, second)

    def forward(self, x):
        self.calls += 1
        return super().forward(x), None


class FeedForward(torch.nn.Linear):
    def __init__(self, first, _inner, **_options):
        super().__init__(first, first)

    def forward(self, x):
        return gelu(super().forward(x))


class Core(torch.nn.Module):
    def __init__(self, **_options):
        super().__init__()

    def forward(self, q, k, v, num_replicated_prefix=0):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2) + num_replicated_prefix


def scale_shift(x, scale, shift, scale_constant=1):
    return x * (scale_constant + scale) + shift


def rotated(x, cos, sin, is_neox_style):
    assert not is_neox_style
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = (part[:, None].float() for part in (cos, sin))
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def rotate_in_place(q, k, cos_sin, *, is_neox):
    """Upstream's function may write into q and k, but only what it returns is right for sure."""
    assert cos_sin.dtype == torch.float32
    found = [rotated(x, *cos_sin.chunk(2, dim=-1), is_neox) for x in (q, k)]
    for x in (q, k):
        x.zero_()
    return found


@pytest.fixture
def upstream(monkeypatch):
    """Module of a site -> a module of its name with upstream's classes; what they ask for is above."""
    names = {
        "torch": torch,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "CustomOp": CustomOp,
        "_is_npu": False,
        "ColumnParallelLinear": Linear,
        "RowParallelLinear": Linear,
        "MLP": FeedForward,
        "USPAttention": Core,
        "get_tp_world_size": lambda: 1,
        "divide": lambda a, b: a // b,
        "add_prefix": lambda a, b: f"{b}.{a}",
        "get_bool_env_var": lambda _: False,
        "current_platform": SimpleNamespace(is_npu=lambda: True),
        "fuse_scale_shift_kernel": scale_shift,
        "tensor_parallel_rms_norm": lambda x, norm: norm(x),
        "_is_cuda": True,
        "_use_aiter": False,
        "_apply_rotary_emb": rotated,
        "apply_flashinfer_rope_qk_inplace": rotate_in_place,
    }
    modules = {}
    for name, wanted in sorted(FOUND.items()):
        space = names
        if "layers" not in name:
            module = modules[name] = ModuleType(name)
            space = vars(module)
            space.update(names)
            monkeypatch.setitem(sys.modules, name, module)
        run(text_of(name, RELEASE), wanted, space)
        assert set(wanted) <= space.keys()
    return modules


@pytest.fixture
def make(upstream):
    """A function that makes a block of upstream's class, with random parameters."""

    def made(name, dtype=torch.float32, width=D, **options):
        (module,) = (module for module in upstream.values() if hasattr(module, name))
        needed = {"supported_attention_backends": set()} if name == WAN else {}
        block = getattr(module, name)(width, width, HEADS, **{"cross_attn_norm": True, **needed, **options})
        for number, parameter in enumerate(block.parameters()):
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(mean + (0.3 if mean else 0.1) * normal(*parameter.shape, dtype=dtype, seed=number))
        for layer, eps in EPS.items():
            for norm in (getattr(block, layer, None), getattr(getattr(block, layer, None), "norm", None)):
                if hasattr(norm, "eps"):
                    norm.eps = eps
        return block.to(dtype)

    return made


def arguments(name, dtype=torch.float32, batch=None, context=None, width=D, **others):
    """The arguments of the block's forward: of one clip for Helios, of two for Wan."""
    batch = batch or (1 if name == HELIOS else B)
    given = {
        "hidden_states": normal(batch, S, width, dtype=dtype),
        "encoder_hidden_states": normal(batch, 3, width, dtype=dtype, seed=1),
        "temb": normal(batch, S, 6, width, dtype=dtype, seed=2),
    }
    if name == HELIOS:  # the model makes it slice by slice
        given["temb"] = given["temb"].transpose(1, 2).contiguous().transpose(1, 2)
    angles = 6 * torch.rand(S, width // HEADS, generator=torch.Generator().manual_seed(0))
    if name == WAN:
        half = angles[:, ::2]
        return given | {"freqs_cis": (half.cos(), half.sin())} | others
    return (
        given
        | {"rotary_emb": torch.cat((angles.cos(), angles.sin()), dim=-1), "original_context_length": context}
        | others
    )


def with_ops(block, calls, refused=None):
    """The block with its lines and the solution's ops in it; each call is written down, number `refused` is refused."""

    def of(op):
        function = getattr(solution, op)
        signature = inspect.signature(function)

        def call(*args, **named):
            given = signature.bind(*args, **named)
            given.apply_defaults()
            calls.append((op, given.arguments))
            return (refuse if len(calls) - 1 == refused else function)(*args, **named)

        return call

    for site in SITES:
        if site.class_ == type(block).__name__:
            deferred_lines.put(sys.modules[site.module], site.ported, (block,), site.op, of(site.op))
    return block


def used(block, calls):
    """The calls as in `EXPECTED`; all tables are the block's."""
    found = []
    for op, given in calls:
        tables = {"gate": given.get("gate_table"), "shift": given.get("table"), "scale": given.get("table")}
        assert {id(table) for table in tables.values() if table is not None} == {id(block.scale_shift_table)}
        numbers = {name: given[name] for name, table in tables.items() if table is not None}
        numbers |= {"eps": given["eps"]} if "eps" in given else {}
        if op == BOTH:
            numbers["affine"] = given["weight"] is not None
            norm = block.self_attn_residual_norm
            norm = getattr(norm, "norm", norm)
            weight, bias = (norm.weight, norm.bias) if numbers["affine"] else (None, None)
            assert given["weight"] is weight
            assert given["bias"] is bias
        found.append((op, numbers))
    return found


def assert_close(got, want, dtype=None):
    """Within six steps of the dtype at the largest value.

    Each op rounds its outputs once. Upstream's norms in PyTorch round the gated sum for the stream, but norm it as it
    was.
    """
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    bound = 6 * torch.finfo(dtype or want.dtype).eps * want.abs().max().item()
    torch.testing.assert_close(got, want, atol=bound, rtol=0)


# --- tests


def test_the_pinned_modules_are_the_wheels():
    assert {site.class_ for site in SITES} == {HELIOS, WAN}
    for site in SITES:
        assert site.module in FOUND
        assert source_of(site), "its sha256 is the site's"


CALLS = {
    "wan": (WAN, {}),
    "wan one clip": (WAN, {"batch": 1}),
    "helios": (HELIOS, {}),
    "helios context": (HELIOS, {"context": 2}),
    "helios all context": (HELIOS, {"context": S}),
}


@pytest.mark.parametrize(
    ("dtype", "temb"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["float32", "float32 temb", "bfloat16"],
)
@pytest.mark.parametrize(("name", "change"), CALLS.values(), ids=CALLS)
def test_the_lines_give_what_the_block_gives(make, name, change, dtype, temb):
    options = {"guidance_cross_attn": change.get("context") is not None} if name == HELIOS else {}
    block, calls = make(name, dtype, **options), []
    call = arguments(name, dtype, **change)
    call["temb"] = call["temb"].to(temb)
    kept = {key: value.clone() for key, value in call.items() if isinstance(value, torch.Tensor)}
    want = block(**call)
    got = with_ops(block, calls)(**call)
    assert used(block, calls) == EXPECTED[name]
    assert all(given["temb"] is call["temb"] for _, given in calls)
    assert all(torch.equal(call[key], value) for key, value in kept.items())
    assert got.untyped_storage().data_ptr() != call["hidden_states"].untyped_storage().data_ptr()
    assert_close(got, want)


def test_wans_first_block_gets_a_transposed_stream(make):
    block, calls = make(WAN), []
    call = arguments(WAN)
    call["hidden_states"] = call["hidden_states"].mT.contiguous().mT
    want = block(**call)
    assert_close(with_ops(block, calls)(**call), want)
    assert used(block, calls) == EXPECTED[WAN]
    assert calls[0][1]["x"].is_contiguous()


def test_wans_stream_keeps_its_dtype_where_layers_have_another(make):
    block, calls = make(WAN), []
    call = arguments(WAN)
    with torch.autocast("cpu", torch.bfloat16):
        want = block(**call)
        got = with_ops(block, calls)(**call)
    assert used(block, calls) == EXPECTED[WAN]
    assert want.dtype == got.dtype == torch.float32
    assert_close(got, want, torch.bfloat16)


OTHERS = {
    "helios line for all tokens": (HELIOS, {}, {"temb": normal(1, 6, D)}),
    "helios two clips": (HELIOS, {}, {"batch": 2}),
    "helios narrow": (HELIOS, {"width": 128}, {"width": 128}),
    "helios no norm": (HELIOS, {"cross_attn_norm": False}, {}),
    "wan line for all tokens": (WAN, {}, {"temb": normal(B, 6, D)}),
    "wan four dimensions": (WAN, {}, {"hidden_states": normal(B, 1, S, D).float()}),
    "wan shard of two clips": (WAN, {}, {"temb": normal(B, 2, S, 6, D)[:, 1]}),
    "wan narrow": (WAN, {"width": 128}, {"width": 128}),
}


def assert_upstreams_own(block, call):
    """Upstream's bits, no op asked, and nothing projected twice."""
    want, calls = type(block).forward(block, **call), []
    with_ops(block, calls)
    layer = next(one for one in block.modules() if isinstance(one, Linear))
    layer.calls = 0
    assert torch.equal(block(**call), want)
    assert (calls, layer.calls) == ([], 1)


@pytest.mark.parametrize(("name", "options", "change"), OTHERS.values(), ids=OTHERS)
def test_another_call_or_block_is_upstreams_own(make, name, options, change):
    options = {"guidance_cross_attn": False} | options if name == HELIOS else options
    assert_upstreams_own(make(name, **options), arguments(name, **change))


@pytest.mark.parametrize("lacking", ["weight", "bias"])
def test_helios_norm_without_weight_or_bias_is_upstreams_own(make, lacking):
    block = make(HELIOS, guidance_cross_attn=False)
    setattr(block.self_attn_residual_norm, lacking, None)
    assert_upstreams_own(block, arguments(HELIOS))


def test_wan_on_several_gpus_or_another_platform_is_upstreams_own(make, upstream, monkeypatch):
    block = make(WAN)
    block.tp_rmsnorm = True
    assert_upstreams_own(block, arguments(WAN))
    block = make(WAN)
    monkeypatch.setattr(upstream[type(block).__module__], "_is_cuda", False)
    assert_upstreams_own(block, arguments(WAN))


def alone(block, calls, call):
    """What the lines return by themselves."""
    made = with_ops(block, calls).forward.made
    found = vars(sys.modules[type(block).__module__])
    ops = {site.op: block.forward.ops[site.op] for site in SITES}
    given = dict.fromkeys(made.signature.parameters) | call | {"self": block}
    return made.run(**given, **{name: found.get(name) or ops[name] for name in made.names})


@both_blocks
def test_a_trace_or_a_port_that_is_off_is_upstreams_own(make, name, monkeypatch):
    block, call, calls = make(name), arguments(name, **({"context": 2} if name == HELIOS else {})), []
    assert alone(block, [], call) is not deferred_lines.OWN
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert alone(block, calls, call) is deferred_lines.OWN
        assert calls == []
        assert_upstreams_own(block, call)
    seen = block.forward.made.run.__globals__
    monkeypatch.setitem(seen, "kda_runs", lambda x: x is not call["hidden_states"])
    assert_upstreams_own(block, call)


@both_blocks
def test_rows_that_are_too_long_for_the_kernel_are_left_alone(make, name):
    """The lines are run alone: a block of this width would be large."""
    calls, shapes = [], {"hidden_states": (1, 1, 8448), "temb": (1, 1, 6, 8448)}
    assert alone(make(name), calls, {name: torch.empty(shape) for name, shape in shapes.items()}) is deferred_lines.OWN
    assert calls == []


@both_blocks
@pytest.mark.parametrize("refused", range(4))
def test_where_an_op_refuses_the_block_computes_all_itself(make, name, refused):
    block, calls = make(name), []
    call = arguments(name, **({"context": 2} if name == HELIOS else {}))
    kept = call["hidden_states"].clone()
    want = block(**call)
    assert torch.equal(with_ops(block, calls, refused)(**call), want)
    assert len(calls) == refused + 1
    assert torch.equal(call["hidden_states"], kept)
