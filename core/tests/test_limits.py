"""The host floor, against a stub of libcuda: allocation and launch of an empty kernel in one call."""

import pytest

from core.tests.stub_cuda import Stub
from kda_core import limits
from kda_core.launch import MISS
from kda_core.protocol import RowSpec

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


@pytest.mark.parametrize("launched", [True, False])
def test_a_host_floor_that_launches_nothing_is_an_error(monkeypatch, launched):
    row = RowSpec(op="op", sets=(), canary=None, scalars={}, inplace=(), outputs=(), returns_none=True, bytes_moved=0)

    def host():
        return None if launched else MISS

    monkeypatch.setattr(limits, "cheapest_launch", lambda templates, device: host)
    monkeypatch.setattr(limits, "fastest_copy", lambda size, in_place: "copy")
    if launched:
        assert limits.floors(row, "cpu") == (host, "copy")
    else:
        with pytest.raises(RuntimeError, match="launches nothing is too low"):
            limits.floors(row, "cpu")
