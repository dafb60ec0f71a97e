"""Rules for outputs beside the tolerance: what each lets pass, what it catches, and in which words."""

import math

import pytest
import torch

from kda_judge.contract.config import Op, Rule, Tolerance
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_judge.judge import oracle
from kda_judge.judge.open_row import footprint, judged_shape, traffic
from kda_judge.judge.output_rules import codes, judged

LOOSE = {"float32": Tolerance(atol=1e-2, rtol=0, reason="for tests")}


def by(rule, out, expected, within=0.0, keys=None, previous=None):
    """The comparison of an output, called `y`."""
    made = Rule(rule=rule, within=within, reason="for tests")
    return judged("y", made, LOOSE, out, torch.as_tensor(expected, dtype=torch.float64), 1.0, previous, keys)


# ---- units ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_neighbours_are_one_apart_from_end_to_end(dtype):
    width = torch.finfo(dtype).bits
    word = torch.int8 if width == 8 else torch.int16
    every = torch.arange(-(2 ** (width - 1)), 2 ** (width - 1)).to(word).view(dtype)
    finite = every[torch.isfinite(every.float())]
    order = finite.float().argsort(stable=True)
    places = codes(finite)[order]
    values = finite.float()[order]
    assert ((places[1:] - places[:-1]) == (values[1:] != values[:-1]).long()).all()
    assert codes(torch.tensor([0.0, -0.0], dtype=torch.float32).to(dtype)).tolist() == [0, 0]


def test_float64_has_too_many_numbers():
    with pytest.raises(UsageError, match="32 bits or less, got float64"):
        codes(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "want", "units"),
    [
        (torch.float8_e4m3fn, 416.0, 1),
        (torch.float8_e4m3fn, -0.001953125, 2),
        (torch.float32, 1e-3, 1),
        (torch.int8, -128.0, 1),
        (torch.uint8, 254.0, 1),
    ],
)
def test_units_are_those_of_the_output(dtype, want, units):
    expected = torch.tensor([[want, 1.0, 2.0]], dtype=torch.float64)
    out = expected.to(dtype)
    word = {1: torch.int8, 4: torch.int32}[out.element_size()]
    out.view(word)[0, 0] += units
    found = by("units", out, expected, within=units)
    assert found.failure is None
    assert (found.error.max_abs, found.error.used) == (units, 1.0)
    assert found.error.worst_index == (0, 0)
    failure = by("units", out, expected, within=units - 1).failure
    assert "1 of 3 elements outside tolerance; worst at [0, 0]: expected " in str(failure)
    assert str(failure).endswith(f"(counted in numbers of {str(dtype)[6:]})")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_nan_is_no_neighbour_of_the_largest_number(dtype):
    largest = torch.full((2,), torch.finfo(dtype).max).to(dtype)
    out = largest.clone()
    out.view({1: torch.uint8, 4: torch.int32}[out.element_size()])[1] += 1  # NaN in float8, infinity in float32
    assert "1 not finite" in str(by("units", out, largest.double(), within=1).failure)


def test_a_remembered_output_is_named():
    before = torch.arange(8, dtype=torch.float64)
    found = by("units", before.to(torch.int8), before.flip(0), within=1, previous=before)
    assert "is the previous call's result" in str(found.failure)


# ---- indices ----------------------------------------------------------------------------------

SCORES = torch.tensor([[3.0, 1.0, 3.0, 2.0], [0.0, 5.0, 4.0, 4.0]], dtype=torch.float64)


@pytest.mark.parametrize("ids", [[[0, 2], [1, 2]], [[2, 0], [1, 3]]])
def test_ties_come_in_any_order(ids):
    found = by("indices", torch.tensor(ids), [[0, 2], [1, 2]], keys=SCORES)
    assert (found.failure, found.error.used) == (None, 0.0)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[0, 3], [1, 2]], r"1 of 4 elements .* worst at [0, 1]: expected 3 +- 0, got 2 (of what stands"),
        ([[0, 0], [1, 2]], "index 0 comes too often in row [0]"),
        ([[0, 2], [1, 4]], "index 4 at [1, 1], expected 0 to 3"),
        ([[0, 2], [-1, 2]], "index -1 at [1, 0], expected 0 to 3"),
    ],
)
def test_indices_that_are_wrong(ids, words):
    found = by("indices", torch.tensor(ids, dtype=torch.int32), [[0, 2], [1, 2]], keys=SCORES)
    for part in words.split(".*"):
        assert part.strip() in str(found.failure)
    assert found.error.used is not None
    assert found.error.used > 1


def test_padding_may_repeat_as_often_as_the_oracle_has_it():
    group = torch.tensor([0.0, 0.0, 1.0, 9.0], dtype=torch.float64)  # 3 is what fills a group up
    assert by("indices", torch.tensor([1, 0, 2, 3, 3]), [0, 1, 2, 3, 3], keys=group).failure is None
    assert "comes too often" in str(by("indices", torch.tensor([1, 1, 2, 3, 3]), [0, 1, 2, 3, 3], keys=group).failure)


def test_nearly_equal_scores_may_be_allowed():
    scores = torch.tensor([[1.0, 1.0 + 1e-7]], dtype=torch.float64)
    assert by("indices", torch.tensor([[0]]), [[1]], keys=scores).failure is not None
    assert by("indices", torch.tensor([[0]]), [[1]], within=1e-6, keys=scores).failure is None


def test_without_keys_the_indices_count():
    assert by("indices", torch.tensor([4, 2]), [4, 2]).failure is None
    assert "expected 2 +- 0, got 3" in str(by("indices", torch.tensor([4, 3]), [4, 2]).failure)


class Reference:
    """Of an op whose output is indices."""

    __file__ = "reference.py"
    found: object = None

    @staticmethod
    def best(scores):
        return (scores.double().argmax(-1, keepdim=True).double(),)

    @classmethod
    def keys(cls, row, values):
        return cls.found


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (3, r"expected a dict for outputs of \['id'\], got int"),
        ({"other": SCORES}, r"expected a dict for outputs of \['id'\], got \['other'\]"),
        ({"id": SCORES.long()}, r"expected float64 or float32 \[2, 'n'\] or \['n'\], got int64 \[2, 4\]"),
        ({"id": SCORES[:1]}, r"got float64 \[1, 4\]"),
    ],
)
def test_keys_of_another_form_are_named(found, words):
    rule = Rule(rule="indices", within=0, reason="for tests")
    op = Op(inputs=("scores",), outputs=("id",), per_row=("id",), rules={"id": rule})
    spec = TensorSpec(shape=(2, 4), dtype="float32")
    made = TensorSpec(shape=(2, 1), dtype="int64", fill="arange")
    row = Workload(id="r", op="best", inputs={"scores": spec}, outputs={"id": made})
    Reference.found = found
    with pytest.raises(UsageError, match=words):
        oracle.ask_oracle(Reference, op, row, {"scores": SCORES.float()})


# ---- probabilities ----------------------------------------------------------------------------


def test_probabilities_sum_to_one_and_are_not_negative():
    want = torch.full((3, 100), 0.01, dtype=torch.float64)
    good = want.float()
    assert by("probabilities", good, want, within=1e-5).failure is None
    assert "row 1 sums to" in str(by("probabilities", good * torch.tensor([[1], [1.001], [1]]), want, 1e-5).failure)
    want[0, :2] = torch.tensor([0.02, 0.0])
    negative = want.float()
    negative[0, 1] = -1e-6
    assert "expected probabilities, got -1e-06" in str(by("probabilities", negative, want, within=1e-5).failure)
    negative[2, 3] = math.nan
    assert "not finite" in str(by("probabilities", negative, want, within=1e-5).failure)


# ---- pools ------------------------------------------------------------------------------------


def test_of_a_pool_the_named_rows_are_written_and_moved():
    op = Op(inputs=("pool", "slots", "x"), outputs=("pool",), returns="none", pools={"pool": "slots"})
    inputs = {
        "pool": TensorSpec(shape=(1000, 2, 8), dtype="float8_e4m3fn"),
        "slots": TensorSpec(shape=(3, 4), dtype="int64", fill="slots", high=1000),
        "x": TensorSpec(shape=(12, 2, 8), dtype="bfloat16"),
    }
    row = Workload(id="r", op="store", inplace=("pool",), inputs=inputs)
    assert judged_shape(op, row, "pool") == (12, 2, 8)
    moved = traffic(op, row, None)
    assert (moved.read, moved.written) == (12 * 8 + 12 * 16 * 2, 12 * 16)
    assert footprint(op, row) == moved.read + moved.written
