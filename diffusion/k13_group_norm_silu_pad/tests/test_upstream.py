"""The ops give what the pinned models run: classes out of the wheels, with the ops in them, return what they return."""

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_layouts
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.upstream_source import source_of

from .. import solution
from . import cases

SITES = sites_of(find_task("group_norm_silu_pad"))
CLIP = torch.randn(1, 32, 3, 6, 5, generator=torch.Generator().manual_seed(0))


def classes_of(release):
    """The VAE's classes of the pinned wheel."""
    (text,) = {source_of(site) for site in SITES if site.release == release}
    return cases.classes_of(text)


def sites_for(block, release):
    return [site for site in SITES if (site.release, site.class_) == (release, type(block).__name__)]


def blocks_of(release):
    """Blocks that a decoder repeats, of every form that the model has."""
    classes = classes_of(release)
    torch.manual_seed(0)
    residual, upsampling = classes["HunyuanVideoResnetBlockCausal3D"], classes["HunyuanVideoUpsampleCausal3D"]
    made = [residual(32), residual(32, 64), upsampling(32, upsample_factor=(1, 2, 2)), upsampling(32, 64)]
    return [block.eval() for block in made]


def put(block, release, calls):
    for site in sites_for(block, release):
        op = getattr(solution, site.op)
        deferred_layouts.defer(block, site.layout, site.op, lambda *args, op=op: calls.append(op) or op(*args))


def take_back(block, release):
    for site in sites_for(block, release):
        deferred_layouts.take_back(None, site.layout, [block])


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("release", sorted({site.release for site in SITES}))
def test_blocks_give_what_the_model_gives(release, frames):
    calls = []
    for block in blocks_of(release):
        x = CLIP[:, :, :frames]
        want = block(x)
        put(block, release, calls)
        got = block(x)
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-5
        assert torch.equal(block(x.contiguous(memory_format=torch.channels_last_3d)), got)
        take_back(block, release)
        assert torch.equal(block(x), want)
    assert calls.count(solution.group_norm_silu_pad) == 8, "two blocks, two norms, two clips"
    assert calls.count(solution.upsample_pad) == 4
    assert calls.count(solution.bias_residual) == 8, "four blocks, two clips"


@torch.no_grad()
@pytest.mark.parametrize("release", sorted({site.release for site in SITES}))
def test_a_convolution_keeps_the_order_that_it_finds(release):
    convolution, calls = classes_of(release)["HunyuanVideoCausalConv3d"](32, 8, stride=2).eval(), []
    want = convolution(CLIP)
    put(convolution, release, calls)
    assert torch.equal(convolution(CLIP), want)
    assert calls == []
    got = convolution(CLIP.contiguous(memory_format=torch.channels_last_3d))
    assert (got - want).abs().max() <= 1e-5
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    assert calls == [solution.upsample_pad, solution.bias_residual]


@torch.no_grad()
@pytest.mark.parametrize("release", sorted({site.release for site in SITES}))
def test_a_decoder(release):
    decoder, calls = cases.decoder_of(classes_of(release)), []
    want = decoder(CLIP)
    for block in decoder.modules():
        put(block, release, calls)
    got = decoder(CLIP)
    assert (got - want).abs().max() <= 1e-5
    assert got.stride() == want.stride()
    assert calls.count(solution.group_norm_silu_pad) == 2 * (2 + 4) + 1, "two a block, of the middle and of two ends"
    assert calls.count(solution.upsample_pad) == 2
    for block in decoder.modules():
        take_back(block, release)
    assert torch.equal(decoder(CLIP), want)
