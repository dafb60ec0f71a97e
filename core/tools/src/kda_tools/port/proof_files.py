"""Makes the test and the benchmark that a port adds, in SGLang's form, from the task's rows and its eager arm."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from textwrap import fill

from kda_judge.contract.tasks import Task
from kda_judge.contract.tensor_spec import INTEGRAL
from kda_judge.contract.workloads import Workload
from kda_tools.port.dispatch_edit import WIDTH
from kda_tools.port.layouts import FACADE_MODULE, Layout, Tree
from kda_tools.port.package_files import gate_name, is_gated_by_bits
from kda_tools.port.row_source import chosen, comparison, makers, operands, rows_text, tensors_passed, tolerances
from kda_tools.project.export.prune import prune

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
"""Most bytes that the inputs of a row in a test may have."""
HEAD = '''"""{told}"""

{imports}
{ci}

'''
ABOUT_TEST = (
    "Rows of production of KDA-Pilot's task {task}, with inputs of {most} MiB at most, and further ones with every "
    "dtype, form of strides and fill of its grid. {within}`kda port` wrote this file."
)
WITHIN = "Tolerances are the task's. "
ABOUT_BENCHMARK = "Rows are those of production of KDA-Pilot's task {task}. `kda port` wrote this file."
SKIP = 'if not torch.cuda.is_available():\n    pytest.skip("CUDA required", allow_module_level=True)\n'
MOUNTED = '''

@pytest.fixture(scope="module", autouse=True)
def mounted():
    """The kernels are on for the tests of this file."""
    before = {gate}.mounted
    {gate}.mount(None)
    yield
    if not before:
        {gate}.unmount(None)

'''
TEST = '''
@torch.no_grad()
@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_as_{name}(row, monkeypatch):
    """The kernels do the call, and its outputs are those of {other}."""
    op = row["op"]
    taken = watched(op, monkeypatch)
    given, scalars = arguments(row)
    expected_in = [None if one is None else one.clone() for one in given]{first}
    made = PORTED[op](*given, **scalars)
    assert taken == [True], "SGLang's own code did this call"
    {expected}{inplace}
    for name, one, other in zip(OUTPUTS[op], _tuple(made), _tuple(expected), strict=True):
        assert (why := off(name, one, other)) is None, why
'''
INPLACE = """
    if OUTPUTS[op][0] in (names := OPERANDS[op]):
        made = [given[names.index(n)] for n in OUTPUTS[op]]
        expected = [expected_in[names.index(n)] for n in OUTPUTS[op]]"""
EAGER_SIDE = "expected = EAGER[op](*expected_in, **scalars)"
OWN_SIDE = """with monkeypatch.context() as patch:
        patch.setattr(HOSTS[op], f"try_{op}", lambda *args, **kwargs: None)
        expected = PORTED[op](*expected_in, **scalars)"""
BITS = '''

def off(name, one, other):
    """Whether the output `name` has other bits than SGLang's own."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name}: {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
    whole = torch.contiguous_format
    bits = [x.clone(memory_format=whole).view(torch.uint8) for x in (one, other)]
    return None if torch.equal(*bits) else f"{name}: not SGLang's bits"
'''
END = """

def _tuple(value):
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-s"]))
"""
FIRST = """
    PORTED[op](*[None if one is None else one.clone() for one in given], **scalars)
    assert not {gate}.disabled, "not the bits of SGLang's own function"
    taken.clear()"""
"""Lines for a gate that compares bits: the first call of a signature runs SGLang's own function and the kernels."""
WATCHED = '''

def watched(op, monkeypatch):
    """A list that gets, for each call of `op`, whether the kernels did it."""
    taken = []
    original = getattr(HOSTS[op], f"try_{op}")

    def spy(*args, **kwargs):
        result = original(*args, **kwargs)
        taken.append(result is not None)
        return result

    monkeypatch.setattr(HOSTS[op], f"try_{op}", spy)
    return taken

'''
LEFT = '''

class Left(Exception):
    """The kernels did not take the call: SGLang's own code comes next."""


@pytest.mark.parametrize("op", {ops})
def test_calls_that_record_gradients_are_left_to_sglang(op, monkeypatch):
    original = getattr(HOSTS[op], f"try_{{op}}")

    def spy(*args, **kwargs):
        result = original(*args, **kwargs)
        if result is None:
            raise Left
        return result

    monkeypatch.setattr(HOSTS[op], f"try_{{op}}", spy)
    row = next(row for row in ROWS if row["op"] == op)
    given, scalars = arguments(row)
    named = zip(OPERANDS[op], given)
    floats = [n for n, x in named if x is not None and x.is_floating_point()]
    # Rather of a tensor that is not written: autograd has words of its own for that.
    name = min(floats, key=lambda n: n in OUTPUTS[op])
    given[OPERANDS[op].index(name)].requires_grad_()
    with torch.enable_grad(), pytest.raises(Left):
        PORTED[op](*given, **scalars)
'''
BENCHMARK = '''
def main():
    """Microseconds of GPU time per call, as a CUDA graph: SGLang's own code, and the port."""{mount}
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
                call = partial(PORTED[op], *given, **scalars)
                call()
                times.append(triton.testing.do_bench_cudagraph(call) * 1000)
            finally:
                setattr(host, name, kept)
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
            call = partial(side[row["op"]], *given, **scalars)
            call()
            times.append(triton.testing.do_bench_cudagraph(call) * 1000)
'''
BENCHMARK_END = """\
        old, new = times
        print(f"| {row['id']} | {old:.2f} | {new:.2f} | {old / new:.2f}x |")


if __name__ == "__main__":
    with torch.no_grad():
        main()
    sys.exit(0)
"""


def proof_files(task: Task, tree: Tree, modules: dict[str, str], tier: str) -> tuple[str, str]:
    """Sources of the test and the benchmark. `modules`: ported op -> the dotted module of its public function.

    Raises:
        UsageError: a row has a fill that only the judge makes.
    """
    made = _Proof(task, tree, modules, tier)
    return tensors_passed(task, modules, made.test()), tensors_passed(task, modules, made.benchmark())


class _Proof:
    """What both files are made of."""

    def __init__(self, task: Task, tree: Tree, modules: dict[str, str], tier: str) -> None:
        self.task, self.tree, self.modules = task, tree, modules
        self.new = any(module.startswith("sglang.kernels.kda_kernels") for module in modules.values())
        self.gated = tree.has_levels(task) and not self.new
        self.by_bits = is_gated_by_bits(tier, tree, task, self.new)
        self.own = tier == "exact" and not self.by_bits and not self.new
        """Whether the port promises the bits of SGLang's own function, and no gate compares them in a server."""
        eager = (task.path / "baseline" / "eager.py").read_text(encoding="utf-8")
        self.eager_imports, self.eager = _eager(eager, modules)
        self.hosts, self.host_imports = _hosts(tree, modules, set(re.findall(r"\w+", self.eager)))

    def test(self) -> str:
        """The test's source."""
        task, modules = self.task, self.modules
        rows = chosen(covered(task, modules))
        compared = BITS if self.own else comparison(task, modules)
        inplace = any(row.inplace for row in rows)
        left = [op for op in modules if any(_has_floats(row) for row in rows if row.op == op)] if not self.new else []
        text = self._head(
            "KDA's kernels and " + ("SGLang's own, bit for bit" if self.own else "the eager chain"),
            ABOUT_TEST.format(task=task.folder, most=MOST_BYTES >> 20, within="" if self.own else WITHIN),
            "test",
            ["import sys", "import pytest", *(() if self.own else self.eager_imports)],
        )
        text += SKIP + self._tables(rows, compared=not self.own) + makers(task, rows) + compared
        text += "" if self.own else self.eager
        mounted = MOUNTED.format(gate=gate_name(task.op)) if self.gated and not self.by_bits else ""
        text += mounted + ("" if self.new else WATCHED)
        test = TEST.format(
            name="sglangs_own" if self.own else "the_eager_chain",
            other="SGLang's own code, bit for bit" if self.own else "the eager chain",
            first=FIRST.format(gate=gate_name(task.op)) if self.by_bits else "",
            expected=OWN_SIDE if self.own else EAGER_SIDE,
            inplace=INPLACE if inplace else "",
        )
        if self.new:  # there is no other code that could do the call
            lines = test.splitlines(keepends=True)
            test = "".join(one for one in lines if "taken" not in one).replace("(row, monkeypatch)", "(row)")
        return _spaced(text + test + (LEFT.format(ops=json.dumps(left)) if left else "") + END)

    def benchmark(self) -> str:
        """The benchmark's source."""
        task, frozen = self.task, [row for row in self.task.workloads if row.op in self.modules]
        rows = [row for row in frozen if row.production] or frozen
        text = self._head(
            "A benchmark of KDA's kernels",
            ABOUT_BENCHMARK.format(task=task.folder),
            "benchmark",
            [
                "import sys",
                "from functools import partial",
                "import triton",
                "from sglang.utils import is_in_ci",
                *(self.eager_imports if self.new else ()),
            ],
        )
        text += (
            self._tables(rows, compared=False, outputs=False).lstrip("\n")
            + makers(task, rows)
            + (self.eager if self.new else "")
        )
        mount = f"\n    {gate_name(task.op)}.mount(None)" if self.gated and not self.by_bits else ""
        return _spaced(text + (NEW_BENCHMARK if self.new else BENCHMARK.replace("{mount}", mount)) + BENCHMARK_END)

    def _head(self, what: str, told: str, kind: str, more: list[str]) -> str:
        gate = [f"from {FACADE_MODULE} import {gate_name(self.task.op)}"] if self.gated else []
        lines = ["import json", "import torch", "from sglang.test.ci.ci_register import register_cuda_ci"]
        lines += [*more, *self.host_imports, *gate]
        if kind == "benchmark" and self.by_bits:
            lines.remove(gate[0])
        about = "\n\n".join(fill(part, WIDTH) for part in (f"{what}: {self.task.config.task.title}.", told))
        return HEAD.format(told=f"{about}\n", imports=_sorted(lines), ci=CI[self.tree.layout, kind])

    def _tables(self, rows: list[Workload], compared: bool, outputs: bool = True) -> str:
        task, modules = self.task, self.modules
        text = f"\nHOSTS = {{\n{self.hosts}}}\nPORTED = {{op: getattr(HOSTS[op], op) for op in HOSTS}}\n"
        text += operands(task, modules, outputs) + (tolerances(task, modules) if compared else "")
        return text + rows_text(task, rows)


def covered(task: Task, ops: Iterable[str]) -> list[Workload]:
    """The frozen rows and the thinned grid, without large inputs and without calls that the kernels do not take."""
    frozen = [row for row in task.workloads if row.op in ops]
    seen = {row.id for row in frozen}
    grid = [row for row in _thin(task) if row.op in ops and row.id not in seen]
    solution = task.load("solution")
    small = [row for row in frozen + grid if sum(spec.nbytes for spec in row.inputs.values()) <= MOST_BYTES]
    return [row for row in small if _kernels_take(solution, row)]


def _spaced(text: str) -> str:
    """The text with two empty lines before each definition on the top level."""
    return re.sub(r"\n+((?:@[^\n]*\n)*(?:def|class) )", r"\n\n\n\1", text)


def _has_floats(row: Workload) -> bool:
    return any(spec.dtype not in INTEGRAL for spec in row.inputs.values())


def _sorted(lines: Iterable[str]) -> str:
    """Imports in three groups, as SGLang's formatter has them."""

    def group(line: str) -> int:
        return 2 if " sglang" in line else 0 if line.split()[1] in sys.stdlib_module_names else 1

    def order(line: str) -> tuple[bool, str]:
        return line.startswith("from"), line

    found = sorted(set(lines), key=lambda line: (group(line), order(line)))
    parts = ["".join(f"{line}\n" for line in found if group(line) == number) for number in range(3)]
    return "\n".join(part for part in parts if part)


def _hosts(tree: Tree, modules: Mapping[str, str], taken: set[str]) -> tuple[str, list[str]]:
    """Lines of the table op -> module, and the imports that it needs; `taken` are names that mean something else."""
    imports, names = {}, {}
    for module in dict.fromkeys(modules.values()):
        package, _, name = module.rpartition(".")
        init = tree.root / package.replace(".", "/") / "__init__.py"
        if init.is_file() and name in _exposed(init.read_text(encoding="utf-8")):
            # The package may have another thing of this name, which `from` would import instead.
            imports[module], names[module] = "import importlib", f'importlib.import_module("{module}")'
            continue
        alias = f"{name}_module" if name in taken or name in modules else name
        if alias in names.values():
            alias = module.replace(".", "_")
        names[module] = alias
        imports[module] = f"from {package} import {name}" + (f" as {alias}" if alias != name else "")
    return "".join(f'    "{op}": {names[module]},\n' for op, module in modules.items()), list(imports.values())


def _thin(task: Task) -> list[Workload]:
    try:
        grid = task.load("bench.grid")
    except ModuleNotFoundError:
        return []
    return list(grid.thin(tuple(grid.grid())))


def _kernels_take(solution: object, row: Workload) -> bool:
    """Whether the kernels take a row's call, by checks on tensors without data or device."""
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


def _exposed(init: str) -> set[str]:
    """Names that a package may have, including strings, because its `__getattr__` may read names from a table."""
    found = set()
    for node in ast.walk(ast.parse(init)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def _eager(eager: str, modules: Iterable[str]) -> tuple[list[str], str]:
    """From the eager arm: the imports that its functions for these ops need, and the source of these functions."""
    asked = f"from .eager import {', '.join(modules)}\n"
    kept = prune({"__init__.py": asked, "eager.py": eager}, ["__init__.py"])["eager.py"]
    lines, imports, parts = kept.splitlines(keepends=True), [], []
    for node in ast.parse(kept).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(ast.unparse(node))
        elif not isinstance(node, ast.Expr):
            parts.append("".join(lines[node.lineno - 1 : node.end_lineno]))
    table = "".join(f'    "{op}": {op},\n' for op in modules)
    return imports, "\n\n# The eager chain.\n\n\n" + "\n\n".join(parts) + f"\n\n\nEAGER = {{\n{table}}}\n"
