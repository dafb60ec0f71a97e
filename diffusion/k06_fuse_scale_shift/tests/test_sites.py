"""The lines in `sites.toml`, in front of the pinned releases' own code: same results; other calls stay upstream's."""

import sys

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.deferred_lines import refuse
from kda_tools.models.upstream_source import counted, module_of

from .. import solution
from ..baseline import eager
from .cases import SCALE_SHIFT, normal

MOVA, JOY = "MulAdd", "fused_add_gate"
SITES = {f"{site.holder} of {site.release}": site for site in sites_of(find_task("fuse_scale_shift"))}
B, S, D = 2, 5, 24
HALVES = [torch.bfloat16, torch.float16]
each_site = pytest.mark.parametrize("site", SITES.values(), ids=SITES)
each_arm = pytest.mark.parametrize("arm", [solution, eager], ids=["solution", "eager"])


def put(site, monkeypatch, call):
    """Upstream's code out of the pinned wheel, and what runs in its place with the lines in front of it.

    Both take x, gate and residual.
    """
    module = module_of(site, [site.holder], torch=torch, nn=torch.nn)
    monkeypatch.setitem(sys.modules, site.module, module)
    if site.class_:
        own, block = getattr(module, site.class_)(), getattr(module, site.class_)()
        deferred_lines.put(module, site.ported, (block,), SCALE_SHIFT, call)
        return own, block
    own = getattr(module, site.function)
    block = deferred_lines.block_of(module, site.function)
    deferred_lines.put(module, site.ported, (block,), SCALE_SHIFT, call)
    function = getattr(module, site.function)
    return (lambda x, gate, residual: own(residual, x, gate)), (lambda x, gate, residual: function(residual, x, gate))


def arguments(site, batch=B, gates=None, dtype=torch.bfloat16):
    """x, gate and residual; the gate is one of six chunks, as the models make it."""
    chunk = normal(gates or batch, 6, D, dtype=dtype, seed=1)[:, 2:3]
    gate = chunk if site.holder == MOVA else chunk.squeeze(1)
    return normal(batch, S, D, dtype=dtype), gate, normal(batch, S, D, dtype=dtype, seed=2)


def exact(x, gate, residual):
    """Product and sum, [B, S, D] each, without any rounding."""
    product = x.double() * (gate if gate.dim() == 3 else gate[:, None]).double()
    return product, residual.double() + product


@each_arm
@each_site
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("batch", "gates"), [(1, 1), (B, B), (B, 1)])
def test_the_lines_give_upstreams_result(monkeypatch, site, batch, gates, dtype, arm):
    call, calls = counted(getattr(arm, SCALE_SHIFT))
    own, block = put(site, monkeypatch, call)
    given = arguments(site, batch, gates, dtype)
    before = [one.clone() for one in given]
    got, want = block(*given), own(*given)
    assert all(map(torch.equal, given, before))
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    [((x, gate, residual, constant), named)] = calls
    assert (constant, named) == (0.0, {})
    assert all(one is other for one, other in zip((x, gate, residual), given, strict=True))
    # A number is off by at most half a step where it is rounded: the result here and upstream's, and upstream's product
    # before, which in JoyImage is not rounded. The arm `eager` rounds the product, too.
    product, total = exact(*given)
    half = 0.505 * torch.finfo(dtype).eps
    rounded = half * product.abs() * ((site.holder == MOVA) + (arm is eager))
    assert ((got.double() - want.double()).abs() <= 2 * half * total.abs() + 1.01 * rounded + 1e-6).all()
    assert solution.launches(SCALE_SHIFT, {"x": x, "scale": gate, "shift": residual}, {"scale_constant": 0.0})


def test_a_gate_for_every_token(monkeypatch):
    """MOVA's chunks of a `t_mod` with four dimensions, which stay views."""
    for site in (one for one in SITES.values() if one.holder == MOVA):
        call, calls = counted(getattr(solution, SCALE_SHIFT))
        own, block = put(site, monkeypatch, call)
        x, _, residual = arguments(site)
        gate = normal(B, S, 6, D, seed=1)[:, :, 2]
        torch.testing.assert_close(block(x, gate, residual), own(x, gate, residual), rtol=2e-2, atol=2e-2)
        assert len(calls) == 1


LEFT = {
    "float32": lambda x, gate, residual: (x.float(), gate.float(), residual.float()),
    "a float32 x": lambda x, gate, residual: (x.float(), gate, residual),
    "a float32 gate": lambda x, gate, residual: (x, gate.float(), residual),
    "a float32 residual": lambda x, gate, residual: (x, gate, residual.float()),
    "float16 and bfloat16": lambda x, gate, residual: (x.half(), gate, residual),
    "x with gaps": lambda x, gate, residual: (torch.cat([x, x], 2)[..., :D], gate, residual),
    "x of one token": lambda x, gate, residual: (x[:, :1], gate, residual),
    "x of one clip": lambda x, gate, residual: (x[:1], gate, residual),
    "a residual of one clip": lambda x, gate, residual: (x, gate, residual[:1]),
    "a residual of one token": lambda x, gate, residual: (x, gate, residual[:, :1]),
    "x of four dimensions": lambda x, gate, residual: (
        x[..., None].repeat(1, 1, 1, 2),
        gate,
        residual[..., None].repeat(1, 1, 1, 2),
    ),
    "a gate of one column": lambda x, gate, residual: (x, gate[..., :1], residual),
    "a gate of another number of clips": lambda x, gate, residual: (x[:1], gate, residual[:1]),
    "a gate of one dimension": lambda x, gate, residual: (x, gate.flatten()[:D], residual),
    "a gate with a dimension more": lambda x, gate, residual: (x, gate[..., None], residual),
    "a gate of three tokens": lambda x, gate, residual: (x, gate.view(B, 1, D).repeat(1, 3, 1), residual),
}


@each_site
@pytest.mark.parametrize("case", LEFT)
def test_other_calls_are_upstreams_own(monkeypatch, site, case):
    call, calls = counted(getattr(solution, SCALE_SHIFT))
    own, block = put(site, monkeypatch, call)
    given = LEFT[case](*arguments(site))
    try:
        want = own(*given)
    except (IndexError, RuntimeError) as error:  # upstream has no meaning for it either
        with pytest.raises(type(error)):
            block(*given)
    else:
        got = block(*given)
        assert torch.equal(got, want)
        assert got.dtype == want.dtype
    assert calls == []


@each_site
def test_a_refused_call_is_upstreams_own(monkeypatch, site):
    own, block = put(site, monkeypatch, refuse)
    given = arguments(site)
    assert torch.equal(block(*given), own(*given))


def test_the_sites_are_these():
    assert [*SITES] == [f"{name} of {release}" for name in (MOVA, JOY) for release in ("0.5.12.post1", "0.5.23")]
