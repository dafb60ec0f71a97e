"""Lines at the head of a block's `forward`: what they see, which calls they leave to the model; two models' lines."""

import ast
import copy
import functools
import inspect
import json
import sys
from types import ModuleType

import pytest
import torch
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from core.tools.tests.every_task import ROOT
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_hook, apply_site, deferred_lines
from kda_tools.models.apply_counts import Counts, gather
from kda_tools.models.chain_sites import Site, blocks, sites_of

K09 = Task(ROOT / "diffusion" / "k09_temb_modulation")
K14 = Task(ROOT / "diffusion" / "k14_rounded_qknorm_rope")
OP = "rounded_qknorm_rope"
HELIOS = [site for site in sites_of(K09) if (site.class_, site.release) == ("HeliosTransformerBlock", "0.5.23")]
MODULE = ModuleType("model_of_a_test")
B, T, H, D = 2, 5, 2, 128


def put(block, lines, **ops):
    """The block with the lines and their ops in it."""
    for op, call in ops.items():
        deferred_lines.put(MODULE, lines, (block,), op, call)
    return block


def take_back(block, lines):
    deferred_lines.take_back(MODULE, lines, (block,))


# ---- any lines


class Block(torch.nn.Module):
    """One whose own statements say that they ran, and with what."""

    def forward(self, x, by=3, *more, far=0, **named):
        return "own", x, by, more, far, named


def naming(name, calls=None):
    """An op that says its name, and that it was called."""
    return lambda *args: (None if calls is None else calls.append(name)) or (name, *args)


def test_lines_that_return_nothing_leave_the_call_to_the_model():
    block = put(Block(), "if x < 0:\n    return op(x)", op=naming("op"))
    assert block(-1) == ("op", -1)
    assert block(1) == Block()(1)


def test_what_the_lines_return_is_the_output_whatever_it_is():
    assert put(Block(), "return op(x)", op=lambda _: None)(1) is None


@pytest.mark.parametrize(
    "lines", ["return op(absent(x))", "op(x)\nreturn absent(x)", "return op(*(absent(one) for one in [x]))"]
)
def test_an_op_that_was_not_put_there_refuses(lines):
    assert put(Block(), lines, op=naming("op"))(1) == Block()(1)


def test_a_builtin_stays_the_builtin():
    block = put(Block(), "return op(len(x), *map(abs, x))", op=naming("op"))
    assert block([1, -5]) == ("op", 2, 1, 5)


@pytest.mark.parametrize(
    ("args", "named"), [((1,), {}), ((1, 2), {"far": 5}), ((1, 2, 3, 4), {"near": 6}), ((), {"by": 7, "x": 1})], ids=str
)
def test_the_lines_see_all_arguments_of_forward(args, named):
    block = put(Block(), "return op(self, x, by, more, far, named)", op=naming("op"))
    assert block(*args, **named) == ("op", block, *Block()(*args, **named)[1:])


def test_arguments_that_forward_does_not_take_are_an_error():
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        put(Block(), "return op()", op=naming("op"))()


ONE, OTHER = "if x < 9:\n    return one(x)", "if x > 0:\n    return other(x)"


@pytest.mark.parametrize(("x", "asked", "got"), [(1, ["other"], "other"), (0, ["one"], "one"), (9, ["other"], "other")])
def test_the_later_lines_are_asked_first(x, asked, got):
    calls = []
    block = put(put(Block(), ONE, one=naming("one", calls)), OTHER, other=naming("other", calls))
    assert block(x) == (got, x)
    assert calls == asked
    calls.clear()
    put(block, OTHER, other=deferred_lines.refuse)
    assert block(x) == (("one", x) if x < 9 else Block()(x)), "what the later op refuses"
    put(put(block, ONE, one=deferred_lines.refuse), OTHER, other=naming("other", calls))
    assert block(x) == (("other", x) if x > 0 else Block()(x)), "the earlier op came again, and is still asked later"


@pytest.mark.parametrize("order", [(ONE, OTHER), (OTHER, ONE)], ids=["first", "last"])
def test_lines_are_taken_back_in_any_order(order):
    calls = []
    block = put(put(Block(), ONE, one=naming("one", calls)), OTHER, other=naming("other", calls))
    take_back(block, order[0])
    assert block(1)[0] == ("other" if order[0] is ONE else "one")
    calls.clear()
    take_back(block, order[1])
    assert block(1) == Block()(1)
    assert calls == []
    assert deferred_lines.lines_of(block) is None


def test_a_block_does_not_look_replaced():
    """Wan's model computes more if it finds `forward` among the attributes of a block."""
    first, other = Block(), Block()
    put(first, ONE, one=naming("one"))
    forward = Block.forward
    put(put(first, OTHER, other=naming("other")), ONE, one=naming("one"))
    put(other, ONE, one=naming("one"))
    assert Block.forward is forward, "torch.compile would compile the block again"
    assert not any("forward" in vars(block) for block in (first, other))
    assert inspect.signature(Block.forward).parameters.keys() == {"self", "x", "by", "more", "far", "named"}


@pytest.mark.parametrize("first", ["class", "its subclass"])
def test_a_subclass_without_a_forward_of_its_own(first):
    base = type("Base", (Block,), {"forward": lambda self, x: ("base", x)})
    heir = type("Heir", (base,), {})
    blocks = base(), heir()
    for block in blocks if first == "class" else blocks[::-1]:
        put(block, "if x > 0:\n    return op(x)", op=naming("op"))
    assert [block(1) for block in blocks] == [("op", 1)] * 2
    assert [block(-1) for block in blocks] == [("base", -1)] * 2
    take_back(blocks[0], "if x > 0:\n    return op(x)")
    assert [block(1) for block in blocks] == [("base", 1), ("op", 1)]


def test_a_copy_of_a_block_runs_the_lines_with_itself():
    block = put(Block(), "return op(self, x)", op=naming("op"))
    other = copy.deepcopy(block)
    assert other(1) == ("op", other, 1)
    take_back(block, "return op(self, x)")
    assert (block(1), other(1)) == (Block()(1), ("op", other, 1))
    module = inspect.unwrap(deferred_lines.own_forward(Block)).__globals__
    assert not any(value is module for value in vars(deferred_lines.lines_of(other)).values())


class Doubling(torch.nn.Module):
    def forward(self, x):
        return x * 2


def test_a_model_is_compiled_once_for_each_arm():
    """Arms take turns: torch.compile gives up on a model that it has to compile each time."""
    model, x, compiled = torch.nn.Sequential(Doubling(), Doubling()), torch.randn(3), []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    run = torch.compile(model, backend=backend, fullgraph=True)
    for turn in range(12):
        for block in model:
            if turn % 2:
                put(block, "return op(x)", op=naming("op"))
            else:
                take_back(block, "return op(x)")
        assert torch.equal(run(x), x * 4)
    assert 1 <= len(compiled) <= 2


def test_torch_compile_may_compile_the_lines_of_several_blocks():
    """It does where it cannot trace the code that calls a block, and keeps what it compiled with the lines' code."""
    blocks = [put(Block(), "return op(x) + 1", op=lambda x, by=by: x * by) for by in (2, 3)]
    found = [torch.compile(deferred_lines.lines_of(block).made.run, backend="eager") for block in blocks]
    x = torch.ones(2)
    for run, block, by in zip(found, blocks, (2, 3), strict=True):
        got = run(self=block, x=x, by=3, more=(), far=0, named={}, **deferred_lines.lines_of(block).ops)
        assert torch.equal(got, x * by + 1)


def test_what_replaced_a_blocks_forward_stays_in_front():
    block = Block()
    block.forward = lambda x: x if x > 0 else Block.forward(block, x)
    put(block, "return op(x)", op=naming("op"))
    assert (block(1), block(-1)) == (1, ("op", -1))
    take_back(block, "return op(x)")
    assert block(-1) == Block()(-1)


def test_a_trace_sees_the_models_own(monkeypatch):
    calls = []
    block = put(Block(), "return op(x)", op=naming("op", calls))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert block(1) == Block()(1)
    assert calls == []


# ---- functions of a module


@pytest.fixture
def package(monkeypatch):
    """A module with a function, another one that imports it, and a function that calls it."""
    own, other = ModuleType("package_of_a_test.own"), ModuleType("package_of_a_test.other")
    exec("def half(x, by=2):\n    return 'own', x, by\n\ndef calls(x):\n    return half(x)\n", vars(own))
    own.__dict__["twice"] = lambda x: ("of the module", x)
    vars(other)["half"] = own.half
    for module in (own, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return own, other


def test_lines_stand_in_front_of_a_function_wherever_it_is_held(package):
    own, other = package
    block = put(deferred_lines.block_of(own, "half"), "if x > 0:\n    return op(x, by)", op=naming("op"))
    assert own.calls(1) == other.half(1) == own.half(x=1) == ("op", 1, 2)
    assert other.half(1, by=3) == ("op", 1, 3)
    assert own.calls(-1) == ("own", -1, 2)
    assert deferred_lines.block_of(own, "half") is block, "one block for every op"
    take_back(block, "if x > 0:\n    return op(x, by)")
    assert own.calls(1) == other.half(1) == ("own", 1, 2)


def test_lines_see_what_the_module_has(package):
    own, _ = package
    block = put(deferred_lines.block_of(own, "half"), "return op(twice(x))", op=naming("op"))
    assert own.half(1) == ("op", ("of the module", 1))
    put(block, "return op(twice(x))", twice=naming("an op of the site"))
    assert own.half(1) == ("op", ("an op of the site", 1))


@torch.no_grad()
def test_torch_compile_traces_the_function_itself(package):
    own, _ = package
    exec("def half(x, by=2):\n    return x / by\n", vars(own))
    calls = []
    put(deferred_lines.block_of(own, "half"), "return op(x)", op=naming("op", calls))
    compiled = torch.compile(lambda x: own.half(x) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 1.5))
    assert calls == []


def site_of(own, **keys):
    return Site(op="op", release="0", module=own.__name__, sha256="0" * 64, **keys)


def test_a_function_is_a_block_of_every_model_once_its_module_is_loaded(package):
    own, _ = package
    model = torch.nn.Sequential(Block())
    assert [*blocks(model, site_of(own, function="half", ported="return op(x)"))] == [own.half._kda_block]
    sys.modules.pop(own.__name__)
    assert [*blocks(model, site_of(own, function="half", ported="return op(x)"))] == []


def test_kda_apply_puts_lines_in_front_of_a_function(package, tmp_path, keep_ops):
    own, other = package
    solution = K09.load("solution").temb_residual
    keep_ops(solution)
    counts = Counts(tmp_path)
    entry = {"function": "temb_residual", "block": "half", "kind": "ported", "place": "return temb_residual(*x)"}
    assert apply_hook.defer_in(own, entry, solution, counts) == f"{own.__name__}.half"
    x = (torch.ones(1, 2, 256), torch.ones(1, 2, 256), torch.ones(1, 2, 6, 256), torch.ones(1, 6, 256), 5)
    assert other.half(x)[0] == "own", "the CPU takes no kernel, so the function itself runs"
    found = {(one.function, one.outcome): number for one, number in gather(tmp_path).calls.items() if number}
    assert found == {("temb_residual", "fell_back"): 1}


# ---- Z-Image


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

    def forward(self, q, k, v, **given):
        self.v, self.given = v, given
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=given["attn_mask"]).transpose(1, 2)


class ZImageAttention(torch.nn.Module):
    """Upstream's class, as far as the op goes."""

    def __init__(self, kv_heads=H, head=D, norms=(ZImageRMSNorm, ZImageRMSNorm), k_eps=1e-5, lacking="", wide=()):
        super().__init__()
        for name in ("qk_norm", "use_fused_qkv", "enable_zimage_qk_fusion"):
            setattr(self, name, name != lacking)
        self.local_num_heads, self.local_num_kv_heads, self.head_dim = H, kv_heads, head
        self.to_qkv = Projection(16, (H + 2 * kv_heads) * head, bias=False, dtype=torch.bfloat16)
        self.norm_q, self.norm_k = norms[0](), norms[1](k_eps)
        self.attn = Core()
        self.to_out = torch.nn.ModuleList([Projection(H * head, 16, bias=False, dtype=torch.bfloat16)])
        for part in wide:
            self.get_submodule(part).float()

    def forward(
        self,
        hidden_states,
        freqs_cis=None,
        rope_cos_sin_cache=None,
        rope_positions=None,
        attn_mask=None,
        attn_mask_meta=None,
        num_replicated_prefix=0,
        num_replicated_suffix=0,
        skip_sequence_parallel_override=False,
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
        given = {"attn_mask": attn_mask, "attn_mask_meta": attn_mask_meta}
        given |= {"num_replicated_prefix": num_replicated_prefix, "num_replicated_suffix": num_replicated_suffix}
        given |= {"skip_sequence_parallel_override": skip_sequence_parallel_override}
        return self.to_out[0](self.attn(q, k, v, **given).flatten(2))[0]


def normed(x, weight, eps):
    x, dtype = x.to(weight.dtype), x.dtype
    return (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight).to(dtype)


def rotated(x, cos_sin):
    """By the rows of `cos_sin`, one for each token of each clip."""
    cos, sin = cos_sin.view(*x.shape[:2], 1, -1).chunk(2, dim=-1)
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def zimage_op(q, k, q_weight, k_weight, cos_sin, eps):
    """The task's op, by the definition."""
    assert q.shape == k.shape
    assert q.stride(-1) == 1
    cos_sin = cos_sin.repeat(q.shape[:2].numel() // len(cos_sin), 1)
    return rotated(normed(q, q_weight, eps), cos_sin), rotated(normed(k, k_weight, eps), cos_sin)


def cache(rows, width=D):
    angles = 6 * torch.rand(rows, width // 2, generator=torch.Generator().manual_seed(0))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


MASK = torch.rand(B, 1, 1, T, generator=torch.Generator().manual_seed(2)) < 0.7
LAST = {"attn_mask_meta": {}, "num_replicated_prefix": 1, "num_replicated_suffix": 2}
LAST |= {"skip_sequence_parallel_override": True}
"""Arguments of which only the last layer knows the meaning."""


def inputs(batch=B, **others):
    """The arguments of a call in which each clip of the batch has its own positions."""
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, T, 16, generator=generator).bfloat16(),
        "freqs_cis": None,
        "rope_cos_sin_cache": cache(batch * T),
        "rope_positions": torch.arange(batch * T),
    } | others


def with_op(block, calls, call=zimage_op):
    """The block with k14's lines and its op in it, which is counted."""
    (site,) = sites_of(K14)
    return put(block, site.ported, **{OP: lambda *args: calls.append(args) or call(*args)})


@torch.no_grad()
@pytest.mark.parametrize(
    "call",
    [
        inputs(),
        inputs(1),
        inputs(rope_cos_sin_cache=cache(T), rope_positions=None),
        inputs(1, rope_cos_sin_cache=cache(T), rope_positions=None),
        inputs(attn_mask=MASK, **LAST),
    ],
    ids=["batch", "one", "same positions", "one without positions", "mask"],
)
def test_the_op_norms_and_rotates(call):
    block, calls = ZImageAttention(), []
    want, given = block(**call), block.attn.given
    with_op(block, calls).to_qkv.calls = 0
    assert torch.equal(block(**call), want)
    ((q, k, q_weight, k_weight, cos_sin, eps),) = calls
    assert block.to_qkv.calls == 1
    assert q.shape == k.shape == (len(call["hidden_states"]), T, H, D)
    assert q_weight is block.norm_q.weight
    assert k_weight is block.norm_k.weight
    assert (cos_sin is call["rope_cos_sin_cache"], eps) == (True, 1e-5)
    assert block.attn.given == given
    assert torch.equal(block(*call.values()), want), "the same arguments by their places"
    assert len(calls) == 2


@torch.no_grad()
@pytest.mark.parametrize("processes", [None, 1, 2])
def test_v_is_copied_only_for_other_processes(processes, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes is not None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    block, calls = ZImageAttention(), []
    want = block(**inputs())
    assert torch.equal(with_op(block, calls)(**inputs()), want)
    ((q, k, *_),) = calls
    storage = q.untyped_storage().data_ptr()
    assert k.untyped_storage().data_ptr() == storage
    several = processes == 2
    assert block.attn.v.is_contiguous() == several
    assert (block.attn.v.untyped_storage().data_ptr() != storage) == several


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ({"kv_heads": 1}, {}),
        ({"head": 64}, {}),
        ({"k_eps": 1e-6}, {}),
        ({"norms": (OtherNorm, ZImageRMSNorm)}, {}),
        ({"norms": (ZImageRMSNorm, OtherNorm)}, {}),
        ({"lacking": "qk_norm"}, {}),
        ({"lacking": "enable_zimage_qk_fusion"}, {}),
        ({"lacking": "use_fused_qkv"}, {}),
        ({"wide": ["norm_q"]}, {}),
        ({"wide": ["norm_k"]}, {}),
        ({"wide": [""]}, {"hidden_states": torch.ones(B, T, 16)}),
        ({}, {"rope_cos_sin_cache": None}),
        ({}, {"rope_cos_sin_cache": cache(B * T + 1)}),
        ({}, {"rope_cos_sin_cache": cache(T), "rope_positions": torch.arange(T).repeat(B)}),
        ({}, {"rope_positions": None}),
        ({}, {"rope_cos_sin_cache": cache(B * T, 64)}),
    ],
    ids=lambda value: " ".join(map(str, value)) or "usual",
)
def test_another_block_or_rotation_is_the_models_own(kind, other):
    block, calls, call = ZImageAttention(**kind), [], inputs(**other)
    want = block(**call)
    with_op(block, calls).to_qkv.calls = 0
    assert torch.equal(block(**call), want)
    assert (calls, block.to_qkv.calls) == ([], 1), "nothing is computed twice"


@torch.no_grad()
def test_where_the_op_refuses_the_model_projects_again():
    block, calls = ZImageAttention(), []
    want = block(**inputs())
    with_op(block, calls, deferred_lines.refuse).to_qkv.calls = 0
    assert torch.equal(block(**inputs()), want)
    assert (len(calls), block.to_qkv.calls) == (1, 2)


# ---- Helios

EAGER = K09.load("baseline.eager")
SIGNATURES = {site.op: inspect.signature(getattr(K09.load("solution"), site.op)) for site in HELIOS}
W, S = 256, 6
"""Columns and tokens of a Helios block."""


class Modulated(torch.nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x, shift, scale):
        return layer_norm(x, (W,), eps=self.eps) * (1 + scale) + shift


class SelfAttention(torch.nn.Linear):
    """One that mixes tokens, and reads all its arguments."""

    def forward(self, x, rotary_emb, original_context_length):
        return super().forward(x).cumsum(dim=1) * rotary_emb + (original_context_length or 0)


class CrossAttention(torch.nn.Linear):
    def forward(self, x, encoder_hidden_states, encoder_key_value=None):
        other = encoder_hidden_states if encoder_key_value is None else encoder_key_value
        return super().forward(x) * other.mean(dim=1, keepdim=True)


class HeliosTransformerBlock(torch.nn.Module):
    """Upstream's class with simple layers; every norm has another eps."""

    def __init__(self, guided=False, norm=torch.nn.LayerNorm, **affine):
        super().__init__()
        self.guidance_cross_attn = guided
        self.norm1, self.norm3 = Modulated(1e-3), Modulated(1e-2)
        self.attn1, self.attn2, self.ffn = SelfAttention(W, W), CrossAttention(W, W), torch.nn.Linear(W, W)
        self.self_attn_residual_norm = norm(W, eps=0.1, **affine)
        self.scale_shift_table = torch.nn.Parameter(torch.empty(1, 6, W))
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.5)

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        rotary_emb,
        original_context_length=None,
        cross_attn_key_value=None,
    ):
        table = self.scale_shift_table if temb.ndim == 3 else self.scale_shift_table[:, None]
        slices = [part.reshape(len(temb), -1, W) for part in (table + temb).unbind(-2)]
        y = self.attn1(self.norm1(hidden_states, *slices[:2]), rotary_emb, original_context_length)
        x = hidden_states + slices[2] * y
        known = S - original_context_length if self.guidance_cross_attn else 0
        new = self.self_attn_residual_norm(x[:, known:])
        new = x[:, known:] + self.attn2(new, encoder_hidden_states, encoder_key_value=cross_attn_key_value)
        x = torch.cat((x[:, :known], new), dim=1)
        return x + slices[5] * self.ffn(self.norm3(x, *slices[3:5]))


def helios_inputs(batch=1, context=None, **others):
    shapes = {"hidden_states": (batch, S, W), "encoder_hidden_states": (batch, 3, W), "temb": (1, S, 6, W)}
    tensors = {name: torch.randn(shape) for name, shape in (shapes | {"rotary_emb": (S, W)}).items()}
    return tensors | {"original_context_length": context} | others


def with_ops(block, calls, refused=""):
    """The block with the lines for Helios in it, and k09's ops by the definition; their slices are written down."""

    def of(op):
        def call(*args, **named):
            given = SIGNATURES[op].bind(*args, **named)  # the solution's own arguments
            given.apply_defaults()
            given = given.arguments
            tables = {"gate": given.get("gate_table"), "shift": given.get("table"), "scale": given.get("table")}
            used = {name: given[name] for name, table in tables.items() if table is block.scale_shift_table}
            calls.append((op, used))
            return (deferred_lines.refuse if op == refused else getattr(EAGER, op))(*args, **named)

        return call

    for site in HELIOS:
        put(block, site.ported, **{site.op: of(site.op)})
    return block


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("guided", "context"), [(False, None), (False, 2), (True, 2), (True, S)])
@pytest.mark.parametrize("cached", [False, True], ids=["encoder", "key value"])
def test_helios_adds_slices_where_it_uses_them(batch, guided, context, cached):
    block, calls = HeliosTransformerBlock(guided), []
    call = helios_inputs(batch, context)
    if cached:
        call["cross_attn_key_value"] = torch.randn(batch, 4, W)
    want, before = block(**call), call["hidden_states"].clone()
    got = with_ops(block, calls)(**call)
    torch.testing.assert_close(got, want)
    assert calls == [
        ("temb_norm_scale_shift", {"shift": 0, "scale": 1}),
        ("temb_residual_norm_scale_shift", {"gate": 2}),
        ("temb_norm_scale_shift", {"shift": 3, "scale": 4}),
        ("temb_residual", {"gate": 5}),
    ]
    assert torch.equal(call["hidden_states"], before)
    assert got.untyped_storage().data_ptr() != call["hidden_states"].untyped_storage().data_ptr()


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "temb"),
    [
        ({}, (1, 6, W)),
        ({}, (2, S, 6, W)),
        ({"norm": lambda *_, **__: torch.nn.Identity()}, (1, S, 6, W)),
        ({"bias": False}, (1, S, 6, W)),
    ],
    ids=["a line for all tokens", "tokens of two clips", "no norm", "no bias"],
)
def test_another_helios_is_the_models_own(kind, temb):
    block, calls = HeliosTransformerBlock(**kind), []
    call = helios_inputs(2, temb=torch.randn(temb))
    want = block(**call)
    assert torch.equal(with_ops(block, calls)(**call), want)
    assert calls == []


@torch.no_grad()
@pytest.mark.parametrize("context", [None, 2])
@pytest.mark.parametrize("refused", SIGNATURES)
def test_where_an_op_refuses_helios_computes_all_again(refused, context):
    block, calls = HeliosTransformerBlock(guided=context is not None), []
    call = helios_inputs(2, context)
    want, before = block(**call), call["hidden_states"].clone()
    assert torch.equal(with_ops(block, calls, refused)(**call), want)
    assert calls[-1][0] == refused
    assert torch.equal(call["hidden_states"], before)


# ---- kda port and kda apply


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "into", "call"),
    [(ZImageAttention, with_op, inputs()), (HeliosTransformerBlock, with_ops, helios_inputs())],
    ids=["zimage", "helios"],
)
def test_a_port_that_is_off_leaves_the_call_to_the_model(kind, into, call, monkeypatch):
    block, calls = kind(), []
    want = block(**call)
    seen = deferred_lines.lines_of(into(block, calls)).made.run.__globals__
    monkeypatch.setitem(seen, "kda_runs", lambda x: x is not call["hidden_states"])
    assert torch.equal(block(**call), want)
    assert calls == []


def test_the_copy_imports_only_pytorch(tmp_path):
    apply_site.write(tmp_path / "site", [], {}, runtime=False)
    copied = tmp_path / "site" / apply_site.COPIED / "deferred_lines.py"
    nodes = list(ast.walk(ast.parse(copied.read_text())))
    absolute = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    absolute |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    relative = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level}
    library = {
        *("__future__", "builtins", "collections.abc", "functools"),
        *("inspect", "symtable", "sys", "textwrap", "types", "typing"),
    }
    assert (relative, absolute) == (set(), library | {"torch"})


@torch.no_grad()
@pytest.mark.parametrize(
    ("task", "kind", "ops", "call"),
    [
        (K14, ZImageAttention, {OP: zimage_op}, inputs()),
        (K09, HeliosTransformerBlock, {op: getattr(EAGER, op) for op in SIGNATURES}, helios_inputs()),
    ],
    ids=["zimage", "helios"],
)
def test_blocks_that_are_made_later_call_the_ops(task, kind, ops, call, tmp_path, monkeypatch):
    calls, originals = [], []

    def replacement(solution, original, _counts):
        originals.append(original)
        return functools.wraps(solution)(lambda *args, **named: calls.append(solution) or solution(*args, **named))

    monkeypatch.setattr(apply_hook, "replacement", replacement)
    apply_site.write(tmp_path / "site", apply_site.sites([task]), {}, runtime=False)
    plan = json.loads((tmp_path / "site" / apply_hook.PLAN).read_text())
    entries = [entry for entry in plan["releases"]["0.5.23"] if entry["block"] == kind.__name__]
    made = type(kind.__name__, (kind,), {})
    setattr(MODULE, kind.__name__, made)
    for entry in entries:
        place = apply_hook.defer_in(MODULE, entry, ops[entry["function"]], Counts(tmp_path))
        assert place == f"model_of_a_test.{kind.__name__}.forward"
    assert originals == [deferred_lines.refuse] * len(ops), "what a refused call meets"
    block = made()
    got = block(**call)
    assert set(calls) == set(ops.values())
    take_back(block, entries[0]["place"])
    torch.testing.assert_close(got, block(**call))
