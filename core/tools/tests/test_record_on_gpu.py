"""`diffusion/scripts/record_on_gpu.sh`: what it begins, and when it stops."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "diffusion" / "scripts" / "record_on_gpu.sh"
FAKE = """#!/usr/bin/env bash
# kda bench OP --record --missing N: OP has as many parts as its file `left` says; each takes a second.
op=$4 folder=$(echo ./*/*_"$4")
left=$(cat "$folder/left")
[ "$left" -gt 0 ] || { echo "$op: every row has a result"; exit 0; }
sleep 1
echo '{}' >>"$folder/docs/ledger.jsonl"
echo $((left - 1)) >"$folder/left"
codes=($(cat "$folder/codes")) # of the parts in turn, the last one again and again
at=$(wc -l <"$folder/docs/ledger.jsonl")
exit "${codes[at - 1]:-${codes[-1]}}"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, left, codes in (("k01_one", 2, "0"), ("k02_two", 9, "1"), ("k03_three", 3, "1 0 1")):
        (tmp_path / "diffusion" / name / "docs").mkdir(parents=True)
        (tmp_path / "diffusion" / name / "left").write_text(f"{left}\n")
        (tmp_path / "diffusion" / name / "codes").write_text(f"{codes}\n")
    (tmp_path / "core" / "tools" / "src").mkdir(parents=True)
    (tmp_path / "llm" / "l01_four" / "docs").mkdir(parents=True)
    (tmp_path / "llm" / "l01_four" / "left").write_text("0\n")
    (tmp_path / "diffusion" / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "diffusion" / "scripts")
    (tmp_path / "fake").write_text(FAKE)
    (tmp_path / "fake").chmod(0o755)
    return tmp_path


def recorded(checkout: Path, *arguments: str, first: int = 3) -> "subprocess.CompletedProcess[str]":
    script, environment = checkout / "diffusion" / "scripts" / SCRIPT.name, {"PYTHON": str(checkout / "fake")}
    return subprocess.run(
        ["bash", script, *arguments],
        env={**os.environ, **environment, "FIRST_S": str(first)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_task_is_recorded_until_nothing_is_missing_or_rows_are_wrong_twice_in_a_row(checkout: Path) -> None:
    ran = recorded(checkout, str(checkout / "out"), "60")
    assert ran.returncode == 0, ran.stderr
    begun = [line.partition(":")[0] for line in ran.stdout.splitlines() if ": rows in " in line]
    assert begun == ["one"] * 2 + ["two"] * 2 + ["three"] * 3
    with tarfile.open(checkout / "out" / "ledgers.tar.gz") as archive:
        names = sorted(archive.getnames())
    assert names == [f"./diffusion/{name}/docs/ledger.jsonl" for name in ("k01_one", "k02_two", "k03_three")]


def test_nothing_is_begun_that_may_not_end_in_time(checkout: Path) -> None:
    ran = recorded(checkout, str(checkout / "out"), "60", "one", first=300)
    assert ran.returncode == 0, ran.stderr
    assert re.match(r"one: no rows begun: (60|59) s are left, they may take 300 s\nended", ran.stdout)
    assert not list(checkout.glob("*/*/docs/ledger.jsonl"))


def test_arguments_are_asked_for(checkout: Path) -> None:
    ran = recorded(checkout, str(checkout / "out"))
    assert ran.returncode != 0
    assert "usage: record_on_gpu.sh OUT SECONDS [TASK...]" in ran.stderr
