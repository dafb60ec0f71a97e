"""The hardware guide: its table follows from records, and what is said to compile for older GPUs does."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.judge.tests.records_factory import gpu_reading
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.tasks import find_task, find_tasks
from kda_judge.evidence import record_log
from kda_tools.cli.base import app
from kda_tools.lab.inspect.aot import compile_task
from kda_tools.lab.measure import run_measure
from kda_tools.lab.measure.hardware_record import LOG, Cluster, Copy, HardwareRecord
from kda_tools.publish import hardware_page
from kda_tools.publish.task_notes import leftovers

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / hardware_page.PAGE).read_text()


def record(name: str = "NVIDIA Test", us: float = 100.0, **changes: object) -> HardwareRecord:
    """A made-up run."""
    values = {
        "utc": "2026-11-23T00:00:00Z",
        "command": "kda doctor --measure",
        "commit": "a" * 40,
        "dirty": False,
        "versions": {"torch": "2.13", "triton": "3.7"},
        "gpu": gpu_reading().model_copy(update={"name": name}),
        "noise": (),
        "capability": "9.0",
        "multiprocessors": 132,
        "l2_bytes": 60_000_000,
        "warps_per_sm": 64,
        "registers_per_sm": 65536,
        "shared_bytes_per_sm": 233472,
        "shared_bytes_per_block": 232448,
        "copies": (Copy(bytes=500_000_000, us=us),),
        "empty_us": 1.0,
        "empty_pdl_us": 0.5,
        "host_launch_us": 2.0,
        "host_output_us": 3.0,
        "widths_us": {"4": 90.0, "8": 70.0, "16": 60.0},
    }
    return HardwareRecord.model_validate(values | changes)


def test_the_table_has_the_latest_clean_run_of_each_kind() -> None:
    runs = [record(us=100.0), record(us=125.0), record(us=50.0, noise=("busy",)), record("NVIDIA Other", us=200.0)]
    text = hardware_page.table(runs)
    assert "| copy, 500 MB read and written | 200.00 us, 2.50 TB/s | 125.00 us, 4.00 TB/s |" in text
    assert "busy" not in text
    assert "noisy: busy" in hardware_page.table(runs[2:3])
    assert "| ... with dependent launch, us | - |" in hardware_page.table([record(empty_pdl_us=None)])
    assert "| ... a barrier of such a cluster, us | - |" in hardware_page.table([record()])
    clusters = tuple(Cluster(blocks=blocks, kernel_us=1.5, barrier_us=0.1 * blocks) for blocks in (1, 2))
    assert "| ... a barrier of such a cluster, us | 0.10, 0.20 |" in hardware_page.table([record(clusters=clusters)])
    chain = {"at once": 1.375, "behind the loads": 1.0, "at its end": 0.875}
    assert "at its end, us | 1.38, 1.00, 0.88 |" in hardware_page.table([record(next_grid_us=chain)])
    engine = (Copy(bytes=4_000_000, us=1.0, bulk_us=1.25),)
    assert "| 1.00 us, 4.00 TB/s; by the copy engine 1.25 us |" in hardware_page.table([record(copies=engine)])
    assert "Nothing is recorded yet" in hardware_page.table([])


def test_the_page_is_what_the_records_give(tmp_path: Path) -> None:
    assert hardware_page.publish(ROOT, check=True) == []
    page = tmp_path / hardware_page.PAGE
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)
    record_log.append(tmp_path / LOG, record())
    assert "run `kda publish`" in hardware_page.publish(tmp_path, check=True)[0]
    assert hardware_page.publish(tmp_path, check=False) == [str(page)]
    assert "NVIDIA Test" in page.read_text()
    assert hardware_page.publish(tmp_path, check=True) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")
def test_without_a_gpu_it_says_so_and_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noxfile.py").touch()
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    with pytest.raises(MissingRequirement, match="needs an NVIDIA GPU that torch can use"):
        CliRunner().invoke(app, ["doctor", "--measure"], catch_exceptions=False)
    assert not (tmp_path / LOG).exists()


@pytest.mark.parametrize(("target", "major"), [("sm_80", 8), ("sm_75", 7)])
def test_what_the_guide_says_of_older_gpus(target: str, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensors on such a GPU a plan takes the default capability for its own; PDL and clusters depend on it."""
    monkeypatch.setattr("kda_runtime.checks.DEFAULT_CAPABILITY", major)
    assert re.search(rf"\b{target}\b", PAGE)
    for op in ("norm_infer", "group_norm_silu", "fused_add_rmsnorm"):
        task = find_task(op)
        kernels = compile_task(
            task, [next(row for row in task.workloads if row.op == name) for name in task.config.ops], [target]
        )
        assert kernels
        assert [kernel.spill_bytes for kernel in kernels] == [0] * len(kernels)
        assert "cluster_kernel" not in {kernel.name for kernel in kernels}


def test_the_guide_has_every_task() -> None:
    """Tasks are named alone, or within a stretch such as `k01 to k09`."""
    text = PAGE.partition("## Which kernels here run where")[2]
    named = {
        f"{letter}{number:02}"
        for letter, first, last in re.findall(r"\b([kl])(\d\d)(?: to [kl](\d\d))?", text)
        for number in range(int(first), int(last or first) + 1)
    }
    assert {task.folder.partition("_")[0] for task in find_tasks() if not leftovers(task)} <= named


@pytest.mark.parametrize(("when", "place"), [("at once", 1), ("behind the loads", 2), ("at its end", None)])
def test_the_next_grid_is_let_start_where_the_record_says(when: str, place: int | None) -> None:
    """In the order of the compiled code, behind the wait."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    constants = {"BLOCK": 1024, "NEXT": when}
    signature = {"dst": "*i32", "src": "*i32", "n": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(run_measure._copy_words, signature=signature, constexprs=constants)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": 8, "launch_pdl": True}
    text = compiled(source, target=target, options=options).asm["ptx"]
    found = re.findall(r"griddepcontrol\.wait|griddepcontrol\.launch_dependents|ld\.global|st\.global", text)
    wanted = ["griddepcontrol.wait", "ld.global", "st.global"]
    wanted[place or 3 : 0] = ["griddepcontrol.launch_dependents"] * (place is not None)
    assert list(dict.fromkeys(found)) == wanted


@pytest.mark.parametrize("blocks", run_measure.CLUSTERS)
def test_barriers_of_clusters_compile(blocks: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    constants = {"BARRIERS": 3, "THREADS": 128 * blocks}
    source = ASTSource(
        run_measure._meet, signature={"dst": "*i32"} | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    text = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_ctas": blocks}).asm["ptx"]
    assert text.count("barrier.cluster.wait.aligned; mov") == 3
