"""The test and the benchmark that a port brings, in SGLang's own form, made of the task's rows and its eager arm."""

from __future__ import annotations

import ast

from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload
from kda_tools.port.layouts import FACADE, Layout, Tree
from kda_tools.port.package_files import gate_name, is_gated_by_bits
from kda_tools.port.row_source import INPUTS, OFF, operands, rows_text, tensors_passed, tolerances

CI = {
    (Layout.JIT_KERNEL, "test"): 'register_cuda_ci(est_time=60, suite="stage-b-kernel-unit-1-gpu-large")',
    (Layout.FACADE, "test"): (
        'register_cuda_ci(\n    est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large"\n)'
    ),
    (Layout.JIT_KERNEL, "benchmark"): (
        "register_cuda_ci(\n    est_time=60,\n"
        '    suite="stage-b-kernel-benchmark-1-gpu-large",\n    disabled="standalone benchmark",\n)'
    ),
    (Layout.FACADE, "benchmark"): (
        'register_cuda_ci(\n    est_time=60, stage="base-b-kernel-benchmark", runner_config="1-gpu-large"\n)'
    ),
}
MOST_BYTES = 1 << 28
"""Of a row's inputs, in a test of the grid."""
HEAD = '''"""{title}: {what}.

Rows and tolerances are those of KDA-Pilot's task {task}; `kda port` wrote this file.
"""

import importlib
import json
{imports}
import torch
{more_imports}
from sglang.test.ci.ci_register import register_cuda_ci

{ci}

'''
TEST = '''
@torch.no_grad()
@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_as_the_eager_chain(row, monkeypatch):
    """The kernels do the call, and its outputs are those of the eager chain."""
    taken = []
{spy}
    given, scalars = arguments(row)
    expected_in = [None if one is None else one.clone() for one in given]{first}
    made = PORTED[row["op"]](*given, **scalars)
    assert taken == [True], "SGLang's own code did this call"
    expected = EAGER[row["op"]](*expected_in, **scalars)
    if row["inplace"]:
        names = OPERANDS[row["op"]]
        made = [given[names.index(n)] for n in OUTPUTS[row["op"]]]
        expected = [expected_in[names.index(n)] for n in OUTPUTS[row["op"]]]
    for name, one, other in zip(OUTPUTS[row["op"]], _tuple(made), _tuple(expected), strict=True):
        assert (why := off(name, one, other)) is None, why


def _tuple(value):
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-s"]))
'''
FIRST = """
    PORTED[row["op"]](*[None if one is None else one.clone() for one in given], **scalars)
    assert not {gate}.disabled, "not the bits of SGLang's own function"
    taken.clear()"""
"""Of the tier `exact`: the first call of a signature is SGLang's own, beside the kernels'."""
SPY = """    name = f"try_{row['op']}"
    original = getattr(HOSTS[row["op"]], name)

    def spy(*args, **kwargs):
        result = original(*args, **kwargs)
        taken.append(result is not None)
        return result

    monkeypatch.setattr(HOSTS[row["op"]], name, spy)"""
BENCHMARK = '''
def main():
    """Microseconds of GPU time per call, as a CUDA graph: SGLang's own code, and the port."""
    print("| row | before us | port us | speedup |")
    print("|---|---:|---:|---:|")
    for row in ROWS[:2] if is_in_ci() else ROWS:
        given, scalars = arguments(row)
        op = row["op"]
        times = []
        for before in (True, False):
            host, name = HOSTS[op], f"try_{op}"
            kept = getattr(host, name)
            if before:
                setattr(host, name, lambda *args, **kwargs: None)
            try:
                call = lambda: PORTED[op](*given, **scalars)
                call()
                times.append(triton.testing.do_bench_cudagraph(call) * 1000)
            finally:
                setattr(host, name, kept)
        old, new = times
        print(f"| {row['id']} | {old:.2f} | {new:.2f} | {old / new:.2f}x |")


if __name__ == "__main__":
    with torch.no_grad():
        main()
    sys.exit(0)
'''
NEW_BENCHMARK = '''
def main():
    """Microseconds of GPU time per call, as a CUDA graph: the eager chain, and the port."""
    print("| row | eager us | port us | speedup |")
    print("|---|---:|---:|---:|")
    for row in ROWS[:2] if is_in_ci() else ROWS:
        given, scalars = arguments(row)
        times = []
        for side in (EAGER, PORTED):
            call = lambda: side[row["op"]](*given, **scalars)
            call()
            times.append(triton.testing.do_bench_cudagraph(call) * 1000)
        old, new = times
        print(f"| {row['id']} | {old:.2f} | {new:.2f} | {old / new:.2f}x |")


if __name__ == "__main__":
    with torch.no_grad():
        main()
    sys.exit(0)
'''


def proof_files(task: Task, tree: Tree, modules: dict[str, str], tier: str) -> tuple[str, str]:
    """Test and benchmark. `modules`: op -> the dotted module that its public function is in, of those dispatched.

    Raises:
        UsageError: a row has a fill that only the judge makes.
    """
    new = any(module.startswith("sglang.kernels.kda_kernels") for module in modules.values())
    frozen = [row for row in task.workloads if row.op in modules]
    production = [row for row in frozen if row.production]
    seen = {row.id for row in frozen}
    grid = [row for row in _thin(task) if row.op in modules and row.id not in seen]
    solution = task.load("solution")
    small = [row for row in frozen + grid if sum(spec.nbytes for spec in row.inputs.values()) <= MOST_BYTES]
    covered = [row for row in small if _kernels_take(solution, row)]
    eager = (task.path / "baseline" / "eager.py").read_text(encoding="utf-8")
    test = HEAD.format(
        title=task.config.task.title,
        what="KDA's kernels and the eager chain",
        task=task.folder,
        imports="import sys\n\nimport pytest",
        more_imports="",
        ci=CI[tree.layout, "test"],
    )
    test = test.replace("import torch\n", "import torch\n" + _imports_of(eager), 1)
    gate = _mounting(task, tree, new, tier)
    skip = 'if not torch.cuda.is_available():\n    pytest.skip("CUDA required", allow_module_level=True)\n'
    test += skip + gate + _tables(task, modules, covered) + INPUTS + OFF + _eager(eager, modules)
    exact = is_gated_by_bits(tier, tree, task, new)
    test += TEST.format(
        first=FIRST.format(gate=gate_name(task.op)) if exact else "",
        spy=SPY if not new else "    taken.append(True)  # new ops: there is no other code",
    )
    benchmark = HEAD.format(
        title=task.config.task.title,
        what="a benchmark of KDA's kernels",
        task=task.folder,
        imports="import sys\n",
        more_imports="import triton\n\nfrom sglang.utils import is_in_ci\n",
        ci=CI[tree.layout, "benchmark"],
    )
    benchmark += gate + _tables(task, modules, production or frozen) + INPUTS
    if new:
        benchmark = benchmark.replace("import torch\n", "import torch\n" + _imports_of(eager), 1)
        benchmark += _eager(eager, modules)
    benchmark += NEW_BENCHMARK if new else BENCHMARK
    return tensors_passed(task, modules, test), tensors_passed(task, modules, benchmark)


def _thin(task: Task) -> list[Workload]:
    try:
        grid = task.load("bench.grid")
    except ModuleNotFoundError:
        return []
    return list(grid.thin(tuple(grid.grid())))


def _kernels_take(solution: object, row: Workload) -> bool:
    """Whether the kernels take a row's call on a GPU: whatever holds on any device."""
    import torch

    tensors = {}
    for name, spec in row.inputs.items():
        size = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
        whole = torch.empty(max(size, 0), dtype=getattr(torch, spec.dtype), device="meta")
        tensors[name] = whole.as_strided(spec.shape, spec.strides)
    try:
        return bool(solution.launches(row.op, tensors, row.scalars))  # type: ignore[attr-defined]
    except ValueError:
        return False


def _mounting(task: Task, tree: Tree, new: bool, tier: str) -> str:
    if not tree.has_levels(task) or new:
        return ""
    gate = gate_name(task.op)
    facade = FACADE.removesuffix("/__init__.py").replace("/", ".")
    mounted = "" if tier == "exact" else f"{gate}.mount(None)\n"
    return f'\n{gate} = importlib.import_module("{facade}").{gate}\n{mounted}'


def _tables(task: Task, modules: dict[str, str], rows: list[Workload]) -> str:
    hosts = "".join(f'    "{op}": importlib.import_module("{module}"),\n' for op, module in modules.items())
    named = f"\nHOSTS = {{\n{hosts}}}\nPORTED = {{op: getattr(HOSTS[op], op) for op in HOSTS}}\n"
    return named + operands(task, modules) + tolerances(task, modules) + rows_text(task, rows)


def _imports_of(eager: str) -> str:
    """The imports of the eager arm beside torch itself."""
    nodes = [node for node in ast.parse(eager).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "".join(f"{ast.unparse(node)}\n" for node in nodes if ast.unparse(node) != "import torch")


def _eager(eager: str, modules: dict[str, str]) -> str:
    """The eager arm's functions as they are written there."""
    tree = ast.parse(eager)
    body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)]
    lines = eager.splitlines(keepends=True)
    parts = ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in body]
    names = "".join(f'    "{op}": {op},\n' for op in modules)
    return "\n\n# The eager chain.\n\n\n" + "\n\n".join(parts) + f"\n\nEAGER = {{\n{names}}}\n\n"
