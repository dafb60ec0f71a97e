"""The lines in `sites.toml`, in front of the pinned releases' functions: same results; other calls stay upstream's."""

import sys
from types import ModuleType

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.deferred_lines import refuse
from kda_tools.models.upstream_source import counted, module_of

from .. import solution
from ..baseline import eager

SITES = {site.function: site for site in sites_of(find_task("rotary_embedding"))}
MOVA, MOVA_OLD, HELIOS = "_apply_rotary_emb_complex", "rope_apply_head_dim", "apply_rotary_emb_transposed"
OP = "apply_rotary_embedding"
B, S, H, D = 2, 5, 3, 8
HALVES = [torch.bfloat16, torch.float16]
COMPLEX = [torch.complex128, torch.complex64]
ARMS = pytest.mark.parametrize("arm", [solution, eager], ids=["solution", "eager"])


def rearrange(x, _pattern, d):
    """What upstream asks of einops: split the last of three dimensions into heads of `d`."""
    if x.dim() != 3 or x.shape[2] % d:
        raise ValueError(f"expected three dimensions, the last a multiple of {d}, got {list(x.shape)}")
    return x.unflatten(-1, (-1, d))


def function_of(name, monkeypatch):
    """The module of a site with upstream's own function alone, out of the pinned wheel."""
    module = module_of(SITES[name], [name], torch=torch, rearrange=rearrange)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def put(module, name, call):
    """Upstream's function, and what runs in its place with the lines in front of it."""
    own = getattr(module, name)
    deferred_lines.put(module, SITES[name].ported, (deferred_lines.block_of(module, name),), OP, call)
    return own, getattr(module, name)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def turns(dtype=torch.complex128, tokens=S, size=D):
    """A complex table, with an angle of its own in every place."""
    angles = torch.rand(tokens, 1, size // 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 6
    return torch.polar(torch.ones_like(angles), angles).to(dtype)


def twice(batch=1, tokens=S, size=D, dtype=torch.float32):
    """Helios's table: every cosine twice, then every sine twice. The ones that upstream does not read are 9 here."""
    table, nine = turns(tokens=tokens, size=size)[:, 0], torch.full((tokens, size // 2), 9.0)
    pairs = torch.stack([table.real, nine], dim=-1), torch.stack([nine, table.imag], dim=-1)
    return torch.cat([pair.flatten(1) for pair in pairs], dim=1).expand(batch, -1, -1).to(dtype)


def arguments(name, dtype=torch.bfloat16, table=None):
    """A call that the lines take."""
    if name == MOVA:
        return normal(B, S, H, D, dtype=dtype), turns(table or torch.complex128)
    if name == MOVA_OLD:
        return normal(B, S, H * D, dtype=dtype), turns(table or torch.complex128), D
    return normal(B, S, H, D, dtype=dtype), twice()


def assert_one_step(got, own):
    """The same form, and values at most one step of the dtype apart.

    Both round once, so only a value near the middle between two numbers may differ. `atol` is what float32 and its
    tables lose before that, where the two products nearly cancel.
    """
    assert (got.shape, got.dtype, got.stride()) == (own.shape, own.dtype, own.stride())
    step = torch.finfo(own.dtype).eps
    torch.testing.assert_close(got.double(), own.double(), rtol=1.01 * step, atol=3e-6)


def test_the_sites_are_these():
    assert {name: site.release for name, site in SITES.items()} == {
        MOVA: "0.5.23",
        MOVA_OLD: "0.5.12.post1",
        HELIOS: "0.5.12.post1",
    }
    assert {site.op for site in SITES.values()} == {OP}


@ARMS
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("name", "table"), [*((n, t) for n in (MOVA, MOVA_OLD) for t in COMPLEX), (HELIOS, None)])
def test_the_lines_give_upstreams_result(monkeypatch, name, table, dtype, arm):
    call, calls = counted(getattr(arm, OP))
    own, function = put(function_of(name, monkeypatch), name, call)
    given = arguments(name, dtype, table)
    before = [one.clone() for one in given[:2]]
    assert_one_step(function(*given), own(*given))
    assert all(torch.equal(one, was) for one, was in zip(given, before, strict=False))
    [((x, cos, sin), named)] = calls
    assert named == {}
    assert torch.equal(x, given[0].view(B, S, H, D))
    angles = turns(table or torch.complex128)[:, 0]
    assert torch.equal(cos, angles.real.float())
    assert torch.equal(sin, angles.imag.float())
    assert solution.launches(OP, {"x": x, "cos": cos, "sin": sin}, {}), "the kernel takes the call"


@pytest.mark.parametrize("intermediate", [torch.float32, torch.float64], ids=str)
def test_upstreams_dtype_of_the_product_does_not_matter(monkeypatch, intermediate):
    call, calls = counted(getattr(solution, OP))
    own, function = put(function_of(MOVA, monkeypatch), MOVA, call)
    given = (*arguments(MOVA), intermediate)
    assert_one_step(function(*given), own(*given))
    assert len(calls) == 1


def test_a_table_with_gaps_is_read_as_it_is(monkeypatch):
    """A part of the heads' columns, or of the tokens: the table of another model."""
    call, calls = counted(getattr(solution, OP))
    own, function = put(function_of(MOVA, monkeypatch), MOVA, call)
    given = normal(B, S, H, D), turns(torch.complex64, tokens=S + 4, size=2 * D)[2 : S + 2, :, ::2]
    assert_one_step(function(*given), own(*given))
    assert len(calls) == 1


X, WIDE = normal(B, S, H, D), normal(B, S, H * D)
LEFT = {
    "float32": (MOVA, X.float(), turns()),
    "gaps": (MOVA, normal(B, S, 2 * H, D)[:, :, :H], turns()),
    "heads first": (MOVA, normal(B, H, S, D).transpose(1, 2), turns()),
    "a line for all tokens": (MOVA, X, turns(tokens=1)),
    "a column for all pairs": (MOVA, X, turns(size=2)),
    "a line for every clip": (MOVA, X, turns(tokens=2 * S).view(B, S, 1, D // 2)),
    "two dimensions": (MOVA, X, turns()[0]),
    "x of three dimensions": (MOVA, X[0], turns()),
    "x of five dimensions": (MOVA, normal(B, S, H, D, 2), turns()),
    "a line for every head": (MOVA, X, turns().expand(S, H, D // 2)),
    "conjugated": (MOVA, X, turns().conj()),
    "real": (MOVA, X, turns().real),
    "old, float32": (MOVA_OLD, WIDE.float(), turns(), D),
    "old, gaps": (MOVA_OLD, normal(B, S, 2 * H * D)[..., : H * D], turns(), D),
    "old, a line for all tokens": (MOVA_OLD, WIDE, turns(tokens=1), D),
    "old, x of two dimensions": (MOVA_OLD, WIDE[0], turns(), D),
    "old, x of four dimensions": (MOVA_OLD, normal(B, S, H * D, 2), turns(), D),
    "old, half a head more": (MOVA_OLD, normal(B, S, H * D + D // 2), turns(), D),
    "old, conjugated": (MOVA_OLD, WIDE, turns().conj(), D),
    "old, real": (MOVA_OLD, WIDE, turns().real, D),
    "Helios, float32": (HELIOS, X.float(), twice()),
    "Helios, x of three dimensions": (HELIOS, X[0], twice()),
    "Helios, x of five dimensions": (HELIOS, normal(B, S, H, D, 2), twice()),
    "Helios, a table for every clip": (HELIOS, X, twice(batch=B)),
    "Helios, a line for all tokens": (HELIOS, X, twice(tokens=1)),
    "Helios, a bfloat16 table": (HELIOS, X, twice(dtype=torch.bfloat16)),
    "Helios, a float64 table": (HELIOS, X, twice(dtype=torch.float64)),
    "Helios, two dimensions": (HELIOS, X, twice()[0]),
}


def same(got, own):
    return got.dtype == own.dtype and got.stride() == own.stride() and torch.equal(got, own)


@pytest.mark.parametrize("case", LEFT)
def test_other_calls_are_upstreams_own(monkeypatch, case):
    name, *given = LEFT[case]
    call, calls = counted(getattr(solution, OP))
    own, function = put(function_of(name, monkeypatch), name, call)
    try:
        want = own(*given)
    except (RuntimeError, ValueError) as error:  # upstream has no meaning for it either
        with pytest.raises(type(error)):
            function(*given)
    else:
        assert same(function(*given), want)
    assert calls == []


@pytest.mark.parametrize("name", SITES)
def test_a_refused_call_is_upstreams_own(monkeypatch, name):
    own, function = put(function_of(name, monkeypatch), name, refuse)
    given = arguments(name)
    assert same(function(*given), own(*given))


def test_a_module_that_imported_the_function_calls_the_op_too(monkeypatch):
    """`layers.rotary_embedding.base` holds the function by its name."""
    module = function_of(MOVA, monkeypatch)
    other = ModuleType("sglang.module_of_a_test")
    vars(other)[MOVA] = getattr(module, MOVA)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    call, calls = counted(getattr(solution, OP))
    put(module, MOVA, call)
    getattr(other, MOVA)(*arguments(MOVA))
    assert len(calls) == 1
