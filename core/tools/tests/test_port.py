"""Ports on the trees of both pinned wheels: what is inserted, taken back, dispatched, recorded, and left alone."""

import ast
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.tools.tests.conftest import Kda
from kda_judge.arms.upstream import cache_folder, obtain
from kda_judge.contract.errors import ExitCode, MissingRequirement, UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task, all_tasks, checkout_root, find_task
from kda_judge.contract.workloads import Workload
from kda_judge.evidence import provenance
from kda_runtime import op as op_module
from kda_tools.port import (
    check_port,
    dispatch_edit,
    insertions,
    package_files,
    port_record,
    port_task,
    proof_files,
    row_source,
    support,
    tree_files,
    tree_format,
    upstream_tests,
)
from kda_tools.port.check_port import check_syntax
from kda_tools.port.dispatch_edit import imports
from kda_tools.port.insertions import Insertion, Patch
from kda_tools.port.layouts import DIFFUSION, FAMILIES, Layout, Tree, classes, find_tree, pin_of
from kda_tools.port.lean_ops import lean_module, op_modules
from kda_tools.port.package_files import KERNEL
from kda_tools.port.port_record import Checks
from kda_tools.port.port_task import Port, make_port, undo
from kda_tools.port.ported_arm import write_arm, write_files
from kda_tools.port.support import SUPPORT
from kda_tools.port.upstream_tests import find_tests, run_tests
from kda_tools.project.export.sources import runtime_files

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cutlass")

TASKS = [task.op for task in all_tasks() if task.family in FAMILIES]
IN_MODELS = {"causal_pad", "group_norm_silu_pad", "temb_modulation", "qkv_pack", "rounded_rmsnorm_modulate"}
NEW = {Layout.JIT_KERNEL: IN_MODELS, Layout.FACADE: IN_MODELS | {"norm_tanh_mul_add", "rounded_qknorm_rope"}}
"""Tasks whose ops a release has not, and a place for: a model's class calls them, or a facade offers them."""
HOMELESS = {
    Layout.JIT_KERNEL: {
        *("gelu_cat", "qknorm_rope_kv_store", "layernorm_modulate", "rounded_qknorm_rope"),
        *("silu_and_mul", "per_token_group_quant", "temperature_softmax"),
    },
    Layout.FACADE: {"qknorm_rope_kv_store"},
}
"""Tasks whose ops a release has not, nor a place for."""
MADE_OF = {"fused_layernorm_modulate": "fused_layernorm_modulate_raw"}
"""Ops that `register_custom_op` makes of a function, in which the dispatch then stands."""
LACKING = {Layout.JIT_KERNEL: {"topk_softmax", "moe_topk_sum"}, Layout.FACADE: set()}
"""Ops that a release has not, of tasks of which it has another one."""
WRAPPED = {"silu_and_mul_quant"}
"""Ops that are a call of another one's function in a release."""
WANTED = ("sglang/kernels/", "sglang/jit_kernel/", "sglang/multimodal_gen/", "sglang/srt/", "sglang/test/ci/")


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    """The text files of both wheels that a port reads, extracted."""
    found = {}
    for layout in Layout:
        pin = pin_of(find_task("norm_infer"), layout)
        try:
            wheel = obtain(pin, cache_folder(checkout_root()), offline=True)
        except MissingRequirement as absent:
            pytest.skip(str(absent))
        found[layout] = tmp_path_factory.mktemp(layout.name)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if (name.startswith(WANTED) and name.endswith((".py", ".md", ".cuh", ".cu", ".h"))) or name.count(
                    "/"
                ) == 1:
                    archive.extract(name, found[layout])
    return found


def hashes(folder: Path) -> dict[str, str]:
    """Path -> sha256 of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(params=list(Layout), ids=lambda layout: layout.value)
def tree(request: pytest.FixtureRequest, releases: dict[Layout, Path]) -> Tree:
    """A release's tree. Nothing is left in it."""
    return find_tree(releases[request.param])


# ---- what is inserted, and taken back -----------------------------------------------------------


def functions_of(text: str) -> dict[str, ast.FunctionDef]:
    """The first definition of every function on the top level."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in reversed(nodes)}


def test_every_op_is_ported_and_taken_back_byte_for_byte(tree: Tree) -> None:
    """All tasks into one tree, undone in another order than they came."""
    before = hashes(tree.root)
    ports = []
    ported = [op for op in TASKS if op not in HOMELESS[tree.layout]]
    for op in ported:
        port = make_port(find_task(op), tree)
        check_syntax(port)
        assert port.strangers == ()
        assert port.new == (op in NEW[tree.layout])
        insertions.write(port.patch, op)
        ports.append(port)
    assert {path for path, digest in hashes(tree.root).items() if before.get(path) != digest} >= {
        path for port in ports for path in port.patch.texts()
    }
    wanted = {op for task in ported for op in find_task(task).config.ops}
    assert {op for port in ports for op in port.modules} == wanted - WRAPPED - LACKING[tree.layout]
    for port in ports:
        _demand_dispatch(tree, port)
        _demand_lines(tree, port)
    for op in [*ported[1::2], *ported[::2]]:
        undo(find_task(op), tree)
    assert hashes(tree.root) == before


def _demand_dispatch(tree: Tree, port: Port) -> None:
    """The public functions are as they were, but for the statements in front of their bodies."""
    for op, module in port.modules.items():
        if port.new:
            continue
        path = tree.root / tree.module_path(module)
        place = MADE_OF.get(op, op)
        node = functions_of(path.read_text())[place]
        text = ast.unparse(node)
        assert f"try_{op}(" in text
        position = [f"try_{op}(" in ast.unparse(statement) for statement in node.body].index(True)
        assert position <= 1, "not in front of the body"
        rest = node.body[:position] + [one for one in node.body[position + 1 :] if "kda_result" not in ast.unparse(one)]
        original = functions_of(_original(tree, path))[place]
        assert [ast.dump(one) for one in rest] == [ast.dump(one) for one in original.body]
        for part in ("args", "returns", "decorator_list"):
            assert ast.dump(ast.Module([getattr(node, part)], [])) == ast.dump(
                ast.Module([getattr(original, part)], [])
            )


def _demand_lines(tree: Tree, port: Port) -> None:
    """What models' classes and functions call stands in front of their statements."""
    for site in classes(port.task, tree, port.tier):
        text = (tree.root / tree.module_path(site.module)).read_text()
        (node,) = [one for one in ast.parse(text).body if getattr(one, "name", "") == site.holder]
        assert f"{site.op}(" in ast.unparse(node) or f"kda_block('{site.layout}'" in ast.unparse(node)


def _original(tree: Tree, path: Path) -> str:
    """A file without what all ports of the tree inserted."""
    text = path.read_text()
    for memory in (tree.repository / insertions.MEMORY).glob("*.json"):
        for part in json.loads(memory.read_text())["inserted"].get(path.relative_to(tree.root).as_posix(), ()):
            text = text.replace(part, "", 1)
    return text


def test_what_the_facade_learns(releases: dict[Layout, Path]) -> None:
    tree = find_tree(releases[Layout.FACADE])
    texts = make_port(find_task("qknorm_rope"), tree).patch.texts()
    facade = texts["sglang/kernels/ops/diffusion/__init__.py"]
    assert '"sglang.kernels.kda_kernels.qknorm_rope:try_fused_inplace_qknorm_rope"' in facade
    scope: dict[str, object] = {}
    for name, value in (("_EXPORTS", ast.Dict), ("_SPECS", ast.Tuple)):
        found = [node for node in ast.parse(facade).body if isinstance(node, ast.AnnAssign)]
        scope[name] = next(node.value for node in found if getattr(node.target, "id", "") == name)
        assert isinstance(scope[name], value)
    exports = ast.literal_eval(scope["_EXPORTS"])  # type: ignore[arg-type]
    assert exports["KDA_QKNORM_ROPE"] == "sites.kda_qknorm_rope_site"
    assert exports["fused_inplace_qknorm_rope"] == "rope.qknorm_rope_jit", "the public name stays where it is"
    stage = texts["sglang/multimodal_gen/runtime/pipelines_core/stages/denoising.py"]
    assert '\n    ("lossless", KDA_QKNORM_ROPE),\n)\n' in stage
    assert "KDA_QKNORM_ROPE" in texts["sglang/multimodal_gen/test/unit/test_quality_fusion_lora.py"]
    init = texts["sglang/kernels/kda_kernels/qknorm_rope/__init__.py"]
    assert "replay_launches(kernels_only(" in init
    host = texts["sglang/kernels/ops/diffusion/rope/qknorm_rope_jit.py"]
    assert "if not round_norm_before_rope and not cache_has_full_width:\n        kda_result" in host
    other = make_port(find_task("group_norm_silu"), tree).patch.texts()
    assert "replay_launches" not in other["sglang/kernels/kda_kernels/group_norm_silu/__init__.py"], "launches cubins"
    found = [f"sglang/kernels/kda_kernels/{SUPPORT}/eager.py" in one for one in (texts, other)]
    assert found == [False, True], "what nobody records keeps what a signature's call remembers"
    new = make_port(find_task("norm_tanh_mul_add"), tree).patch
    registers = [any("torch.library" in text for text in one.values()) for one in (texts, new.texts())]
    assert registers == [False, True], "tracers see SGLang's own function, if it has one"
    assert '"fused_norm_tanh_mul_add": "sglang.kernels.kda_kernels.norm_tanh_mul_add"' in "".join(new.texts().values())
    assert not any("denoising" in path or "site" in path for path in new.texts())


def exact(op: str, folder: Path) -> Task:
    """A copy of a task that promises the bits of SGLang's own functions."""
    task = copied(op, folder)
    config = task.path / "config.toml"
    config.write_text(config.read_text().replace('numerics = "lossless"', 'numerics = "exact"'))
    return Task(task.path)


def test_what_promises_exact_bits_waits_for_no_level(releases: dict[Layout, Path], tmp_path: Path) -> None:
    port = make_port(exact("qknorm_rope", tmp_path), find_tree(releases[Layout.FACADE]))
    check_syntax(port)
    texts = port.patch.texts()
    site = texts["sglang/kernels/ops/diffusion/sites/kda_qknorm_rope_site.py"]
    assert 'KDA_QKNORM_ROPE = BitExactFusionGate("KDA qknorm_rope", per_signature=True)' in site
    assert '"KDA_QKNORM_ROPE": "sites.kda_qknorm_rope_site"' in texts["sglang/kernels/ops/diffusion/__init__.py"]
    assert not any("denoising" in path or "quality_fusion" in path for path in texts)
    assert not any("KDA_QKNORM_ROPE.mount" in text for text in texts.values())
    assert "| `qknorm_rope/` |" in texts["sglang/kernels/kda_kernels/README.md"]
    assert "; exact) |" in texts["sglang/kernels/kda_kernels/README.md"]
    test = texts["test/registered/kernels/ops/diffusion/test_kda_qknorm_rope.py"]
    assert "assert not KDA_QKNORM_ROPE.disabled" in test
    eager = make_port(exact("qknorm_rope", tmp_path / "older"), find_tree(releases[Layout.JIT_KERNEL]))
    assert not any("BitExact" in text or path.endswith("exact.py") for path, text in eager.patch.texts().items())


def test_a_task_of_another_family(releases: dict[Layout, Path], tmp_path: Path) -> None:
    task = copied("qknorm_rope", tmp_path, family="audio")
    with pytest.raises(UsageError, match=r"expected a task of diffusion or llm.*got one of audio; `kda export"):
        make_port(task, find_tree(releases[Layout.FACADE]))


def copied(op: str, folder: Path, family: str = DIFFUSION) -> Task:
    """A copy of a task that may be changed."""
    original = find_task(op).path
    copy = folder / family / original.name
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return Task(copy)


def test_a_runtime_that_has_changed_is_noticed() -> None:
    text = inspect.getsource(op_module)
    for there, instead in (
        ("_fake", "_made"),
        ("plain: ", "eager: "),
        (" five functions", " six functions"),
        ("_every.add(", "_ops.add("),
    ):
        with pytest.raises(
            UsageError, match=rf"kda_runtime/op\.py: expected .*, lacks: *{re.escape(there.strip(': '))}"
        ):
            op_modules(text.replace(there, instead))
    runtime = "".join(runtime_files().values())
    assert [words for words in support.WORDS if words not in runtime] == []


OPS = """
_op = partial(Op[Call], plan=plan, plain=_plain)  # all of them
ONE = Op("one", kernel=kernel, plan=plan, plain=_plain, exact=(best, _best))
TWO = _op(
    "two",
    exact=(plan, _plain),
)
other(plain=1, exact=True)
"""


@pytest.mark.parametrize(
    ("plain", "exact", "lines"),
    [
        (
            False,
            False,
            ("_op = partial(Op[Call], plan=plan)  # all of them", 'ONE = Op("one", kernel=kernel, plan=plan)'),
        ),
        (True, False, ("_op = partial(Op[Call], plan=plan, plain=_plain)  # all of them",)),
        (False, True, ('ONE = Op("one", kernel=kernel, plan=best)',)),
        (True, True, ('ONE = Op("one", kernel=kernel, plan=best, plain=_best)',)),
    ],
)
def test_ops_are_declared_with_one_plan(plain: bool, exact: bool, lines: tuple[str, ...]) -> None:
    text = OPS.replace("exact=(plan, _plain),", "")
    made = lean_module(text, plain, exact)
    assert set(lines) <= set(made.splitlines())
    assert "other(plain=1, exact=True)" in made
    if exact:
        with pytest.raises(UsageError, match=r"two.*expected plan beside exact"):
            lean_module(OPS, plain, exact)
    else:
        assert 'TWO = _op(\n    "two",\n)' in lean_module(OPS, plain, exact)


def test_a_checkout_has_its_python_below(releases: dict[Layout, Path], tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    for name in ("kernels", "multimodal_gen"):
        (tmp_path / "python" / "sglang").mkdir(exist_ok=True)
        (tmp_path / "python" / "sglang" / name).symlink_to(releases[Layout.FACADE] / "sglang" / name)
    (tmp_path / "python" / "sglang" / "__init__.py").touch()
    tree = find_tree(tmp_path)
    paths = make_port(find_task("rotary_embedding"), tree).patch.texts()
    assert "test/registered/kernels/ops/diffusion/test_kda_rotary_embedding.py" in paths
    assert "python/sglang/kernels/kda_kernels/rotary_embedding/__init__.py" in paths


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(HOMELESS[Layout.JIT_KERNEL]))
def test_a_new_op_has_no_place_without_levels_that_keep_it_off(tree: Tree, op: str) -> None:
    if op in HOMELESS[tree.layout]:
        with pytest.raises(UsageError, match=rf"{op}: sglang {tree.layout.value} has no function of it"):
            make_port(find_task(op), tree)
    else:
        assert make_port(find_task(op), tree).modules


REGISTERED = """from x import register_custom_op, replay_launches

@replay_launches
def gelu_raw(x):
    return x

gelu = register_custom_op(gelu_raw, op_name="gelu")
"""


def test_an_op_made_of_a_function_is_dispatched_there(tmp_path: Path) -> None:
    def gelu(x: Any) -> Any: ...

    def in_place(x: Any) -> None: ...

    where = tmp_path / "gelu.py"
    (_, front) = dispatch_edit.dispatch(REGISTERED, where, "p", [gelu])
    assert front.line == REGISTERED.splitlines().index("def gelu_raw(x):") + 1
    in_place.__name__ = "gelu"
    with pytest.raises(UsageError, match=r"gelu\.py:4: gelu_raw: expected a result, or no replay_launches"):
        dispatch_edit.dispatch(REGISTERED, where, "p", [in_place])


def test_folders_that_are_no_tree(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a checkout of SGLang or a folder with sglang/"):
        find_tree(tmp_path)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    with pytest.raises(UsageError, match=r"expected the layout of 0\.5\.12\.post1 or 0\.5\.23, found neither"):
        find_tree(tmp_path)
    (tmp_path / "sglang" / "jit_kernel" / "diffusion").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"ltx2_rotary\.py: expected the module of apply_ltx2_split_rotary_emb"):
        make_port(find_task("rotary_embedding"), find_tree(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def apply_rotary_embedding(", "def renamed(", "expected a function apply_rotary_embedding on its top level"),
        ("interleaved: bool = False", "pairs: bool = False, *, more: int", "has the argument more, without a default"),
        ("sin: torch.Tensor,", "*sin: torch.Tensor,", "expected named parameters"),
    ],
)
def test_a_module_that_became_another(
    releases: dict[Layout, Path], tmp_path: Path, old: str, new: str, words: str
) -> None:
    kernels, models = "sglang/jit_kernel/diffusion/triton", "sglang/multimodal_gen/runtime/models/dits"
    files = (f"{kernels}/rotary.py", f"{kernels}/ltx2_rotary.py", f"{models}/mova_video_dit.py", f"{models}/helios.py")
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        text = (releases[Layout.JIT_KERNEL] / path).read_text()
        (tmp_path / path).write_text(text.replace(old, new) if path.endswith("/rotary.py") else text)
    (tmp_path / "sglang" / "__init__.py").touch()
    with pytest.raises(UsageError) as refused:
        make_port(find_task("rotary_embedding"), find_tree(tmp_path))
    assert words in str(refused.value)
    assert "rotary.py" in str(refused.value)


def patched(folder: Path) -> Patch:
    (folder / "a.py").write_bytes(b"one\r\ntwo\r\n")
    return Patch(folder, created={"new/b.py": "x = 1\n"}, inserted={"a.py": [Insertion(1, "mine = 1\n")]})


def test_a_patch_keeps_line_ends_and_says_what_it_does(tmp_path: Path) -> None:
    patch = patched(tmp_path)
    assert "+mine = 1" in patch.difference()
    assert "new file mode 100644\n--- /dev/null\n+++ b/new/b.py\n" in patch.difference()
    insertions.write(patch, "op")
    assert (tmp_path / "a.py").read_bytes() == b"one\r\nmine = 1\r\ntwo\r\n"
    with pytest.raises(UsageError, match="is ported to this tree already"):
        insertions.write(patch, "op")
    insertions.undo(tmp_path, "op")
    assert (tmp_path / "a.py").read_bytes() == b"one\r\ntwo\r\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py"]
    with pytest.raises(UsageError, match="nothing to undo"):
        insertions.undo(tmp_path, "op")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("a.py", b"one\r\ntwo\r\n# changed\r\nmine = 1\r\n"),
        ("a.py", b"one\r\nmine = 1\r\nmine = 1\r\ntwo\r\n"),
        ("new/b.py", b"x = 2\n"),
    ],
)
def test_what_was_changed_since_is_not_taken_back(tmp_path: Path, path: str, content: bytes) -> None:
    insertions.write(patched(tmp_path), "op")
    (tmp_path / path).write_bytes(content)
    before = hashes(tmp_path)
    with pytest.raises(UsageError, match="changed since op was ported"):
        insertions.undo(tmp_path, "op")
    assert hashes(tmp_path) == before


def test_a_port_that_broke_off_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = patched(tmp_path)
    before = hashes(tmp_path)
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: write(path, data) if "b.py" in path.name else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        insertions.write(patch, "op")
    monkeypatch.undo()
    insertions.undo(tmp_path, "op")
    assert hashes(tmp_path) == before


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    patch = patched(tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "b.py").write_text("yours")
    with pytest.raises(UsageError, match=r"b\.py: expected a place for a new file"):
        insertions.write(patch, "op")
    assert not (tmp_path / insertions.MEMORY).exists()


# ---- in a process: platforms, the recorder, the grid --------------------------------------------

PLATFORMS = """
import os, sys, types
from pathlib import Path
from types import SimpleNamespace
import torch
from kda_judge.arms import sglang_standins
from kda_judge.arms.upstream import activate

plan = {plan!r}
sys.modules["torch_npu"] = types.ModuleType("torch_npu")
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(warp_size=32)
for platform in ("npu", "hip", "cpu", "cuda"):
    if os.fork():
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, platform
        continue
    for name in ("cuda", "hip", "cpu", "npu"):
        setattr(sglang_standins.Platform, f"is_{{name}}", staticmethod(lambda name=name: name == platform))
    activate(Path({tree!r}), plan["version"])
    from importlib import import_module
    if plan["gate"]:
        gate = getattr(import_module(plan["gate"][0]), plan["gate"][1])
        assert not gate.mounted
        gate.mount(None)
    module = import_module(plan["functions"]["apply_rotary_embedding"])
    public, mine = module.apply_rotary_embedding, getattr(module, "try_apply_rotary_embedding")
    x, table = torch.ones(2, 3, 4, dtype=torch.float16), torch.ones(2, 2, dtype=torch.float16)
    assert (public.__name__ == "apply_rotary_embedding_native") == (platform in ("npu", "cpu")), public
    # Interpreted, the kernels take CPU tensors: what keeps them off is the platform alone.
    assert (mine(x, table, table) is None) == (platform != "cuda")
    assert "triton" in sys.modules or platform != "cuda"
    if platform == "cpu":
        assert public(x, table, table).shape == x.shape
    if platform == "cuda":
        assert torch.equal(public(x, table, table), mine(x, table, table))
        assert mine(x.double(), table, table) is None, "a dtype that the kernels do not take"
        assert mine(x, table[:1, :1], table) is None, "a call without meaning"
        x.requires_grad_()
        assert mine(x, table, table) is None, "gradients"
        with torch.no_grad():
            assert mine(x, table, table) is not None
        if plan["gate"]:
            gate.unmount(None)
            with torch.no_grad():
                assert mine(x, table, table) is None, "an exact request"
    os._exit(0)
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    named = {"PYTHONPATH": import_path(), "TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp", **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=named)


def test_fallbacks_of_other_platforms_stay(tree: Tree, tmp_path: Path) -> None:
    """On NPU, ROCm and CPU a port changes nothing; where it is asked, what it does not take is left."""
    port = make_port(find_task("rotary_embedding"), tree)
    arm = write_arm(port, tmp_path / "arm")
    fallback = "jit_kernel/diffusion/triton/npu_fallback.py"
    if tree.layout is Layout.FACADE:
        fallback = "kernels/ops/diffusion/common/fallback_npu.py"
    target = arm / "tree" / "sglang" / fallback
    shutil.copy(tree.root / "sglang" / fallback, target)
    plan = json.loads((arm / "arm.json").read_text())
    done = python(PLATFORMS.format(plan=plan, tree=str(arm / "tree")))
    assert done.returncode == 0, done.stderr


BITS = """
import importlib, sys
sys.path.insert(0, {folder!r})
import arm
import torch
from importlib import import_module

plan = arm._plan
gate = getattr(import_module(plan["gate"][0]), plan["gate"][1])
gate.verified_sigs = set()
name, module = {name!r}, plan["functions"][{name!r}]
host, package = import_module(module), import_module({package!r})
mine, kernel = getattr(package, "try_" + name), getattr(import_module({package!r} + ".kernel"), name)
calls, other_bits = [], []

def own(*args, **kwargs):
    # SGLang's own function, which asks the port first and needs a GPU: here the kernels themselves, or other bits.
    if (made := mine(*args, **kwargs)) is not None:
        return made
    calls.append(args)
    made = kernel(*args, **kwargs)
    if other_bits:
        (kwargs.get("q", args[0] if args else None) if made is None else made).mul_(2)
    return made

own.__signature__ = __import__("inspect").signature(kernel)
setattr(host, name, own)
{calls}
"""
BITS_IN_PLACE = """
w, table, at = torch.ones(64).half(), torch.rand(3, 64), torch.arange(3)

def given(heads=2):
    torch.manual_seed(0)
    packed = torch.randn(3, 2 * heads, 64).half()
    return packed[:, :heads], packed[:, heads:]

def run(heads=2):
    q, k = given(heads)
    before = len(calls)
    own(q, k, w, w, table, at, is_neox=True)
    right = given(heads)
    kernel(*right, w, w, table, at, is_neox=True)
    return len(calls) - before, torch.equal(k, right[1]), torch.equal(q, right[0])

assert run() == (1, True, True), "first seen: both run, and the caller gets SGLang's"
assert run() == (0, True, True), "from then on the kernels alone"
assert run(heads=4) == (1, True, True), "another signature is compared as well"
other_bits.append(True)
assert run() == (0, True, True), "verified before"
assert run(heads=1) == (1, True, False), "the caller gets SGLang's bits, q doubled"
assert gate.disabled and mine(*given(), w, w, table, at, is_neox=True) is None, "and the kernels are off for good"
"""
BITS_INTO = """
x, w = torch.randn(4, 64).half(), torch.ones(64).half()
made = own(x, w, None, 1e-6)
assert len(calls) == 1 and torch.equal(own(x, w, None, 1e-6), made) and len(calls) == 1
assert mine(x.double(), w, None, 1e-6) is None and not gate.disabled, "what the kernels do not take says nothing"
out = torch.empty_like(x)
assert own(x, w, None, 1e-6, False, out) is out and torch.equal(out, made) and len(calls) == 2
other_bits.append(True)
out = torch.empty_like(x)
assert torch.equal(own(x, w, None, 1e-5, False, out), 2 * kernel(x, w, None, 1e-5)) and gate.disabled
"""


@pytest.mark.parametrize(
    ("op", "name", "calls"),
    [("qknorm_rope", "fused_inplace_qknorm_rope", BITS_IN_PLACE), ("norm_infer", "norm_infer", BITS_INTO)],
)
def test_exact_bits_are_compared_when_a_signature_is_first_seen(
    releases: dict[Layout, Path], tmp_path: Path, op: str, name: str, calls: str
) -> None:
    """Of calls in place and into a given tensor, too, where the comparison must not be of a tensor with itself."""
    port = make_port(exact(op, tmp_path), find_tree(releases[Layout.FACADE]))
    write_arm(port, tmp_path / "arm")
    done = python(BITS.format(folder=str(tmp_path), name=name, package=port.package, calls=calls))
    assert done.returncode == 0, done.stderr


def test_the_grid_of_exact_kernels_runs_without_a_gpu(releases: dict[Layout, Path], tmp_path: Path) -> None:
    port = make_port(exact("qknorm_rope", tmp_path), find_tree(releases[Layout.FACADE]))
    with check_port.arm(port) as folder:
        grid = check_port.run_grid(port, folder, ["qwen-19x*"], "cpu")
    assert [row.id for row in grid.taken] == ["qwen-19x24x128"], grid.lines()


def test_a_port_with_exact_bits_is_of_the_ops_that_can(releases: dict[Layout, Path]) -> None:
    """k06's scale and shift can, its LayerNorms cannot: they stay SGLang's."""
    port = make_port(find_task("fuse_scale_shift"), find_tree(releases[Layout.FACADE]), exact=True)
    texts = port.patch.texts()
    package = "sglang/kernels/kda_kernels/fuse_scale_shift"
    assert "    plan=exact_plan,\n" in texts[f"{package}/kernel/scale_shift.py"]
    assert f"sglang/kernels/kda_kernels/{SUPPORT}/exact.py" in texts
    assert "try_fuse_scale_shift_kernel" in texts[f"{package}/__init__.py"]
    assert not any("try_fuse_layernorm" in text for text in texts.values())
    assert "BitExactFusionGate" in texts["sglang/kernels/ops/diffusion/sites/kda_fuse_scale_shift_site.py"]
    assert not any("denoising" in path for path in texts), "no level of a request decides"
    with check_port.arm(port) as folder:
        grid = check_port.run_grid(port, folder, ["qwen-19x3072-row", "*select01*"], "cpu")
    assert ([row.id for row in grid.taken], grid.failed) == (["qwen-19x3072-row"], ()), grid.lines()
    with pytest.raises(UsageError, match="--exact: k05_norm_scale_shift: no op of it has an exact mode"):
        make_port(find_task("norm_scale_shift"), find_tree(releases[Layout.FACADE]), exact=True)


SWITCHED_OFF = """
import importlib, os, sys
sys.path.insert(0, {folder!r})
import arm  # which takes SGLang's variables out of the environment
import torch

package = importlib.import_module({package!r})
x, table = torch.ones(2, 3, 4, dtype=torch.float16), torch.ones(2, 2, dtype=torch.float16)
for value in ("0", "1"):
    os.environ["SGLANG_DISABLE_KDA_KERNELS"] = value
    assert (importlib.reload(package).try_apply_rotary_embedding(x, table, table) is None) == (value == "1")
"""


def test_a_variable_turns_the_kernels_off(tree: Tree, tmp_path: Path) -> None:
    port = make_port(find_task("rotary_embedding"), tree)
    write_arm(port, tmp_path / "arm")
    done = python(SWITCHED_OFF.format(folder=str(tmp_path), package=port.package))
    assert done.returncode == 0, done.stderr


def package_of(port: Port) -> dict[str, str]:
    """Files of the package a port brings, by their paths in it."""
    begin = port.tree.package(port.task) + "/"
    return {path.removeprefix(begin): text for path, text in port.patch.created.items() if path.startswith(begin)}


def test_what_nobody_asks_for_stays_here(tree: Tree) -> None:
    port = make_port(find_task("norm_infer"), tree)
    files = package_of(port)
    assert "_every" not in "".join(port.patch.shared.values()), "a list of all ops is for tuning"
    assert "hooks(" not in files["kernel/__init__.py"]
    assert "def _plain" not in files["kernel/norm.py"], "SGLang's own function does what the kernels do not take"
    assert not [name for name in files if name.endswith(".toml")]
    assert "tomli" not in "".join(files.values())
    exact_one = package_of(make_port(find_task("fuse_scale_shift"), tree, exact=True))
    assert "kernel/select01.py" not in exact_one
    tables = {name: json.loads(one["kernel/tuned.json"]) for name, one in (("exact", exact_one), ("norm", files))}
    assert (set(tables["exact"]), set(tables["norm"])) == ({"scale_shift"}, {"norm"})


def own_files(port: Port) -> dict[str, str]:
    """The Python files that a port alone brings into a tree, by their paths, without its test and benchmark."""
    files = {**port.patch.created, **port.patch.shared}
    return {
        path: text for path, text in files.items() if path.endswith(".py") and "sglang/" in path and "_kda_" not in path
    }


def words(node: ast.AST) -> Counter[str]:
    """The names that code names, in strings too, but not in docstrings."""
    found: Counter[str] = Counter()
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            found[one.id] += 1
        elif isinstance(one, ast.Attribute):
            found[one.attr] += 1
        elif isinstance(one, ast.alias):
            found[one.name] += 1
        elif isinstance(one, ast.Constant):
            found.update(re.findall(r"\w+", str(one.value)))
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
            found.subtract(re.findall(r"\w+", str(one.value.value)))
    return found


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes, constants and methods of a module, with their names."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((each.id, each) for one in names for each in ast.walk(one) if isinstance(each, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
            methods = [one for one in node.body if isinstance(node, ast.ClassDef) and isinstance(one, ast.FunctionDef)]
            yield from ((one.name, one) for one in methods)


CALLED_FROM_OUTSIDE = {"data_ptr", "mount", "unmount"}
"""Methods that Triton and SGLang call."""


def test_nothing_in_a_port_is_unreachable_or_missing(tree: Tree, tmp_path: Path) -> None:
    """No function, class, constant or method that nothing names; no import of what is not there; no unknown name."""
    for op in (one for one in TASKS if one not in HOMELESS[tree.layout]):
        files = own_files(make_port(find_task(op), tree))
        assert len(files) > 8, op
        trees = {path: ast.parse(text) for path, text in files.items()}
        named = sum(map(words, trees.values()), Counter())
        for path, module in trees.items():
            for name, node in definitions(module):
                hook = name.startswith("__") or name in CALLED_FROM_OUTSIDE
                assert hook or named[name] > words(node)[name], (path, name)
            for node in ast.walk(module):
                if isinstance(node, ast.ImportFrom) and node.level:
                    assert all(is_there(trees, path, node, one.name) for one in node.names), (path, ast.unparse(node))
            (tmp_path / op / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / op / path).write_text(files[path])
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(tmp_path)]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def is_there(trees: dict[str, ast.Module], path: str, node: ast.ImportFrom, name: str) -> bool:
    """Whether a relative import leads to a module of the port, or to a name that one defines or imports."""
    place = Path(path).parents[node.level - 1].joinpath(*(node.module or "").split("."))
    if f"{place / name}.py" in trees or f"{place / name}/__init__.py" in trees:
        return True
    module = trees.get(f"{place}.py") or trees.get(f"{place}/__init__.py") or ast.Module([], [])
    imported = {each.name for one in module.body if isinstance(one, ast.ImportFrom) for each in one.names}
    return name in imported.union(found for found, _ in definitions(module))


def test_ports_share_one_package(releases: dict[Layout, Path], tmp_path: Path) -> None:
    """It has what its ports need, whichever came first, and a later port's patch only adds to it."""
    tree = find_tree(shutil.copytree(releases[Layout.FACADE], tmp_path / "tree"))
    folder = tree.root / "sglang/kernels/kda_kernels" / SUPPORT
    first, second = find_task("norm_infer"), find_task("causal_pad")
    alone = make_port(second, tree).patch.shared
    insertions.write(make_port(first, tree).patch, first.op)
    before = hashes(folder)
    port = make_port(second, tree)
    patch = port.patch.difference()
    assert f"+++ b/sglang/kernels/kda_kernels/{SUPPORT}/op_with_plain.py" in patch
    assert f"{SUPPORT}/tuned_table.py" not in patch, "the first port brought all that both need of it"
    insertions.write(port.patch, second.op)
    with check_port.arm(make_port(first, tree)) as arm:
        grid = check_port.run_grid(make_port(first, tree), arm, ["zimage-rms-4096x128"], "cpu")
    assert (len(grid.taken), grid.failed) == (1, ()), "with an `Op` that has all that both need"
    undo(first, tree)
    assert {path: (tree.root / path).read_text() for path in alone} == alone
    insertions.write(make_port(first, tree).patch, first.op)
    undo(second, tree)
    assert hashes(folder) == before
    init = folder.with_name(first.op) / "__init__.py"
    text = init.read_text()
    init.write_text(f"{text}(\n")
    with pytest.raises(UsageError, match=r"norm_infer/__init__\.py:\d+: expected Python"):
        make_port(second, tree)
    init.write_text(text)
    (folder / "op.py").write_text("# of another version\n")
    for call in (lambda: make_port(second, tree), lambda: undo(first, tree)):
        with pytest.raises(UsageError, match=r"kda_support/op\.py: expected what this version .*, got another file"):
            call()


def test_new_ops_keep_their_plain_path(releases: dict[Layout, Path]) -> None:
    port = make_port(find_task("norm_tanh_mul_add"), find_tree(releases[Layout.FACADE]))
    files = package_of(port)
    assert "def _plain" in files["kernel/norm_tanh_mul_add.py"]
    recorded = port.patch.shared[f"sglang/kernels/kda_kernels/{SUPPORT}/recorded.py"]
    assert "def whole" in recorded
    assert "def kernels_only" not in recorded
    assert "No model calls these ops yet" in files["README.md"]


@pytest.mark.parametrize("op", ["qknorm_rope", "moe_routing", "temperature_softmax"])
def test_files_are_as_sglangs_formatter_has_them(releases: dict[Layout, Path], tmp_path: Path, op: str) -> None:
    port = make_port(find_task(op), find_tree(releases[Layout.FACADE]))
    files = package_of(port)
    for name, digest in json.loads(files["provenance.json"])["files"].items():
        assert hashlib.sha256(files[name].encode()).hexdigest() == digest, name
    for path, text in {**port.patch.created, **port.patch.shared}.items():
        if path.endswith(".py"):
            (tmp_path / "sglang" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "sglang" / path).write_text(text)
    for name in files:
        if name.endswith(".py"):
            assert files[name].startswith("# SPDX-License-Identifier: Apache-2.0\n"), name
            assert files[name].count("SPDX-License-Identifier") == 1
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["format", "--check"], ["check", "--select", "F,I", "--config", tree_format.CONFIG]):
        command = [*ruff, *words, "--line-length", "88", "--isolated", str(tmp_path / "sglang")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_what_is_inserted_is_as_sglangs_formatter_has_it(releases: dict[Layout, Path], tmp_path: Path) -> None:
    """Imports in their places, lines in models no wider than there: ruff passes each file that it passes without them.

    k02, k03 and k06 insert names into one list of imports, k02 an import into a file without others of SGLang's. As the
    tasks state them, k11's and k14's lines are too wide for their places.
    """
    tree = find_tree(shutil.copytree(releases[Layout.FACADE], tmp_path / "tree"))
    ruff, given = [sys.executable, "-m", "ruff"], ["--line-length", "88", "--isolated", "--no-cache"]
    checks = (["format", "--check"], ["check", "--select", "I", "--config", tree_format.CONFIG])
    for op in ("qknorm_rope", "qkv_pack", "rounded_qknorm_rope", "fuse_scale_shift", "rotary_embedding"):
        patch = make_port(find_task(op), tree).patch
        paths = [path for path in patch.inserted if path.endswith(".py")]
        assert paths
        for path in paths:
            for words in checks:
                command = [*ruff, *words, *given]
                before = subprocess.run([*command, str(tree.repository / path)], capture_output=True).returncode
                (tmp_path / "after.py").write_text(patch.texts()[path])
                done = subprocess.run([*command, str(tmp_path / "after.py")], capture_output=True, text=True)
                assert done.returncode <= before, (op, path, done.stdout)
        insertions.write(patch, op)


def test_an_import_of_another_port_keeps_the_empty_line_above_it(tmp_path: Path) -> None:
    """Undone, a port finds its lines as it wrote them, whichever comes first."""
    text = "import torch\n\n\ndef f(x):\n    return x\n"
    (tmp_path / "m.py").write_text(text)
    for op, module in (("b", "sglang.kda_b"), ("a", "sglang.kda_a")):
        patch = insertions.Patch(tmp_path)
        patch.insert("m.py", *imports(patch.read("m.py"), tmp_path / "m.py", module, [f"try_{op}"]))
        insertions.write(patch, op)
    assert (tmp_path / "m.py").read_text().startswith("import torch\n\nfrom sglang.kda_b import try_b\n")
    insertions.undo(tmp_path, "b")
    insertions.undo(tmp_path, "a")
    assert (tmp_path / "m.py").read_text() == text


def test_without_a_formatter_the_port_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tree_format.shutil, "which", lambda *_, **__: None)
    assert tree_format.formatted({"a.py": "x  = 1\n"}) == {"a.py": "x  = 1\n"}
    assert "files are not formatted" in capsys.readouterr().err
    monkeypatch.undo()
    assert tree_format.formatted({"a/b.py": "x  = 1\n", "b.json": "{ }"}) == {"a/b.py": "x = 1\n", "b.json": "{ }"}
    with pytest.raises(UsageError, match="expected files of Python"):
        tree_format.formatted({"a.py": "x  = \n"})


def test_the_readme_of_a_port_is_true_in_a_tree(tree: Tree) -> None:
    readme = package_of(make_port(find_task("fuse_scale_shift"), tree))["README.md"]
    for stays in ("asks `try_fuse_scale_shift_kernel` first", "Numerics: lossless", "SGLANG_DISABLE_KDA_KERNELS=1"):
        assert stays in readme
    for goes in ("why_not", "plain PyTorch", "launcher", "from sglang"):
        assert goes not in readme.partition("## What it computes")[0]
    assert ("no quality levels" in readme) == (tree.layout is Layout.JIT_KERNEL)


def test_bits_are_only_claimed_where_they_are_compared(
    releases: dict[Layout, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kda_tools.project.export.readme.published_runs", lambda *_: {})
    port = make_port(find_task("silu_and_mul"), find_tree(releases[Layout.FACADE]), exact=True)
    readme = package_of(port)["README.md"]
    assert "Numerics: exact, made to give the bits of SGLang's own kernels. Its test compares them." in readme
    assert "Not measured yet." in readme


RECORDER = """
import importlib, sys
sys.path.insert(0, {folder!r})
arm = importlib.import_module("arm")
from importlib import import_module
import torch
from sglang.kernels.ops.diffusion.common import fast_launch
package = {package!r}
kernel = import_module(package + ".kernel")
support = package.rpartition(".")[0] + ".kda_support"
kernels_only = import_module(support + ".recorded").kernels_only
import_module(support + ".launch").Launch.run = lambda *_: None  # what is left is what the wrapper does
seen = []
class Watched(fast_launch._LaunchOnly):
    def __torch_dispatch__(self, *args, **kwargs):
        result = super().__torch_dispatch__(*args, **kwargs)
        seen.append(self.violation)
        return result
fast_launch._LaunchOnly = Watched

def violation(function, *args, **kwargs):
    seen.clear()
    out, _ = fast_launch._record(function, args, kwargs, [one for one in args if isinstance(one, torch.Tensor)])
    return out, next((one for one in seen if one), None)

{calls}
"""
INTO = """
x, w = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
assert violation(kernel.norm_infer, x, w, None, 1e-6)[1] is None
run = kernels_only(kernel.norm_infer)
assert violation(run, x, w, None, 1e-6)[1] is None
out = torch.empty_like(x)
made, why = violation(run, x, w, None, 1e-6, True, out)
assert why is None and made is out
assert violation(run, x.double(), w, None, 1e-6) == (None, None), "a call that is left records as nothing"
assert violation(kernels_only(kernel.triton_one_pass_rms_norm), x, w, 1e-6)[1] is None
"""
IN_PLACE = """
q, k = torch.ones(3, 2, 64, dtype=torch.bfloat16), torch.ones(3, 1, 64, dtype=torch.bfloat16)
w, table, at = torch.ones(64, dtype=torch.bfloat16), torch.ones(3, 64), torch.arange(3)
made, why = violation(kernels_only(kernel.fused_inplace_qknorm_rope), q, k, w, w, table, at, is_neox=False)
assert why is None and made is q
"""


@pytest.mark.parametrize(("op", "calls"), [("norm_infer", INTO), ("qknorm_rope", IN_PLACE)])
def test_upstreams_recorder_sees_launches_alone(
    releases: dict[Layout, Path], tmp_path: Path, op: str, calls: str
) -> None:
    """`replay_launches` gives up on whatever but allocations and launches happens inside."""
    port = make_port(find_task(op), find_tree(releases[Layout.FACADE]))
    write_arm(port, tmp_path / "arm")
    done = python(RECORDER.format(folder=str(tmp_path), package=port.package, calls=calls))
    assert done.returncode == 0, done.stderr


def test_the_grid_runs_through_the_ported_function(tree: Tree, monkeypatch: pytest.MonkeyPatch, kda: Kda) -> None:
    """The difference first, then what was checked; a kernel that is wrong is found, and nothing is written."""
    before = hashes(tree.root)
    command = ("port", "rotary_embedding", "--sglang", str(tree.root), "--rows", "ltx2-1x126x2048", "--device", "cpu")
    code, out, err = kda(*command)
    assert (code, out.splitlines()[0][:16]) == (ExitCode.OK, "diff --git a/sgl")
    assert "grid: 1 rows on the CPU, in Triton's interpreter ...\n" in err
    assert "CPU, in Triton's interpreter: 1 of 1 rows right, done by the port's kernels\n" in err
    collect = package_files.package_files

    def broken(task: Task, layout: Layout, package: str, new: bool, exact: bool) -> dict[str, str]:
        files = collect(task, layout, package, new, exact)
        name = f"{KERNEL}/ltx2_rotary.py"
        assert "tl.fma(-b" in files[name]
        return {**files, name: files[name].replace("tl.fma(-b", "tl.fma(b")}

    monkeypatch.setattr(port_task, "package_files", broken)
    code, _, err = kda(*command, "--write")
    assert code == ExitCode.UNFIT_ROWS, err
    assert hashes(tree.root) == before


def test_upstreams_own_tests_are_found_and_start(releases: dict[Layout, Path], tmp_path: Path) -> None:
    """Without a GPU they are collected, so their imports work beside the stand-ins, and that none ran is said."""
    port = make_port(find_task("fuse_scale_shift"), find_tree(releases[Layout.JIT_KERNEL]))
    assert [path.name for path in find_tests(port)] == ["test_qwen_image_modulation.py"]
    (one,) = run_tests(port, write_arm(port, tmp_path / "arm"))
    import torch

    if torch.cuda.is_available():
        assert one.ran, one.outcome
    else:
        assert one.outcome == "not run: its 288 tests need a GPU"
        assert not one.ran


SHIPPED = {
    ("fused_add_rmsnorm", Layout.JIT_KERNEL): ["test_fused_add_rmsnorm.py", "test_rmsnorm.py"],
    ("norm_scale_shift", Layout.FACADE): ["test_layernorm_cutedsl_dispatch.py"],
    ("group_norm_silu", Layout.FACADE): ["test_latent_upsampler_group_norm_silu.py"],
    ("qknorm_rope", Layout.FACADE): ["test_flux3_action.py"],
}


@pytest.mark.parametrize(("op", "layout"), list(SHIPPED))
def test_upstreams_tests_are_found_in_every_folder_that_has_some(
    releases: dict[Layout, Path], op: str, layout: Layout
) -> None:
    port = make_port(find_task(op), find_tree(releases[layout]))
    assert [path.name for path in find_tests(port)] == SHIPPED[op, layout]


OWN_TEST = """
import pytest
import torch


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("is_neox", [False, True])
def test_as_flashinfer(width, is_neox):
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    from sglang.jit_kernel.diffusion.qknorm_rope import fused_inplace_qknorm_rope

    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 2, 64).half()
    angles = torch.rand(9, width // 2)
    cache, positions = torch.cat([angles.cos(), angles.sin()], -1), torch.tensor([8, 0, 3])
    weight = torch.ones(64).half()
    wanted = [(x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)) for x in (q, k)]
    flat = [x.reshape(3, -1) for x in wanted]
    apply_rope_with_cos_sin_cache_inplace(positions, *flat, 64, cache, is_neox)
    fused_inplace_qknorm_rope(q, k, weight, weight, cache, positions, is_neox=is_neox, rope_dim=width)
    for made, right in zip((q, k), flat):
        torch.testing.assert_close(made.float(), right.view(3, 2, 64), atol=4e-3, rtol=4e-3)


def test_that_fails():
    assert WRONG, "as it should"


def test_that_needs_the_whole_gpu(request):
    if hasattr(request.config, "workerinput"):  # of several processes
        raise torch.OutOfMemoryError("CUDA out of memory")
"""


@pytest.mark.parametrize("right", [True, False])
def test_upstreams_tests_run_the_port_and_say_whose_calls_they_were(
    releases: dict[Layout, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """In Triton's interpreter, by a test of our own in SGLang's place: that one of SGLang's has run needs a GPU."""
    tree = find_tree(releases[Layout.JIT_KERNEL])
    own = tree.root / "sglang/jit_kernel/tests/diffusion/test_own_qknorm_rope.py"
    monkeypatch.setattr(upstream_tests, "has_gpu", lambda: True)
    monkeypatch.setattr(upstream_tests, "WORKERS", 2)
    monkeypatch.setattr(upstream_tests, "find_tests", lambda _: [own])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    port = make_port(find_task("qknorm_rope"), tree)
    try:
        own.write_text(OWN_TEST.replace("WRONG", str(right)))
        arm = write_arm(port, tmp_path / "arm")
        before = hashes(arm)
        (one,) = run_tests(port, arm)
    finally:
        own.unlink()
    assert hashes(arm) == before, "the arm is timed after the tests, which need more of the tree"
    assert one.ran == right, one.outcome
    assert (one.taken, one.left) == (4, 0)
    assert one.outcome.endswith("; 4 of 4 calls were the port's")
    assert f"{5 + right} passed" in one.outcome
    assert "memory" not in one.outcome
    assert ("as it should" in one.outcome) != right


def test_a_test_that_needs_a_missing_package_is_not_run(
    releases: dict[Layout, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = find_tree(releases[Layout.JIT_KERNEL])
    own = tree.root / "sglang/jit_kernel/tests/diffusion/test_own_qknorm_rope.py"
    monkeypatch.setattr(upstream_tests, "has_gpu", lambda: True)
    monkeypatch.setattr(upstream_tests, "find_tests", lambda _: [own])
    port = make_port(find_task("qknorm_rope"), tree)
    try:
        own.write_text("def test_one():\n    import nobody_has_this.part\n")
        (one,) = run_tests(port, write_arm(port, tmp_path / "arm"))
    finally:
        own.unlink()
    assert (one.outcome, one.ran) == ("not run: it needs nobody_has_this", False)


def test_an_arm_imports_a_file_that_asks_for_more_than_the_pins_hold(releases: dict[Layout, Path]) -> None:
    """k10's function lies in a file that imports half of the framework for constants of another function."""
    port = make_port(find_task("layernorm_modulate"), find_tree(releases[Layout.FACADE]))
    with check_port.arm(port) as folder:
        grid = check_port.run_grid(port, folder, ["flux-512x3072"], "cpu")
    assert ([row.id for row in grid.left], grid.refused, grid.failed) == (["flux-512x3072"], (), ())


def test_calls_that_the_tree_cannot_get_are_no_failures(releases: dict[Layout, Path]) -> None:
    """Arguments of a later release, and calls that SGLang's own function refuses before a gate compares bits."""
    port = make_port(find_task("moe_routing"), find_tree(releases[Layout.JIT_KERNEL]))
    assert "write_inactive_prefix_count" in port.lacking["moe_align_block_size"]
    told: list[str] = []
    rows = ["moe_align*write_inactive*", "moe_align_block_size-1x2-of-4-by-16-int32-pad_sorted_token_ids"]
    with check_port.arm(port) as folder:
        grid = check_port.run_grid(port, folder, rows, "cpu", say=told.append)
    assert grid.asked == 1
    assert told[0].endswith("their calls have write_inactive_prefix_count, which the tree's function does not")
    (row,) = grid.left
    errors = (
        f"arm 'ported' raised ValueError: {tree_files.REFUSED}: 16-byte aligned",
        "arm 'baseline' raised RuntimeError: view size is not compatible with input tensor's size and stride",
        "arm 'ported' raised RuntimeError: CUDA error: an illegal access",
        "arm 'ported' raised RuntimeError: view size is not compatible with input tensor's size and stride",
        "arm 'baseline' raised RuntimeError: CUDA error: an illegal access",
        "arm 'baseline' raised ModuleNotFoundError: flashinfer",
    )
    fake = [row.model_copy(update={"id": error, "reason": error}) for error in errors]
    session = SimpleNamespace(kind="cuda")
    sorted_ = check_port._sorted(session, SimpleNamespace(rows=tuple(fake), partial=True), 6)  # type: ignore[arg-type]
    assert ([one.id for one in sorted_.refused], [one.id for one in sorted_.failed]) == ([*errors[:2]], [*errors[2:]])
    assert sorted_.asked == 4
    assert "2 more rows are left out" in "\n".join(sorted_.lines())


PICKY = """
import torch
from arm import _or_refused

def picky(x, out):
    if x.data_ptr() % 16 or out.data_ptr() % 16:
        raise RuntimeError("16-byte aligned")
    if not x.is_contiguous():
        raise RuntimeError("contiguous")
    out.copy_(2 * x)
    return out.clone()

memory, called = torch.arange(64.0), _or_refused(picky)
x, out = memory[1:9].view(2, 4), memory[17:29].as_strided((2, 4), (8, 1))
assert (called(x, out=out) == 2 * x).all() and (out == 2 * x).all()
assert memory[21:25].tolist() == [21, 22, 23, 24], "the gap of out"
for wrong in (memory[:8].view(4, 2).t(), memory[1:9].view(4, 2).t()):
    try:
        called(wrong, torch.empty(2, 4))
    except ValueError as error:
        assert str(error) == "no: contiguous", error
    else:
        raise AssertionError("it was not refused")
"""


def test_what_sglangs_function_takes_at_aligned_addresses_only_is_checked_on_copies(tmp_path: Path) -> None:
    write_files(tmp_path / "arm", {"sglang/__init__.py": b""}, "0.5.23", {}, exact=True)
    plan = (tmp_path / "arm" / "arm.json").read_text()
    (tmp_path / "arm" / "arm.json").write_text(plan.replace(tree_files.REFUSED, "no"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), import_path()]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PICKY], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_checks_are_kept_for_the_same_patch_alone(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kda: Kda
) -> None:
    # The patch names the commit, and whether files were changed since: an edit while this runs makes it another patch.
    monkeypatch.setattr(provenance, "git_state", lambda _: provenance.GitState("0" * 40, dirty=False))
    file = tmp_path / "checks.json"
    command = ["port", "qknorm_rope", "--sglang", str(tree.root), "--rows", "qwen-19x*", "--checks", str(file)]
    assert kda(*command)[0] == ExitCode.OK
    kept = Checks.model_validate_json(file.read_text())
    assert (kept.gpu, kept.grid_right, kept.grid_failed) == (None, 1, ())
    monkeypatch.setattr(check_port, "run_grid", None)  # it would fail if it were called
    code, _, err = kda(*command)
    assert code == ExitCode.OK
    assert f"checked before: {file}" in err
    for spoil, words in (
        ({"patch_sha256": "0" * 64}, "expected the checks of this patch"),
        ({"grid_right": "many"}, "key 'grid_right': "),
    ):
        file.write_text(json.dumps({**json.loads(kept.model_dump_json()), **spoil}))
        code, _, err = kda(*command)
        assert (code, words in err) == (ExitCode.USAGE, True), err


CONFTEST = """
import sys
sys.path.insert(0, {folder!r})
from kda_judge.arms.triton_interpreter import convert_as_a_gpu_does
convert_as_a_gpu_does()
import arm
from importlib import import_module
for op, module in arm._plan["functions"].items():  # a call that is left gives None, as it does on a GPU
    host = import_module(module)
    attempt = getattr(host, f"try_{{op}}", None)
    if attempt is not None and attempt.__name__ == "called":
        setattr(host, f"try_{{op}}", attempt.__closure__[0].cell_contents)
"""
FACADE_CONFTEST = """
from sglang.kernels.ops import diffusion
from sglang.kernels.registry import registry
from sglang.kernels.spec import KernelBackend
spec = registry.get_backend("diffusion.fused_inplace_qknorm_rope", KernelBackend.KDA)
assert callable(spec.load())
diffusion.KDA_QKNORM_ROPE.unmount(None)  # the test mounts it

def pytest_sessionfinish():
    print("after:", diffusion.KDA_QKNORM_ROPE.mounted)
"""
FACADE_FILES = ("ops/diffusion/__init__.py", "registry.py", "spec.py")


def test_the_test_that_a_port_brings(releases: dict[Layout, Path], tmp_path: Path) -> None:
    """Behind the real facade, whose registry takes the new entry: on small rows, interpreted in place of a GPU."""
    tree = find_tree(releases[Layout.FACADE])
    port = make_port(find_task("qknorm_rope"), tree)
    texts = port.patch.texts()
    arm = write_arm(port, tmp_path / "arm")
    for name in (*(f"sglang/kernels/{one}" for one in FACADE_FILES), "sglang/test/ci/ci_register.py"):
        target = arm / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(texts.get(name) or (tree.root / name).read_text())
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(tmp_path)) + FACADE_CONFTEST)
    text = texts[tree.test(port.task).relative_to(tree.repository).as_posix()]
    told = run_brought(text, tmp_path)
    assert "3 passed" in told
    assert "after: False" in told, "the test left the kernels on for the process"
    package = arm / "tree" / "sglang/kernels/kda_kernels/qknorm_rope/__init__.py"
    left = "        return None\n    return _function("
    assert left in package.read_text()
    package.write_text(package.read_text().replace(left, left.replace("None", "True")))
    told = run_brought(text, tmp_path)
    assert "1 failed, 2 passed" in told, told
    assert "DID NOT RAISE" in told


def run_brought(text: str, folder: Path, op: str = "") -> str:
    """What pytest says of a brought test with the two smallest rows, all of one op, in Triton's interpreter."""
    skip = 'if not torch.cuda.is_available():\n    pytest.skip("CUDA required", allow_module_level=True)\n'
    assert skip in text
    head, rest = text.replace(skip, "").replace('"cuda"', '"cpu"').split("\n\ndef make(spec):", 1)
    small = f"""
ROWS = [row for row in ROWS if {op!r} in row["op"]]
PORTED = {{one: PORTED[one] for one in PORTED if any(row["op"] == one for row in ROWS)}}
ROWS = sorted(ROWS, key=lambda row: max(eval("*".join(map(str, one["shape"]))) for one in row["inputs"].values()))[:2]
"""
    rest = re.sub(r'parametrize\("op", (.*)\)', r'parametrize("op", [one for one in \1 if one in PORTED])', rest)
    (folder / "test_it.py").write_text(f"{head}\n{small}\n\ndef make(spec):{rest}")
    code = f"import pytest, sys; sys.exit(pytest.main(['-q', '-c', '/dev/null', {str(folder / 'test_it.py')!r}]))"
    done = python(code)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("task", "op", "wrong", "bits"),
    [
        ("fused_add_rmsnorm", "fused_add", ("+= widen(added", "-= widen(added"), False),
        ("moe_routing", "topk_softmax", None, False),  # tensors are passed by name, the order of equal experts is free
        ("per_token_group_quant", "", ("448.0 / largest", "300.0 / largest"), False),  # neighbours are as good
        ("temperature_softmax", "", None, False),  # its module is a package
        ("per_token_group_quant", "", None, True),
    ],
)
def test_a_language_models_op_is_dispatched_and_brings_a_test(
    releases: dict[Layout, Path], tmp_path: Path, task: str, op: str, wrong: tuple[str, str] | None, bits: bool
) -> None:
    """No level decides: the calls are the kernels' wherever these can run."""
    tree = find_tree(releases[Layout.FACADE])
    port = make_port(find_task(task), tree, exact=bits)
    assert set(port.patch.inserted) == {
        "sglang/kernels/kda_kernels/README.md",
        *(tree.module_path(module) for module in port.modules.values()),
    }
    arm = write_arm(port, tmp_path / "arm")
    target = arm / "tree" / "sglang/test/ci/ci_register.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(tree.root / "sglang/test/ci/ci_register.py", target)
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(tmp_path)))
    text = port.patch.created[f"test/registered/kernels/ops/test_kda_{task}.py"]
    assert ("EAGER" in text) != bits
    if bits:  # SGLang's own code needs a GPU: the kernels once more in its place, then other bits
        own = "expected = PORTED[op](*expected_in, **scalars)\n"
        assert own in text
        kernel = f"expected = getattr(__import__('importlib').import_module('{port.package}.{KERNEL}'), op)"
        text = text.replace(own, f"{kernel}(*expected_in, **scalars)\n")
        other = "expected_in[1].view(torch.uint8).bitwise_xor_(1)\n"
        assert "2 failed, 1 passed" in run_brought(
            text.replace("    if OUTPUTS", f"    {other}    if OUTPUTS"), tmp_path
        )
    assert "3 passed" in run_brought(text, tmp_path, op)
    for path in (arm / "tree" / port.tree.package(port.task) / KERNEL).glob("*.py") if wrong else ():
        path.write_text(path.read_text().replace(*wrong))
    if wrong:
        assert "2 failed" in run_brought(text, tmp_path, op)


def test_a_test_of_new_ops_runs(releases: dict[Layout, Path], tmp_path: Path) -> None:
    tree = find_tree(releases[Layout.FACADE])
    port = make_port(find_task("norm_tanh_mul_add"), tree)
    arm = write_arm(port, tmp_path / "arm")
    target = arm / "tree" / "sglang/test/ci/ci_register.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(tree.root / "sglang/test/ci/ci_register.py", target)
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(tmp_path)))
    text = port.patch.created["test/registered/kernels/ops/diffusion/test_kda_norm_tanh_mul_add.py"]
    assert "2 passed" in run_brought(text, tmp_path)


def test_rows_of_a_brought_test_are_few_and_cover_the_grid() -> None:
    """All of production, and few beside them that have every op, dtype, form of stride and fill."""
    for op in TASKS:
        task = find_task(op)
        rows = proof_files.covered(task, task.config.ops)
        picked = row_source.chosen(rows)
        assert picked == row_source.chosen(list(rows)), "another choice for the same rows"
        production = [row for row in rows if row.production]
        assert [row for row in picked if row.production] == production
        assert len(picked) <= len(production) + row_source.MOST_FURTHER
        have, wanted = ({one for row in some for one in row_source.coarse(row)} for some in (picked, rows))
        assert have == wanted, op


def test_rows_are_read_as_they_were() -> None:
    """Short as a line is, it says what the task's row says."""
    for op in TASKS:
        rows = row_source.chosen(covered_of(op))
        scope: dict[str, Any] = {"json": json}
        exec(row_source.rows_text(find_task(op), rows), scope)
        for row, read in zip(rows, scope["ROWS"], strict=True):
            assert (read["id"], read["op"], read["scalars"]) == (row.id, row.op, row.scalars)
            for name, spec in row.inputs.items():
                wanted = {"shape": list(spec.shape), "dtype": spec.dtype}
                wanted |= {"stride": list(spec.stride)} if spec.stride is not None else {}
                wanted |= {"fill": spec.fill} if spec.fill != "normal" else {}
                wanted |= {"low": spec.low} if spec.low else {}
                wanted |= {"high": spec.high} if spec.high is not None else {}
                assert {"dtype": read["dtype"], **read["inputs"][name]} == wanted, (row.id, name)


def test_more_rows_than_a_few_where_these_are_needed() -> None:
    rows = covered_of("qknorm_rope")
    few = row_source.chosen(rows, most=0)
    kinds = {one for row in rows for one in row_source.coarse(row)}
    assert {one for row in few for one in row_source.coarse(row)} == kinds
    assert len(few) < len(row_source.chosen(rows))


def covered_of(op: str) -> list[Workload]:
    task = find_task(op)
    return proof_files.covered(task, task.config.ops)


def brought(port: Port) -> tuple[str, str]:
    """Test and benchmark."""
    test, benchmark = port.tree.test(port.task), port.tree.benchmark(port.task)
    text = {path: port.patch.created[path.relative_to(port.tree.repository).as_posix()] for path in (test, benchmark)}
    return text[test], text[benchmark]


def test_what_a_port_brings_is_short_and_has_nothing_unused(tree: Tree) -> None:
    """No key at its default, no table without entries, no helper that nothing calls, no import at run time."""
    for op in TASKS:
        if op in HOMELESS[tree.layout]:
            continue
        port = make_port(find_task(op), tree)
        for path, text in port.patch.created.items():
            if path.endswith(".py"):
                assert not re.search(r"kda_runtime|see\s+`why_not`|The optimised arm|type: ignore", text), path
        for text in brought(port):
            assert len(text) < 32_000
            assert not re.search(r'null|"fill": "normal"|"low": 0\b|"inplace"|\{\n\}', text), op
            body = ast.parse(text).body
            defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            defined += [
                one.id
                for node in body
                if isinstance(node, ast.Assign)
                for one in node.targets
                if isinstance(one, ast.Name)
            ]
            defined += [
                one.asname or one.name
                for node in body
                if isinstance(node, ast.Import | ast.ImportFrom)
                for one in node.names
            ]
            for name in defined:
                hook = name.startswith("test_") or name == "mounted" or "." in name
                assert hook or len(re.findall(rf"\b{name}\b", text)) > 1, (op, name)
            lines = [line for line in text.splitlines() if line.startswith('{"id"')]
            assert sum(len(line) >= 400 for line in lines) <= len(lines) / 4, op
            fills = set(re.findall(r'"fill": "(\w+)"', text))
            made = text.partition("def make(spec):")[2].partition("def arguments")[0]
            for fill, words in (("slots", "randperm"), ("randint", "randint("), ("cos_sin", "cat("), ("scale", "exp2")):
                assert (words in made) == (fill in fills), (op, fill)
            assert ("importlib" in text) == (op == "temperature_softmax" and tree.layout is Layout.FACADE)


def test_a_solution_that_nobody_measured_is_written_with_a_note(
    releases: dict[Layout, Path], monkeypatch: pytest.MonkeyPatch, kda: Kda
) -> None:
    """Undone, what was edited is told apart from what was removed; the task is named by how its folder begins."""
    tree = releases[Layout.FACADE]
    command = ["port", "l02", "--sglang", str(tree)]
    with monkeypatch.context() as empty:
        empty.setattr(port_record, "published_runs", lambda _: {})
        empty.setattr(port_record, "log", lambda task: task.path / "no ports")
        code, _, err = kda(*command, "--no-check", "--write")
    assert code == ExitCode.OK
    assert "note: l02_fused_add_rmsnorm: no run on a GPU is published" in err
    assert err.startswith(f"l02_fused_add_rmsnorm for {tree}: making the patch ...\n")
    code, out, _ = kda(*command, "--undo")
    assert "as before: sglang/kernels/ops/layernorm/norm.py\n" in out
    assert "removed: sglang/kernels/kda_kernels/fused_add_rmsnorm/__init__.py\n" in out
    assert "as before: sglang/kernels/kda_kernels/fused" not in out
    assert port_record.unmeasured(find_task("qknorm_rope")) is None


def test_choices_that_were_not_measured_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = copied("qknorm_rope", tmp_path)
    assert port_record.unmeasured(task) is None
    table = task.path / "solution" / "tuned.toml"
    total = table.read_text().count("\nreason = ")
    table.write_text(table.read_text().replace('reason = "', 'reason = "not measured: ', 1))
    assert port_record.unmeasured(task) == (
        f"note: k03_qknorm_rope/solution/tuned.toml: 1 of {total} choices were not measured"
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--undo", "--write"), "--undo: expected alone"),
        (("--record", "--no-check"), "--record: expected with the checks"),
        (("--undo",), "nothing to undo"),
        (
            ("--checks", "/nowhere/checks.json"),
            "--checks /nowhere/checks.json: expected a file in a folder that exists",
        ),
    ],
)
def test_wrong_options_are_refused_before_the_patch_is_made(
    releases: dict[Layout, Path], more: tuple[str, ...], words: str, kda: Kda
) -> None:
    tree = releases[Layout.JIT_KERNEL]
    code, out, err = kda("port", "norm_infer", "--sglang", str(tree), *more)
    assert (code, out) == (ExitCode.USAGE, "")
    assert words in err
    assert "making the patch" not in err


def test_nothing_is_checked_for_a_record_that_needs_a_gpu(
    releases: dict[Layout, Path], monkeypatch: pytest.MonkeyPatch, kda: Kda
) -> None:
    monkeypatch.setattr(port_record, "has_gpu", lambda: False)
    tree = releases[Layout.JIT_KERNEL]
    code, out, err = kda("port", "norm_infer", "--sglang", str(tree), "--record")
    assert (code, out) == (ExitCode.REQUIREMENT, "")
    assert "--record: needs a GPU" in err
    assert "making the patch" not in err
