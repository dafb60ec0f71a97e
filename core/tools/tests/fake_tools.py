"""Stand-ins for `ncu` and `compute-sanitizer`: they start the program that they are given and write what the real ones
would write about it, as far as kda reads that. No number here was measured on anything.
"""

import stat
import sys
from pathlib import Path

CSV_HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
    '"Block Size","Grid Size","Device","CC"'
)
UNITS_HEAD = '"","","","","","","","","","",""'
COUNTERS = {
    "dram__bytes_read.sum": ("byte", "1,048,576"),
    "dram__bytes_write.sum": ("byte", "524288"),
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "71.5"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "71.5"),
    "gpu__time_duration.sum": ("ns", "4,512"),
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": ("byte", "96"),
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": ("byte", "32"),
    "l1tex__throughput.avg.pct_of_peak_sustained_active": ("%", "30.25"),
    "launch__block_size": ("", "128"),
    "launch__occupancy_limit_blocks": ("block", "32"),
    "launch__occupancy_limit_registers": ("block", "10"),
    "launch__occupancy_limit_shared_mem": ("block", "10"),
    "launch__occupancy_limit_warps": ("block", "16"),
    "launch__registers_per_thread": ("register/thread", "48"),
    "launch__shared_mem_per_block_driver": ("byte/block", "1,024"),
    "launch__shared_mem_per_block_dynamic": ("Kbyte/block", "2.048"),
    "launch__shared_mem_per_block_static": ("byte/block", "16"),
    "launch__waves_per_multiprocessor": ("", "1.36"),
    "lts__t_sector_hit_rate.pct": ("%", "33.4"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "40"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "62.5"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "22.75"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "55.1"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "1"),
    "smsp__average_warps_issue_stalled_long_scoreboard_not_issued_per_issue_active.ratio": ("inst", "9"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "6"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1"),
    "smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio": ("inst", "n/a"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "2"),
}


def raw_csv(*kernels: dict[str, tuple[str, str]], names: tuple[str, ...] = ()) -> str:
    """The raw page of `ncu --csv` for kernels with these counters -> (unit, printed value)."""
    columns = list(kernels[0])
    lines = [
        ",".join([CSV_HEAD, *(f'"{name}"' for name in columns)]),
        ",".join([UNITS_HEAD, *(f'"{kernels[0][name][0]}"' for name in columns)]),
    ]
    for number, kernel in enumerate(kernels):
        name = names[number] if names else "axpy_kernel"
        head = f'"{number}","77","python3","host","{name}","1","7","(128, 1, 1)","(640, 2, 1)","0","9.0"'
        lines.append(",".join([head, *(f'"{kernel[column][1]}"' for column in columns)]))
    return "\n".join(lines) + "\n"


NCU = """
args = sys.argv[1:]
if "--version" in args:
    print("NVIDIA (R) Nsight Compute Command Line Profiler")
    print("Version 2025.3.1.0 (build 1) (public-release)")
elif "--import" in args:
    assert os.environ["LC_ALL"] == "C"
    assert "raw" in args and "base" in args
    print(CSVS[Path(args[args.index("--import") + 1]).read_text()], end="")
else:
    report, program = Path(args[args.index("--export") + 1]), args[args.index(sys.executable) :]
    if MODE == "permission":
        print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU counters")
        sys.exit(1)
    code = subprocess.run(program).returncode
    if MODE == "nothing":
        print("==WARNING== No kernels were profiled.")
    elif code:
        print(f"==ERROR== The application returned an error code ({code}).")
    else:
        report.write_text(json.loads(Path(program[3]).read_text())["arm"]["name"])
    sys.exit(code)
"""

SANITIZER = """
args = sys.argv[1:]
if "--version" in args:
    print("NVIDIA (R) Compute Sanitizer")
    print("Version 2025.3.1.0 (build 1) (public-release)")
    sys.exit()
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
log, tool = Path(args[args.index("--log-file") + 1]), args[args.index("--tool") + 1]
program = args[args.index(sys.executable) :]
assert ("--padding" in args) == (tool == "memcheck")
assert int(args[args.index("--launch-timeout") + 1]) >= 60
with HISTORY.open("a") as file:
    rows = [visit["row"]["id"] for visit in json.loads(Path(program[3]).read_text())["visits"]]
    file.write(f"{tool} {len(rows)}\\n")
lines = ["========= COMPUTE-SANITIZER"]
if MODE == "unsupported":
    log.write_text("\\n".join([*lines, "========= Error: Device not supported.", ""]))
    sys.exit(255)
code = subprocess.run(program).returncode
bad = [row for row in rows if row in BAD] if tool == "memcheck" else []
for row in bad:
    lines += ["========= Invalid __global__ write of size 4 bytes", f"=========     at axpy+0x1b0 in {row}.py:7",
              "=========     by thread (31,0,0) in block (4,0,0)", "========="]
if code:
    lines += ["========= Target application returned an error", "========="]
if tool == "racecheck":
    warned = 2 if MODE == "races" else 0
    for place in range(warned):
        lines += [f"========= Warning: Race reported between Write access at axpy+0x4{place}", "========="]
    plural = "hazard" if warned == 1 else "hazards"
    lines += [f"========= RACECHECK SUMMARY: {warned} {plural} displayed (0 errors, {warned} warnings)"]
else:
    count = len(bad)
    lines += [f"========= ERROR SUMMARY: {count} error{'' if count == 1 else 's'}"]
    lines += ["========= ERROR SUMMARY: 9 errors were not printed. Use --print-limit option"] if count else []
log.write_text("\\n".join([*lines, ""]))
sys.exit(66 if bad else code)
"""


def put(folder: Path, name: str, body: str, **values: object) -> Path:
    """An executable `name` in `folder` that runs `body` with these values."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    given = "".join(f"{key} = {value!r}\n" for key, value in values.items())
    imports = "import json, os, subprocess, sys\nfrom pathlib import Path, PosixPath\n"
    path.write_text(f"#!{sys.executable}\n{imports}{given}{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def put_ncu(folder: Path, csvs: dict[str, str], mode: str = "") -> Path:
    """An `ncu` whose report of an arm prints as `csvs[arm]`."""
    return put(folder, "ncu", NCU, CSVS=csvs, MODE=mode)


def put_sanitizer(folder: Path, bad: tuple[str, ...] = (), mode: str = "") -> Path:
    """A `compute-sanitizer` whose memcheck reports an error on the rows `bad`; returns the list of its runs."""
    history = folder / "history"
    put(folder, "compute-sanitizer", SANITIZER, BAD=bad, MODE=mode, HISTORY=history)
    return history
