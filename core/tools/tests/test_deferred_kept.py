"""torch.compile compiles a model once for each arm: a block's `forward` is the same object when an arm comes back."""

import copy
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kda_tools.models import deferred_gelu, deferred_joins, deferred_lines, deferred_residuals
from kda_tools.models.deferred_kept import KEPT, MOST, kept

MODEL = ModuleType("model_of_a_test")
D = 4


def test_the_same_object_for_the_same_objects():
    owner, other, one, two = SimpleNamespace(), SimpleNamespace(), object(), object()
    first = kept(owner, (one, two), object)
    assert kept(owner, (one, two), object) is first
    assert kept(owner, (two, one), object) is not first
    assert kept(owner, (one,), object) is not first
    assert kept(other, (one, two), object) is not first


def test_equal_is_not_the_same():
    owner = SimpleNamespace()
    assert kept(owner, ([],), object) is not kept(owner, ([],), object), "each list lives as long as its entry"


def test_a_copy_of_the_owner_has_other_objects():
    owner, one = SimpleNamespace(), [0]
    kept(owner, (one,), object)
    other = copy.deepcopy(owner)
    assert kept(other, (one,), list) == [], "the copy's entry is of a copy of the list"


def test_few_objects_are_kept():
    owner, first = SimpleNamespace(), object()
    made = kept(owner, (first,), object)
    for _ in range(MOST - 1):
        kept(owner, (object(),), object)
    assert kept(owner, (first,), object) is made
    kept(owner, (object(),), object)
    assert len(vars(owner)[KEPT]) == MOST
    assert kept(owner, (first,), object) is not made


# ---- the ways into a model


def join_seqs(prefix, body, pad, dim=1):
    return torch.cat([prefix, body], dim=dim) if pad == 0 else None


def apply_qk_norm_with_optional_rope(**given):
    return given["q"] * 2, given["k"] * 2


def hunyuan_qknorm(_site, q, k, _q_norm, _k_norm):
    return q * 2, k * 2


def hunyuan_pack_qkv(*parts):
    return tuple(torch.cat(pair, 1) for pair in zip(parts[:3], parts[3:6], strict=True))


def residual_gate_add(residual, update, gate):
    return residual + update * gate


def rms_norm_modulate(_block, rms_norm, x, scale, shift, eps):
    return MODEL._ltx2_modulate(rms_norm(x, (D,), None, eps), scale, shift)


def modulate(x, scale, shift):
    return x * (1 + scale) + shift


FUNCTIONS = {one.__name__: one for one in (join_seqs, apply_qk_norm_with_optional_rope, residual_gate_add)}
FUNCTIONS |= {"_hunyuan_qknorm": hunyuan_qknorm, "_hunyuan_pack_qkv": hunyuan_pack_qkv}
FUNCTIONS |= {"_ltx2_rms_norm_modulate": rms_norm_modulate, "_ltx2_modulate": modulate}


@pytest.fixture(autouse=True)
def _upstream():
    vars(MODEL).update(FUNCTIONS)
    torch._dynamo.reset()


class Doubling(torch.nn.Module):
    def forward(self, x):
        return x * 2


class Gelu(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.act = torch.nn.GELU(approximate="tanh")

    def forward(self, x):
        return torch.cat((x, self.act(x)), dim=-1)


class Flux(torch.nn.Module):
    added_kv_proj_dim = D

    def forward(self, x):
        names = {"q_norm": None, "k_norm": None, "cos_sin_cache": x[0], "is_neox": False}
        parts = [(*MODEL.apply_qk_norm_with_optional_rope(q=x, k=x + 1, **names), x) for _ in range(2)]
        return [MODEL.join_seqs(*pair, 0) for pair in zip(*parts, strict=True)]


class Hunyuan(torch.nn.Module):
    def forward(self, x):
        q, k = MODEL._hunyuan_qknorm(self, x, x + 1, None, None)
        return MODEL._hunyuan_pack_qkv(q, k, x, q, k, x, x, x)


class Residuals(torch.nn.Module):
    def get_ada_values(self, x):
        return list(torch.stack([x[:, :1]] * 4).unbind(0))

    def forward(self, x):
        values = self.get_ada_values(x)
        y = MODEL._ltx2_rms_norm_modulate(self, torch.nn.functional.rms_norm, x, *values[:2], 1e-6)
        return MODEL.residual_gate_add(x, y, values[2])


WAYS = {
    "gelu": (deferred_gelu, "act", Gelu),
    "flux": (deferred_joins, "join_seqs", Flux),
    "hunyuan": (deferred_joins, "_hunyuan_pack_qkv", Hunyuan),
    "lines": (deferred_lines, "return op(x)", Doubling),
    "residuals": (deferred_residuals, "ltx2", Residuals),
}
each = pytest.mark.parametrize(("way", "name", "kind"), WAYS.values(), ids=WAYS)
KEEPING = ("lines", "residuals")
"""Those that keep what they made: for the others torch.compile does not ask which object it is."""
keeping = pytest.mark.parametrize(("way", "name", "kind"), [WAYS[name] for name in KEEPING], ids=KEEPING)


def op(*_):
    """What the arms put into the model; torch.compile never sees it."""
    raise AssertionError


def standing(block):
    """What stands in the model now."""
    functions = {name: value for name, value in vars(MODEL).items() if name in FUNCTIONS}
    own = {name: value for name, value in vars(block).items() if name in ("forward", "get_ada_values")}
    return functions | own | block._modules


@keeping
def test_what_comes_back_is_the_same(way, name, kind):
    block = kind()
    before = standing(block)
    way.put(MODEL, name, (block,), "op", op)
    found = standing(block)
    assert found.keys() >= before.keys()
    assert any(value is not before.get(one) for one, value in found.items())
    for _ in range(2):
        way.take_back(MODEL, name, (block,))
        now = standing(block)
        assert now.keys() == before.keys()
        assert all(value is before[one] for one, value in now.items())
        way.put(MODEL, name, (block,), "op", op)
        again = standing(block)
        assert again.keys() == found.keys()
        assert all(value is found[one] for one, value in again.items())


@keeping
def test_another_block_gets_its_own_but_another_op_does_not(way, name, kind):
    blocks = [kind(), kind()]
    way.put(MODEL, name, blocks, "op", op)
    one, other = (set(map(id, standing(block).values())) for block in blocks)
    shared = {id(getattr(MODEL, function)) for function in FUNCTIONS}
    assert one & other == shared
    way.put(MODEL, name, blocks, "op", lambda *_: None)
    assert set(map(id, standing(blocks[0]).values())) == one, "what stands there asks for the op at each call"


class Model(torch.nn.Module):
    """Two blocks side by side; torch.compile takes their `forward` into its own graph."""

    def __init__(self, kind):
        super().__init__()
        self.blocks = torch.nn.ModuleList([kind(), kind()])

    def forward(self, x):
        return [block(x) for block in self.blocks]


@each
def test_a_model_is_compiled_once_for_each_arm(way, name, kind):
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    model, x = Model(kind), torch.randn(2, 3, D)
    want = model(x)
    run = torch.compile(model, backend=backend, fullgraph=True)
    for turn in range(12):
        if turn % 2:
            way.put(MODEL, name, model.blocks, "op", op)
        else:
            way.take_back(MODEL, name, model.blocks)
        torch.testing.assert_close(run(x), want, rtol=0, atol=0)
    assert 1 <= len(compiled) <= 2
