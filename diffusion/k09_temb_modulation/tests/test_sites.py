"""The lines in `sites.toml`, in front of upstream's blocks: of both releases for Wan, of 0.5.12.post1 for Helios.

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
from kda_tools.models.deferred_lines import refuse
from kda_tools.models.upstream_source import run, source_of, text_of

from .. import solution
from .cases import BOTH, NORM, RESIDUAL, normal

HELIOS, WAN, LATER = "HeliosTransformerBlock", "WanTransformerBlock", "WanTransformerBlock of 0.5.23"
RELEASES = {HELIOS: "0.5.12.post1", WAN: "0.5.12.post1", LATER: "0.5.23"}
SITES = {
    name: [
        site
        for site in sites_of(find_task("temb_modulation"))
        if (site.class_, site.release) == (name.split()[0], release)
    ]
    for name, release in RELEASES.items()
}
RUNTIME = "sglang.multimodal_gen.runtime"
FOUND = {
    f"{RUNTIME}.models.dits.helios": (
        "HeliosSelfAttention",
        "HeliosCrossAttention",
        "HeliosTransformerBlock",
        "apply_rotary_emb_transposed",
    ),
    f"{RUNTIME}.models.dits.wanvideo": (
        *("WanSelfAttention", "WanT2VCrossAttention", "WanTransformerBlock"),
        *("_eager_temb_table_slices", "_wan_temb_table_slices"),
    ),
    f"{RUNTIME}.layers.layernorm": (
        *("RMSNorm", "LayerNorm", "FP32LayerNorm", "_ScaleResidualNormScaleShift", "_NormScaleShift"),
        *("ScaleResidualLayerNormScaleShift", "LayerNormScaleShift"),
    ),
    f"{RUNTIME}.layers.elementwise": ("MulAdd",),
}
"""Module -> what is taken out of it; layers first, when sorted."""
LAYERS = f"{RUNTIME}.layers."
B, S, D, HEADS = 2, 6, 256, 2
EPS = {"norm1": 0.1, "self_attn_residual_norm": 0.2, "norm3": 0.3, "cross_attn_residual_norm": 0.4}
EPS |= {"ffn_residual_norm1": EPS["norm1"]}
"""Large ones, so that a wrong one shows. A block's first norm is one of two, which upstream makes alike."""
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
EXPECTED[LATER] = EXPECTED[WAN]
"""Block -> the calls of a forward: what is used of their numbers, and whether the norm has weight and bias."""
each_block = pytest.mark.parametrize("name", RELEASES)
both_wans = pytest.mark.parametrize("name", [WAN, LATER])
pytestmark = pytest.mark.usefixtures("_without_gradients")


@pytest.fixture
def _without_gradients():
    with torch.no_grad():
        yield


# --- upstream's text, and simple layers for what it asks for


class CustomOp(torch.nn.Module):
    """Upstream's class where there is no kernel."""

    _forward_method = None

    def forward(self, *args):
        return self.forward_native(*args)

    def dispatch_forward(self):
        return self.forward_native

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

    exchanges = False

    def forward_qk_filled(self, q, k, v, fill_all):
        """As where processes exchange heads: the caller writes q and k into what is sent."""
        if not self.exchanges:
            return None
        sent = torch.empty_like(q), torch.empty_like(k)
        for part in (0, 1):
            fill_all([(0, q.shape[2], *sent)], part)
        return self(*sent, v) + 1


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


def norm_and_rotate_in_place(x, weight, cos_sin, eps, width):
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    normed = normed.unflatten(-1, (-1, width)).unflatten(0, (-1, len(cos_sin)))
    x.copy_(rotated(normed, *cos_sin.chunk(2, dim=-1), False).reshape(x.shape))


@pytest.fixture
def upstream(monkeypatch):
    """A function: release -> modules with upstream's classes, by the names of the sites' modules.

    What the classes ask for is above.
    """
    made = {}
    return lambda release: made.get(release) or made.setdefault(release, modules_of(release, monkeypatch))


def modules_of(release, monkeypatch):
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
        "USE_AITER": False,
        "_WanGELUMLP": FeedForward,
        "can_use_fused_rmsnorm_interleaved_rope": lambda *_: True,
        "fused_rmsnorm_interleaved_rope_": norm_and_rotate_in_place,
        "rmsnorm_interleaved_rope_block_cols": lambda _: 0,
        "_apply_rotary_emb": rotated,
        "apply_flashinfer_rope_qk_inplace": rotate_in_place,
    }
    for name in ("sglang", "sglang.multimodal_gen"):  # the block imports `envs` from there
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[name])["envs"] = None
    modules = {}
    needed = {site.module for name in RELEASES if RELEASES[name] == release for site in SITES[name]}
    for name, wanted in sorted(FOUND.items()):
        space = names
        if not name.startswith(LAYERS):
            if name not in needed:
                continue
            module = modules[name] = ModuleType(name)
            space = vars(module)
            space.update(names)
            monkeypatch.setitem(sys.modules, name, module)
        run(text_of(name, release), wanted, space)
        assert {one for one in wanted if not one.endswith("_slices") or release == "0.5.23"} <= space.keys()
    return modules


def rounded(_norm, given, out):
    """As this norm's kernel rounds: the block asks for q, k and v without rounding it again."""
    return tuple(part.to(given[0].dtype) for part in out)


@pytest.fixture
def make(upstream):
    """A function that makes a block of upstream's class, with random parameters."""

    def made(name, dtype=torch.float32, width=D, **options):
        found, kind = upstream(RELEASES[name]), name.split()[0]
        (module,) = (module for module in found.values() if hasattr(module, kind))
        needed = {} if name == HELIOS else {"supported_attention_backends": set()}
        block = getattr(module, kind)(width, width, HEADS, **{"cross_attn_norm": True, **needed, **options})
        for number, parameter in enumerate(block.parameters()):
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(mean + (0.3 if mean else 0.1) * normal(*parameter.shape, dtype=dtype, seed=number))
        for layer, eps in EPS.items():
            for norm in (getattr(block, layer, None), getattr(getattr(block, layer, None), "norm", None)):
                if hasattr(norm, "eps"):
                    norm.eps = eps
        if name == LATER:
            block.ffn_residual_norm1.register_forward_hook(rounded)
        vars(block)["case"] = name
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
    if name != HELIOS:
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

    for site in SITES[block.case]:
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
    for site in (site for sites in SITES.values() for site in sites):
        assert site.module in FOUND
        assert source_of(site), "its sha256 is the site's"


CALLS = {
    "wan": (WAN, {}),
    "wan one clip": (WAN, {"batch": 1}),
    "wan 0.5.23": (LATER, {}),
    "wan 0.5.23 one clip": (LATER, {"batch": 1}),
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


@both_wans
def test_wans_stream_keeps_its_dtype_where_layers_have_another(make, name):
    block, calls = make(name), []
    call = arguments(name)
    with torch.autocast("cpu", torch.bfloat16):
        want = block(**call)
        got = with_ops(block, calls)(**call)
    assert used(block, calls) == EXPECTED[name]
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
    "wan 0.5.23 line for all tokens": (LATER, {}, {"temb": normal(B, 6, D)}),
    "wan 0.5.23 four dimensions": (LATER, {}, {"hidden_states": normal(B, 1, S, D).float()}),
    "wan 0.5.23 shard of two clips": (LATER, {}, {"temb": normal(B, 2, S, 6, D)[:, 1]}),
    "wan 0.5.23 narrow": (LATER, {"width": 128}, {"width": 128}),
    "wan 0.5.23 after upstream's block": (
        *(LATER, {}),
        {"ffn_residual": (normal(B, S, D).float(), normal(B, S, D, seed=1).float())},
    ),
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
    monkeypatch.setattr(upstream(RELEASES[WAN])[type(block).__module__], "_is_cuda", False)
    assert_upstreams_own(block, arguments(WAN))


def alone(block, calls, call):
    """What the lines return by themselves."""
    lines = deferred_lines.lines_of(with_ops(block, calls))
    made = lines.made
    found = vars(sys.modules[type(block).__module__])
    ops = lines.ops
    given = dict.fromkeys(made.signature.parameters) | call | {"self": block}
    return made.run(**given, **{name: found.get(name) or ops[name] for name in made.names})


@each_block
def test_a_trace_or_a_port_that_is_off_is_upstreams_own(make, name, monkeypatch):
    block, call, calls = make(name), arguments(name, **({"context": 2} if name == HELIOS else {})), []
    assert alone(block, [], call) is not deferred_lines.OWN
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert alone(block, calls, call) is deferred_lines.OWN
        assert calls == []
        assert_upstreams_own(block, call)
    seen = deferred_lines.lines_of(block).made.run.__globals__
    monkeypatch.setitem(seen, "kda_runs", lambda x: x is not call["hidden_states"])
    assert_upstreams_own(block, call)


@each_block
def test_rows_that_are_too_long_for_the_kernel_are_left_alone(make, name):
    """The lines are run alone: a block of this width would be large."""
    calls, shapes = [], {"hidden_states": (1, 1, 8448), "temb": (1, 1, 6, 8448)}
    assert alone(make(name), calls, {name: torch.empty(shape) for name, shape in shapes.items()}) is deferred_lines.OWN
    assert calls == []


@each_block
@pytest.mark.parametrize("refused", range(4))
def test_where_an_op_refuses_the_block_computes_all_itself(make, name, refused):
    block, calls = make(name), []
    call = arguments(name, **({"context": 2} if name == HELIOS else {}))
    kept = call["hidden_states"].clone()
    want = block(**call)
    assert torch.equal(with_ops(block, calls, refused)(**call), want)
    assert len(calls) == refused + 1
    assert torch.equal(call["hidden_states"], kept)


# --- Wan of 0.5.23: what its block does in functions of its own, and its chain of blocks


@pytest.mark.parametrize("cached", [False, True], ids=["table made", "table given"])
@pytest.mark.parametrize("way", ["rotated by itself", "normed and rotated at once", "exchanged"])
def test_q_and_k_are_normed_and_rotated_as_upstream_does(make, way, cached):
    block, calls = make(LATER), []
    call = arguments(LATER, rope_cos_sin_cache=None)
    plain = block(**call)
    block.fuse_qk_norm_rope = way != "rotated by itself"
    block.attn1.exchanges = way == "exchanged"
    if cached:  # other angles, so that it shows which are used
        call["rope_cos_sin_cache"] = torch.cat(call["freqs_cis"], dim=-1).roll(1, dims=0).cos()
    want = block(**call)
    assert torch.allclose(plain, want, atol=1e-3) is not cached, "without a table q and k are always rotated apart"
    assert_close(with_ops(block, calls)(**call), want)
    assert used(block, calls) == EXPECTED[LATER]


def test_cross_attention_gets_the_texts_keys_and_values(make):
    block, calls = make(LATER), []
    call = arguments(LATER)
    other = normal(B, 3, D, seed=7).float()
    plain, call["text_kv"] = block(**call), block.attn2.project_context_kv(other)
    want = block(**call)
    assert not torch.allclose(plain, want, atol=1e-3)
    assert_close(with_ops(block, calls)(**call), want)
    assert used(block, calls) == EXPECTED[LATER]


def chained(blocks, call):
    """The blocks as upstream's model runs them: each leaves its feed-forward's output to the next."""
    x, left = call["hidden_states"], None
    for block in blocks[:-1]:
        x, left = block(**call | {"hidden_states": x, "ffn_residual": left, "defer_ffn_residual": True})
    return blocks[-1](**call | {"hidden_states": x, "ffn_residual": left})


def chain_of(make, dtype=torch.float32):
    blocks = [make(LATER, dtype) for _ in range(3)]
    for number, block in enumerate(blocks):
        block.scale_shift_table.copy_(normal(1, 6, D, dtype=dtype, seed=20 + number))
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_block_in_a_chain_leaves_nothing_to_the_next(make, dtype):
    blocks, calls, call = chain_of(make, dtype), [], arguments(LATER, dtype)
    want = chained(blocks, call)
    assert_close(chained([with_ops(block, calls) for block in blocks], call), want)
    assert [op for op, _ in calls] == 3 * [op for op, _ in EXPECTED[LATER]]
    last = [given["gate_table"] for op, given in calls if op == RESIDUAL]
    assert all(table is block.scale_shift_table for table, block in zip(last, blocks, strict=True))


@pytest.mark.parametrize("without", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}])
def test_blocks_with_and_without_lines_are_chained(make, without):
    blocks, calls, call = chain_of(make), [], arguments(LATER)
    want = chained(blocks, call)
    some = [block if number in without else with_ops(block, calls) for number, block in enumerate(blocks)]
    assert_close(chained(some, call), want)
    # After a block without lines a block runs its own statements.
    assert len(calls) == {(0,): 0, (1,): 4, (2,): 8, (0, 1): 0, (0, 2): 0, (1, 2): 4}[tuple(sorted(without))]


@pytest.mark.parametrize("refused", range(12))
def test_a_chain_goes_on_where_an_op_refuses(make, refused):
    blocks, calls, call = chain_of(make), [], arguments(LATER)
    want = chained(blocks, call)
    assert_close(chained([with_ops(block, calls, refused) for block in blocks], call), want)
    # The block of the refused call, and all after it, run their own statements.
    assert len(calls) == refused + 1


def test_a_compiled_block_takes_what_the_block_before_left(make):
    blocks, calls, call = chain_of(make), [], arguments(LATER)
    want = chained(blocks, call)
    compiled = torch.compile(with_ops(blocks[1], calls), backend="eager")
    assert_close(chained([with_ops(blocks[0], calls), compiled, with_ops(blocks[2], calls)], call), want)
    assert len(calls) == 4
