"""The lines for FLUX in `sites.toml` give what its own attention gives, which comes out of the wheels' text.

Upstream's layers are small stand-ins. Its norm and rotation work in place and round once, as its kernel does.
"""

import sys
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.lab.beside_upstream import stand_ins
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.upstream_source import assert_lines_ask, module_of, run, text_of

from . import layers
from .layers import STEP, Lines, RMSNorm, assert_equal, normal

RUNTIME = "sglang.multimodal_gen.runtime"
SITES = [site for site in sites_of(find_task("qkv_pack")) if site.module.endswith("flux")]
OLD = "0.5.12.post1"
PICTURE, TEXT, HEADS = 7, 3, 4
Backend = Enum("Backend", ["FA", "SDPA"])


# --- upstream's module


class Linear(torch.nn.Module):
    """A projection. Without `gather_output` it gives this rank's part of the columns."""

    ranks = 1

    def __init__(self, wide, widths, gather_output=True, input_is_parallel=False, **_):
        super().__init__()
        parts = widths if isinstance(widths, list) else [widths]
        rows = sum(part // (1 if gather_output else self.ranks) for part in parts)
        wide = wide // self.ranks if input_is_parallel else wide
        self.weight = torch.nn.Parameter(normal(rows, wide) / wide**0.5)

    def forward(self, x):
        return x @ self.weight.T, None


class Attention(layers.Attention):
    backend = Backend.SDPA


class NunchakuConfig:
    """One projection for q, k and v."""


def normed_and_rotated(
    *, q, k, q_norm, k_norm, head_dim, cos_sin_cache, is_neox, allow_inplace, position_offset=0, freqs_complex=None
):
    """Upstream's kernel. Neighbours turn as one complex number."""
    assert not is_neox
    assert allow_inplace
    for x, norm in ((q, q_norm), (k, k_norm)):
        y = torch.nn.functional.rms_norm(x.float(), (head_dim,), norm.weight.float(), norm.variance_epsilon)
        if cos_sin_cache is not None:
            rows = cos_sin_cache[position_offset : position_offset + x.shape[1]]
            turns = torch.complex(*rows.chunk(2, dim=-1))
            assert freqs_complex is None or torch.equal(freqs_complex, turns)
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            y = torch.view_as_real(pairs * turns[:, None]).flatten(-2)
        x.copy_(y)
    return q, k


def upstream(site, ranks):
    """Upstream's module between the stand-ins; what joins, splits and projects is upstream's own."""
    linear = type("Linear", (Linear,), {"ranks": ranks})
    needed = {
        "torch": torch,
        "AttentionModuleMixin": object,
        "RMSNorm": RMSNorm,
        "ColumnParallelLinear": linear,
        "MergedColumnParallelLinear": linear,
        "RowParallelLinear": linear,
        "NunchakuConfig": NunchakuConfig,
        "USPAttention": Attention,
        "AttentionBackendEnum": Backend,
        "apply_qk_norm_with_optional_rope": normed_and_rotated,
        "get_tp_world_size": lambda: ranks,
        "divide": lambda number, by: number // by,
        "convrot_int8_shares_input": lambda _: False,
    }
    if site.release != OLD:
        run(
            text_of(f"{RUNTIME}.models.dits.common", site.release),
            ("_project_shared_input", "get_qkv_projections"),
            needed,
        )
        run(text_of(f"{RUNTIME}.distributed.sp_shard_utils", site.release), ("join_seqs", "split_seqs"), needed)
    return module_of(site, ("_get_qkv_projections", "_rope_cos_sin_cache", "FluxAttention"), **needed)


# --- a block and its call


class Case(Lines):
    """The attention of a block of upstream's module, its arguments, and the calls of the op."""

    def __init__(self, module, site, size=64, batch=2, dtype=torch.bfloat16, **made):
        torch.manual_seed(0)
        self.module, self.site, self.size, self.width = module, site, size, size * HEADS
        made = {"added_kv_proj_dim": self.width, **made}
        block = module.FluxAttention(query_dim=self.width, num_heads=HEADS, dim_head=size, **made)
        self.block = block.requires_grad_(False).to(dtype)
        if made["added_kv_proj_dim"] is not None:
            block.norm_added_q.variance_epsilon = block.norm_added_k.variance_epsilon = 0.1
        angles = torch.rand(PICTURE + TEXT + 2, size // 2) * 6
        self.cos_sin = angles.cos(), angles.sin()
        self.arguments = {
            "x": normal(batch, PICTURE, self.width, dtype=dtype),
            "encoder_hidden_states": normal(batch, TEXT, self.width, dtype=dtype),
            "freqs_cis": self.cos_sin,
        }
        self.calls = []

    @property
    def table(self):
        return torch.cat(self.cos_sin, dim=-1)

    def give(self, **changes):
        self.arguments |= changes
        return self

    def run(self):
        """The block's output, and what attention got."""
        self.block.attn.given.clear()
        return self.block(**self.arguments), [*self.block.attn.given]


@pytest.fixture(params=SITES, ids=lambda site: site.release)
def site(request):
    return request.param


@pytest.fixture
def made(site, monkeypatch):
    """Makes a case."""

    def make(ranks=1, **sizes):
        module = upstream(site, ranks)
        envs = {"envs": SimpleNamespace(SGLANG_DIFFUSION_ENABLE_MXFP8_ATTENTION=False)}
        for name, one in (stand_ins({"sglang.multimodal_gen": envs}) | {site.module: module}).items():
            monkeypatch.setitem(sys.modules, name, one)
        return Case(module, site, **sizes)

    return make


def assert_near(case):
    """Compare with upstream. q and k are rounded once on both sides: they differ by a step at most; v has its bits."""
    want, (theirs,) = case.run()
    before = {name: x.clone() for name, x in case.arguments.items() if isinstance(x, torch.Tensor)}
    case.put()
    got, (ours,) = case.run()
    for x, y in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=STEP, atol=1e-6)
    assert torch.equal(ours[2], theirs[2])
    assert ours[3] == theirs[3]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * STEP, atol=2 * STEP)
    assert all(torch.equal(case.arguments[name], x) for name, x in before.items())
    assert len(case.calls) == 2
    return ours


# --- tests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_lines_give_upstreams_output(made, batch, dtype):
    assert_near(made(batch=batch, dtype=dtype))


@pytest.mark.parametrize("prefix", [0, 2])
def test_attention_gets_what_upstream_gives_it(made, prefix):
    """0.5.12.post1 counts the text where the caller counts no prefix."""
    case = made().give(num_replicated_prefix=prefix)
    if case.site.release == OLD:
        assert assert_near(case)[3] == {"num_replicated_prefix": prefix or TEXT}
        return
    meta, mask = {"local_pad": 0, "pad_start": 9}, torch.ones(2, PICTURE + TEXT)
    case.give(attn_mask_meta=meta, attn_mask=mask)
    others = assert_near(case)[3]
    assert others == {"num_replicated_prefix": prefix, "attn_mask_meta": meta, "attn_mask": mask}
    assert others["attn_mask"] is mask


def test_a_table_that_the_model_made_is_read_where_it_lies(made):
    case = made()
    if case.site.release == OLD:
        pytest.skip("this release makes it in every call")
    table, freqs = case.table, torch.complex(*case.cos_sin)
    assert_near(case.give(freqs_cis=table, complex_freqs=freqs))
    places = [call[5].data_ptr() for call in case.calls]
    assert places == [table.data_ptr(), table[TEXT:].data_ptr()]


def test_the_op_is_called_for_each_stream_with_its_place(made):
    case = made()
    case.put()
    _, (given,) = case.run()
    begin, block = 0, case.block
    streams = (TEXT, block.norm_added_q, block.norm_added_k, 0.1), (PICTURE, block.norm_q, block.norm_k, 1e-5)
    for call, (tokens, q_norm, k_norm, eps) in zip(case.calls, streams, strict=True):
        q, k, v, q_weight, k_weight, cos, sin, out, last = call
        assert {x.shape for x in (q, k, v)} == {(2, tokens, HEADS, case.size)}
        assert q_weight is q_norm.weight
        assert k_weight is k_norm.weight
        assert torch.equal(cos[:tokens], case.table[begin : begin + tokens])
        assert (sin, last) == (None, eps)
        assert out.shape == (3, 2, tokens, HEADS, case.size)
        for plane, joint in zip(out, given[:3], strict=True):
            assert joint.is_contiguous()
            assert joint[:, begin:].data_ptr() == plane.data_ptr()
        begin += tokens


def one_projection(case):
    assert case.block.use_fused_qkv


FORMS = {
    "one projection": ({"quant_config": NunchakuConfig()}, one_projection),
    "two layers behind attention": ({}, lambda case: case.block.to_out.append(torch.nn.Tanh())),
    "no layer behind the picture's": ({}, lambda case: vars(case.block).update(pre_only=True)),
}


@pytest.mark.parametrize(("sizes", "change"), FORMS.values(), ids=FORMS)
def test_other_forms_of_the_block(made, sizes, change):
    case = made(**sizes)
    change(case)
    assert_near(case)


def test_a_rank_has_its_own_heads(made):
    case = made(ranks=2)
    if case.site.release == OLD:
        pytest.skip("this release splits no heads")
    assert_near(case)
    assert [call[0].shape[2] for call in case.calls] == [2, 2]


@pytest.mark.parametrize("refused", [0, 1])
def test_a_refused_call_leaves_the_block_to_upstream(made, refused):
    case = made()
    want, _ = case.run()
    case.put(refused={refused})
    got, _ = case.run()
    assert len(case.calls) == refused + 1
    assert_equal(got, want)


def norm(name, **values):
    return lambda case: vars(getattr(case.block, f"norm_{name}")).update(values)


def other_norm(case):
    case.block.norm_added_k.__class__ = type("Other", (RMSNorm,), {})


def table_of(make):
    return lambda case: case.give(freqs_cis=tuple(map(make, case.cos_sin)))


UNUSUAL = {
    "no table": lambda case: case.give(freqs_cis=None),
    "no text": lambda case: case.give(encoder_hidden_states=None),
    "a deep table": table_of(lambda one: one[None]),
    "a short table": table_of(lambda one: one[: PICTURE + TEXT - 1]),
    "a narrow table": table_of(lambda one: one[:, :16]),
    "two eps": norm("q", variance_epsilon=0.5),
    "two eps, text": norm("added_k", variance_epsilon=0.5),
    "a norm of some columns": norm("k", variance_size_override=32),
    "a norm that rounds before its weight": norm("added_q", cast_x_before_out_mul=True),
    "another norm": other_norm,
    "two dtypes": lambda case: case.block.to_v.__setattr__("forward", lambda x: (x.float(), None)),
    "other heads": lambda case: vars(case.block).update(heads=2),
}
NEWER = {
    "text with a pad": lambda case: case.give(attn_mask_meta={"local_pad": 1}),
    "rotated by a matrix": lambda case: vars(case.block).update(use_offline_qk_rotation=True),
}


@pytest.mark.parametrize("name", [*UNUSUAL, *NEWER])
def test_an_unusual_call_is_upstreams(made, name):
    case = made()
    if name in NEWER and case.site.release == OLD:
        pytest.skip("this release has no such calls")
    (UNUSUAL | NEWER)[name](case)
    want = case.outcome()
    case.put()
    assert_equal(case.outcome(), want)
    assert not case.calls


SIZES = {"float32": {"dtype": torch.float32}, "small heads": {"size": 32}}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_the_kernel_does_not_take_is_upstreams(made, sizes):
    case = made(**sizes)
    want = case.outcome()
    assert not isinstance(want, str)
    case.put()
    assert_equal(case.outcome(), want)
    assert not case.calls


@pytest.mark.parametrize("text", [False, True])
def test_the_attention_of_a_single_block_is_upstreams(made, text):
    """It has no layers for a text."""
    case = made(added_kv_proj_dim=None)
    if not text:
        case.give(encoder_hidden_states=None)
    want = case.outcome()
    assert isinstance(want, str) is text
    case.put()
    assert_equal(case.outcome(), want)
    assert not case.calls


@pytest.mark.parametrize("compiling", [False, True])
def test_the_lines_ask_whether_the_kernels_run(made, monkeypatch, compiling):
    case = made()
    assert_lines_ask(monkeypatch, case.site, case.block, case.arguments, "x", compiling)
