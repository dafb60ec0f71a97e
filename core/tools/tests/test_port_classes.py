"""Ports into classes of models: what stands at the head of `forward`, what it calls, and what it leaves alone."""

import ast
import zipfile
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch

from kda_judge.arms.upstream import cache_folder, obtain
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import checkout_root, find_task
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.known_models import load_models
from kda_tools.port.dispatch_edit import FIRST, into_models
from kda_tools.port.facade_edit import STAGE
from kda_tools.port.insertions import with_insertions, write
from kda_tools.port.layouts import Layout, Tree, find_tree
from kda_tools.port.port_task import Port, make_port, undo

TASK, BLOCKS, SLICES = find_task("causal_pad"), find_task("group_norm_silu_pad"), find_task("temb_modulation")
VAE = "sglang/multimodal_gen/runtime/models/vaes/hunyuanvae.py"
DITS = [
    f"sglang/multimodal_gen/runtime/models/dits/{name}.py"
    for name in ("helios", "wanvideo", "hunyuanvideo", "flux", "ltx_2", "joy_image", "mova_video_dit")
]
HELIOS, WAN, HUNYUAN, FLUX, LTX2, JOY, MOVA = DITS
SCALE_SHIFT = "sglang/kernels/ops/diffusion/modulate/scale_shift_triton.py"
FACADE = "sglang/kernels/ops/diffusion/__init__.py"
NEEDED = ("sglang/__init__.py", FACADE, STAGE, "sglang/kernels/kda_kernels/README.md")
NEEDED += (VAE, *DITS, SCALE_SHIFT)
CLIP = torch.randn(1, 2, 3, 6, 5)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The release's files that ports touch."""
    root = tmp_path_factory.mktemp("tree")
    pin = load_models().releases[Layout.FACADE.value]
    try:
        wheel = obtain(pin, cache_folder(checkout_root()), offline=True)
    except MissingRequirement as absent:
        pytest.skip(str(absent))
    with zipfile.ZipFile(wheel) as archive:
        for name in NEEDED:
            archive.extract(name, root)
    return find_tree(root)


@pytest.fixture(scope="module")
def port(tree: Tree) -> Port:
    """The port of k12."""
    return make_port(TASK, tree)


@pytest.fixture(scope="module")
def blocks(tree: Tree) -> Port:
    """The port of k13, which calls its ops for whole blocks."""
    return make_port(BLOCKS, tree)


@pytest.fixture(scope="module")
def slices(tree: Tree) -> Port:
    """The port of k09, whose ops Helios's block calls."""
    return make_port(SLICES, tree)


def copied(tree: Tree, folder: Path) -> None:
    """Copy the tree's files into a folder of their own."""
    for name in NEEDED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((tree.root / name).read_bytes())


def outputs(text: str, kernel: int = 3, spatial_parallel: bool = False, **names: Any) -> list[torch.Tensor]:
    """What both classes make of the clip, with convolutions that return their input."""
    convolution, upsampling = TASK.load("tests.cases").classes_of(text, **names)
    layers = [convolution(2, 2, kernel_size=kernel)]
    layers += [upsampling(2, kernel_size=kernel, upsample_factor=factors) for factors in FACTORS]
    for layer in layers:
        padding = layer.conv if isinstance(layer, upsampling) else layer
        padding.conv, padding.spatial_parallel = torch.nn.Identity(), spatial_parallel
    return [layer(CLIP) for layer in layers]


def imported_in(text: str) -> tuple[str, list[str]]:
    """The file of the port's package, and the names that the module imports from it, sorted."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    imported = [
        (node.module, alias.name) for node in nodes if "kda_kernels" in str(node.module) for alias in node.names
    ]
    (module,) = {str(module) for module, _ in imported}
    return f"{module.replace('.', '/')}/__init__.py", sorted(name for _, name in imported)


def forward_of(text: str, name: str) -> list[ast.stmt]:
    """The statements of a class's `forward`."""
    (block,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name]
    (forward,) = [node for node in block.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    return forward.body


FACTORS = ((1, 2, 2), (2, 2, 2), (2, 2, 1))
CALLS = [("causal_pad", (2, 1, 1)), ("upsample_causal_pad", (1, 2, 2, 1, 1)), ("upsample_causal_pad", (2, 2, 2, 1, 1))]


@pytest.mark.parametrize(
    ("kernel", "spatial_parallel", "runs", "expected"),
    [
        (3, False, True, [*CALLS, ("causal_pad", (2, 1, 1))]),  # pixels that are no squares are padded alone
        (3, False, False, []),
        (3, True, True, []),
        (1, False, True, [(name, (*numbers[:-3], 0, 0, 0)) for name, numbers in CALLS[1:]]),
    ],
    ids=["as in the model", "not on a GPU, or turned off", "shared by several GPUs", "nothing to pad"],
)
def test_classes_call_the_ops_where_these_do_the_same(
    port: Port, kernel: int, spatial_parallel: bool, runs: bool, expected: list[Any]
) -> None:
    calls: list[Any] = []
    solution = TASK.load("solution")

    def counted(name: str) -> Any:
        return lambda x, *numbers: calls.append((name, numbers)) or getattr(solution, name)(x, *numbers)

    names = {name: counted(name) for name in ("causal_pad", "upsample_causal_pad")} | {
        "kda_runs_causal_pad": lambda _: runs
    }
    got = outputs(port.patch.texts()[VAE], kernel, spatial_parallel, **names)
    want = outputs(port.patch.read(VAE), kernel, spatial_parallel)
    assert all(map(torch.equal, got, want))
    assert calls == expected


def test_the_module_imports_what_its_classes_call_and_the_package_offers_it(port: Port) -> None:
    assert port.new
    assert port.strangers == ()
    texts = port.patch.texts()
    package, names = imported_in(texts[VAE])
    assert names == ["causal_pad", "kda_runs", "upsample_causal_pad"]
    assert f"__all__ = {names!r}".replace("'", '"') in texts[package]
    assert '_DISABLED = os.environ.get("SGLANG_DISABLE_KDA_KERNELS") == "1"' in texts[package]
    readme = texts[package.replace("__init__.py", "README.md")]
    assert "hunyuanvae.HunyuanVideoUpsampleCausal3D.forward` calls `upsample_causal_pad`" in readme
    assert "No model calls these ops yet" not in readme


@torch.no_grad()
def test_blocks_give_what_their_own_statements_give(blocks: Port) -> None:
    calls: list[str] = []
    helper: dict[str, Any] = {}
    texts, solution, cases = blocks.patch.texts(), BLOCKS.load("solution"), BLOCKS.load("tests.cases")
    exec(texts["sglang/kernels/kda_kernels/group_norm_silu_pad/layouts.py"], helper)

    def counted(name: str) -> Any:
        return lambda *args: calls.append(name) or getattr(solution, name)(*args)

    ops = {name: counted(name) for name in BLOCKS.config.ops}
    for runs in (True, False):
        names = {"kda_block": lambda *args, runs=runs: helper["output_of"](*args, ops) if runs else None}
        clip = torch.randn(1, 32, 3, 6, 5)
        got = cases.decoder_of(cases.classes_of(texts[VAE], **names))(clip)
        want = cases.decoder_of(cases.classes_of(blocks.patch.read(VAE)))(clip)
        assert (got - want).abs().max() <= 1e-5
        assert {name: calls.count(name) for name in ops} == {
            "group_norm_silu_pad": 13,
            "upsample_pad": 2,
            "bias_residual": 8,
        }


def test_blocks_of_other_bits_have_a_gate(blocks: Port) -> None:
    texts, package = blocks.patch.texts(), "sglang/kernels/kda_kernels/group_norm_silu_pad"
    assert f"from {package.replace('/', '.')} import kda_block\n" in texts[VAE]
    init = texts[f"{package}/__init__.py"]
    assert "and KDA_GROUP_NORM_SILU_PAD.mounted" in init
    assert "torch.is_grad_enabled() or not kda_runs(x)" in init
    assert '    ("lossless", KDA_GROUP_NORM_SILU_PAD),\n' in texts[STAGE]
    assert '"KDA_GROUP_NORM_SILU_PAD": "sites.kda_group_norm_silu_pad_site"' in texts[FACADE]
    assert "sglang/kernels/ops/diffusion/sites/kda_group_norm_silu_pad_site.py" in blocks.patch.created
    imported = {
        str(node.module) if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(texts[f"{package}/layouts.py"]))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"__future__", "collections.abc", "contextlib", "typing", "torch"}


@pytest.mark.parametrize("first", ["causal_pad", "group_norm_silu_pad"])
def test_both_ports_can_be_undone_in_any_order(tree: Tree, tmp_path: Path, first: str) -> None:
    copied(tree, tmp_path)
    original = (tmp_path / VAE).read_bytes()
    for task in (TASK, BLOCKS):
        port = make_port(task, find_tree(tmp_path))
        assert port.strangers == (), "what another port inserted does not count"
        write(port.patch, task.op)
    text = (tmp_path / VAE).read_text()
    assert text.index('kda_block("padding"') < text.index("return self.conv(causal_pad(")
    assert f"{FIRST}\n        {FIRST}" not in text
    for task in sorted((TASK, BLOCKS), key=lambda task: task.op != first):
        undo(task, find_tree(tmp_path))
    assert (tmp_path / VAE).read_bytes() == original


def test_upstreams_bits_leave_blocks_alone(blocks: Port) -> None:
    texts = make_port(BLOCKS, blocks.tree, exact=True).patch.texts()
    assert VAE not in texts
    assert STAGE not in texts
    init = texts["sglang/kernels/kda_kernels/group_norm_silu_pad/__init__.py"]
    assert "def upsample_pad(" in init
    assert "kda_block" not in init


def test_copies_need_no_gate(port: Port) -> None:
    assert not [name for name in port.patch.created if name.endswith(("_site.py", "layouts.py"))]
    assert STAGE not in port.patch.texts()


@pytest.mark.parametrize(
    ("op", "path", "classes"),
    [
        ("temb_modulation", HELIOS, 1),
        ("temb_modulation", WAN, 1),
        ("qkv_pack", HUNYUAN, 2),
        ("qkv_pack", FLUX, 1),
        ("qkv_pack", JOY, 1),
        ("rounded_rmsnorm_modulate", LTX2, 1),
    ],
)
def test_a_class_asks_the_ops_in_front_of_its_own_statements(tree: Tree, op: str, path: str, classes: int) -> None:
    port, module = make_port(find_task(op), tree), path.removesuffix(".py").replace("/", ".")
    sites = [one for one in sites_of(port.task) if (one.module, one.release) == (module, Layout.FACADE.value)]
    assert [site.op for site in sites] == classes * list(port.task.config.ops), "one site for each op"
    assert len({site.class_ for site in sites}) == classes
    for name, lines in {(site.class_, site.ported) for site in sites}:
        own = forward_of(port.patch.read(path), name)
        block = ast.parse(f"class {name}:\n    def forward(self):\n{indent(lines, '        ')}")
        docstring = int(isinstance(own[0], ast.Expr) and isinstance(own[0].value, ast.Constant))
        lines_there = ast.unparse(block).replace("kda_runs(", f"kda_runs_{op}(")
        wanted = [*own[:docstring], *forward_of(lines_there, name), *own[docstring:]]
        assert [*map(ast.dump, forward_of(port.patch.texts()[path], name))] == [*map(ast.dump, wanted)]


def test_helios_asks_the_ops_only_if_a_level_has_mounted_them(slices: Port) -> None:
    assert slices.new
    assert slices.strangers == ()
    texts = slices.patch.texts()
    package, names = imported_in(texts[HELIOS])
    assert names == sorted([*SLICES.config.ops, "kda_runs"])
    (runs,) = [node for node in ast.parse(texts[package]).body if getattr(node, "name", "") == "kda_runs"]
    assert ast.unparse(runs).endswith("and (not _DISABLED) and KDA_TEMB_MODULATION.mounted")
    assert '    ("lossless", KDA_TEMB_MODULATION),\n' in texts[STAGE]
    assert '"KDA_TEMB_MODULATION": "sites.kda_temb_modulation_site"' in texts[FACADE]
    assert "sglang/kernels/ops/diffusion/sites/kda_temb_modulation_site.py" in slices.patch.created
    readme = texts[package.replace("__init__.py", "README.md")]
    assert all(f"helios.HeliosTransformerBlock.forward` calls `{op}`" in readme for op in SLICES.config.ops)


@pytest.mark.parametrize("op", ["temb_modulation", "qkv_pack", "rounded_rmsnorm_modulate"])
def test_a_port_into_classes_parses_and_can_be_undone(tree: Tree, tmp_path: Path, op: str) -> None:
    copied(tree, tmp_path)
    original = {path: (tmp_path / path).read_bytes() for path in DITS}
    write(make_port(find_task(op), find_tree(tmp_path)).patch, op)
    changed = {path for path in DITS if (tmp_path / path).read_bytes() != original[path]}
    assert (
        changed
        == {"temb_modulation": {HELIOS, WAN}, "qkv_pack": {HUNYUAN, FLUX, JOY}, "rounded_rmsnorm_modulate": {LTX2}}[op]
    )
    assert all(ast.parse((tmp_path / path).read_text()).body for path in changed)
    undo(find_task(op), find_tree(tmp_path))
    assert {path: (tmp_path / path).read_bytes() for path in DITS} == original


def test_ops_with_pytorchs_bits_need_no_gate(tree: Tree) -> None:
    port = make_port(find_task("rounded_rmsnorm_modulate"), tree)
    assert not [name for name in port.patch.created if name.endswith("_site.py")]
    assert STAGE not in port.patch.texts()


def test_statements_call_sglangs_function_where_it_has_one(tree: Tree) -> None:
    port = make_port(find_task("fuse_scale_shift"), tree)
    assert (port.new, port.strangers) == (False, ())
    texts = port.patch.texts()
    host = SCALE_SHIFT.removesuffix(".py").replace("/", ".")
    for path, name in ((MOVA, "MulAdd.forward"), (JOY, "fused_add_gate")):
        imports = {
            str(node.module): [(alias.name, alias.asname) for alias in node.names]
            for node in ast.parse(texts[path]).body
            if isinstance(node, ast.ImportFrom)
        }
        assert imports[host] == [("fuse_scale_shift_kernel", None)], "it asks the port's kernel first"
        assert imports[port.package] == [("kda_runs", "kda_runs_fuse_scale_shift")]
        readme = texts[f"{port.package.replace('.', '/')}/README.md"]
        assert f"{path.rpartition('/')[2][:-3]}.{name}` calls `fuse_scale_shift_kernel`" in readme
    (function,) = [node for node in ast.parse(texts[JOY]).body if getattr(node, "name", "") == "fused_add_gate"]
    (own,) = [node for node in ast.parse(port.patch.read(JOY)).body if getattr(node, "name", "") == "fused_add_gate"]
    x, gate = torch.randn(2, 3, 256).bfloat16(), torch.randn(2, 256).bfloat16()
    op, calls = port.task.load("solution").fuse_scale_shift_kernel, []
    for runs in (True, False):
        seen = {
            "torch": torch,
            "kda_runs_fuse_scale_shift": lambda _, runs=runs: runs,
            "fuse_scale_shift_kernel": lambda *args: calls.append(args) or op(*args),
        }
        exec(compile(ast.Module([function], []), JOY, "exec"), seen)
        got = seen["fused_add_gate"](x, x, gate)
        exec(compile(ast.Module([own], []), JOY, "exec"), seen)
        assert torch.equal(got, seen["fused_add_gate"](x, x, gate))
        assert len(calls) == 1


def test_two_ports_in_one_module_ask_gates_of_their_own(tree: Tree, tmp_path: Path) -> None:
    copied(tree, tmp_path)
    for op in ("fuse_scale_shift", "qkv_pack"):
        write(make_port(find_task(op), find_tree(tmp_path)).patch, op)
    imported = [
        (str(node.module).rpartition(".")[2], alias.asname)
        for node in ast.parse((tmp_path / JOY).read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == "kda_runs"
    ]
    assert sorted(imported) == [(op, f"kda_runs_{op}") for op in ("fuse_scale_shift", "qkv_pack")]


def test_a_port_of_upstreams_bits_leaves_statements_alone(tree: Tree) -> None:
    texts = make_port(find_task("fuse_scale_shift"), tree, exact=True).patch.texts()
    assert SCALE_SHIFT in texts
    assert not {JOY, MOVA} & texts.keys()


def test_other_tasks_of_new_ops_say_that_no_model_calls_them(port: Port) -> None:
    files = make_port(find_task("norm_tanh_mul_add"), port.tree).patch.texts()
    assert "No model calls these ops yet" in files["sglang/kernels/kda_kernels/norm_tanh_mul_add/README.md"]
    assert VAE not in files


def test_a_changed_module_is_named(port: Port, tmp_path: Path) -> None:
    copied(port.tree, tmp_path)
    with (tmp_path / VAE).open("a") as file:
        file.write("# another line\n")
    assert make_port(TASK, find_tree(tmp_path)).strangers == (VAE,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class A:\n    x = 1\n", "class A with a method forward"),
        ("class B:\n    def forward(self):\n        pass\n", "function A on its top level"),
    ],
)
def test_a_class_without_forward_is_named(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=rf"there: expected a {expected}, found none"):
        into_models(text, Path("there"), {"A": "op()"}, {"op": "package"})


def test_lines_go_behind_the_docstring() -> None:
    text = 'class A:\n    def forward(self, x):\n        """Text."""\n        return x\n'
    lines = into_models(text, Path("there"), {"A": "if op(x):\n    return 1"}, {"op": "package", "other": "package"})
    changed = with_insertions(text, lines)
    assert changed.startswith("from package import op\n")
    assert (
        changed.index('"""Text."""')
        < changed.index("        if op(x):\n            return 1\n")
        < changed.index("return x")
    )
