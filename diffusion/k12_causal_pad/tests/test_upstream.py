"""The classes in `sites.toml`, out of the wheels, give the baseline's output, and so do the lines in front of them.

They are run with a convolution that returns its input.
"""

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.upstream_source import source_of

from .. import solution
from ..baseline import primary
from .cases import MARGINS, classes_of, normal

SITES = sites_of(find_task("causal_pad"))


def classes_in(release):
    """The sites' classes of a release; all are in one module."""
    (text,) = {source_of(site) for site in SITES if site.release == release}
    return classes_of(text)


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("release", sorted({site.release for site in SITES}))
def test_the_models_classes_give_the_baselines_output(release, frames):
    classes = classes_in(release)
    assert {site.class_ for site in SITES if site.release == release} == {one.__name__ for one in classes}
    x = normal(1, 2, frames, 6, 5)
    convolution = classes[0](2, 2, kernel_size=3)
    convolution.conv = torch.nn.Identity()
    assert torch.equal(convolution(x), primary.causal_pad(x, *MARGINS))
    for factors in ((1, 2), (2, 2)):
        layer = classes[1](2, upsample_factor=(*factors, factors[1]))
        layer.conv.conv = torch.nn.Identity()
        assert torch.equal(layer(x), primary.upsample_causal_pad(x, *factors, *MARGINS))


OTHER = {"pad_mode": "constant"}, {"time_causal_padding": (0, 0, 0, 0, 0, 0)}, {"spatial_parallel": True}


@pytest.mark.parametrize("other", [{}, *OTHER], ids=str)
@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.op} {site.release}")
def test_the_lines_call_the_op_in_place_of_the_statements(site, other):
    made = {one.__name__: one for one in classes_in(site.release)}[site.class_]
    upsamples = site.op == "upsample_causal_pad"
    block = made(2, upsample_factor=(2, 2, 2)) if upsamples else made(2, 2, kernel_size=3)
    convolution, calls = block.conv if upsamples else block, []
    convolution.conv, convolution.spatial_parallel = torch.nn.Identity(), False
    vars(convolution).update(other)
    x = normal(1, 2, 3, 6, 5, dtype=torch.float32)
    want = block(x)
    deferred_lines.put(
        None, site.ported, (block,), site.op, lambda *given: calls.append(given) or getattr(solution, site.op)(*given)
    )
    assert torch.equal(block(x), want)
    numbers = (*((2, 2) if upsamples else ()), *MARGINS)
    nothing_to_pad = upsamples and "time_causal_padding" in other  # it still upsamples
    expected = [numbers] if not other else [(2, 2, 0, 0, 0)] if nothing_to_pad else []
    assert [given[1:] for given in calls] == expected
