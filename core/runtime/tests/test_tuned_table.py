"""The tuning table as a solution reads it: which line is taken, what is refused, and what forcing a choice does."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kda_runtime.tuned_table import Table, TableError


@dataclass(frozen=True)
class Config:
    warps: int
    early: bool = True
    store: str = ""


def line(config: str = "{warps = 4}", at_most: str = "", capability: int = 9, table: str = "norm") -> str:
    bounds = f"at_most = {at_most}\n" if at_most else ""
    return (
        f"[[{table}]]\ncapability = {capability}\n{bounds}config = {config}\n"
        'device = "NVIDIA H200"\ndate = "2026-11-20"\nreason = "a test"\n'
    )


def table(folder: Path, *lines: str) -> Table[Config]:
    if lines:
        (folder / "tuned.toml").write_text("\n".join(lines))
    return Table(str(folder / "norm.py"), "norm", Config)


def test_the_first_line_whose_every_bound_holds(tmp_path: Path) -> None:
    tuned = table(
        tmp_path,
        line("{warps = 1}", "{width = 512}"),
        line("{warps = 2}", "{width = 8192, bytes = 1000}"),
        line('{warps = 8, early = false, store = ".cs"}'),
    )
    assert tuned.select(9, width=512, bytes=10**9) == Config(1)
    assert tuned.select(9, width=513, bytes=1000) == Config(2)
    assert tuned.select(9, width=513, bytes=1001) == Config(8, early=False, store=".cs")
    assert tuned.select(9, width=8193, bytes=1) == Config(8, early=False, store=".cs")
    assert tuned.configs == (Config(1), Config(2), Config(8, early=False, store=".cs"))


def test_a_capability_takes_its_own_lines_alone_or_the_default_ones(tmp_path: Path) -> None:
    lines = line("{warps = 1}", "{width = 512}"), line("{warps = 4}"), line("{warps = 16}", capability=10)
    tuned = table(tmp_path, *lines)
    assert tuned.select(10, width=1) == Config(16)
    assert tuned.select(12, width=1) == Config(1)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), "tuned.toml: file not found"),
        ((line(table="other"),), "tuned.toml: missing table [[norm]]"),
        ((line("{wraps = 4}"),), "[[norm]], at_most {}, key 'config': unknown key 'wraps'; did you mean warps?"),
        ((line("{early = true}"),), "key 'config': missing key 'warps'"),
        ((line("{warps = true}"),), "key 'config': key 'warps': expected int, got True"),
        ((line(at_most="{width = 1}"),), "no line of capability 9 fits {'width': 2}"),
        ((line(at_most="{rows = 1}"),), "key 'at_most': expected one of ['width'], got 'rows'"),
        ((line() + "notes = 1\n",), "tuned.toml: [[norm]], line 1: unknown key 'notes'"),
        ((line(at_most='{width = "wide"}'),), "line 1: key 'at_most.width': expected a number, got 'wide'"),
        ((line("{warps = [4]}"),), "line 1: key 'config.warps': expected a plain value, got [4]"),
        ((line().replace('device = "NVIDIA H200"\n', ""),), "[[norm]], line 1: missing key 'device'"),
        (("norm = 3\n",), "tuned.toml: key 'norm': expected tables [[norm]], got 3"),
        (("[[norm]\n",), "tuned.toml: not valid TOML"),
        ((line(capability=0),), "[[norm]], line 1: key 'capability': expected a positive number, got 0"),
    ],
)
def test_what_is_refused(tmp_path: Path, lines: tuple[str, ...], expected: str) -> None:
    with pytest.raises(TableError, match=re.escape(expected)):
        table(tmp_path, *lines).select(9, width=2)


def test_forced_answers_everything_and_ends(tmp_path: Path) -> None:
    tuned = table(tmp_path, line())
    with tuned.forced(Config(1)) as asked:
        assert tuned.select(9, width=3) == Config(1)
        with tuned.forced(Config(2)) as inner:
            assert tuned.select(8, width=4, bytes=5) == Config(2)
        assert tuned.select(9) == Config(1)
    assert tuned.select(9, width=6) == Config(4)
    assert (asked, inner) == ([{"width": 3}, {}], [{"width": 4, "bytes": 5}])


def test_forced_ends_when_the_call_fails(tmp_path: Path) -> None:
    tuned = table(tmp_path, line())
    with pytest.raises(ValueError, match="boom"), tuned.forced(Config(1)):
        raise ValueError("boom")
    assert tuned.select(9) == Config(4)


def test_importing_and_selecting_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "tuned.toml").write_text(line())
    code = (
        "import dataclasses, sys; from kda_runtime.tuned_table import Table\n"
        "Config = dataclasses.make_dataclass('Config', [('warps', int)])\n"
        f"table = Table({str(tmp_path / 'norm.py')!r}, 'norm', Config)\n"
        "with table.forced(Config(1)): pass\n"
        "print(table.select(9).warps, sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "4 []\n", done.stderr
