"""Z-Image's attention by one op for norm and rotation: which calls go to the op, what the others run, both ways in."""

import ast
import functools
import textwrap
from types import ModuleType

import pytest
import torch

from core.tools.tests.every_task import ROOT
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_hook, apply_site, deferred_attention, deferred_slices
from kda_tools.models.apply_counts import Counts
from kda_tools.models.chain_sites import SiteFile, sites_of

K14 = Task(ROOT / "diffusion" / "k14_rounded_qknorm_rope")
OP, NAME = "rounded_qknorm_rope", "zimage"
MODULE = ModuleType("model_of_a_test")
B, T, H, D = 2, 5, 2, 128


class ZImageRMSNorm(torch.nn.Module):
    """Upstream's class: every step rounds."""

    def __init__(self, eps=1e-5):
        super().__init__()
        self.weight = torch.nn.Parameter(1 + 0.2 * torch.randn(D).bfloat16())
        self.variance_epsilon = eps

    def forward(self, x):
        return normed(x, self.weight, self.variance_epsilon)


class OtherNorm(ZImageRMSNorm):
    """One that the op does not know."""


class Projection(torch.nn.Linear):
    """A linear layer that returns its output and a bias, as upstream's do; it counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x), None


class Core(torch.nn.Module):
    """What upstream's attention calls at last; it keeps what it got."""

    def forward(self, q, k, v, attn_mask=None, num_replicated_suffix=0, **_others):
        self.v, self.suffix = v, num_replicated_suffix
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask).transpose(1, 2)


class ZImageAttention(torch.nn.Module):
    """Upstream's class, as far as the op goes."""

    def __init__(self, kv_heads=H, head=D, norms=(ZImageRMSNorm, ZImageRMSNorm), k_eps=1e-5):
        super().__init__()
        self.qk_norm = self.use_fused_qkv = self.enable_zimage_qk_fusion = True
        self.local_num_heads, self.local_num_kv_heads, self.head_dim = H, kv_heads, head
        self.to_qkv = Projection(16, (H + 2 * kv_heads) * head, bias=False, dtype=torch.bfloat16)
        self.norm_q, self.norm_k = norms[0](), norms[1](k_eps)
        self.attn = Core()
        self.to_out = torch.nn.ModuleList([Projection(H * head, 16, bias=False, dtype=torch.bfloat16)])

    def forward(
        self, hidden_states, freqs_cis=None, rope_cos_sin_cache=None, rope_positions=None, attn_mask=None, **others
    ):
        numbers = [heads * self.head_dim for heads in (H, *[self.local_num_kv_heads] * 2)]
        q, k, v = self.to_qkv(hidden_states)[0].split(numbers, dim=-1)
        q, k, v = (x.contiguous().unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.qk_norm and self.head_dim == D:
            q, k = self.norm_q(q), self.norm_k(k)
        if rope_cos_sin_cache is not None and rope_cos_sin_cache.shape[-1] == self.head_dim:
            if rope_positions is None:
                rope_positions = torch.arange(q.shape[1]).repeat(q.shape[0])
            q, k = (rotated(x, rope_cos_sin_cache[rope_positions]) for x in (q, k))
        k, v = (x.repeat_interleave(H // self.local_num_kv_heads, dim=2) for x in (k, v))
        return self.to_out[0](self.attn(q, k, v, attn_mask=attn_mask, **others).flatten(2))[0]


def normed(x, weight, eps):
    x, dtype = x.to(weight.dtype), x.dtype
    return (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight).to(dtype)


def rotated(x, cos_sin):
    """By the rows of `cos_sin`, one for each token of each clip."""
    cos, sin = cos_sin.view(*x.shape[:2], 1, -1).chunk(2, dim=-1)
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def op(q, k, q_weight, k_weight, cos_sin, eps):
    """The task's op, by the definition."""
    assert q.shape == k.shape
    assert q.stride(-1) == 1
    cos_sin = cos_sin.repeat(q.shape[:2].numel() // len(cos_sin), 1)
    return rotated(normed(q, q_weight, eps), cos_sin), rotated(normed(k, k_weight, eps), cos_sin)


def cache(rows, width=D):
    angles = 6 * torch.rand(rows, width // 2, generator=torch.Generator().manual_seed(0))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def inputs(batch=B, **others):
    """The arguments of a call in which each clip of the batch has its own positions."""
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, T, 16, generator=generator).bfloat16(),
        "freqs_cis": None,
        "rope_cos_sin_cache": cache(batch * T),
        "rope_positions": torch.arange(batch * T),
    } | others


def put(block, calls, call=op):
    """The block with the op in it, which is counted."""
    deferred_attention.put(MODULE, NAME, (block,), OP, lambda *args: calls.append(args) or call(*args))
    return block


@torch.no_grad()
@pytest.mark.parametrize(
    "call",
    [
        inputs(),
        inputs(1),
        inputs(rope_cos_sin_cache=cache(T), rope_positions=None),
        inputs(1, rope_cos_sin_cache=cache(T), rope_positions=None),
        inputs(attn_mask=torch.rand(B, 1, 1, T) < 0.7, num_replicated_suffix=2),
    ],
    ids=["batch", "one", "same positions", "one without positions", "mask"],
)
def test_the_op_norms_and_rotates(call):
    block, calls = ZImageAttention(), []
    want = block(**call)
    for _ in range(2):  # again, as at every change of an arm
        put(block, calls)
    block.to_qkv.calls = 0
    assert torch.equal(block(**call), want)
    ((q, k, q_weight, k_weight, cos_sin, eps),) = calls
    assert block.to_qkv.calls == 1
    assert q.shape == k.shape == (len(call["hidden_states"]), T, H, D)
    assert q_weight is block.norm_q.weight
    assert k_weight is block.norm_k.weight
    assert (cos_sin is call["rope_cos_sin_cache"], eps) == (True, 1e-5)
    assert block.attn.suffix == call.get("num_replicated_suffix", 0)
    deferred_attention.take_back(MODULE, NAME, (block,))
    assert "forward" not in vars(block)
    assert torch.equal(block(**call), want)
    assert len(calls) == 1


@torch.no_grad()
def test_arguments_by_their_places():
    block, calls = ZImageAttention(), []
    want = block(*inputs().values())
    assert torch.equal(put(block, calls)(*inputs().values()), want)
    assert len(calls) == 1
    mask = torch.rand(B, 1, 1, T) < 0.7
    assert torch.equal(block(*inputs().values(), mask), block(**inputs(attn_mask=mask)))
    assert len(calls) == 2, "a mask without its name is the model's own"


@torch.no_grad()
@pytest.mark.parametrize("processes", [None, 1, 2])
def test_v_is_copied_only_for_other_processes(processes, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes is not None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    block, calls = ZImageAttention(), []
    want = block(**inputs())
    assert torch.equal(put(block, calls)(**inputs()), want)
    ((q, k, *_),) = calls
    storage = q.untyped_storage().data_ptr()
    assert k.untyped_storage().data_ptr() == storage
    several = processes == 2
    assert block.attn.v.is_contiguous() == several
    assert (block.attn.v.untyped_storage().data_ptr() != storage) == several


@torch.no_grad()
@pytest.mark.parametrize(
    "kind",
    [
        {"kv_heads": 1},
        {"head": 64},
        {"k_eps": 1e-6},
        {"norms": (OtherNorm, ZImageRMSNorm)},
        {"norms": (ZImageRMSNorm, OtherNorm)},
    ],
    ids=str,
)
def test_another_block_is_the_models_own(kind):
    block, calls = ZImageAttention(**kind), []
    call = inputs(rope_cos_sin_cache=cache(B * T, block.head_dim))
    want = block(**call)
    assert torch.equal(put(block, calls)(**call), want)
    assert calls == []


@torch.no_grad()
@pytest.mark.parametrize("name", ["qk_norm", "enable_zimage_qk_fusion", "use_fused_qkv"])
def test_a_block_that_fuses_nothing_is_the_models_own(name):
    block, calls = ZImageAttention(), []
    setattr(block, name, False)
    want = block(**inputs())
    block.to_qkv.calls = 0
    assert torch.equal(put(block, calls)(**inputs()), want)
    assert (calls, block.to_qkv.calls) == ([], 1), "nothing is computed twice"


@torch.no_grad()
@pytest.mark.parametrize(
    "other",
    [
        {"rope_cos_sin_cache": None},
        {"rope_cos_sin_cache": cache(B * T + 1)},
        {"rope_cos_sin_cache": cache(T), "rope_positions": torch.arange(T).repeat(B)},
        {"rope_positions": None},
        {"rope_cos_sin_cache": cache(B * T, 64)},
    ],
    ids=["no cache", "more rows", "shared rows", "rows of all clips", "narrow"],
)
def test_another_rotation_is_the_models_own(other):
    block, calls = ZImageAttention(), []
    want = block(**inputs(**other))
    block.to_qkv.calls = 0
    assert torch.equal(put(block, calls)(**inputs(**other)), want)
    assert (calls, block.to_qkv.calls) == ([], 1)


@torch.no_grad()
@pytest.mark.parametrize("part", ["all", "norm_q", "norm_k"])
def test_another_dtype_is_the_models_own(part):
    block, calls, call = ZImageAttention(), [], inputs()
    (block if part == "all" else getattr(block, part)).float()
    if part == "all":
        call["hidden_states"] = call["hidden_states"].float()
    want = block(**call)
    assert torch.equal(put(block, calls)(**call), want)
    assert calls == []


@torch.no_grad()
def test_where_the_op_refuses_the_model_projects_again():
    block, calls = ZImageAttention(), []
    want = block(**inputs())
    block.to_qkv.calls = 0
    assert torch.equal(put(block, calls, deferred_slices.refuse)(**inputs()), want)
    assert (len(calls), block.to_qkv.calls) == (1, 2)


@torch.no_grad()
def test_what_stood_there_before_runs_and_comes_back():
    block, calls = ZImageAttention(), []
    before = block.forward = lambda hidden_states, **_: hidden_states
    for _ in range(2):
        put(block, [], deferred_slices.refuse)
    assert torch.equal(block(**inputs()), inputs()["hidden_states"])
    deferred_attention.take_back(MODULE, NAME, (block,))
    assert block.forward is before
    put(block, calls)(**inputs())
    assert len(calls) == 1
    other = block.forward = lambda *_args: None
    deferred_attention.take_back(MODULE, NAME, (block,))
    assert block.forward is other, "only what this module has put there is removed"


@torch.no_grad()
@pytest.mark.parametrize("real", [True, False], ids=["compiled", "as if"])
def test_torch_compile_sees_the_models_own(real, monkeypatch):
    block, calls = ZImageAttention(), []
    want = block(**inputs())
    if real:
        run = torch.compile(put(block, calls), backend="eager", fullgraph=True)
    else:
        run = put(block, calls)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(run(**inputs()), want)
    assert calls == []


def test_an_unknown_attention_is_named():
    (site,) = sites_of(K14)
    assert (site.op, site.kind, site.place) == (OP, "attention", NAME)
    known = site.model_dump(by_alias=True)
    with pytest.raises(ValueError, match="key 'attention': expected one of zimage, got 'wan'"):
        SiteFile.model_validate({"site": (known | {"attention": "wan"},)})


# ---- kda port


def ported(calls, runs=True):
    """A class whose `forward` begins with what a port puts there."""
    (site,) = sites_of(K14)
    arguments = "self, hidden_states, freqs_cis=None, rope_cos_sin_cache=None, rope_positions=None, attn_mask=None"
    zeros = ("num_replicated_prefix", "num_replicated_suffix", "skip_sequence_parallel_override")
    arguments += "".join(f", {name}=0" for name in ("attn_mask_meta", *zeros))
    lines = textwrap.indent(site.ported, " ")
    names = {"torch": torch, "kda_runs": lambda _: runs, OP: lambda *args: calls.append(args) or op(*args)}
    exec(f"def forward({arguments}):\n{lines}\n return 'the model'", names)
    return type("Ported", (ZImageAttention,), {"forward": names["forward"]})


@torch.no_grad()
@pytest.mark.parametrize("processes", [None, 2])
def test_what_a_port_puts_there_computes_the_same(processes, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes is not None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    block, calls = ZImageAttention(), []
    call = inputs(attn_mask=torch.rand(B, 1, 1, T) < 0.7, num_replicated_suffix=2)
    want = block(**call)
    block.__class__ = ported(calls)
    assert torch.equal(block(**call), want)
    assert (len(calls), block.attn.suffix, block.attn.v.is_contiguous()) == (1, 2, processes == 2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("block", "call"),
    [
        ({}, {"rope_cos_sin_cache": None}),
        ({}, {"rope_cos_sin_cache": cache(B * T, 64)}),
        ({}, {"hidden_states": torch.zeros(B, T, 16)}),
        ({"kv_heads": 1}, {}),
        ({"head": 64}, {"rope_cos_sin_cache": cache(B * T, 64)}),
        ({"k_eps": 1e-6}, {}),
    ],
    ids=["no cache", "narrow", "float32", "fewer heads", "other heads", "two eps"],
)
def test_a_port_leaves_the_rest_to_the_model(block, call):
    calls = []
    assert ported(calls)(**block)(**inputs(**call)) == "the model"
    assert ported(calls, runs=False)()(**inputs()) == "the model", "not on a GPU, or turned off"
    assert calls == []


# ---- kda apply


def test_the_copy_imports_only_pytorch(tmp_path):
    apply_site.write(tmp_path / "site", [], {}, runtime=False)
    copy = tmp_path / "site" / apply_site.COPIED / "deferred_attention.py"
    nodes = list(ast.walk(ast.parse(copy.read_text())))
    absolute = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    absolute |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    relative = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level}
    assert (relative, absolute) == (
        {"deferred_kept", "deferred_slices"},
        {"__future__", "collections.abc", "functools", "torch", "types", "typing"},
    )


@torch.no_grad()
def test_blocks_that_are_made_later_call_the_op(tmp_path, monkeypatch):
    calls, originals = [], []

    def replacement(solution, original, _counts):
        originals.append(original)
        return functools.wraps(solution)(lambda *args: calls.append(args) or solution(*args))

    monkeypatch.setattr(apply_hook, "replacement", replacement)
    MODULE.Block = type("Block", (ZImageAttention,), {})
    entry = {"block": "Block", "kind": "attention", "place": NAME, "function": OP}
    place = apply_hook.defer_in(MODULE, entry, op, Counts(tmp_path))
    assert place == "model_of_a_test.Block.zimage"
    assert originals == [deferred_slices.refuse], "what a refused call meets"
    block = MODULE.Block()
    got = block(**inputs())
    deferred_attention.take_back(MODULE, NAME, (block,))
    assert torch.equal(got, block(**inputs()))
    assert len(calls) == 1
