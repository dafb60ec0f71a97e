"""`kda sanitize` with a fake compute-sanitizer, from the command to the page; its log; and which rows it gets."""

import shutil
from dataclasses import replace

import pytest
import torch

from core.judge.tests.records_factory import gpu_reading
from core.tools.tests.fake_tools import put_sanitizer
from kda_judge.contract.config import Op
from kda_judge.contract.errors import ExitCode
from kda_judge.contract.tasks import find_task
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_judge.evidence import gpu_state, record_log
from kda_judge.session import Request, open_session
from kda_tools.lab.inspect import cuda_tools
from kda_tools.lab.sanitize import run_sanitize as run
from kda_tools.lab.sanitize.choose_rows import FROZEN_ROWS, GRID_ROWS, LARGEST_FROZEN, choose, representative
from kda_tools.lab.sanitize.sanitize_record import SanitizeRecord, Tool
from kda_tools.publish.generate import publish
from kda_tools.publish.sanitize_page import digest_md

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OVERRUN = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at _norm+0x1b0 in norm.py:88
=========     by thread (31,0,0) in block (4,0,0)
=========
========= Invalid __global__ write of size 2 bytes
=========     at _norm+0x1c0 in norm.py:88
=========
========= ERROR SUMMARY: 103 errors
========= ERROR SUMMARY: 3 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Warning: Race reported between Write access at _norm+0x550 in norm.py:100
=========     and Read access at _norm+0x580 in norm.py:107 [512 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""
NO_CUDA = (
    "========= COMPUTE-SANITIZER\n========= Error: Target application terminated before first instrumented API call\n"
)


def test_logs_of_compute_sanitizer():
    assert run.parse(CLEAN) == run.Report(0, 0)
    assert run.parse(CLEAN).first == ""
    first = (
        "Invalid __global__ write of size 2 bytes\nat _norm+0x1b0 in norm.py:88\nby thread (31,0,0) in block (4,0,0)"
    )
    second = "Invalid __global__ write of size 2 bytes\nat _norm+0x1c0 in norm.py:88"
    assert run.parse(OVERRUN) == run.Report(103, 0, (first, second))
    assert run.parse(OVERRUN).first == first
    many = OVERRUN.replace("========= ERROR", "========= again\n=========\n" * 30 + "========= ERROR", 1)
    assert len(run.parse(many).reports) == run.MOST_REPORTS
    assert run.parse(RACES.replace("2 errors, 1 warning", "1 error, 2 warnings")).errors == 1
    report = run.parse(RACES)
    assert (report.errors, report.warnings) == (2, 1)
    assert report.first.startswith("Warning: Race reported between Write access")
    assert run.parse(NO_CUDA) is None
    assert run.parse("") is None


# ---- which rows -------------------------------------------------------------------------------

OPS = {"f": Op(inputs=("x", "w"), outputs=("y",), like={"y": "x"})}


def row(name, shape=(8, 16), dtype="float32", stride=None, weight=True, production=False, **scalars):
    inputs = {"x": TensorSpec(shape=shape, dtype=dtype, stride=stride)}
    if weight:
        inputs["w"] = TensorSpec(shape=shape[-1:], dtype=dtype)
    return Workload(id=name, op="f", inputs=inputs, scalars=scalars, production=production)


def by_width(one):
    return () if one.inputs["x"].shape[-1] > 1000 else (("kernel", f"N={one.inputs['x'].shape[-1]}"),)


def test_production_rows_are_the_smallest_and_one_per_variant():
    frozen = [row("small"), row("again", (16, 16)), row("wide", (16, 64)), row("wider", (99, 64))]
    chosen = representative(frozen, [], OPS, by_width)
    assert [(one.id, chosen.why) for one, chosen in chosen] == [
        ("small", "smallest production row"),
        ("wide", "variant of kernel"),
    ]


def test_production_rows_are_limited_when_each_is_a_variant_of_its_own():
    def constants(one):
        tokens, width = one.inputs["x"].shape
        return (("kernel", f"N={width} TOKENS={tokens} WARPS={1 + tokens % 2}"),)

    frozen = [row("small"), *(row(f"r{tokens}", (tokens, 16)) for tokens in range(10, 30, 2)), row("most", (41, 64))]
    chosen = [one.id for one, _ in representative(frozen, [], OPS, constants)]
    assert chosen == ["small", "most", "r10", "r12", "r14", "r16", "r18"]
    assert len(chosen) == 1 + FROZEN_ROWS
    huge = row("huge", (LARGEST_FROZEN // 256, 64))
    assert [one.id for one, _ in representative([row("small"), huge], [], OPS, by_width)] == ["small"]
    assert [one.id for one, _ in representative([huge], [], OPS, by_width)] == ["huge"]


def test_grid_rows_show_what_none_has_shown_and_the_smaller_of_equals_comes_first():
    grid = [
        row("as-production", (8, 16)),
        row("odd", (9, 16)),
        row("odd-larger", (11, 16)),
        row("half-ragged-strided", (10, 15), "float16", (30, 1)),
        row("no-weight", (12, 16), weight=False),
        row("plain", (4, 2048)),
        row("eps", (64, 16), eps=2),
    ]
    chosen = representative([row("production")], grid, OPS, by_width)
    ids = [one.id for one, _ in chosen]
    assert ids == ["production", "half-ragged-strided", "odd", "eps", "no-weight", "plain"]
    assert chosen[1][1].why == "grid: ragged w, ragged x, strided x and 2 more"
    assert chosen[5][1].why == "grid: plain path of f"


def test_grid_rows_show_new_combinations_when_nothing_else_is_new():
    grid = [row("odd", (9, 16)), row("ragged", (8, 15)), row("both", (9, 15)), row("both-larger", (11, 15))]
    chosen = representative([row("first", (9, 16)), row("second", (8, 15))], grid, OPS, by_width)
    assert [(one.id, reason.why) for one, reason in chosen[2:]] == [("both", "grid: 2 new combinations")]


def test_the_grid_is_limited():
    grid = [row(f"r{number}", eps=number) for number in range(3 * GRID_ROWS)]
    assert len(representative([row("production")], grid, OPS, by_width)) == 1 + GRID_ROWS


def test_real_tasks_give_few_rows_of_every_op(monkeypatch, request):
    monkeypatch.setenv("KDA_ROOT", str(request.config.rootpath))
    task = find_task("norm_infer")
    # The CPU's session shrinks rows, and with them a variant; rows as on a GPU need none here.
    session = replace(open_session(Request(task=task, device="cpu")), kind="cuda")
    chosen = choose(session)
    assert {one.op for one, _ in chosen} == set(task.config.ops)
    assert {one.inputs["x"].dtype for one, _ in chosen} == {"float32", "float16", "bfloat16"}
    assert any(one.inputs["x"].stride for one, _ in chosen)
    assert len({one.id for one, _ in chosen}) == len(chosen) <= len(task.workloads) + GRID_ROWS
    asked = choose(replace(session, request=replace(session.request, rows=["onepass-3x3x128-*"])))
    assert len(asked) == 9
    assert {reason.why for _, reason in asked} == {"asked for"}
    of_the_lab = session.settings.model_copy(update={"subject": "cuda_cpp"})
    some = choose(replace(session, settings=of_the_lab))
    assert {one.op for one, _ in some} == {"triton_one_pass_rms_norm"}, "the only op that this arm has"


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """`kda sanitize` takes the CPU for the GPU."""
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_state, "read_state", lambda *_: gpu_reading())
    monkeypatch.setattr(run, "open_session", lambda request: open_session(replace(request, device="cpu")))


def use(monkeypatch, folder, **how):
    history = put_sanitizer(folder, **how)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return history


def test_clean_from_the_command_to_the_page(checkout, on_cpu, kda, monkeypatch, tmp_path):
    history = use(monkeypatch, tmp_path / "bin", mode="races")
    code, out, err = kda("sanitize", "axpy")
    assert (code, err) == (0, "memcheck: 2 rows\nracecheck: 2 rows\n")
    assert "  out-64x16: memcheck 0 errors, racecheck 0 errors (smallest production row)\n" in out
    assert history.read_text() == "memcheck 2\nracecheck 2\n"
    (record,) = record_log.read(checkout / "toys" / "k90_axpy" / "docs" / "sanitize.jsonl", SanitizeRecord)
    assert (record.version, record.command) == ("2025.3.1.0", "kda sanitize axpy")
    assert [(run.tool, run.errors, run.warnings) for run in record.runs] == [
        (Tool.MEMCHECK, 0, 0),
        (Tool.RACECHECK, 0, 2),
    ]
    page = digest_md(find_task("axpy"), whole=True)
    today = record.utc[:10]
    assert f"| `inplace-64x16` | axpy_ | smallest production row | 0 errors, {today} | 0 errors, {today} |" in page
    assert "  - racecheck: 0 errors, 2 warnings in 2 rows\n" in page
    for number in (1, 2):
        report = f"Warning: Race reported between Write access at axpy+0x4{number - 1}"
        assert f"    report {number}\n\n    ```\n    {report}\n" in page


def test_errors_are_traced_to_their_rows(checkout, on_cpu, kda, monkeypatch, tmp_path):
    history = use(monkeypatch, tmp_path / "bin", bad=("inplace-64x16",))
    code, out, _ = kda("sanitize", "axpy", "--tool", "memcheck", "--tool", "initcheck")
    assert code == ExitCode.UNFIT_ROWS
    assert history.read_text() == "memcheck 2\nmemcheck 1\nmemcheck 1\ninitcheck 2\n"
    assert (
        "memcheck on inplace-64x16:\nInvalid __global__ write of size 4 bytes\nat axpy+0x1b0 in inplace-64x16.py:7"
        in out
    )
    assert "  out-64x16: memcheck 0 errors, initcheck 0 errors" in out
    page = digest_md(find_task("axpy"), whole=True)
    assert "| `inplace-64x16` | axpy_ | smallest production row | 1 error, " in page
    short = str(digest_md(find_task("axpy")))
    assert "- **memcheck: errors on `inplace-64x16`** in 2 rows, " in short
    assert "- **initcheck: no error** in 2 rows, " in short
    assert "    Invalid __global__ write of size 4 bytes\n" in page


def test_a_later_run_of_some_rows_replaces_only_those(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin", bad=("out-64x16", "inplace-64x16"))
    assert kda("sanitize", "axpy", "--tool", "memcheck")[0] == ExitCode.UNFIT_ROWS
    use(monkeypatch, tmp_path / "bin")
    assert kda("sanitize", "axpy", "--rows", "out-*", "--tool", "memcheck")[0] == 0
    page = digest_md(find_task("axpy"), whole=True)
    assert "| `out-64x16` | axpy | asked for | 0 errors, " in page
    assert "| `inplace-64x16` | axpy_ | smallest production row | 1 error, " in page


def test_rows_of_an_earlier_solution_do_not_hide_that_others_are_checked(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin", bad=("inplace-64x16",))
    assert kda("sanitize", "axpy", "--tool", "memcheck")[0] == ExitCode.UNFIT_ROWS
    solution = find_task("axpy").path / "solution" / "__init__.py"
    solution.write_text(f"{solution.read_text()}# faster\n")
    use(monkeypatch, tmp_path / "bin")
    assert kda("sanitize", "axpy", "--rows", "out-*", "--tool", "memcheck")[0] == 0
    (line,) = [one for one in str(digest_md(find_task("axpy"))).splitlines() if one.startswith("- **memcheck")]
    assert line.startswith("- **memcheck: no error** in 1 row, ")
    assert line.endswith("; 1 other row checked only before the solution changed: errors on `inplace-64x16`")


def test_the_page_is_published_and_follows_the_solution(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin")
    (checkout / "README.md").write_text("<!-- kda:results:begin -->\n<!-- kda:results:end -->\n")
    assert kda("sanitize", "axpy")[0] == 0
    task = find_task("axpy")
    publish([task], check=False, draw=False)
    assert publish([task], check=True, draw=False) == []
    with (task.path / "solution" / "__init__.py").open("a") as file:
        file.write("# faster\n")
    (wrong,) = publish([task], check=True, draw=False)
    assert "sanitize.md" in wrong
    assert "**the solution has changed since**" in wrong


def test_an_arm_that_fails_without_an_error_is_no_clean_run(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin")
    source = checkout / "toys" / "k90_axpy" / "solution" / "__init__.py"
    source.write_text(source.read_text().replace("x.copy_(", "raise KeyError(7)\n    x.copy_("))
    code, _, err = kda("sanitize", "axpy")
    assert code == ExitCode.ARM_FAILED
    assert "arm 'solution' failed on row 'inplace-64x16' under compute-sanitizer --tool memcheck (exit code 1)" in err
    assert "KeyError: 7" in err


def test_a_tool_that_cannot_work_here(checkout, on_cpu, kda, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "bin", mode="unsupported")
    code, _, err = kda("sanitize", "axpy")
    assert code == ExitCode.REQUIREMENT
    assert "compute-sanitizer --tool memcheck: ended with exit code 255 and no summary" in err
    assert "| ========= Error: Device not supported." in err


def test_without_the_tool_without_a_gpu_and_with_bad_names(checkout, on_cpu, kda, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_tools, "FOLDERS", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = kda("sanitize", "axpy")
    assert code == ExitCode.REQUIREMENT
    assert "kda: compute-sanitizer: not found on PATH" in err
    assert "Install the CUDA toolkit" in err
    expected = "kda: --tool 'memchek': expected one of memcheck, racecheck, initcheck, synccheck\n"
    assert kda("sanitize", "axpy", "--tool", "memchek") == (ExitCode.USAGE, "", expected)
    code, _, err = kda("sanitize", "axpy", "--rows", "none-*")
    assert (code, "kda: --rows 'none-*': no such row; nearest: " in err) == (ExitCode.USAGE, True)
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)
    code, _, err = kda("sanitize", "axpy")
    assert code == ExitCode.REQUIREMENT
    assert err.startswith("kda: sanitize needs an NVIDIA GPU, and none is visible here")


PLANTED = """
import torch
import triton
import triton.language as tl


@triton.jit
def _add(out, x, y, factor, n, EXTRA: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, factor * tl.load(x + at, inside) + tl.load(y + at, inside), at < n + EXTRA)


def axpy(x, y, *, factor):
    y = y.contiguous()
    out = torch.empty_like(x)
    _add[(triton.cdiv(x.numel() + 1, 256),)](out, x, y, factor, x.numel(), EXTRA=1, BLOCK=256)
    return out


def axpy_(x, y, *, factor):
    _add[(triton.cdiv(x.numel(), 256),)](x, x, y, factor, x.numel(), EXTRA=0, BLOCK=256)
"""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not shutil.which("compute-sanitizer"), reason="needs a GPU and compute-sanitizer"
)
def test_memcheck_finds_a_planted_overrun(toy):
    (toy.path / "solution" / "__init__.py").write_text(PLANTED)
    session = run.open_sanitize(toy, [])
    record = run.sanitize(session, choose(session), run.USUAL, "test")
    memcheck, racecheck = record.runs
    assert [finding.row for finding in memcheck.findings] == ["out-64x16"]
    assert "Invalid __global__ write" in memcheck.report
    assert racecheck.errors == 0
