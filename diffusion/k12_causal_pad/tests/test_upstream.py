"""The baseline is what the pinned models run: the classes in `baseline/sites.toml`, out of the wheels, give its output.

They are run with a convolution that returns its input.
"""

import hashlib
import zipfile

import pytest
import torch

from kda_judge.arms.upstream import cache_folder
from kda_judge.contract.tasks import checkout_root, find_task
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.known_models import load_models

from ..baseline import primary
from .cases import MARGINS, classes_of, normal

SITES = sites_of(find_task("causal_pad"))


def source_of(release):
    """The text of the sites' module, out of the pinned wheel."""
    sites = [site for site in SITES if site.release == release]
    wheel = cache_folder(checkout_root()) / "wheels" / load_models().releases[release].wheel
    if not wheel.is_file():
        pytest.skip(f"{wheel.name} is not in the cache")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{sites[0].module.replace('.', '/')}.py").decode()
    assert {site.sha256 for site in sites} == {hashlib.sha256(text.encode()).hexdigest()}
    return text


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("release", sorted({site.release for site in SITES}))
def test_the_models_classes_give_the_baselines_output(release, frames):
    classes = classes_of(source_of(release))
    assert {site.class_ for site in SITES if site.release == release} == {one.__name__ for one in classes}
    x = normal(1, 2, frames, 6, 5)
    convolution = classes[0](2, 2, kernel_size=3)
    convolution.conv = torch.nn.Identity()
    assert torch.equal(convolution(x), primary.causal_pad(x, *MARGINS))
    for factors in ((1, 2), (2, 2)):
        layer = classes[1](2, upsample_factor=(*factors, factors[1]))
        layer.conv.conv = torch.nn.Identity()
        assert torch.equal(layer(x), primary.upsample_causal_pad(x, *factors, *MARGINS))
