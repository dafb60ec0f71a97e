"""The host floor, against a stub of libcuda: allocation and launch of an empty kernel in one call."""

import pytest

from core.tests.stub_cuda import Stub

SCRIPT = """
from kda_core import limits

like = [torch.empty(3, 5), torch.empty(4, 2).t(), torch.empty(7, dtype=torch.bfloat16)]
floor = limits.cheapest_launch(like, torch.device("cpu"))
made = say("launched", floor, torch.empty(9), None, factor=3)
print("pointers:", *(f"{tensor.data_ptr():x}" for tensor in made))
print("like:", [(t.shape, t.stride(), t.dtype) for t in made] == [(t.shape, t.stride(), t.dtype) for t in like])
"""


@pytest.mark.parametrize("make", ["native", "python"])
def test_host_floor_allocates_like_the_outputs_and_launches_once(tmp_path, make):
    lines = Stub(tmp_path).run(SCRIPT, KDA_LAUNCH=make)
    assert lines["launched"] == (
        "grid 1 1 1 block 32 1 1 shared 0 stream 0x5000 function 0x79 "
        f"args {lines['pointers']} scratch (nil) (nil) queries 0"
    )
    assert lines["like"] == "True"
