"""Norms that wait for the join of two streams: which calls go to the op, what anything else gets, both ways in."""

import json
from types import ModuleType, SimpleNamespace

import pytest
import torch

from core.tools.tests.every_task import ROOT
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_hook, apply_site, deferred_joins, deferred_slices
from kda_tools.models.apply_counts import Counts, gather
from kda_tools.models.chain_sites import SiteFile, sites_of

K11 = Task(ROOT / "diffusion" / "k11_qkv_pack")
B, H, D, CLIP, TEXT = 1, 2, 64, 7, 3
MODEL = ModuleType("model_of_a_test")
"""Upstream's module, as far as its blocks ask for it."""


def norm_of(x, norm):
    return torch.nn.functional.rms_norm(x.float(), (D,), norm.weight.float(), norm.variance_epsilon).to(x.dtype)


def rotated(x, cos, sin):
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def hunyuan_qknorm(_site, q, k, q_norm, k_norm):
    return norm_of(q, q_norm), norm_of(k, k_norm)


def hunyuan_pack_qkv(clip_q, clip_k, clip_v, text_q, text_k, text_v, cos, sin):
    turned = [rotated(x, cos[:, None], sin[:, None]) for x in (clip_q, clip_k)]
    return tuple(torch.cat(pair, 1) for pair in zip((*turned, clip_v), (text_q, text_k, text_v), strict=True))


def apply_qk_norm_with_optional_rope(*, q, k, q_norm, k_norm, cos_sin_cache, is_neox=False, position_offset=0):
    """In place, as upstream's kernel."""
    cos, sin = cos_sin_cache[position_offset : position_offset + q.shape[1], None].chunk(2, dim=-1)
    for x, norm in ((q, q_norm), (k, k_norm)):
        x.copy_(rotated(norm_of(x, norm), cos, sin))
    return q, k


def join_seqs(prefix, body, pad, dim=1):
    real = prefix.shape[dim] - pad
    return torch.cat([prefix.narrow(dim, 0, real), body, prefix.narrow(dim, real, pad)], dim=dim)


OWN = {one.__name__: one for one in (apply_qk_norm_with_optional_rope, join_seqs)}
OWN |= {"_hunyuan_qknorm": hunyuan_qknorm, "_hunyuan_pack_qkv": hunyuan_pack_qkv}


@pytest.fixture(autouse=True)
def _upstream():
    vars(MODEL).update(OWN)


def rms(**more):
    return SimpleNamespace(weight=1 + 0.2 * torch.randn(D).bfloat16(), variance_epsilon=1e-6, **more)


class Hunyuan(torch.nn.Module):
    """Attention's inputs in a block of HunyuanVideo: of one projection of both streams, or of one for each."""

    def __init__(self, single, **norm):
        super().__init__()
        self.single, self.norms = single, [rms(**norm) for _ in range(4)]

    def forward(self, clip, text, cos, sin):
        if self.single:
            qkv = torch.cat((clip, text), dim=1).view(B, -1, 3, H, D)
            q, k = MODEL._hunyuan_qknorm(self, qkv[:, :, 0], qkv[:, :, 1], *self.norms[:2])
            v, n = qkv[:, :, 2], text.shape[1]
            parts = (q[:, :-n], k[:, :-n], v[:, :-n], q[:, -n:], k[:, -n:], v[:, -n:])
        else:
            clip, text = (x.view(B, -1, 3, H, D).unbind(2) for x in (clip, text))
            one = MODEL._hunyuan_qknorm(self, *clip[:2], *self.norms[:2])
            other = MODEL._hunyuan_qknorm(self, *text[:2], *self.norms[2:])
            parts = (*one, clip[2], *other, text[2])
        return MODEL._hunyuan_pack_qkv(*parts, cos, sin)


class FluxAttention(torch.nn.Module):
    """The same in FLUX: a double block joins two streams, a single block has one."""

    def __init__(self, added=H * D, pad=0, **norm):
        super().__init__()
        self.added_kv_proj_dim, self.pad, self.norms = added, pad, [rms(**norm) for _ in range(4)]

    def forward(self, clip, text, cos, sin):
        cache = torch.cat((cos, sin), dim=-1)
        q, k, v = (x.contiguous() for x in clip.view(B, -1, 3, H, D).unbind(2))
        names = {"cos_sin_cache": cache, "is_neox": False}
        if self.added_kv_proj_dim is None:
            q, k = MODEL.apply_qk_norm_with_optional_rope(q=q, k=k, q_norm=self.norms[0], k_norm=self.norms[1], **names)
            return q * 1, k * 1, v
        text_q, text_k, text_v = (x.contiguous() for x in text.view(B, -1, 3, H, D).unbind(2))
        text_q, text_k = MODEL.apply_qk_norm_with_optional_rope(
            q=text_q, k=text_k, q_norm=self.norms[2], k_norm=self.norms[3], **names
        )
        q, k = MODEL.apply_qk_norm_with_optional_rope(
            q=q, k=k, q_norm=self.norms[0], k_norm=self.norms[1], position_offset=text_v.shape[1], **names
        )
        return tuple(MODEL.join_seqs(*pair, self.pad) for pair in ((text_q, q), (text_k, k), (text_v, v)))


def inputs(rows=CLIP + TEXT):
    generator = torch.Generator().manual_seed(0)
    clip, text = (torch.randn(B, n, 3 * H * D, generator=generator).bfloat16() for n in (CLIP, TEXT))
    angles = 6 * torch.rand(rows, D // 2, generator=generator)
    return clip, text, angles.cos(), angles.sin()


def counted(calls):
    """The solution, which writes down the tokens of each call, and whether it has a place to write to."""
    op = K11.load("solution").qkv_norm_rope_pack
    return lambda *args: calls.append((args[0].shape[1], args[7] is not None)) or op(*args)


def refused(*_):
    raise deferred_slices.Refused


def assert_close(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    assert torch.equal(got[2], want[2])


CASES = [
    (lambda: Hunyuan(single=True), "_hunyuan_pack_qkv", CLIP, [(CLIP + TEXT, False)]),
    (lambda: Hunyuan(single=False), "_hunyuan_pack_qkv", CLIP, [(CLIP, True), (TEXT, True)]),
    (FluxAttention, "join_seqs", CLIP + TEXT, [(TEXT, True), (CLIP, True)]),
]
each = pytest.mark.parametrize(("make", "name", "rows", "expected"), CASES, ids=["single", "double", "flux"])


@each
def test_the_op_gets_both_streams(make, name, rows, expected):
    torch.manual_seed(0)
    block, given, calls = make(), inputs(rows), []
    want = block(*given)
    for _ in range(2):  # again, as at every change of an arm
        deferred_joins.put(MODEL, name, (block,), "qkv_norm_rope_pack", counted(calls))
    assert_close(block(*given), want)
    assert calls == expected
    deferred_joins.take_back(MODEL, name, (block,))
    assert all(getattr(MODEL, one) is own for one, own in OWN.items())
    assert "forward" not in vars(block)
    assert all(map(torch.equal, block(*given), want))
    assert calls == expected


@each
@pytest.mark.parametrize("what", ["refused", "other norm", "other eps", "compiled"])
def test_anything_else_gets_the_models_own_functions(make, name, rows, expected, what):
    torch.manual_seed(0)
    block, given, calls = make(), inputs(rows), []
    if what == "other norm":
        block.norms[0].cast_x_before_out_mul = block.norms[3].cast_x_before_out_mul = True
    if what == "other eps":
        block.norms[1].variance_epsilon = block.norms[3].variance_epsilon = 1e-3
    want = block(*given)
    call = refused if what == "refused" else counted(calls)
    deferred_joins.put(MODEL, name, (block,), "qkv_norm_rope_pack", call)
    run = torch.compile(block, backend="eager", fullgraph=True) if what == "compiled" else block
    assert all(map(torch.equal, run(*given), want))
    assert calls == []


@pytest.mark.parametrize("block", [FluxAttention(added=None), FluxAttention(pad=1)], ids=["one stream", "a pad"])
def test_flux_without_a_join_of_this_kind(block):
    given, calls = inputs(), []
    want = block(*given)
    deferred_joins.put(MODEL, "join_seqs", (block,), "qkv_norm_rope_pack", counted(calls))
    assert all(map(torch.equal, block(*given), want))
    assert calls == []


def test_v_of_two_tensors_is_no_whole():
    torch.manual_seed(0)
    block, given, calls = Hunyuan(single=True), inputs(CLIP), []
    deferred_joins.put(MODEL, "_hunyuan_pack_qkv", (block,), "qkv_norm_rope_pack", counted(calls))
    deferring = MODEL._hunyuan_pack_qkv
    MODEL._hunyuan_pack_qkv = lambda *a: deferring(*a[:5], a[5].clone(), *a[6:])
    assert_close(block(*given), hunyuan_of(block, given))
    assert calls == []


def test_a_tensor_that_was_asked_for_is_not_normed_again():
    """FLUX's own function works in place."""
    torch.manual_seed(0)
    block, given, calls = FluxAttention(), inputs(), []
    want = block(*given)
    deferred_joins.put(MODEL, "join_seqs", (block,), "qkv_norm_rope_pack", counted(calls))
    join = MODEL.join_seqs
    MODEL.join_seqs = lambda prefix, body, pad: join(prefix, body, pad) if prefix.shape else None
    assert_close(block(*given), want)
    assert calls == [(CLIP, True)]


def hunyuan_of(block, given):
    vars(MODEL).update(OWN)
    return block(*given)


def test_an_unknown_function_is_named():
    site = sites_of(K11)[0].model_dump(by_alias=True) | {"joins": "cat"}
    with pytest.raises(ValueError, match="key 'joins': expected one of _hunyuan_pack_qkv, join_seqs, got 'cat'"):
        SiteFile.model_validate({"site": (site,)})


# ---- kda apply


@each
def test_blocks_that_are_made_later_call_the_solution(make, name, rows, expected, tmp_path, keep_ops):
    apply_site.write(tmp_path / "site", apply_site.sites([K11]), {}, runtime=False)
    plan = json.loads((tmp_path / "site" / apply_hook.PLAN).read_text())
    assert (tmp_path / "site" / apply_site.COPIED / "deferred_joins.py").is_file()
    (entry,) = [one for one in plan["releases"]["0.5.23"] if one["place"] == name]
    kind = type(make())
    MODEL.Block = type("Block", (kind,), {})
    counts, function = Counts(tmp_path), K11.load("solution").qkv_norm_rope_pack
    keep_ops(function)
    torch.manual_seed(0)
    place = apply_hook.defer_in(MODEL, entry | {"block": "Block"}, function, counts)
    assert place == f"model_of_a_test.Block.{name}"
    block = MODEL.Block(**({"single": len(expected) == 1} if kind is Hunyuan else {}))
    got = block(*inputs(rows))
    deferred_joins.take_back(MODEL, name, (block,))
    assert all(map(torch.equal, got, block(*inputs(rows))))
    found = {(one.function, one.outcome): number for one, number in gather(tmp_path).calls.items() if number}
    # Without a GPU the kernels take no call; where a stream was refused, so is the other one.
    assert found == {("qkv_norm_rope_pack", "fell_back"): 2 if kind is FluxAttention else 1}
