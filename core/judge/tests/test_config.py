"""A task's contract: what is refused, and that the refusal names the file and the key."""

import re
from pathlib import Path

import pytest

from kda_judge.contract.config import load_config
from kda_judge.contract.errors import ExitCode, UsageError
from kda_judge.contract.tasks import Task, find_task, find_tasks

GOOD = """\
[task]
op = "double"
title = "Twice x"

[ops.double]
inputs = ["x"]
outputs = ["y"]
like = { y = "x" }

[upstream."pkg-1.0"]
package = "pkg"
version = "1.0"
wheel_sha256 = "DIGEST"
python = "312"
platform = "any"
licence = "MIT"
files = "baseline/pkg.sha256"

[arms.baseline]
module = "baseline"
upstream = "pkg-1.0"

[arms.solution]
module = "solution"
devices = ["cuda", "cpu"]

[tolerance.float32]
atol = 1e-5
rtol = 0
reason = "one rounding"

[targets.h200]
capability = "sm_90a"
attained = 0.8

[bench]
samples = 5
seeds = [1, 2, 3]
""".replace("DIGEST", "0" * 64)
ROWS = """\
[[workload]]
id = "a"
op = "double"
inputs.x = { shape = [4, 8], dtype = "float32" }
"""


def config_error(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_tolerance_is_needed_where_no_rule_stands_alone(tmp_path: Path) -> None:
    without = re.sub(r"\[tolerance.float32\].*?\n\n", "", GOOD, flags=re.DOTALL)
    assert "missing key 'tolerance': an output has no rule that stands alone" in config_error(tmp_path, without)
    path = tmp_path / "config.toml"
    for rule, alone in (("units", True), ("probabilities", False)):
        made = f'like = {{ y = "x" }}\nrules.y = {{ rule = "{rule}", within = 0, reason = "r" }}'
        path.write_text(without.replace('like = { y = "x" }', made))
        if alone:
            assert not load_config(path).ops["double"].tolerated("y")
        else:
            assert "missing key 'tolerance'" in config_error(tmp_path, path.read_text())


def test_a_check_of_the_whole_file_does_not_show_all_of_it(tmp_path: Path) -> None:
    said = config_error(tmp_path, GOOD.replace('upstream = "pkg-1.0"', 'upstream = "pgk-1.0"'))
    assert said.endswith("[arms.baseline] upstream = 'pgk-1.0': no such [upstream] table, got ['pkg-1.0']")


def make_task(root: Path, config: str = GOOD, rows: str = ROWS, folder: str = "k01_double") -> Task:
    path = root / "family" / folder
    (path / "bench").mkdir(parents=True)
    (path / "config.toml").write_text(config)
    (path / "bench" / "workloads.toml").write_text(rows)
    return Task(path)


def rows_error(tmp_path: Path, rows: str) -> str:
    task = make_task(tmp_path, rows=rows)
    with pytest.raises(UsageError) as caught:
        _ = task.workloads
    assert str(task.path / "bench" / "workloads.toml") in str(caught.value)
    return str(caught.value)


def test_good_config_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(GOOD)
    config = load_config(path)
    assert config.ops["double"].like == {"y": "x"}
    assert config.arms["baseline"].devices == ("cuda",)
    assert (config.bench.samples, config.bench.generations, config.bench.seeds) == (5, 3, (1, 2, 3))
    assert config.targets["h200"].within_us is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("samples = 5", "sampels = 5", "unknown key 'bench.sampels'; did you mean samples"),
        ("[targets.h200]", "[target.h200]", "unknown key 'target'; did you mean targets"),
        (
            "[targets.h200]",
            "[targets.h200]\nops_within_us = { tripel = 1.0 }",
            r"\[targets.h200\] ops_within_us: expected ops of \['double'\], got \['tripel'\]",
        ),
        ("samples = 5", 'samples = "5"', "key 'bench.samples': .*integer.*, got '5'"),
        ("samples = 5", "samples = 0", "key 'bench.samples': .*greater than 0, got 0"),
        ("atol = 1e-5", "atol = -1.0", "key 'tolerance.float32.atol': .*greater than or equal to 0, got -1.0"),
        ('title = "Twice x"\n', "", "missing key 'task.title'"),
        ('reason = "one rounding"\n', "", "missing key 'tolerance.float32.reason'"),
        (
            'devices = ["cuda", "cpu"]',
            'devices = ["tpu"]',
            "'arms.solution.devices.0': .*'cuda' or 'cpu', got 'tpu'",
        ),
        ('op = "double"', 'op = "Double"', "key 'task.op': .*pattern.*, got 'Double'"),
        ("0" * 64, "0" * 63, "key 'upstream.pkg-1.0.wheel_sha256': .*pattern"),
        ('upstream = "pkg-1.0"', 'upstream = "pkg-2.0"', r"\[arms.baseline\] upstream = 'pkg-2.0': no such"),
        ("[arms.solution]", "[arms.solutoin]", r"\[arms.solution\] is required, got arms \['baseline', 'solutoin'\]"),
        (
            'module = "solution"',
            'module = "solution"\nops = ["double"]',
            r"\[arms.solution\] ops: expected none, since this arm has every op, got \['double'\]",
        ),
        (
            "[arms.solution]",
            '[arms.other]\nmodule = "other"\nops = ["double", "tripel"]\n\n[arms.solution]',
            r"\[arms.other\] ops: expected ops of \['double'\], got \['tripel'\]",
        ),
        (
            'like = { y = "x" }',
            'like = { y = "x" }\ngpus = 8',
            "'ops.double': .*gpus = 8: expected 1; .* group of GPUs",
        ),
        (
            'like = { y = "x" }',
            'like = { y = "x" }\nrules.z = { rule = "units", within = 1, reason = "r" }',
            r"rules names 'z': expected one of the outputs, \['y'\]",
        ),
        (
            'like = { y = "x" }',
            'like = { y = "x" }\nrules.y = { rule = "tokens", within = 1, reason = "r" }',
            "'ops.double.rules.y.rule': .*'units', 'indices' or 'probabilities', got 'tokens'",
        ),
        (
            'like = { y = "x" }',
            'like = { y = "x" }\npools = { y = "x" }',
            "expected an output that is written in place",
        ),
        ('like = { y = "x" }', "like = {}", "output 'y' is no input, `like` names no input for it, and it is not"),
        (
            'like = { y = "x" }',
            'like = { y = "z" }',
            "output 'y' is no input, `like` names no input for it, and it is not",
        ),
        ('like = { y = "x" }', 'like = { y = "x", z = "x" }', r"like names 'z': expected .* outputs, \['y'\]"),
        ('like = { y = "x" }', 'per_row = ["z"]', "output 'y' is no input"),
        ('like = { y = "x" }', 'per_row = ["y", "z"]', r"per_row names 'z': expected .* outputs, \['y'\]"),
        ('like = { y = "x" }', 'per_row = ["y"]\nlike = { y = "x" }', "like names 'y': .* each in `like` or in"),
    ],
)
def test_bad_config_is_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert GOOD.count(old) >= 1
    message = config_error(tmp_path, GOOD.replace(old, new, 1))
    assert re.search(expected, message), message


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    message = config_error(tmp_path, GOOD.replace("samples = 5", "sampels = 5").replace("rtol = 0", "rtol = true"))
    assert "bench.sampels" in message
    assert "tolerance.float32.rtol" in message


def test_malformed_and_missing_files(tmp_path: Path) -> None:
    assert "not valid TOML" in config_error(tmp_path, "[task\n")
    missing = tmp_path / "nowhere" / "config.toml"
    with pytest.raises(UsageError, match=re.escape(f"{missing}: file not found")):
        load_config(missing)


def test_op_must_match_the_folder(tmp_path: Path) -> None:
    task = make_task(tmp_path, folder="k01_triple")
    with pytest.raises(UsageError, match=r"config.toml: key 'task.op': expected 'triple'.*'double'"):
        _ = task.config


def test_missing_workloads(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (task.path / "bench" / "workloads.toml").unlink()
    with pytest.raises(UsageError, match=r"bench/workloads.toml: file not found"):
        _ = task.workloads


def test_duplicate_row_id(tmp_path: Path) -> None:
    assert "duplicate workload id 'a'" in rows_error(tmp_path, ROWS + ROWS)


def test_row_of_an_unknown_op(tmp_path: Path) -> None:
    message = rows_error(tmp_path, ROWS.replace('op = "double"', 'op = "dubble"'))
    assert "row 'a': key 'op': no [ops.dubble]" in message
    assert "nearest: double" in message


def test_row_with_an_unknown_input(tmp_path: Path) -> None:
    message = rows_error(tmp_path, ROWS.replace("inputs.x", "inputs.z"))
    assert "row 'a': inputs ['z'] are not inputs of double: ['x']" in message


def test_row_that_contradicts_in_place(tmp_path: Path) -> None:
    message = rows_error(tmp_path, ROWS + 'inplace = ["x"]\n')
    assert "row 'a': key 'inplace': double writes [] in place, got ['x']" in message


def test_tasks_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(tmp_path)
    make_task(tmp_path, folder="k02_treble")
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    assert [task.op for task in find_tasks()] == ["double", "treble"]
    monkeypatch.chdir(tmp_path / "family" / "k02_treble")
    for name in (
        "double",
        "k01",
        "k01_double",
        "family/k01_double",
        "family/k01_double/",
        "../k01_double",
        "../k01_double/",
    ):
        assert find_task(name).folder == "k01_double"
    with pytest.raises(UsageError, match="unknown task 'duoble'; nearest: double"):
        find_task("duoble")
    with pytest.raises(UsageError, match=r"unknown task 'k03'; nearest: k0[12], k0[12]$"):
        find_task("k03")
    make_task(tmp_path, folder="k01_other")
    with pytest.raises(
        UsageError, match="'k01': expected the beginning of one folder, got that of family/k01_double, "
    ):
        find_task("k01")


def test_two_tasks_of_one_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(tmp_path)
    make_task(tmp_path, folder="k02_double")
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    with pytest.raises(UsageError, match=r"k02_double: op 'double' is taken by .*k01_double"):
        find_tasks()


def test_no_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    with pytest.raises(UsageError, match="no tasks found"):
        find_task("double")
    monkeypatch.setenv("KDA_ROOT", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="KDA_ROOT: expected a folder"):
        find_task("double")
