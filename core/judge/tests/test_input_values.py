"""Values that the judge draws or reads: ranges, structure, skew, and what captured files must be."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from kda_judge.arms.arena import Arena, Plan, as_bits
from kda_judge.arms.input_values import Family, make
from kda_judge.contract import captured
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tensor_spec import ITEM_SIZE, TensorSpec
from kda_judge.contract.workloads import Workload, load_workloads, shrink


def drawn(seed: int = 1, family: Family = Family.NORMAL, **inputs: TensorSpec) -> dict[str, torch.Tensor]:
    return make(Workload(id="row", op="op", inputs=inputs), family, seed, "cpu")


def spec(*shape: int, dtype: str, **more: object) -> TensorSpec:
    return TensorSpec.model_validate({"shape": shape, "dtype": dtype, **more})


@pytest.mark.parametrize("dtype", ITEM_SIZE)
def test_every_dtype_lies_in_an_arena_bit_by_bit(dtype: str) -> None:
    fill = {} if getattr(torch, dtype).is_floating_point else {"fill": "randint", "high": 2}
    x = spec(5, 6, dtype=dtype, stride=(8, 1), **fill)
    values = drawn(x=x)["x"]
    plan = Plan()
    place = plan.add(x)
    arena = Arena(plan, "cpu")
    try:
        view = arena.view(place)
        view.copy_(values)
        assert (view.dtype, view.stride(), view.element_size()) == (values.dtype, (8, 1), ITEM_SIZE[dtype])
        assert torch.equal(as_bits(view), as_bits(values))
        assert not arena.gap_changed(place)
        arena.bytes[place.offset + 6 * ITEM_SIZE[dtype]] += 1
        assert arena.gap_changed(place)
        meta = torch.empty_strided(x.shape, x.strides, dtype=getattr(torch, dtype), device="meta")
        assert (meta.dtype, meta.stride()) == (view.dtype, view.stride())
    finally:
        arena.close()


@pytest.mark.parametrize("family", Family)
def test_float8_stays_finite_and_keeps_many_values(family: Family) -> None:
    x = drawn(family=family, x=spec(512, 512, dtype="float8_e4m3fn"))["x"].float()
    assert bool(torch.isfinite(x).all())
    assert len(x.unique()) > 8


def test_a_lower_bound_leaves_earlier_draws_as_they_were() -> None:
    before = torch.randint(1000, (64,), generator=torch.Generator().manual_seed(5))
    assert torch.equal(before, torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(5)))
    low = drawn(x=spec(4096, dtype="int8", fill="randint", low=-127, high=128))["x"]
    assert (int(low.min()), int(low.max())) == (-127, 127)


def test_slots_are_not_repeated_and_differ_by_seed() -> None:
    slots = spec(64, 2, dtype="int32", fill="slots", high=130)
    one, two = (drawn(seed, x=slots)["x"] for seed in (1, 2))
    assert len(one.unique()) == 128
    assert int(one.max()) < 130
    assert not torch.equal(one, two)


def test_block_tables_follow_lengths_wherever_these_stand() -> None:
    table = spec(16, 8, dtype="int32", fill="block_table", high=200, lengths="n", block=16)
    lengths = spec(16, dtype="int64", fill="randint", low=1, high=129)
    values = drawn(table=table, n=lengths)
    assert list(values) == ["table", "n"]
    used = [-(-int(length) // 16) for length in values["n"]]
    taken = [slot for row, count in zip(values["table"].tolist(), used, strict=True) for slot in row[:count]]
    assert len(set(taken)) == sum(used)
    assert all(not any(row[count:]) for row, count in zip(values["table"].tolist(), used, strict=True))


def test_popular_experts_follow_zipf_or_the_counts() -> None:
    zipf = drawn(x=spec(20_000, 1, dtype="int32", fill="expert_ids", high=4, skew=1.0))["x"]
    shares = zipf.flatten().bincount(minlength=4).sort(descending=True).values / 20_000
    assert shares.tolist() == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.02)
    ids = drawn(x=spec(20_000, 2, dtype="int64", fill="expert_ids", high=4, counts=(0, 1, 1, 8)))["x"]
    assert bool((ids[:, 0] != ids[:, 1]).all())
    assert not bool((ids == 0).any())
    assert float((ids[:, 0] == 3).float().mean()) == pytest.approx(0.8, abs=0.02)


def test_scales_are_positive() -> None:
    scales = drawn(x=spec(4096, dtype="float32", fill="scale"))["x"]
    assert 2**-6 <= float(scales.min()) < 0.03
    assert 32 < float(scales.max()) <= 2**6


# ---- captured ---------------------------------------------------------------------------------


def rows_with(folder: Path, array: object, more: str = "", dtype: str = "int32", name: str = "ids.npy") -> Path:
    """A file of rows whose only input is captured, beside the file itself."""
    path = folder / "values" / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, np.asarray(array), allow_pickle=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rows = folder / "workloads.toml"
    rows.write_text(
        f'[[workload]]\nid = "a"\nop = "f"\ninputs.ids = {{ shape = [3, 2], dtype = "{dtype}", fill = "captured", '
        f'file = "values/{name}", sha256 = "{digest}", shuffle = true{more} }}\n'
    )
    return rows


IDS = np.array([[0, 1], [2, 3], [4, 5]], dtype=np.int32)


def test_captured_rows_come_in_an_order_of_the_seed(tmp_path: Path) -> None:
    (row,) = load_workloads(rows_with(tmp_path, IDS, ", high = 6"))
    orders = {tuple(make(row, Family.NORMAL, seed, "cpu")["ids"][:, 0].tolist()) for seed in range(40)}
    assert len(orders) == 6
    small = shrink(row, {}).inputs["ids"]
    assert (small.shape, small.high) == ((3, 2), 6)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)])
def test_what_numpy_lacks_is_captured_as_bits(tmp_path: Path, dtype: str, bits: type) -> None:
    values = torch.arange(6.0).reshape(3, 2).to(getattr(torch, dtype))
    array = as_bits(values).numpy().view(bits)
    (row,) = load_workloads(rows_with(tmp_path, array, dtype=dtype))
    assert sorted(make(row, Family.NORMAL, 1, "cpu")["ids"].float().flatten().tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("array", "more", "words"),
    [
        (IDS.astype(np.int64), ", high = 6", r"expected int32 \[3, 2\], which the row has as int32, got <i8 \[3, 2\]"),
        (IDS.astype(">i4"), ", high = 6", r"got >i4 \[3, 2\]"),
        (IDS.T, ", high = 6", r"got <i4 \[2, 3\]"),
        (IDS, ", high = 5", "expected values from 0 to below 5, got 0 to 5"),
        (IDS, "", "captured integers need `high`"),
        (np.array([[{}]]), ", high = 6", r"expected an \.npy file without pickles: .*allow_pickle"),
        (b"PK\3\4 no array", ", high = 6", r"expected an \.npy file without pickles"),
        (b"", ", high = 6", r"expected an \.npy file without pickles"),
    ],
)
def test_a_captured_file_that_is_not_what_the_row_says(tmp_path: Path, array: object, more: str, words: str) -> None:
    rows = rows_with(tmp_path, array, more)
    with pytest.raises(UsageError, match=words) as caught:
        load_workloads(rows)
    assert str(rows) in str(caught.value)


def test_a_captured_file_that_changed_is_missing_or_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_with(tmp_path, IDS, ", high = 6")
    path = tmp_path / "values" / "ids.npy"
    np.save(path, IDS + 1)
    with pytest.raises(UsageError, match=r"row 'a': key 'inputs.ids.file': .*expected sha256 \w{64}, as the row says"):
        load_workloads(rows)
    monkeypatch.setattr(captured, "MOST_BYTES", 100)
    with pytest.raises(UsageError, match="expected 100 bytes of captured values or less, got 152"):
        load_workloads(rows)
    path.unlink()
    with pytest.raises(UsageError, match=r"ids.npy: captured values: No such file"):
        load_workloads(rows)


def test_an_op_may_not_see_the_same_values_in_every_draw(tmp_path: Path) -> None:
    rows = rows_with(tmp_path, IDS, ", high = 6")
    rows.write_text(rows.read_text().replace(", shuffle = true", ""))
    with pytest.raises(UsageError, match="every input is captured: an op could remember its result"):
        load_workloads(rows)
