"""`kda upstream check`: between the pinned wheels, and against releases made for the test."""

import zipfile
from pathlib import Path

import pytest

from core.judge.tests.records_factory import make_record
from core.tools.tests.conftest import Kda
from kda_judge.arms.upstream import cache_folder, obtain, read_lock
from kda_judge.contract.errors import ExitCode, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task, checkout_root, find_task
from kda_judge.evidence.run_record import Correctness, Interval
from kda_tools.port import upstream_check
from kda_tools.port.upstream_check import Checked, check, find_wheel, older_pin, table
from kda_tools.port.upstream_wins import ARM, Fate, fate, wins

pytest.importorskip("torch")
pytest.importorskip("triton")
PINS = ("sglang-0.5.12.post1", "sglang-0.5.23")


@pytest.fixture(scope="module")
def wheels() -> dict[str, Path]:
    """The pinned wheels, from the cache."""
    pins = find_task("rotary_embedding").config.upstream
    try:
        return {name: obtain(pins[name], cache_folder(checkout_root()), offline=True) for name in PINS}
    except MissingRequirement as absent:
        pytest.skip(str(absent))


def test_from_the_first_pinned_release_to_the_second(
    wheels: dict[str, Path], kda: Kda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del wheels
    out = tmp_path / "table.md"
    asked = ("--task", "qknorm_rope", "--task", "norm_tanh_mul_add")
    monkeypatch.setattr("kda_judge.evidence.gpu_state.has_gpu", lambda: False)
    code, told, steps = kda("upstream", "check", "0.5.23", "--out", str(out), *asked)
    assert code == ExitCode.UNFIT_ROWS, "k04's ops are gone"
    assert out.read_text() == told
    assert steps.splitlines()[0] == "the wheel of 0.5.23 ..."
    assert [line for line in steps.splitlines() if line.startswith("2 of 2: norm_tanh_mul_add")]
    rows = {tuple(line.split(" | ")[:2]): line for line in told.splitlines()}
    moved = rows["| qknorm_rope", "`fused_inplace_qknorm_rope`"]
    assert "sglang.kernels.ops.diffusion.rope.qknorm_rope_jit" in moved
    assert "new `round_norm_before_rope` (False), new `cache_has_full_width` (False)" in moved
    assert "**gone**" in rows["| norm_tanh_mul_add", "`fused_norm_tanh_mul_add`"]
    assert rows["| qknorm_rope", "14 of 0.5.12.post1"].endswith("| 0 | 1 | 1 | 12 | yes |")
    assert rows["| norm_tanh_mul_add", "4 of 0.5.12.post1"].endswith("| 0 | 0 | 0 | 4 | no op left |")
    assert "nothing was measured" in told


def release(wheels: dict[str, Path], folder: Path, edits: dict[str, tuple[str, str]]) -> Path:
    """A wheel with the files of k02's second pin, some of which are edited (or renamed, where the edit is a path)."""
    task = find_task("rotary_embedding")
    wheel = folder / "sglang-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheels[PINS[1]]) as old, zipfile.ZipFile(wheel, "w") as new:
        for name in read_lock(task.path / task.config.upstream[PINS[1]].files):
            text = old.read(name).decode()
            before, after = edits.get(name.rpartition("/")[2], ("", ""))
            assert before in text or before == name
            new.writestr(after if before == name else name, text if before == name else text.replace(before, after))
    return wheel


ROTARY = "sglang/kernels/ops/diffusion/rope/rotary_triton.py"


@pytest.mark.parametrize(
    ("edits", "function", "files", "fits"),
    [
        ({}, "same module | same", "5 | 0 | 0 | 0 | yes", True),
        ({"rotary_triton.py": ("interleaved: bool = False", "interleaved: bool = True")},
         "same module | `interleaved`: False -> True", "4 | 0 | 1 | 0 | yes", True),
        ({"rotary_triton.py": ("cos: torch.Tensor, sin: torch.Tensor", "sin: torch.Tensor, cos: torch.Tensor")},
         "same module | another order", "4 | 0 | 1 | 0 | yes", True),
        ({"rotary_triton.py": ("def apply_rotary_embedding(", "def another(")},
         "**gone** | -", "4 | 0 | 1 | 0 | no op left", False),
        ({"rotary_triton.py": (ROTARY, "sglang/kernels/moved.py")},
         "sglang.kernels.moved | same", "4 | 1 | 0 | 0 | yes", True),
        ({"rotary_triton.py": ("import torch\n", "import torch\nimport sglang.new_thing\n")},
         "same module | same", "4 | 0 | 1 | 0 | ModuleNotFoundError: sglang.new_thing", False),
    ],
    ids=["same", "default", "order", "gone", "moved", "imports"],
)  # fmt: skip
def test_what_a_release_changed(
    wheels: dict[str, Path], tmp_path: Path, edits: dict[str, tuple[str, str]], function: str, files: str, fits: bool
) -> None:
    task = find_task("rotary_embedding")
    found = check([task], "9.9", release(wheels, tmp_path, edits), cache_folder(checkout_root()))
    told = table(found, "9.9")
    total = len(read_lock(task.path / task.config.upstream[PINS[1]].files))
    assert total == 5
    assert f"`apply_rotary_embedding` | 0.5.23 `{ROTARY[:-3].replace('/', '.')}` | {function} |" in told, told
    assert f"| rotary_embedding | {total} of 0.5.23 | {files}" in told, told
    assert [one.fits for one in found] == [fits]


def test_which_pin_is_compared() -> None:
    """The one before the release; without one before it, the last."""
    task = find_task("rotary_embedding")
    pins = [older_pin(task, version) for version in ("0.5.12.post1", "0.5.23", "0.6.0")]
    assert [pin and pin.version for pin in pins] == ["0.5.23", "0.5.12.post1", "0.5.23"]


def test_a_release_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's last words are shown; a kept wheel needs no pip."""
    monkeypatch.setattr(upstream_check.sys, "executable", "/bin/false")
    task = find_task("rotary_embedding")
    with pytest.raises(MissingRequirement, match=r"expected pip to download sglang==9\.8 .* got 0 wheels"):
        find_wheel("9.8", [task], tmp_path)
    kept = tmp_path / "wheels" / "sglang-9.8-py3-none-any.whl"
    kept.touch()
    assert find_wheel("9.8", [task], tmp_path) == ("9.8", kept)
    for wrong in ("*", "", "../9.8", "9.8-*"):
        with pytest.raises(UsageError, match=r"VERSION: expected a release such as 0\.5\.23, or latest, got"):
            find_wheel(wrong, [task], tmp_path)
    with pytest.raises(UsageError, match="expected tasks that pin sglang"):
        find_wheel("9.8", [], tmp_path)


def test_the_table_says_whether_the_release_still_computes_the_same(task: Task, tmp_path: Path) -> None:
    record = make_record(task)
    (first, *rest) = record.rows
    other = first.arms["baseline"]
    wrong = other.model_copy(update={"correctness": Correctness(passed=False, checks=1, failure="output 'y' | off")})
    rows = [first.model_copy(update={"arms": {**first.arms, ARM: other}})]
    rows += [row.model_copy(update={"arms": {**row.arms, ARM: wrong}}) for row in rest[:1]] + rest[1:2]
    pin = next(iter(task.config.upstream.values()))
    told = wins(Checked(task, pin, []), record.model_copy(update={"rows": tuple(rows)})).splitlines()[2:]
    assert told[0].endswith("| yes |")
    assert told[1].endswith("| **no**: output 'y' / off |")
    assert len(told) == 2 or "| not run: " in told[2]


def test_the_fate_of_a_win() -> None:
    def times(low: float, high: float) -> Interval:
        return Interval(estimate=(low + high) / 2, low=low, high=high)

    assert fate(times(1.4, 1.5), times(1.45, 1.5)) is Fate.HOLDS
    assert fate(times(1.4, 1.5), times(1.3, 1.45)) is Fate.HOLDS, "the intervals meet"
    assert fate(times(1.4, 1.5), times(1.2, 1.3)) is Fate.SHRANK
    assert fate(times(1.4, 1.5), times(0.99, 1.3)) is Fate.DIED
    assert fate(times(0.9, 1.1), times(0.8, 0.9)) is Fate.UNKNOWN, "it was none"
    assert fate(None, times(1.2, 1.3)) is Fate.UNKNOWN
