"""The comparison with the oracle: every element counts, and the words and numbers say which one was wrong."""

import math

import pytest
import torch

from kda_judge.arms.input_values import nudged
from kda_judge.contract.config import Op, Tolerance
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_judge.judge import correctness, oracle
from kda_judge.judge.correctness import compare, worse, worse_than_baseline

TIGHT = Tolerance(atol=1e-3, rtol=1e-2, reason="for tests")


def expected(*shape: int) -> torch.Tensor:
    return torch.linspace(-4, 4, math.prod(shape), dtype=torch.float64).reshape(shape)


def test_exact_outputs_use_nothing_of_the_tolerance():
    want = expected(4, 6)
    found = compare("y", want.float(), want.float().double(), TIGHT)
    assert found.failure is None
    assert (found.error.max_abs, found.error.rel_l2, found.error.used) == (0.0, 0.0, 0.0)


def test_the_element_that_used_most_of_its_own_tolerance_is_named():
    want = expected(4, 6)
    out = want.clone()
    out[3, 5] += 0.03  # large, where 0.041 is allowed
    out[1, 5] += 0.0027  # smaller, where 0.0027 is allowed and a little
    found = compare("y", out, want, TIGHT)
    assert found.failure is None
    assert found.error.worst_index == (1, 5)
    assert found.error.max_abs == pytest.approx(0.03)
    assert 0.95 < found.error.used < 1


def test_one_element_beyond_its_tolerance_fails_whatever_the_others_are():
    want = expected(1000, 10)
    out = want.clone()
    out[500, 3] += 0.02
    found = compare("y", out, want, TIGHT)
    assert found.failure is not None
    assert "1 of 10000 elements outside tolerance; worst at [500, 3]" in found.failure
    assert found.error.used > 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_fails_and_is_counted(value):
    want = expected(3, 3)
    out = want.clone()
    out[2, 0] = value
    found = compare("y", out, want, TIGHT)
    assert found.failure is not None
    assert "worst at [2, 0]" in found.failure
    assert "1 not finite" in found.failure


def test_chunks_change_nothing(monkeypatch):
    want = expected(7, 11)
    out = want + 5e-3 * torch.sin(torch.arange(77, dtype=torch.float64)).reshape(7, 11)
    whole = compare("y", out, want, TIGHT)
    monkeypatch.setattr(correctness, "CHUNK", 10)
    parts = compare("y", out, want, TIGHT)
    assert parts.failure == whole.failure
    assert parts.error.worst_index == whole.error.worst_index
    for name in ("max_abs", "max_rel", "rel_l2", "allowed", "used"):
        assert getattr(parts.error, name) == pytest.approx(getattr(whole.error, name)), name


def test_the_magnitude_of_a_family_never_exceeds_the_outputs():
    want = expected(4, 6)  # up to 4
    out = want + 64 * TIGHT.atol
    assert compare("y", out, want * 1.0, TIGHT, magnitude=64.0).failure is not None
    assert compare("y", out, want, TIGHT, magnitude=1.0).failure is not None
    large = want * 100
    assert compare("y", large + 64 * TIGHT.atol, large, TIGHT, magnitude=64.0).failure is None


def test_the_previous_result_is_recognised():
    want, before = expected(4, 6), expected(4, 6).flip(0)
    found = compare("y", before.clone(), want, TIGHT, previous=before)
    assert found.failure == "output 'y' is the previous call's result: it was remembered, not computed"


def test_empty_outputs_are_equal():
    nothing = torch.zeros(0, 8, dtype=torch.float64)
    assert compare("y", nothing.float(), nothing, TIGHT).failure is None


def test_twice_the_baseline_is_the_ceiling():
    want = expected(4, 6)
    base = compare("y", want + 1e-4, want, TIGHT).error
    good = compare("y", want + 1.9e-4, want, TIGHT).error
    bad = compare("y", want + 2.1e-4, want, TIGHT).error
    assert worse_than_baseline(good, base) is None
    assert "more than twice the baseline's 0.0001 on the same" in str(worse_than_baseline(bad, base))
    assert worse_than_baseline(bad, base, roundings=2e-5) is None
    assert "0.0001 and 5e-06 for rounding on" in str(worse_than_baseline(bad, base, roundings=5e-6))


def test_inputs_are_nudged_by_one_bit_of_float32_in_both_directions():
    values = {
        "x": torch.full((64,), 65.0),
        "half": torch.ones(4).half(),
        "index": torch.arange(3),
        "zero": torch.zeros(1),
    }
    moved = nudged(values, "seed")
    assert sorted(((moved["x"] - 65) * 2**17).unique().tolist()) == [-1.0, 1.0]
    assert all(torch.equal(moved[name], values[name]) for name in ("half", "index"))
    assert moved["zero"] != 0
    assert all(torch.equal(value, nudged(values, "seed")[name]) for name, value in moved.items())
    assert not torch.equal(moved["x"], nudged(values, "another")["x"])


def test_what_the_last_bits_of_the_inputs_do_to_each_output():
    class Reference:
        __file__ = "reference.py"

        @staticmethod
        def both(x, y):
            return 3 * x.double(), y.double()

    op = Op(inputs=("x", "y"), outputs=("three", "same"), like={"three": "x", "same": "y"})
    spec = {"x": TensorSpec(shape=(5,), dtype="float32"), "y": TensorSpec(shape=(5,), dtype="bfloat16")}
    values = {"x": torch.full((5,), 65.0), "y": torch.ones(5).bfloat16()}
    row = Workload(id="row", op="both", inputs=spec)
    expected = oracle.ask_oracle(Reference, op, row, values)
    assert oracle.last_bits(Reference, op, row, values, expected, "seed") == [3 * 2**-17, 0.0]


def test_the_worst_of_two_trials_is_taken_number_by_number():
    want = expected(4, 6)
    one = compare("y", want + 1e-4, want, TIGHT).error
    two = compare("y", want * (1 + 2e-3), want, TIGHT).error
    both = worse(one, two)
    assert both.max_abs == max(one.max_abs, two.max_abs)
    assert both.used == max(one.used, two.used)
    assert both.max_rel == max(one.max_rel, two.max_rel)
