"""`kda profile` with a fake ncu, from the command to the page; and what is read out of ncu's raw CSV page."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.judge.tests.records_factory import gpu_reading
from core.tools.tests.fake_tools import COUNTERS, put_ncu, raw_csv
from kda_judge.contract.errors import ArmFailed, ExitCode, LedgerError, MissingRequirement
from kda_judge.evidence import gpu_state, record_log
from kda_judge.evidence.gpu_state import GpuProcess
from kda_judge.session import open_session
from kda_tools.lab.inspect import cuda_tools
from kda_tools.lab.profile import nsight, run_profile
from kda_tools.lab.profile.profile_record import Kernel, ProfileRecord, log
from kda_tools.publish import profile_page
from kda_tools.publish.generate import publish
from kda_tools.publish.profile_page import bound, digest_md, mean, short, top_stalls

DURATION = "gpu__time_duration.sum"


# ---- ncu's CSV --------------------------------------------------------------------------------


def test_every_counter_ends_in_its_field():
    (kernel,) = nsight.kernels("==PROF== Loaded a report\n" + raw_csv(COUNTERS))
    assert kernel == Kernel(
        name="axpy_kernel",
        grid=(640, 2, 1),
        block=(128, 1, 1),
        duration_us=4.512,
        memory_pct=71.5,
        dram_pct=71.5,
        l2_pct=40,
        l1_pct=30.25,
        compute_pct=22.75,
        occupancy_pct=55.1,
        theoretical_occupancy_pct=62.5,
        blocks_per_sm={"blocks": 32, "registers": 10, "shared_mem": 10, "warps": 16},
        waves=1.36,
        registers=48,
        shared_bytes=2064,
        local_bytes=128,
        l2_hit_pct=33.4,
        dram_read_bytes=1048576,
        dram_written_bytes=524288,
        stalls={"barrier": 1, "long_scoreboard": 6, "selected": 1, "wait": 2},
    )


def test_units_are_brought_to_one():
    same = {"nsecond": "2,500", "us": "2.5", "usecond": "2.5", "ms": "0.0025", "second": "2.5e-6"}
    for unit, value in same.items():
        (kernel,) = nsight.kernels(raw_csv({"gpu__time_duration.sum": (unit, value)}))
        assert kernel.duration_us == 2.5
    counters = {"gpu__time_duration.sum": ("ns", "1"), "dram__bytes_read.sum": ("Mbyte", "1.5")}
    assert nsight.kernels(raw_csv(counters))[0].dram_read_bytes == 1.5e6


def test_what_was_not_counted_is_none():
    counters = {"gpu__time_duration.sum": ("ns", "1"), "dram__bytes_read.sum": ("byte", "n/a")}
    (kernel,) = nsight.kernels(raw_csv(counters))
    assert (kernel.dram_read_bytes, kernel.registers, kernel.stalls) == (None, None, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== no such file\n", 'expected a CSV table that starts with "ID", got \'==ERROR=='),
        (raw_csv({DURATION: ("fortnight", "1")}), "'gpu__time_duration.sum': expected a unit of ns, nsecond"),
        (raw_csv({DURATION: ("ns", "soon")}), "'gpu__time_duration.sum': expected a number, got 'soon'"),
        (raw_csv({DURATION: ("ns", "n/a")}), "expected a duration for every kernel"),
        (raw_csv(COUNTERS).replace("(640, 2, 1)", "(640)"), "'Grid Size': expected three sizes, got '(640)'"),
    ],
)
def test_csv_that_is_not_understood_is_an_error(text, message):
    with pytest.raises(MissingRequirement) as error:
        nsight.kernels(text)
    assert message in str(error.value)


def test_no_counter_is_asked_for_twice_and_every_field_exists():
    names = [metric.name for metric in (*nsight.METRICS, *nsight.FROM_SECTIONS)]
    assert len(names) == len(set(names))
    fields = {field for metric in (*nsight.METRICS, *nsight.FROM_SECTIONS) for field in metric.fields}
    assert fields | {"name", "grid", "block", "blocks_per_sm", "stalls"} == set(Kernel.model_fields)


# ---- from counters to words -------------------------------------------------------------------


def kernel(duration: float = 1.0, **fields: object) -> Kernel:
    return Kernel(name="k", grid=(1, 1, 1), block=(1, 1, 1), duration_us=duration, **fields)


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ([kernel(memory_pct=60, compute_pct=59, dram_pct=20, l2_pct=80, l1_pct=50)], "memory, 60% of peak (L2 80%)"),
        ([kernel(memory_pct=59.9, compute_pct=80)], "compute, 80% of peak"),
        ([kernel(memory_pct=59, compute_pct=3, waves=0.25)], "size: 0.25 waves of blocks leave the GPU partly idle"),
        (
            [kernel(memory_pct=59, compute_pct=3, waves=1, stalls={"selected": 5, "wait": 1, "barrier": 2})],
            "latency: no unit reaches 60% of its peak; warps wait at a barrier of the block",
        ),
        ([kernel(compute_pct=80)], "-"),
        ([kernel(3, memory_pct=80, compute_pct=0), kernel(1, memory_pct=0, compute_pct=0)], "memory, 60% of peak"),
    ],
)
def test_bound_follows_its_rule(kernels, words):
    assert bound(kernels) == words


def test_means_and_stalls_are_weighted_by_duration():
    long = kernel(3, memory_pct=10.0, stalls={"wait": 3, "selected": 1})
    kernels = [long, kernel(1, memory_pct=50.0, stalls={"barrier": 9})]
    assert mean(kernels, "memory_pct") == 20
    assert mean(kernels, "compute_pct") is None
    assert top_stalls(kernels) == [("wait", 0.5625), ("barrier", 0.25)]


def test_short_names():
    assert short("void norm::kernel<float, 4>(Params<float>)") == "norm::kernel"
    assert short("void <unnamed>::rope<128, 0>(<unnamed>::Params)") == "rope"
    assert short("_axpy") == "_axpy"
    assert short("kernel_cutlass_" + "x" * 100) == "kernel_cutlass_" + "x" * 42 + "..."


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """`kda profile` takes the CPU for the GPU, and the eager arm for the baseline."""
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_state, "read_state", lambda *_: gpu_reading())
    monkeypatch.setattr(
        run_profile, "open_session", lambda request: open_session(replace(request, against=["eager"], device="cpu"))
    )
    monkeypatch.setattr(profile_page, "contradicted", lambda *_: [])  # the rows are shrunken, which no GPU's are


def faster() -> dict[str, tuple[str, str]]:
    return {**COUNTERS, "gpu__time_duration.sum": ("ns", "2000"), "launch__registers_per_thread": ("", "32")}


def use(monkeypatch, folder: Path, mode: str = "") -> None:
    twice = raw_csv(COUNTERS, COUNTERS, names=("void mul<float>(Args)", "add"))
    put_ncu(folder, {"eager": twice, "solution": raw_csv(faster())}, mode)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_profile_from_the_command_to_the_page(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin")
    code, out, err = kda("profile", "axpy", "--row", "out-64x16", "--row", "inplace-64x16")
    assert (code, err) == (0, "")
    docs = checkout / "toys" / "k90_axpy" / "docs"
    records = record_log.read(docs / "profile.jsonl", ProfileRecord)
    assert [record.row for record in records] == ["out-64x16", "inplace-64x16"]
    record = records[0]
    assert record.command == "kda profile axpy --row out-64x16 --row inplace-64x16"
    assert record.ncu == "2025.3.1.0"
    assert record.bytes_moved == 3 * 8 * 16 * 4
    assert {arm: [k.duration_us for k in kernels] for arm, kernels in record.arms.items()} == {
        "eager": [4.512, 4.512],
        "solution": [2.0],
    }
    reports = sorted(path.name for path in (checkout / "profiles").iterdir())
    assert len(reports) == 4
    assert reports[-1] == f"out-64x16-solution-{record.run_id}.ncu-rep"
    assert "## out-64x16" in out

    from kda_judge.contract.tasks import find_task

    short = digest_md(find_task("axpy"))
    assert short is not None
    assert short.splitlines()[4] == "**What limits the solution on 2 profiled rows: memory throughput on 2.**"
    assert "registers per thread" not in short
    page = digest_md(find_task("axpy"), whole=True)
    assert page is not None
    table = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("|")]
    cells = {line[1]: line[2:-1] for line in table}
    assert cells["duration"] == ["9.02 us", "2.00 us"]
    assert cells["**bound**"] == ["memory, 72% of peak (DRAM 72%)"] * 2
    assert cells["registers per thread"] == ["48", "32"]
    assert cells["... limited by"] == ["registers, shared memory (10 blocks)"] * 2
    assert cells["local memory (spills)"] == ["256 bytes", "128 bytes"]
    assert cells["top stalls"] == ["long_scoreboard 60%, wait 20%, barrier 10%"] * 2
    assert cells["DRAM read + written"][1] == f"1.049 + 0.524 MB, {1572864 / 1536:.2f} of what must move"
    assert "| eager    | `mul`         | 640x2x1 | 128x1x1 |" in page
    assert "changed since" not in page


def test_the_page_is_published_and_follows_the_solution(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin")
    (checkout / "README.md").write_text("<!-- kda:results:begin -->\n<!-- kda:results:end -->\n")
    assert kda("profile", "axpy", "--row", "out-64x16")[0] == 0

    from kda_judge.contract.tasks import find_task

    task = find_task("axpy")
    publish([task], check=False, draw=False)
    assert publish([task], check=True, draw=False) == []
    page = task.path / "docs" / "profile.md"
    page.write_text(page.read_text().replace("| 2.00", "| 1.00"))
    (wrong,) = publish([task], check=True, draw=False)
    assert "profile.md" in wrong
    with (task.path / "solution" / "__init__.py").open("a") as file:
        file.write("# faster\n")
    publish([task], check=False, draw=False)
    assert ", the solution has changed since |" in page.read_text()


def test_the_latest_profile_of_a_row_is_shown(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin")
    assert kda("profile", "axpy", "--row", "out-64x16")[0] == 0
    put_ncu(tmp_path / "bin", {"eager": raw_csv(COUNTERS), "solution": raw_csv(COUNTERS)})
    assert kda("profile", "axpy", "--row", "out-64x16")[0] == 0

    from kda_judge.contract.tasks import find_task

    page = digest_md(find_task("axpy"), whole=True)
    assert page is not None
    assert page.count("## out-64x16") == 1
    assert "2.00 us" not in page


@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        ("permission", ExitCode.REQUIREMENT, "kda: ncu: the driver lets only administrators read the GPU's counters."),
        ("nothing", ExitCode.ARM_FAILED, "kda: arm 'eager' launched no kernel in the profiled call of row 'out-64x16'"),
    ],
)
def test_what_ncu_complains_about_is_explained(checkout, on_cpu, kda, monkeypatch, tmp_path, mode, code, message):
    use(monkeypatch, tmp_path / "bin", mode)
    got, _, err = kda("profile", "axpy", "--row", "out-64x16")
    assert got == code
    assert message in err
    assert not (checkout / "toys" / "k90_axpy" / "docs" / "profile.jsonl").exists()


def test_a_failing_arm_is_shown_with_its_last_words(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin")
    (checkout / "toys" / "k90_axpy" / "solution" / "__init__.py").write_text(
        "def axpy(*_, **__):\n    raise KeyError(7)\n"
    )
    code, _, err = kda("profile", "axpy", "--row", "out-64x16")
    assert code == ExitCode.ARM_FAILED
    assert "arm 'solution' failed on row 'out-64x16' under ncu (exit code 1)" in err
    assert "KeyError: 7" in err


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("==ERROR== Failed to find metric regex:^dram__x$\n", MissingRequirement, "lacks a counter .*newest release"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", MissingRequirement, "cannot be reached"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.\n", MissingRequirement, "DCGM"),
        ("==ERROR== Something new\n", MissingRequirement, r"exit code 9 and no report\n    \| ==ERROR== Something new"),
        ("==WARNING== No kernels were profiled.\n", ArmFailed, "launched no kernel"),
    ],
)
def test_complaints(tmp_path, said, error, message):
    with pytest.raises(error, match=message):
        nsight.check(cuda_tools.Ran(9, said, ("r",)), "solution", "r", tmp_path / "absent")


def test_without_ncu_without_a_gpu_and_with_bad_names(checkout, on_cpu, kda, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_tools, "FOLDERS", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = kda("profile", "axpy", "--row", "out-64x16")
    assert code == ExitCode.REQUIREMENT
    assert err.startswith("kda: ncu: not found on PATH")
    assert "Install Nsight Compute" in err
    assert kda("profile", "axpy", "--row", "out-64x17") == (
        ExitCode.USAGE,
        "",
        "kda: --row 'out-64x17': no such row; nearest: out-64x16, inplace-64x16\n",
    )
    busy = gpu_reading().model_copy(update={"processes": (GpuProcess(pid=4242, memory_mb=1),)})
    monkeypatch.setattr(gpu_state, "read_state", lambda *_: busy)
    code, _, err = kda("profile", "axpy", "--row", "out-64x16")
    assert code == ExitCode.REQUIREMENT
    assert "the GPU is busy: NVIDIA H200 is held by pid 4242" in err
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)
    code, _, err = kda("profile", "axpy", "--row", "out-64x16")
    assert code == ExitCode.REQUIREMENT
    assert err.startswith("kda: profile needs an NVIDIA GPU, and none is visible here")


def test_a_broken_line_is_named(checkout):
    from kda_judge.contract.tasks import find_task

    task = find_task("axpy")
    log(task).write_text(json.dumps({"schema_version": 1, "row": "out-64x16"}) + "\n")
    with pytest.raises(LedgerError, match=r"profile.jsonl:1: run_id: Field required"):
        digest_md(task)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not shutil.which("ncu"), reason="needs a GPU and ncu")
def test_ncu_counts_everything(toy, tmp_path):
    session = run_profile.open_profile(toy, "solution", "eager", allow_busy=True)
    record = run_profile.profile(session, toy.workloads[0], tmp_path, "test")
    for kernels in record.arms.values():
        for kernel in kernels:
            missing = [name for name, value in kernel.model_dump().items() if value is None or value == {}]
            assert missing == []
