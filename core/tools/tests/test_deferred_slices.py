"""Slices that wait for the op that adds them: which calls go there, what anything else gets, both ways into a model."""

import json
from types import ModuleType

import pytest
import torch

from core.tools.tests.every_task import ROOT
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_hook, apply_site, deferred_slices
from kda_tools.models.apply_counts import Counts, gather
from kda_tools.models.chain_sites import FILE, sites_of
from kda_tools.models.deferred_slices import Slice
from kda_tools.models.deferred_ways import WAYS

K09 = Task(ROOT / "diffusion" / "k09_temb_modulation")
OPS = ("temb_norm_scale_shift", "temb_residual_norm_scale_shift", "temb_residual")
EPS = 1e-6
B, S, D = 1, 4, 256


def slices(table, temb):
    """Upstream's, in PyTorch."""
    return tuple(part.squeeze(2) for part in (table.unsqueeze(0) + temb.float()).chunk(6, dim=2))


MODEL = ModuleType("model_of_a_test")
"""Upstream's module, as far as its blocks ask for it."""


@pytest.fixture(autouse=True)
def _upstream():
    MODEL.slices = slices


class Norm(torch.nn.Module):
    """What both norms of upstream have."""

    def __init__(self, affine=False, norm_type="layer"):
        super().__init__()
        self.norm_type, self.eps = norm_type, EPS
        self.norm = torch.nn.LayerNorm(D, EPS, elementwise_affine=affine)
        if affine:
            torch.nn.init.normal_(self.norm.weight)
            torch.nn.init.normal_(self.norm.bias)


class LayerNormScaleShift(Norm):
    def forward(self, x, shift, scale):
        return self.norm(x) * (1 + scale) + shift


class ScaleResidualLayerNormScaleShift(Norm):
    def forward(self, residual, x, gate, shift, scale):
        summed = residual + x * gate
        return self.norm(summed) * (1 + scale) + shift, summed


class MulAdd(torch.nn.Module):
    def forward(self, a, b, c, k=0):
        return a * (k + b) + c


class Block(torch.nn.Module):
    """Wan's, without attention and feed-forward."""

    def __init__(self, **norm):
        super().__init__()
        self.scale_shift_table = torch.nn.Parameter(torch.randn(1, 6, D), requires_grad=False)
        self.norm1 = LayerNormScaleShift(**norm)
        self.self_attn_residual_norm = ScaleResidualLayerNormScaleShift(affine=True)
        self.cross_attn_residual_norm = ScaleResidualLayerNormScaleShift()
        self.ffn_residual_norm1 = ScaleResidualLayerNormScaleShift()
        self.mlp_residual = MulAdd()

    def forward(self, x, temb, before=None, chained=False):
        shift, scale, gate, c_shift, c_scale, c_gate = MODEL.slices(self.scale_shift_table, temb)
        assert shift.dtype == torch.float32
        zero = torch.zeros(1)
        y = self.norm1(x, shift, scale)
        if before is not None:
            y, x = self.ffn_residual_norm1(x, *before, shift, scale)
        y, x = self.self_attn_residual_norm(x, y, gate, zero, zero)
        y, x = self.cross_attn_residual_norm(x, y, 1, c_shift, c_scale)
        return (x, (y, c_gate)) if chained else self.mlp_residual(y, c_gate, x)


def counted(calls):
    """The solutions, which write down the names of those that were called."""
    solution = K09.load("solution")

    def one(op):
        return lambda *args, **kwargs: calls.append(op) or getattr(solution, op)(*args, **kwargs)

    return {op: one(op) for op in OPS}


def two_blocks(first, second, x, temb):
    x, before = first(x, temb, chained=True)
    return second(x, temb, before)


def test_every_call_of_a_block_goes_to_its_op():
    torch.manual_seed(0)
    first, second, x, temb = Block(), Block(), torch.randn(B, S, D), torch.randn(B, S, 6, D)
    expected = two_blocks(first, second, x, temb)
    calls = []
    for op, call in counted(calls).items():
        deferred_slices.put(MODEL, "slices", (first, second), op, call)
    torch.testing.assert_close(two_blocks(first, second, x, temb), expected)
    norm, both, residual = OPS
    assert calls == [norm, both, both, norm, both, both, both, residual]
    deferred_slices.take_back(MODEL, "slices", (first, second))
    assert MODEL.slices is slices
    assert torch.equal(two_blocks(first, second, x, temb), expected)
    assert len(calls) == 8


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("refused", ()),
        ("rms", OPS[1:]),
        ("compiled", ()),
    ],
)
def test_anything_else_gets_the_tensors(what, left):
    torch.manual_seed(0)
    block = Block(**({"norm_type": "rms"} if what == "rms" else {}))
    x, temb = torch.randn(B, S, D), torch.randn(B, S, 6, D)
    expected, calls = block(x, temb), []
    for op, call in counted(calls).items():
        call = deferred_slices.refuse if what == "refused" else call
        deferred_slices.put(MODEL, "slices", (block,), op, call)
    run = torch.compile(block, backend="eager") if what == "compiled" else block
    torch.testing.assert_close(run(x, temb), expected)
    assert set(calls) == set(left)


def test_slices_of_two_sums_are_no_pair():
    layer, temb, calls = LayerNormScaleShift(), torch.randn(B, S, 6, D), []
    block = torch.nn.Sequential(layer)
    deferred_slices.defer(block, "slices", OPS[0], counted(calls)[OPS[0]])
    x, one, two = torch.randn(B, S, D), torch.randn(1, 6, D), torch.randn(1, 6, D)
    expected = torch.nn.functional.layer_norm(x, (D,), eps=EPS) * (1 + slices(two, temb)[1]) + slices(one, temb)[0]
    torch.testing.assert_close(layer(x, Slice(one, temb, 0), Slice(two, temb, 1)), expected)
    assert calls == []
    layer(x, shift=Slice(one, temb, 0), scale=Slice(one, temb, 1))
    assert calls == [OPS[0]]


def test_a_slice_is_upstreams_tensor():
    table, temb = torch.randn(1, 6, D).bfloat16(), torch.randn(B, S, 6, D).bfloat16()
    for number, made in enumerate(slices(table, temb)):
        assert torch.equal(Slice(table, temb, number).tensor(), made)


KEYS = {"release": "0.5.23", "module": "m", "sha256": "0" * 64, "class": "Block"}


def read(folder, **keys):
    """The sites of a task whose file has one site with these keys."""
    entries = "\n".join(f"{key} = {json.dumps(value)}" for key, value in (KEYS | keys).items())
    (folder / FILE).write_text(f"[[site]]\n{entries}\n")
    return sites_of(Task(folder))


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"slices": "f"}, ("slices", "f")),
        ({"ported": "return op(x)"}, ("ported", "return op(x)")),
        ({"ported": "return op(x)", "slices": "f"}, ("slices", "f")),
        ({"layout": "decoder", "ported": "return op(x)"}, ("layout", "decoder")),
    ],
)
def test_lines_for_a_port_are_a_kind_only_where_there_is_no_other(keys, place, tmp_path):
    (site,) = read(tmp_path, op="op", **keys)
    assert (site.kind, site.place, site.ported) == (*place, keys.get("ported", ""))


@pytest.mark.parametrize(
    ("keys", "got"),
    [
        ({}, "none"),
        ({"slices": ""}, "none"),
        ({"slices": "f", "activation": "act"}, "activation and slices"),
        ({"slices": "f", "activation": "act", "ported": "return op(x)"}, "activation and slices"),
    ],
)
def test_a_site_has_one_kind(keys, got, tmp_path):
    with pytest.raises(UsageError, match=rf"(?m)sites\.toml: .*expected one of {', '.join(WAYS)}, got {got}$"):
        read(tmp_path, op="op", **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"function": "f", "ported": "return op(x)"}, "expected either class or function, got both"),
        ({"class": "", "ported": "return op(x)"}, "expected either class or function, got neither"),
        (
            {"class": "", "function": "f", "slices": "g"},
            "key 'function': expected it with 'ported' alone, got 'slices'",
        ),
    ],
)
def test_a_site_is_a_class_or_a_function(keys, message, tmp_path):
    with pytest.raises(UsageError, match=rf"sites\.toml: .*{message}"):
        read(tmp_path, op="op", **keys)


def test_each_op_of_a_list_has_a_site(tmp_path):
    sites = read(tmp_path, ops=["one", "other"], slices="f")
    assert [site.op for site in sites] == ["one", "other"]
    assert len({site.model_copy(update={"op": ""}) for site in sites}) == 1, "they differ only by their op"


def test_each_release_of_a_table_of_hashes_has_a_site(tmp_path):
    hashes = {release: str(number) * 64 for number, release in enumerate(("0.5.12.post1", "0.5.23"))}
    text = "".join(f'sha256."{release}" = "{digest}"\n' for release, digest in hashes.items())
    (tmp_path / FILE).write_text(f'[[site]]\nops = ["a", "b"]\nmodule = "m"\nclass = "C"\nslices = "f"\n{text}')
    found = [(site.release, site.sha256, site.op) for site in sites_of(Task(tmp_path))]
    assert found == [(*pair, op) for pair in hashes.items() for op in "ab"]
    (tmp_path / FILE).write_text(f'[[site]]\nop = "a"\nrelease = "1"\nmodule = "m"\nclass = "C"\nslices = "f"\n{text}')
    with pytest.raises(UsageError, match=r"key 'site\.0\.sha256'"):
        sites_of(Task(tmp_path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"op": "one", "ops": ["other"]}, "unknown key 'site.0.ops'"),
        ({"ops": []}, "missing key 'site.0.op'"),
        ({"ops": "one"}, "missing key 'site.0.op'"),
        ({"ops": [1]}, "key 'site.0.op': Input should be a valid string, got 1"),
        ({}, "missing key 'site.0.op'"),
    ],
)
def test_another_list_of_ops_is_an_error(keys, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, slices="f", **keys)


# ---- kda apply


def test_blocks_that_are_made_later_call_the_solution(tmp_path, keep_ops):
    sites = [site for site in apply_site.sites([K09]) if site.kind == "slices"]
    apply_site.write(tmp_path / "site", sites, {}, runtime=False)
    plan = json.loads((tmp_path / "site" / apply_hook.PLAN).read_text())
    assert (tmp_path / "site" / apply_site.COPIED / "deferred_slices.py").is_file()
    MODEL.Block = type("Block", (Block,), {})
    counts = Counts(tmp_path)
    solution = K09.load("solution")
    keep_ops(*(getattr(solution, op) for op in OPS))
    for entry in plan["releases"]["0.5.23"]:
        entry |= {"block": "Block", "place": "slices"}
        place = apply_hook.defer_in(MODEL, entry, getattr(solution, entry["function"]), counts)
        assert place == "model_of_a_test.Block.slices"
    block = MODEL.Block()
    x, temb = torch.randn(B, S, D), torch.randn(B, S, 6, D)
    got = block(x, temb)
    deferred_slices.take_back(MODEL, "slices", (block,))
    torch.testing.assert_close(got, block(x, temb))
    found = {(one.function, one.outcome): number for one, number in gather(tmp_path).calls.items() if number}
    assert found == {(op, "fell_back"): number for op, number in zip(OPS, (1, 2, 1), strict=True)}
