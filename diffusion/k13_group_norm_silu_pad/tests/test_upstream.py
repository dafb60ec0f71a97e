"""The ops give what the pinned models run: classes out of the wheels, with the ops in them, return what they return."""

import ast
import hashlib
import zipfile

import pytest
import torch

from kda_judge.arms.upstream import cache_folder
from kda_judge.contract.tasks import checkout_root, find_task
from kda_tools.models import deferred_layouts
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.known_models import load_models

from .. import solution

SITES = sites_of(find_task("group_norm_silu_pad"))
WANTED = ("HunyuanVideoCausalConv3d", "HunyuanVideoUpsampleCausal3D", "HunyuanVideoResnetBlockCausal3D")
CLIP = torch.randn(1, 32, 3, 6, 5, generator=torch.Generator().manual_seed(0))


def classes_of(release):
    """The VAE's classes of the pinned wheel, made of their text alone."""
    sites = [site for site in SITES if site.release == release]
    wheel = cache_folder(checkout_root()) / "wheels" / load_models().releases[release].wheel
    if not wheel.is_file():
        pytest.skip(f"{wheel.name} is not in the cache")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{sites[0].module.replace('.', '/')}.py").decode()
    assert {site.sha256 for site in sites} == {hashlib.sha256(text.encode()).hexdigest()}
    module = ast.parse(text)
    kept = (*WANTED, "_apply_group_norm_silu")
    kinds = (ast.ClassDef, ast.FunctionDef)
    module.body = [one for one in module.body if isinstance(one, kinds) and one.name in kept]
    found = {
        "torch": torch,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "SpatialParallelConv3d": torch.nn.Conv3d,
        "get_act_fn": lambda _: torch.nn.SiLU(),
        "apply_group_norm_silu": lambda x, norm, activation: activation(norm(x)),
    }
    exec(compile(module, "hunyuanvae.py", "exec"), found)
    return {name: found[name] for name in WANTED}


def blocks_of(release):
    """Blocks of the sites' classes, of every form that the model has, with the class's sites."""
    classes = classes_of(release)
    torch.manual_seed(0)
    residual, upsampling = classes["HunyuanVideoResnetBlockCausal3D"], classes["HunyuanVideoUpsampleCausal3D"]
    made = [residual(32), residual(32, 64), upsampling(32, upsample_factor=(1, 2, 2)), upsampling(32, 64)]
    for block in made:
        yield block.eval(), [one for one in SITES if (one.release, one.class_) == (release, type(block).__name__)]


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("release", sorted({site.release for site in SITES}))
def test_blocks_give_what_the_model_gives(release, frames):
    calls = []
    for block, sites in blocks_of(release):
        x = CLIP[:, :, :frames]
        want = block(x)
        for site in sites:
            op = getattr(solution, site.op)
            deferred_layouts.defer(block, site.layout, site.op, lambda *args, op=op: calls.append(op) or op(*args))
        got = block(x)
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-5
        assert torch.equal(block(x.contiguous(memory_format=torch.channels_last_3d)), got)
        deferred_layouts.take_back(None, sites[0].layout, [block])
        assert torch.equal(block(x), want)
    assert calls.count(solution.group_norm_silu_pad) == 8, "two blocks, two norms, two clips"
    assert calls.count(solution.upsample_pad) == 4
    assert calls.count(solution.bias_residual) == 8, "four blocks, two clips"
