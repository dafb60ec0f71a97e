"""The lines for Z-Image of 0.5.12.post1 give what its own attention gives, which comes out of the wheel's text."""

import sys

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.upstream_source import assert_lines_ask, counted, module_of

from .. import solution
from . import layers
from .layers import STEP, Linear, Lines, RMSNorm, assert_equal, normal, normed_and_rotated

(SITE,) = [site for site in sites_of(find_task("qkv_pack")) if site.module.endswith("zimage")]
SIZE, HEADS, TOKENS = 64, 3, 5


class Attention(layers.Attention):
    """Of several ranks, it gets the last tokens of q, k and v by themselves."""

    def forward(self, q, k, v, **others):
        self.given.append((q, k, v, others))
        return (q + k + v) if "replicated_v" not in others else (q + k + v, others["replicated_v"])


def rotated(q, _k_or_cos, *_others, **_named):
    """In place of rotations that no test compares."""
    return q


class Case(Lines):
    """An attention of upstream's module, its arguments, and the calls of the op."""

    def __init__(self, monkeypatch, ranks, batch, **sizes):
        torch.manual_seed(0)
        module = module_of(
            SITE,
            ("ZImageAttention",),
            torch=torch,
            nn=torch.nn,
            RMSNorm=RMSNorm,
            MergedColumnParallelLinear=Linear,
            RowParallelLinear=Linear,
            USPAttention=Attention,
            UlyssesAttention=Attention,
            apply_qk_norm_with_optional_rope=normed_and_rotated,
            apply_flashinfer_rope_qk_inplace=lambda q, k, *_, **__: (q, k),
            _apply_rotary_emb=rotated,
            get_tp_world_size=lambda: 1,
            get_sp_world_size=lambda: ranks,
            get_ring_parallel_world_size=lambda: 1,
            _is_cuda=True,
        )
        monkeypatch.setitem(sys.modules, SITE.module, module)
        size, heads = sizes.get("size", SIZE), HEADS
        self.block = module.ZImageAttention(size * heads, heads, sizes.get("kv_heads", heads)).requires_grad_(False)
        angles = torch.rand(TOKENS + 1, size // 2) * 6
        self.arguments = {
            "hidden_states": normal(batch, TOKENS, size * heads),
            "freqs_cis": (angles.cos(), angles.sin()),
            "num_replicated_suffix": 2,
        }
        self.module, self.calls = module, []

    def put(self, call=solution.qkv_norm_rope_pack):
        op, self.calls = counted(call)
        deferred_lines.put(self.module, SITE.ported, (self.block,), SITE.op, op)

    def run(self):
        """The attention's output, and what the layers for attention got."""
        for layer in (self.block.attn, self.block.ulysses_attn):
            layer.given.clear()
        return self.block(**self.arguments), [*self.block.attn.given, *self.block.ulysses_attn.given]


@pytest.fixture
def made(monkeypatch):
    """Makes a case."""
    return lambda ranks=1, batch=2, **sizes: Case(monkeypatch, ranks, batch, **sizes)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_lines_give_upstreams_output(made, batch):
    """q and k are rounded once on both sides, so they differ by a step at most; v is the same by bits."""
    case = made(batch=batch)
    want, (theirs,) = case.run()
    case.put()
    got, (ours,) = case.run()
    assert len(case.calls) == 1
    for x, y in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=STEP, atol=0)
    assert torch.equal(ours[2], theirs[2])
    assert ours[3] == theirs[3]
    assert ours[3]["num_replicated_suffix"] == 2
    torch.testing.assert_close(got, want, rtol=4 * STEP, atol=4 * STEP)


def test_the_op_reads_the_projection_where_it_lies(made):
    case = made()
    case.put()
    case.run()
    ((q, k, v, q_weight, k_weight, table, *rest), named) = case.calls[0]
    assert [x.storage_offset() for x in (q, k, v)] == [0, SIZE * HEADS, 2 * SIZE * HEADS]
    assert q_weight is case.block.norm_q.weight
    assert k_weight is case.block.norm_k.weight
    assert torch.equal(table, torch.cat(case.arguments["freqs_cis"], dim=-1))
    assert (rest, named) == ([None, None, case.block.norm_q.variance_epsilon], {})


def test_a_refused_call_is_upstreams(made):
    case = made()
    want, _ = case.run()
    case.put(deferred_lines.refuse)
    assert torch.equal(case.run()[0], want)
    assert len(case.calls) == 1


@pytest.mark.parametrize(("suffix", "calls"), [(2, 0), (0, 1)])
def test_ranks_that_share_a_clip_keep_the_last_tokens_apart(made, suffix, calls):
    case = made(ranks=2)
    case.arguments["num_replicated_suffix"] = suffix
    case.put()
    case.run()
    assert len(case.calls) == calls
    assert bool(case.block.ulysses_attn.given) is (calls == 0)


def norm(name, **values):
    return lambda case: vars(getattr(case.block, name)).update(values)


def table(change):
    return lambda case: case.arguments.update(freqs_cis=change(case.arguments["freqs_cis"]))


UNUSUAL = {
    "no table": table(lambda _: None),
    "a short table": table(lambda parts: tuple(part[: TOKENS - 1] for part in parts)),
    "a narrow table": table(lambda parts: tuple(part[:, :16] for part in parts)),
    "a deep table": table(lambda parts: tuple(part[:, None] for part in parts)),
    "no norms": lambda case: vars(case.block).update(qk_norm=False) or case.block.register_module("norm_q", None),
    "two eps": norm("norm_k", variance_epsilon=0.5),
    "a norm of some columns": norm("norm_q", variance_size_override=32),
    "a norm that rounds before its weight": norm("norm_k", cast_x_before_out_mul=True),
    "another norm": lambda case: (
        vars(case.block.norm_k).update() or setattr(case.block.norm_k, "__class__", type("Other", (RMSNorm,), {}))
    ),
    "float32": lambda case: (case.block.float(), case.arguments.update(hidden_states=torch.randn(2, TOKENS, 192))),
}


@pytest.mark.parametrize("change", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_call_is_upstreams(made, change):
    case = made()
    change(case)
    want = case.outcome()
    case.put()
    got = case.outcome()
    assert_equal(got, want)
    assert not case.calls


@pytest.mark.parametrize("sizes", [{"size": 32}, {"kv_heads": 1}], ids=str)
def test_other_heads_are_upstreams(made, sizes):
    case = made(**sizes)
    want = case.outcome()
    case.put()
    got = case.outcome()
    assert_equal(got, want)
    assert not case.calls


@pytest.mark.parametrize("compiling", [False, True])
def test_the_lines_ask_whether_the_kernels_run(made, monkeypatch, compiling):
    case = made()
    assert_lines_ask(monkeypatch, SITE, case.block, case.arguments, "hidden_states", compiling)
