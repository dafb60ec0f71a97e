"""Memory of entries: what is told apart, what is found again, what goes."""

import pytest
import torch

from kda_runtime.launch import MISS, Chain
from kda_runtime.plans import Plans, plain_entry


@pytest.mark.parametrize("state", [torch.inference_mode, lambda: torch.autocast("cpu"), torch.enable_grad])
def test_plans_tell_apart_what_entries_miss_on(state):
    # An entry that was found must not miss: its caller would think that it had launched.
    given = [torch.zeros(3, requires_grad=True)]
    plans = Plans()
    with torch.no_grad():
        entry = plain_entry(Chain((), ()), given, ())
        plans.add(given, (), entry)
        assert plans.find(given, ()) is entry
        assert entry(*given) is None
        with state():
            assert entry(*given) is MISS
            assert plans.find(given, ()) is None
    assert plans.find([torch._neg_view(given[0].detach())], ()) is None


def test_plans_are_found_again_and_bounded():
    plans = Plans(hot=2, total=3)
    sizes = [[torch.zeros(n)] for n in range(1, 5)]
    for n, given in enumerate(sizes):
        plans.add(given, (n,), lambda n=n: n)
    assert [entry() for entry in (plans.last, *plans.hot)] == [3, 2]
    assert plans.find(sizes[0], (0,)) is None, "the oldest went"
    assert plans.find(sizes[1], (9,)) is None, "scalars are part of the key"
    assert plans.find(sizes[1], (1,))() == 1
    assert [entry() for entry in (plans.last, *plans.hot)] == [1, 3], "found plans are hot again"
    plans.clear()
    assert plans.last() is MISS
    assert plans.hot == ()
    assert plans.find(sizes[1], (1,)) is None
