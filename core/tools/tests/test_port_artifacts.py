"""What a pull request needs, and the page of measured ports: from records made for the test."""

from pathlib import Path

import pytest

from core.judge.tests.records_factory import make_checkout, make_record
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import Task, find_task
from kda_judge.evidence import record_log
from kda_judge.evidence.run_record import RunRecord
from kda_tools.lab.profile.profile_record import ProfileRecord
from kda_tools.lab.profile.profile_record import log as profile_log
from kda_tools.port import ports_page
from kda_tools.port.artifacts import Given, causes, collect, write
from kda_tools.port.port_record import PortRecord, log, measure, records
from kda_tools.port.upstream_tests import UpstreamTest


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
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    return make_checkout(tmp_path)


def test_the_page_says_which_of_upstreams_tests_ran(task: Task) -> None:
    assert ports_page.publish([task], check=True) == [], "no port, no page"
    record_log.append(log(task), ported(task, layout="0.5.12.post1"))
    never = UpstreamTest(file="test_y.py", outcome="not run: its 3 tests need a GPU", ran=False)
    record_log.append(log(task), ported(task, upstream_tests=(never,), strangers=("sglang/a.py",)))
    assert [one.layout for one in records(task)] == ["0.5.12.post1", "0.5.23"]
    assert len(ports_page.publish([task], check=True)) == 1
    assert not (task.path / "docs" / "ports.md").exists()
    ports_page.publish([task], check=False)
    page = (task.path / "docs" / "ports.md").read_text()
    assert "## 0.5.12.post1\n" in page
    assert "- SGLang's `test_x.py`: 12 passed." in page
    assert "- SGLang's `test_y.py`: not run: its 3 tests need a GPU." in page
    assert "- Not the release's file: `sglang/a.py`." in page
    assert "- Grid on NVIDIA H200: of 9 rows 7 right, 0 wrong, 2 not checked." in page
    assert ports_page.publish([task], check=True) == []


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tools.port.port_record.has_gpu", lambda: False)
    with pytest.raises(MissingRequirement, match="--record: needs a GPU"):
        measure(None, Path(), [], "kda port")  # type: ignore[arg-type]


def test_what_no_record_has_is_said_to_be_missing(task: Task, tmp_path: Path) -> None:
    made = collect(task, Given())
    for what in ("no port was measured", "no run of the solution is published", "no pair of profiles", "no whole"):
        assert any(one.startswith(what) for one in made.missing), what
        assert f"- {what}" in made.files["description.md"]
    assert made.files["microbench.md"] == "Not measured.\n"
    record_log.append(log(task), ported(task))
    made = collect(task, Given(overlapping=(31, 7)))
    assert not any("no port was measured" in one for one in made.missing)
    assert "- SGLang's `test_x.py`: 12 passed." in made.files["microbench.md"]
    assert "#31, #7, as far as the author knows" in made.files["description.md"]
    picture = tmp_path / "fox.png"
    with pytest.raises(UsageError, match="expected an image or a clip, got no file"):
        write(task, tmp_path / "out", Given(pictures=(picture,)))
    picture.write_bytes(b"a fox")
    write(task, tmp_path / "out", Given(pictures=(picture,)))
    assert (tmp_path / "out" / "fox.png").read_bytes() == b"a fox"
    assert "no generated image" not in (tmp_path / "out" / "description.md").read_text()
    with pytest.raises(UsageError, match="expected a new or an empty folder"):
        write(task, tmp_path / "out", Given())


def test_causes_are_those_of_the_profile() -> None:
    """Every number of the draft is one that Nsight Compute counted."""
    record = record_log.read(profile_log(find_task("rotary_embedding")), ProfileRecord)[0]
    (_, before), (_, after) = record.arms.items()
    told = causes(record)
    assert f"- Kernels of a call: {len(before)} before, {len(after)} after" in told
    registers = [max(kernel.registers or 0 for kernel in side) for side in (before, after)]
    assert f"{registers[0]} before, {registers[1]} after" in told
    less = before[0].model_copy(update={"registers": None})
    assert "Registers" not in causes(record.model_copy(update={"arms": {"baseline": (less,), "solution": after}}))
