"""The lines for HunyuanVideo give what its own blocks give, which come out of the wheels' text.

Upstream's norm, and the attention of 0.5.12.post1, come out of that text too. Its other layers are small stand-ins.
"""

import enum
import sys
from types import SimpleNamespace

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_gelu, deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.deferred_lines import refuse
from kda_tools.models.upstream_source import assert_lines_ask, counted, module_of, run, text_of

from .. import solution
from .layers import MLP, STEP, Attention, LayerNormScaleShift, Linear, Lines, assert_equal, normal

SITES = [site for site in sites_of(find_task("qkv_pack")) if site.module.endswith("hunyuanvideo")]
OLD = "0.5.12.post1"
LAYERS = "sglang.multimodal_gen.runtime.layers"
OWN = (
    "_hunyuan_qknorm",
    "_hunyuan_pack_qkv",
    "_hunyuan_pack_qkv_reference",
    "MMDoubleStreamBlock",
    "MMSingleStreamBlock",
)
"""What is taken of upstream's module, where the release has it."""
CLIP, TEXT, SIZE, HEADS = 7, 3, 64, 4
EPS = {"q_norm": 0.02, "k_norm": 0.02, "img_attn": 0.05, "txt_attn": 0.1}


# --- upstream's module


class CustomOp(torch.nn.Module):
    """Upstream's base of a layer, on the CPU."""

    @staticmethod
    def register(_name):
        return lambda made: made

    def forward(self, *args):
        return self.forward_native(*args)


class ScaleResidualLayerNormScaleShift(LayerNormScaleShift):
    def forward(self, residual, x, gate, shift, scale):
        left = residual + x * gate[:, None]
        return super().forward(left, shift, scale), left


class MulAdd(torch.nn.Module):
    def forward(self, a, b, c, k=0):
        return c + a * (k + b[:, None])


class Modulation(torch.nn.Module):
    def __init__(self, wide, factor, **_):
        super().__init__()
        self.layer = Linear(wide, wide * factor)

    def forward(self, vec):
        return self.layer(vec)[0]


class Backend(enum.Enum):
    FA = enum.auto()
    SLIDING_TILE_ATTN = enum.auto()
    VIDEO_SPARSE_ATTN = enum.auto()


class Core(Attention):
    """Attention itself, which gets the request's metadata."""

    def forward(self, q, k, v, metadata=None, **others):
        others |= {"metadata": metadata} if metadata else {}
        return super().forward(q, k, v, **others).contiguous()

    def preprocess_qkv(self, qkv, _metadata):
        return qkv

    def postprocess_output(self, output, _metadata):
        return output


def rotated(x, cos, sin, is_neox_style):
    """Upstream's kernel: neighbours, in float32, rounded once."""
    assert not is_neox_style
    cos, sin = (table[: x.shape[1], None].float() for table in (cos, sin))
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def norm_of(release):
    """Upstream's own RMSNorm."""
    names = {"torch": torch, "nn": torch.nn, "CustomOp": CustomOp, "get_bool_env_var": lambda _: False}
    names |= {"_use_aiter": False, "USE_AITER": False}
    run(text_of(f"{LAYERS}.layernorm", release), ("RMSNorm",), names)
    return names["RMSNorm"]


def context():
    """Of a request that runs."""
    return SimpleNamespace(attn_metadata="of the request")


def ulysses_of(release, sharers):
    """Upstream's own UlyssesAttention, for the first of so many ranks; the others' tokens do not come."""
    backend = SimpleNamespace(get_impl_cls=lambda: Core, get_enum=lambda: Backend.FA)
    names = {
        "torch": torch,
        "nn": torch.nn,
        "get_compute_dtype": lambda: torch.bfloat16,
        "get_attn_backend": lambda *_, **__: backend,
        "wrap_attention_impl_forward": lambda core: core,
        "get_forward_context": context,
        "get_sp_parallel_rank": lambda: 0,
        "get_sp_world_size": lambda: sharers,
        "sequence_model_parallel_all_to_all_4D": lambda x, **_: x,
        "sequence_model_parallel_all_gather": lambda x, **_: x,
    }
    run(text_of(f"{LAYERS}.attention.layer", release), ("UlyssesAttention",), names)
    return names["UlyssesAttention"]


def upstream(site, ranks=1, sharers=1):
    """Upstream's module: the text of `OWN`, out of the pinned wheel. `ranks` share heads, `sharers` tokens."""
    linear = type("Linear", (Linear,), {"ranks": ranks})
    old = site.release == OLD
    return module_of(
        site,
        OWN,
        torch=torch,
        nn=torch.nn,
        RMSNorm=norm_of(site.release),
        LayerNormScaleShift=LayerNormScaleShift,
        ScaleResidualLayerNormScaleShift=ScaleResidualLayerNormScaleShift,
        MulAdd=MulAdd,
        ModulateProjection=Modulation,
        MLP=MLP,
        HunyuanMLP=MLP,
        MergedColumnParallelLinear=linear,
        RowParallelLinear=linear,
        ReplicatedLinear=Linear,
        USPAttention=Core,
        UlyssesAttention=ulysses_of(site.release, sharers) if old else None,
        _apply_rotary_emb=rotated,
        try_hunyuan_qknorm=lambda *_: None,
        _HUNYUAN_QKV_PACK=SimpleNamespace(disabled=True),
        _HUNYUAN_QKV_PACK_SIGS=(),
        HUNYUAN_QKNORM=SimpleNamespace(mark=lambda _: None),
        get_forward_context=context,
        get_tp_world_size=lambda: ranks,
        get_sp_world_size=lambda: sharers,
        divide=lambda number, by: number // by,
    )


# --- a block and its call


class Case(Lines):
    """A block of upstream's module, its arguments, and the op's calls."""

    def __init__(self, module, site, size=SIZE):
        torch.manual_seed(0)
        self.module, self.site, self.width, self.size = module, site, size * HEADS, size
        self.single = site.class_ == "MMSingleStreamBlock"
        self.old = site.release == OLD
        self.block = getattr(module, site.class_)(self.width, HEADS, mlp_ratio=2.0).requires_grad_(False)
        for name, norm in self.block.named_modules():
            if isinstance(norm, module.RMSNorm):
                norm.weight.data = normal(size) * 0.3 + 1
                norm.variance_epsilon = next(eps for key, eps in EPS.items() if name.startswith(key))
        self.first = self.block.linear1 if self.single else self.block.img_attn_qkv
        self.arguments = {}
        self.calls = []

    def give(self, batch=1, rows=CLIP + 2, dtype=torch.bfloat16, **others):
        """Make arguments. `rows`: those of the tables."""
        clip, text = normal(batch, CLIP, self.width, dtype=dtype), normal(batch, TEXT, self.width, dtype=dtype)
        streams = {"x": torch.cat((clip, text), 1), "txt_len": TEXT} if self.single else {"img": clip, "txt": text}
        angles = torch.rand(rows, self.size // 2) * 6
        vec = normal(batch, self.width) * 0.5
        self.arguments = streams | {"vec": vec, "freqs_cis": (angles.cos(), angles.sin())} | others
        return self

    def put(self, call=solution.qkv_norm_rope_pack, refused=()):
        """Put the lines there. `refused`: numbers of calls that the op does not take."""

        def op(*given):
            return (refuse if len(self.calls) - 1 in refused else call)(*given)

        counting, self.calls = counted(op)
        deferred_lines.put(self.module, self.site.ported, (self.block,), self.site.op, counting)

    def run(self):
        """The block's outputs, and what attention got."""
        core = self.block.attn.attn_impl if self.old else self.block.attn
        core.given.clear()
        made = self.block(**self.arguments)
        return (made,) if self.single else made, [*core.given]

    def norms(self):
        """The norms of q and k, for each call of the op."""
        if self.single:
            return [(self.block.q_norm, self.block.k_norm)]
        return [[getattr(self.block, f"{name}_attn_{x}_norm") for x in "qk"] for name in ("img", "txt")]

    def in_upstreams_steps(self, q, k, v, q_weight, k_weight, cos, sin, out, eps):
        """The op, rounded where upstream rounds: after the norm too."""
        planes = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            norm = self.module.RMSNorm(self.size, eps)
            norm.weight.data = weight
            y = norm(x)
            rows = 0 if cos is None else len(cos)
            planes.append(torch.cat((rotated(y[:, :rows], cos, sin, False), y[:, rows:]), 1) if rows else y)
        made = torch.stack((*planes, v)).detach()
        return made if out is None else out.copy_(made)


@pytest.fixture(params=SITES, ids=lambda site: f"{site.class_} {site.release}")
def site(request):
    return request.param


@pytest.fixture
def made(site, monkeypatch):
    """Makes a case."""

    def make(ranks=1, sharers=1, **sizes):
        monkeypatch.setitem(sys.modules, site.module, module := upstream(site, ranks, sharers))
        return Case(module, site, **sizes)

    return make


def assert_left_to_upstream(case):
    want = case.outcome()
    case.put()
    assert_equal(case.outcome(), want)
    assert not case.calls


# --- tests


def test_each_class_of_each_release_has_lines():
    found = {(site.class_, site.release) for site in SITES if site.ported}
    classes, releases = ("MMDoubleStreamBlock", "MMSingleStreamBlock"), (OLD, "0.5.23")
    assert found == {(name, release) for name in classes for release in releases}
    assert len(SITES) == len(found)


SHARDED = {"txt_is_sharded": True, "seq_lens": [CLIP + TEXT]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("others", [{}, SHARDED], ids=["", "sharded"])
@pytest.mark.parametrize("batch", [1, 2])
def test_all_but_the_ops_rounding_is_upstreams(made, batch, others, dtype):
    """With an op that rounds where upstream does, all is equal by bits."""
    case = made()
    if others and case.old:
        pytest.skip("this release keeps the text whole")
    case.give(batch, dtype=dtype, **others)
    want, (theirs,) = case.run()
    before = {name: x.clone() for name, x in case.arguments.items() if isinstance(x, torch.Tensor)}
    case.put(case.in_upstreams_steps)
    got, (ours,) = case.run()
    assert len(case.calls) == len(case.norms())
    assert all(map(torch.equal, ours[:3], theirs[:3]))
    assert (
        ours[3]
        == theirs[3]
        == (
            {"metadata": "of the request"}
            if case.old
            else {"seq_lens": [10]}
            if others
            else {"num_replicated_suffix": 3}
        )
    )
    assert_equal(got, want)
    assert all(torch.equal(case.arguments[name], x) for name, x in before.items())


@pytest.mark.parametrize("batch", [1, 2])
def test_the_op_rounds_once_less(made, batch):
    """Upstream rounds a pair's elements after the norm, then both sides round the rotated ones.

    Each rounding is half a step at most, of an element that is no longer than its pair; 1.6 has room for what the
    roundings do to the pair's length. The text is rounded once on both sides. v is the same by bits.
    """
    case = made().give(batch)
    want, (theirs,) = case.run()
    case.put()
    got, (ours,) = case.run()
    for x, y in zip(ours[:2], theirs[:2], strict=True):
        pairs = y[:, :CLIP].float().unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(-1, -1, -1, -1, 2)
        assert ((x - y)[:, :CLIP].float().abs() <= 1.6 * STEP * pairs.flatten(-2)).all()
        torch.testing.assert_close(x[:, CLIP:], y[:, CLIP:], rtol=STEP, atol=0)
    assert torch.equal(ours[2], theirs[2])
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * STEP, atol=4 * STEP)


@pytest.mark.parametrize("rows", [CLIP, CLIP + TEXT + 1])
def test_the_op_is_called_for_each_projection_with_its_place(made, rows):
    case = made().give(2, rows)
    case.put()
    _, ((*attended, _),) = case.run()
    begin = 0
    lengths = [CLIP + TEXT] if case.single else [CLIP, TEXT]
    for (call, names), tokens, norms in zip(case.calls, lengths, case.norms(), strict=True):
        q, k, v, q_weight, k_weight, cos, sin, out, eps = call
        assert not names
        assert q_weight is norms[0].weight
        assert k_weight is norms[1].weight
        assert eps == norms[0].variance_epsilon
        for table, whole in zip((cos, sin), case.arguments["freqs_cis"], strict=True):
            assert table is None if begin else torch.equal(table, whole[:CLIP])
        assert {x.shape for x in (q, k, v)} == {(2, tokens, HEADS, SIZE)}
        assert [x.storage_offset() for x in (q, k, v)] == [0, case.width, 2 * case.width], "read where they lie"
        if case.single:
            assert out is None
        else:
            assert out.shape == (3, 2, tokens, HEADS, SIZE)
            assert out.stride()[1:3] == ((CLIP + TEXT) * case.width, case.width)
            assert out.storage_offset() == begin * case.width
        begin += tokens
    assert all(x.shape[1] == CLIP + TEXT and x.is_contiguous() for x in attended)


def test_a_rank_has_its_own_heads(made):
    case = made(ranks=2)
    if case.old:
        pytest.skip("this release splits no heads")
    want, _ = case.give(2).run()
    case.put(case.in_upstreams_steps)
    assert_equal(case.run()[0], want)
    assert {call[0].shape[2] for call, _ in case.calls} == {2}


def test_ranks_that_share_the_tokens(made):
    """0.5.12.post1's attention has to know the text's tokens there."""
    case = made(sharers=2).give()
    if case.old:
        assert_left_to_upstream(case)
    else:
        case.put()
        case.run()
        assert len(case.calls) == len(case.norms())


@pytest.mark.parametrize("backend", ["SLIDING_TILE_ATTN", "VIDEO_SPARSE_ATTN"])
def test_a_backend_that_reorders_the_clip_is_upstreams(made, backend):
    """In 0.5.23 attention gets one tensor from upstream too."""
    case = made().give()
    if not case.old:
        pytest.skip("upstream joins before attention")
    case.block.attn.backend = Backend[backend]
    assert_left_to_upstream(case)


def test_another_class_of_attention_is_upstreams(made):
    """In 0.5.23 the lines call attention itself."""
    case = made().give()
    if not case.old:
        pytest.skip("the lines call attention itself")
    case.block.attn.__class__ = type("Other", (type(case.block.attn),), {})
    assert_left_to_upstream(case)


@pytest.mark.parametrize("refused", [0, 1])
def test_a_refused_call_leaves_the_block_to_upstream(made, refused):
    case = made().give(2)
    if refused >= len(case.norms()):
        pytest.skip("one call")
    want, _ = case.run()
    case.put(refused={refused})
    got, _ = case.run()
    assert len(case.calls) == refused + 1
    assert_equal(got, want)


@pytest.mark.parametrize("first", ["lines", "gelu"])
def test_the_op_of_the_gelu_still_gets_its_call(made, first):
    """k08 puts a stand-in in the place of the activation."""
    case = made().give()
    if not case.single:
        pytest.skip("this block has no such GELU")
    want, _ = case.run()
    fused, calls = counted(deferred_gelu.chain)
    for one in (first, *{"lines", "gelu"} - {first}):
        if one == "lines":
            case.put(case.in_upstreams_steps)
        else:
            deferred_gelu.put(case.module, "mlp_act", (case.block,), "fused_gelu_tanh_cat", fused)
    got, _ = case.run()
    assert (len(case.calls), len(calls)) == (1, 1)
    assert_equal(got, want)


def argument(**makes):
    return lambda case: case.arguments.update({name: make(case) for name, make in makes.items()})


def tables(make):
    return argument(freqs_cis=lambda case: tuple(map(make, case.arguments["freqs_cis"])))


def two_tables(case):
    cos, sin = case.arguments["freqs_cis"]
    case.arguments["freqs_cis"] = cos, sin[:CLIP]


def norm(stream, number, **values):
    return lambda case: vars(case.norms()[stream if not case.single else 0][number]).update(values)


def other_norm(case):
    case.norms()[-1][1].__class__ = type("Other", (case.module.RMSNorm,), {})


def other_dtype(case):
    case.block.float()
    case.arguments = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in case.arguments.items()}


def two_dtypes(case):
    getattr(case.block, "linear1" if case.single else "txt_attn_qkv").to(torch.float32 if case.single else torch.half)


def other_heads(case):
    """Attributes of both releases."""
    case.block.num_attention_heads = case.block.local_num_attention_heads = 2


UNUSUAL = {
    "no tables": argument(freqs_cis=lambda _: None),
    "deep tables": tables(lambda table: table[..., None]),
    "short tables": tables(lambda table: table[: CLIP - 1]),
    "narrow tables": tables(lambda table: table[:, :16]),
    "two tables": two_tables,
    "two eps": norm(0, 1, variance_epsilon=0.5),
    "two eps, text": norm(1, 1, variance_epsilon=0.5),
    "a norm of some columns": norm(0, 1, variance_size_override=32),
    "a norm that rounds before its weight": norm(1, 0, cast_x_before_out_mul=True),
    "another norm": other_norm,
    "float32": other_dtype,
    "two dtypes": two_dtypes,
    "other heads": other_heads,
}


@pytest.mark.parametrize("change", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_call_is_upstreams(made, change):
    case = made().give(2)
    change(case)
    assert_left_to_upstream(case)


@pytest.mark.parametrize("tokens", [0, CLIP + TEXT])
def test_one_stream_alone_is_upstreams(made, tokens):
    case = made().give()
    if not case.single:
        pytest.skip("this block has two streams")
    case.arguments["txt_len"] = tokens
    assert_left_to_upstream(case)


def test_other_sizes_of_heads_are_upstreams(made):
    assert_left_to_upstream(made(size=32).give(2))


@pytest.mark.parametrize("compiling", [False, True])
def test_the_lines_ask_whether_the_kernels_run(made, monkeypatch, compiling):
    case = made().give()
    assert_lines_ask(monkeypatch, case.site, case.block, case.arguments, "x" if case.single else "img", compiling)
