"""The lines for JoyImage give what its own block gives, which comes out of the wheels' text.

Upstream's layers are small stand-ins. Its norm and rotation round once, as its kernels do.
"""

import sys

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.upstream_source import assert_lines_ask, module_of

from .layers import (
    MLP,
    STEP,
    Attention,
    LayerNormScaleShift,
    Linear,
    Lines,
    RMSNorm,
    assert_equal,
    normal,
    normed_and_rotated,
)

SITES = [site for site in sites_of(find_task("qkv_pack")) if site.module.endswith("joy_image")]
OWN = (
    "_MODULATION_FACTOR",
    "_joy_image_qk_rope",
    "_joy_joint_qkv",
    "_joy_complex_freqs",
    "fused_add_gate",
    "ModulateWan",
    "MMDoubleStreamBlock",
)
"""What is taken of upstream's module, where the release has it."""
CLIP, TEXT, SIZE = 7, 3, 64


# --- upstream's module


def rearrange(x, form, **sizes):
    assert form == "B L (K H D) -> K B L H D"
    return x.unflatten(-1, (sizes["K"], sizes["H"], -1)).permute(2, 0, 1, 3, 4)


def upstream(site, ranks=1):
    """Upstream's module: the text of `OWN`, out of the pinned wheel, between the stand-ins."""
    linear = type("Linear", (Linear,), {"ranks": ranks})
    return module_of(
        site,
        OWN,
        torch=torch,
        nn=torch.nn,
        rearrange=rearrange,
        RMSNorm=RMSNorm,
        LayerNormScaleShift=LayerNormScaleShift,
        MergedColumnParallelLinear=linear,
        RowParallelLinear=linear,
        ReplicatedLinear=Linear,
        MLP=MLP,
        USPAttention=Attention,
        apply_qk_norm_with_optional_rope=normed_and_rotated,
        get_tp_world_size=lambda: ranks,
        divide=lambda number, by: number // by,
        set_weight_attrs=lambda *_: None,
    )


# --- a block and its call


class Case(Lines):
    """A block of upstream's module, its arguments, and what was called."""

    def __init__(self, module, site, size=SIZE, heads=4):
        torch.manual_seed(0)
        self.module, self.site, self.width, self.size = module, site, size * heads, size
        self.block = module.MMDoubleStreamBlock(self.width, heads, mlp_width_ratio=2.0).requires_grad_(False)
        for stream in ("img", "txt"):
            table = getattr(self.block, f"{stream}_mod").modulate_table
            table.data = normal(*table.shape)
        for norm in (self.block.txt_attn_q_norm, self.block.txt_attn_k_norm):
            norm.variance_epsilon = 0.1
        self.arguments = {}
        self.calls = []

    def give(self, batch=1, turned=False, dtype=torch.bfloat16):
        """Make arguments. `turned`: the text has a table too."""
        self.arguments = {
            "img": normal(batch, CLIP, self.width, dtype=dtype),
            "txt": normal(batch, TEXT, self.width, dtype=dtype),
            "vec": normal(batch, 6, self.width) * 0.5,
            "vis_freqs_cis": self.table(CLIP + 2),
            "txt_freqs_cis": self.table(TEXT + 1) if turned else None,
            "num_replicated_suffix": TEXT,
        }
        return self

    def table(self, rows):
        angles = torch.rand(rows, self.size // 2) * 6
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def run(self):
        """The block's output, and what attention got. The model makes the complex tables of the others."""
        given = dict(self.arguments)
        if self.site.release != "0.5.12.post1":
            for stream in ("vis", "txt"):
                table = given[f"{stream}_freqs_cis"]
                usual = isinstance(table, torch.Tensor)
                given[f"{stream}_complex_freqs"] = self.module._joy_complex_freqs(table) if usual else None
        self.block.attn.given.clear()
        return self.block(**given), [*self.block.attn.given]


@pytest.fixture(params=SITES, ids=lambda site: site.release)
def site(request):
    return request.param


@pytest.fixture
def made(site, monkeypatch):
    """Makes a case."""

    def make(ranks=1, **sizes):
        monkeypatch.setitem(sys.modules, site.module, module := upstream(site, ranks))
        return Case(module, site, **sizes)

    return make


# --- tests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_lines_give_upstreams_output(made, monkeypatch, batch, turned, dtype):
    """q and k are rounded once on both sides, so they differ by a step at most; v is the same by bits."""
    case = made().give(batch, turned, dtype)
    want, (theirs,) = case.run()
    own, gates = case.module.fused_add_gate, []
    monkeypatch.setattr(case.module, "fused_add_gate", lambda *given: gates.append(given) or own(*given))
    before = {name: x.clone() for name, x in case.arguments.items() if isinstance(x, torch.Tensor)}
    case.put()
    got, (ours,) = case.run()
    for x, y in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=STEP, atol=0)
    assert torch.equal(ours[2], theirs[2])
    assert ours[3] == theirs[3] == {"num_replicated_suffix": TEXT}
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * STEP, atol=2 * STEP)
    assert len(gates) == 4
    assert all(torch.equal(case.arguments[name], x) for name, x in before.items())


@pytest.mark.parametrize("turned", [False, True])
def test_the_op_is_called_for_each_stream_with_its_place(made, turned):
    case = made().give(2, turned)
    case.put()
    _, (given,) = case.run()
    block, begin = case.block, 0
    assert len(case.calls) == 2
    streams = ("img", CLIP, "vis_freqs_cis", 1e-6), ("txt", TEXT, "txt_freqs_cis", 0.1)
    for call, (name, tokens, table, eps) in zip(case.calls, streams, strict=True):
        q, k, v, q_weight, k_weight, cos, sin, out, last = call
        assert q_weight is getattr(block, f"{name}_attn_q_norm").weight
        assert k_weight is getattr(block, f"{name}_attn_k_norm").weight
        assert cos is case.arguments[table]
        assert (sin, last) == (None, eps)
        assert {x.shape for x in (q, k, v)} == {(2, tokens, 4, SIZE)}
        assert [x.storage_offset() for x in (q, k, v)] == [0, case.width, 2 * case.width], "read where they lie"
        assert out.shape == (3, 2, tokens, 4, SIZE)
        for plane, joint in zip(out, given[:3], strict=True):
            assert joint.is_contiguous()
            assert joint[:, begin:].data_ptr() == plane.data_ptr()
        begin += tokens


def test_a_rank_has_its_own_heads(made):
    case = made(ranks=2)
    if case.site.release == "0.5.12.post1":
        pytest.skip("this release splits no heads")
    want, _ = case.give().run()
    case.put()
    got, _ = case.run()
    assert [call[0].shape[2] for call in case.calls] == [2, 2]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * STEP, atol=2 * STEP)


@pytest.mark.parametrize("refused", [0, 1])
def test_a_refused_call_leaves_the_block_to_upstream(made, refused):
    case = made().give(2, turned=True)
    want, _ = case.run()
    case.put(refused={refused})
    got, _ = case.run()
    assert len(case.calls) == refused + 1
    assert_equal(got, want)


def norm(name, **values):
    return lambda case: vars(getattr(case.block, f"{name}_norm")).update(values)


def argument(**makes):
    return lambda case: case.arguments.update({name: make(case) for name, make in makes.items()})


def other_norm(case):
    case.block.txt_attn_k_norm.__class__ = type("Other", (RMSNorm,), {})


def projected(name, dtype):
    return lambda case: getattr(case.block, f"{name}_attn_qkv").to(dtype)


UNUSUAL = {
    "no table": argument(vis_freqs_cis=lambda _: None),
    "two tables": argument(vis_freqs_cis=lambda case: case.table(CLIP).chunk(2, dim=-1)),
    "a deep table": argument(vis_freqs_cis=lambda case: case.table(CLIP)[..., None]),
    "a short table": argument(vis_freqs_cis=lambda case: case.table(CLIP - 1)),
    "a narrow table": argument(vis_freqs_cis=lambda case: case.table(CLIP)[:, :32]),
    "two tables, text": argument(txt_freqs_cis=lambda case: case.table(TEXT).chunk(2, dim=-1)),
    "a deep table, text": argument(txt_freqs_cis=lambda case: case.table(TEXT)[..., None]),
    "a short table, text": argument(txt_freqs_cis=lambda case: case.table(TEXT - 1)),
    "a narrow table, text": argument(txt_freqs_cis=lambda case: case.table(TEXT)[:, :32]),
    "two eps": norm("img_attn_q", variance_epsilon=0.5),
    "two eps, text": norm("txt_attn_k", variance_epsilon=0.5),
    "a norm of some columns": norm("img_attn_k", variance_size_override=32),
    "a norm that rounds before its weight": norm("txt_attn_q", cast_x_before_out_mul=True),
    "another norm": other_norm,
    "float32": lambda case: [projected(name, torch.float32)(case) for name in ("img", "txt")],
    "two dtypes": projected("txt", torch.float16),
}


@pytest.mark.parametrize("change", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_call_is_upstreams(made, change):
    case = made().give(2, turned=True)
    change(case)
    want = case.outcome()
    case.put()
    assert_equal(case.outcome(), want)
    assert not case.calls


def test_other_sizes_of_heads_are_upstreams(made):
    case = made(size=32).give(2)
    want = case.outcome()
    case.put()
    assert_equal(case.outcome(), want)
    assert not case.calls


@pytest.mark.parametrize("compiling", [False, True])
def test_the_lines_ask_whether_the_kernels_run(made, monkeypatch, compiling):
    case = made().give()
    assert_lines_ask(monkeypatch, case.site, case.block, case.arguments, "img", compiling)
