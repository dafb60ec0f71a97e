"""What a pull request needs, and the page of measured ports: from records made for the test."""

import datetime as dt
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from core.judge.tests.records_factory import gpu_reading, make_checkout, make_record
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import Task, find_task
from kda_judge.contract.workloads import select
from kda_judge.evidence import ledger, provenance, record_log
from kda_judge.evidence.run_record import RunRecord
from kda_tools.cli.base import app
from kda_tools.knowledge import watchlist
from kda_tools.knowledge.watchlist import Pull
from kda_tools.lab.profile.profile_record import ProfileRecord
from kda_tools.lab.profile.profile_record import log as profile_log
from kda_tools.models import task_share
from kda_tools.models.apply_site import Replacement
from kda_tools.port import artifacts, ports_page
from kda_tools.port.artifacts import Given, causes, collect, write
from kda_tools.port.port_record import PortRecord, log, measure, records
from kda_tools.port.upstream_tests import UpstreamTest

REAL = Path(__file__).resolve().parents[3] / "diffusion" / "k02_rotary_embedding"


def ported(task: Task, **more: object) -> PortRecord:
    """A record of a port, whose run is one of the factory's."""
    run = make_record(task)
    arms = {"solution": "ported"}
    rows = tuple(
        row.model_copy(update={"arms": {arms.get(name, name): arm for name, arm in row.arms.items()}})
        for row in run.rows
    )
    settings = run.settings.model_copy(update={"subject": "ported"})
    run = RunRecord.model_validate(run.model_copy(update={"rows": rows, "settings": settings}).model_dump())
    checks: dict[str, object] = {
        "patch_sha256": "0" * 64,
        "gpu": "NVIDIA H200",
        "grid_asked": 9,
        "grid_right": 7,
        "grid_failed": (),
        "upstream_tests": (UpstreamTest(file="test_x.py", outcome="12 passed", ran=True),),
    }
    checks |= {name: more.pop(name) for name in list(more) if name in checks}
    return PortRecord.model_validate({"layout": "0.5.23", "strangers": (), "checks": checks, "run": run, **more})


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    return of_family("diffusion", tmp_path, monkeypatch)


def of_family(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The factory's task there, whose function the latest release has."""
    monkeypatch.setenv("KDA_ROOT", str(folder))
    path = make_checkout(folder).path
    path.parent.rename(folder / family)
    held = Replacement("fake", "0.5.23", "sglang.kernels.ops.fake", "fake", "0" * 64)
    monkeypatch.setattr(artifacts, "replacements", lambda _: [held])
    return Task(folder / family / path.name)


def test_the_page_says_which_of_upstreams_tests_ran(task: Task) -> None:
    assert ports_page.publish([task], check=True) == [], "no port, no page"
    record_log.append(log(task), ported(task, layout="0.5.12.post1"))
    never = UpstreamTest(file="test_y.py", outcome="not run: its 3 tests need a GPU", ran=False)
    record_log.append(log(task), ported(task, upstream_tests=(never,), strangers=("sglang/a.py",)))
    older = records(task)[-1]
    board = gpu_reading().model_copy(update={"name": "NVIDIA H100 80GB HBM3"})
    machine = older.run.machine.model_copy(update={"before": board})
    other = older.model_copy(update={"run": older.run.model_copy(update={"machine": machine, "run_id": "another"})})
    record_log.append(log(task), other)
    assert [one.layout for one in records(task)] == ["0.5.12.post1", "0.5.23", "0.5.23"]
    record_log.append(log(task), older.model_copy(update={"exact": True}))
    assert len(ports_page.publish([task], check=True)) == 1
    assert not (task.path / "docs" / "ports.md").exists()
    ports_page.publish([task], check=False)
    page = (task.path / "docs" / "ports.md").read_text()
    assert re.findall("^## .*", page, re.MULTILINE) == [
        *("## 0.5.12.post1, H200", "## 0.5.23, H100", "## 0.5.23, H200", "## 0.5.23, H200, exact")
    ]
    assert re.search(r"^- Elements with equal bits, in the worst row: baseline \S+%, ", page, re.MULTILINE)
    assert "- SGLang's `test_x.py`: 12 passed." in page
    assert "- SGLang's `test_y.py`: not run: its 3 tests need a GPU." in page
    assert "- Not the release's file: `sglang/a.py`." in page
    assert re.search(
        r"^- Wall time in eager code, where the host launches each call: baseline / ported \d\.", page, re.MULTILINE
    )
    assert "- Grid on NVIDIA H200: of 9 rows 7 right, 0 wrong, 2 not checked." in page
    assert ports_page.publish([task], check=True) == []
    assert ports_page.OUTDATED not in page
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x + 0\n")
    assert ports_page.page_md(task, records(task)).count(ports_page.OUTDATED) == 4


def test_only_rows_of_ported_ops_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of l04 to 0.5.23 has no function for the gated SiLU alone."""
    task = find_task("per_token_group_quant")
    port = SimpleNamespace(
        task=task, unported_ops=frozenset({"silu_and_mul_quant"}), modules={"per_token_group_quant": "m"}
    )
    timed: list[str] = []
    monkeypatch.setattr("kda_tools.port.port_record.demand_gpu", lambda: None)
    monkeypatch.setattr("kda_tools.port.port_record.open_session", lambda request: request)
    monkeypatch.setattr("kda_tools.port.port_record.frozen_rows", lambda request: select(task.workloads, request.rows))
    monkeypatch.setattr("kda_tools.port.port_record.run", lambda _, rows, **__: timed.extend(row.op for row in rows))
    measure(port, Path(), [], "kda port")  # type: ignore[arg-type]
    assert set(timed) == {"per_token_group_quant"}
    with pytest.raises(UsageError, match="--rows: expected rows of per_token_group_quant, which are ported, got none"):
        measure(port, Path(), ["*-silu-*"], "kda port")  # type: ignore[arg-type]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tools.port.port_record.has_gpu", lambda: False)
    with pytest.raises(MissingRequirement, match="--record: needs a GPU"):
        measure(None, Path(), [], "kda port")  # type: ignore[arg-type]


def test_what_no_record_has_is_said_to_be_missing(task: Task, tmp_path: Path) -> None:
    made = collect(task, Given())
    for what in ("no port was measured", "no run of the solution is published", "no pair of profiles"):
        assert any(one.startswith(what) for one in made.missing), what
        assert f"- {what}" in made.files["description.md"]
    assert made.files["microbench.md"] == "Not measured.\n"
    assert made.files["numerics.md"].endswith("\nNot measured.\n")
    record_log.append(log(task), ported(task))
    made = collect(task, Given(overlapping=(31, 7)))
    assert not any("no port was measured" in one for one in made.missing)
    assert "- SGLang's `test_x.py`: 12 passed." in made.files["microbench.md"]
    assert "| row | ported | baseline (sglang 1.0) |" in made.files["microbench.md"]
    assert "as far as the author knows: #31, #7.\n" in made.files["description.md"]
    picture = tmp_path / "fox.png"
    with pytest.raises(UsageError, match="expected an image or a clip, got no file"):
        write(task, tmp_path / "out", Given(pictures=(picture,)))
    picture.write_bytes(b"a fox")
    write(task, tmp_path / "out", Given(pictures=(picture,)))
    assert (tmp_path / "out" / "fox.png").read_bytes() == b"a fox"
    assert "no generated image" not in (tmp_path / "out" / "description.md").read_text()
    with pytest.raises(UsageError, match="expected a new or an empty folder"):
        write(task, tmp_path / "out", Given())


def pinned(task: Task) -> Task:
    """The task, whose latest arm stands on a release of its own."""
    config = task.path / "config.toml"
    text = config.read_text()
    first = text.index('[upstream."sglang-1.0"]')
    pin = text[first : text.index("[arms.baseline]")].replace("1.0", "0.5.23")
    text = text.replace('module = "baseline.latest"\n', 'module = "baseline.latest"\nupstream = "sglang-0.5.23"\n')
    config.write_text(text[:first] + pin + text[first:])
    lock = task.path / "baseline" / "sglang-0.5.23.sha256"
    lock.write_text((task.path / "baseline" / "sglang-1.0.sha256").read_text())
    return Task(task.path)


def test_ratios_of_medians_over_the_latest_release(task: Task) -> None:
    """Of a record that has wall intervals only: no speedup is left out while both times are there."""
    task = pinned(task)
    record = make_record(task, old=True)
    assert not any(basis.value == "device" for row in record.rows for basis in row.speedup)
    ledger.append(task.ledger, record)
    made = collect(task, Given())
    table = made.files["microbench.md"]
    assert "| row | upstream_latest (sglang 0.5.23) us | solution us | speedup |" in table
    rows = [line.split("|")[2:5] for line in table.splitlines() if line.startswith(("| small", "| large"))]
    assert len(rows) == 2
    for theirs, ours, speedup in rows:
        assert float(speedup) == pytest.approx(float(theirs) / float(ours), rel=0.01)
    text = made.files["description.md"]
    assert text.startswith("# Faster `fake`\n")
    assert "over sglang 0.5.23, GPU time on NVIDIA H200: 1." in text
    assert "ran interleaved in one session" in text
    assert "was not counted in run" in made.files["numerics.md"]
    assert "|---|" not in made.files["numerics.md"], "a table without rows"


def test_the_draft_is_of_a_port_into_the_newest_release(task: Task) -> None:
    """Whichever was measured last. The host's time is told too: without a CUDA graph it decides."""
    task = pinned(task)
    newest, older = ported(task), ported(task, layout="0.5.12.post1", exact=True)
    for one in (newest, older):
        record_log.append(log(task), one)
    made = collect(task, Given())
    text = made.files["description.md"]
    assert "- `sglang.kernels.ops.fake.fake`\n" in text
    assert "Declared: **lossless**" in text
    assert re.search(r"geometric mean \d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]\. By wall time, .*: \d\.\d{3} \[", text), text
    assert "No measured step of a model is recorded that has this task in it." in text


@pytest.mark.parametrize("of_port", [False, True])
def test_an_outdated_record_claims_nothing(task: Task, of_port: bool) -> None:
    if of_port:
        record_log.append(log(task), ported(task))
    else:
        ledger.append(task.ledger, make_record(task))
    assert "# Faster" in collect(task, Given()).files["description.md"]
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x + 0\n")
    made = collect(task, Given())
    text = made.files["description.md"]
    assert text.startswith("# KDA-Pilot's kernels in front of `fake`\n")
    assert "Not measured: the last times are outdated.\n" in text
    assert "interleaved" not in text
    assert "Speedups" not in text
    assert "Outdated: solution has changed" in made.files["microbench.md"]


def test_the_draft_has_the_headings_of_upstreams_template(task: Task) -> None:
    lines = collect(task, Given()).files["description.md"].splitlines()
    headings = ["Motivation", "Modifications", "Accuracy Tests", "Benchmarking and Profiling", "Checklist"]
    assert [line[3:] for line in lines if line.startswith("## ")][:5] == headings


@pytest.mark.parametrize(
    ("family", "numerics", "words"),
    [
        ("diffusion", "lossless", "Off by default: a request's quality level `lossless`"),
        ("diffusion", "exact", "On by default for each call whose first run gave the bits"),
        ("llm", "lossless", "On by default wherever the kernels can run. `SGLANG_DISABLE_KDA_KERNELS=1` in the env"),
    ],
)
def test_who_decides_is_said(
    family: str, numerics: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = of_family(family, tmp_path, monkeypatch)
    config = task.path / "config.toml"
    config.write_text(config.read_text().replace('op = "fake"\n', f'op = "fake"\nnumerics = "{numerics}"\n', 1))
    made = collect(Task(task.path), Given())
    assert words in made.files["description.md"]
    assert "- `sglang.kernels.ops.fake.fake`\n" in made.files["description.md"]
    asked = any("denoise" in one or "picture" in one for one in made.missing)
    assert asked == ("models.md" in made.files) == (family == "diffusion")
    assert ("of a language model is recorded" in made.files["description.md"]) == (family == "llm")
    if family == "llm":
        with pytest.raises(UsageError, match="expected with a task of diffusion, got k99_fake"):
            collect(task, Given(pictures=(tmp_path / "fox.png",)))


def test_steps_of_models_that_are_recorded_are_told_without_whole_requests() -> None:
    made = artifacts.Artifacts()
    told = artifacts._models(find_task("qknorm_rope"), Given(), made)
    assert "Whole requests were not measured.\n\nRows come from " in told
    assert "of the GPU's time of a step" in told
    runs = re.findall(r"^- (\S+) \((\S+), (\S+), run .* times as fast; measured .*: eager \d", told, re.MULTILINE)
    assert len(runs) == len(set(runs)) >= 2, "the newest run of each model, release and GPU, with the step's speedup"
    assert [one for one in made.missing if one.startswith("no whole requests")]


@pytest.mark.parametrize("old", [False, True])
def test_a_draft_has_steps_of_its_release_alone_and_none_that_is_stale(
    old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_share, "stale", lambda *_: ["solution"] * old)
    task = find_task("qknorm_rope")
    told, draft = (task_share.share_of_steps(task, release).splitlines()[1:] for release in (None, "0.5.23"))
    assert all((" (stale)): " in line) == old for line in told)
    of_release = [line for line in told if " (0.5.23, " in line]
    assert len(told) > len(of_release) > 1
    assert draft == (["No measured step of a model is recorded that has this task in it."] if old else of_release)


def test_causes_are_those_of_the_profile() -> None:
    """Every number of the draft is one that Nsight Compute counted."""
    record = record_log.read(profile_log(find_task("rotary_embedding")), ProfileRecord)[0]
    (_, before), (_, after) = record.arms.items()
    told = causes(record)
    assert len(before) == len(after)
    assert "Kernels of a call" not in told, "what does not differ is no cause"
    assert "baseline (sglang 0.5.12.post1) and solution" in told
    registers = [max(kernel.registers or 0 for kernel in side) for side in (before, after)]
    assert f"{registers[0]} before, {registers[1]} after" in told
    less = before[0].model_copy(update={"registers": None})
    assert "Registers" not in causes(record.model_copy(update={"arms": {"baseline": (less,), "solution": after}}))
    moved = sum((one.dram_read_bytes or 0) + (one.dram_written_bytes or 0) for one in after)
    for must, words in ((int(moved) + 1, "; the rest stayed in L2."), (int(moved), ".")):
        assert causes(record.model_copy(update={"bytes_moved": must})).endswith(f"{must:,} bytes{words}")


def test_numbers_of_an_outdated_profile_say_so(task: Task) -> None:
    record = record_log.read(profile_log(Task(REAL)), ProfileRecord)[0]
    record_log.append(profile_log(task), record)
    made = collect(task, Given())
    told = f"of {record.utc[:10]}"
    assert f"Outdated: {told}, and of another version of the solution" in made.files["profile.md"]
    assert "\nNot profiled.\n" in made.files["description.md"]
    assert f"- the profile {told} is of another version" in made.files["description.md"]
    now = provenance.hashes(task)
    current = record.provenance.model_copy(update={"hashes": now, "pins": {}})
    record_log.append(profile_log(task), record.model_copy(update={"provenance": current}))
    made = collect(task, Given())
    assert "Outdated" not in made.files["profile.md"]
    assert "Not profiled" not in made.files["description.md"]


def test_the_draft_names_what_the_watchlist_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, those of the command first; numbers of another repository would name something else."""
    asked = []
    day = dt.date(2026, 1, 1)
    pulls = [
        Pull(repository=place, number=number, title="t", entries=("rotary",), opened=day, seen=day)
        for place, number in (("sgl-project/sglang", 7), ("sgl-project/sglang", 8), ("a/b", 9))
    ]
    monkeypatch.setattr(watchlist, "pulls_of_task", lambda _, folder: pulls if folder == "k02_rotary_embedding" else ())
    monkeypatch.setattr(artifacts, "write", lambda *given: asked.append(given[2]) or artifacts.Artifacts())
    words = ["port", "artifacts", "rotary_embedding", "--out", str(tmp_path / "out"), "--overlaps", "7"]
    CliRunner().invoke(app, words, catch_exceptions=False)
    assert asked[0].overlapping == (7, 8)
