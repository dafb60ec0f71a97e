"""The catalogue of fused ops: facts are what the pinned wheels give, each op is in an entry, and it can be searched."""

import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kda_judge.arms.upstream import cache_folder, obtain
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import find_tasks
from kda_tools.cli.base import app
from kda_tools.knowledge import catalogue_pages
from kda_tools.knowledge.catalogue_diff import difference, find_release
from kda_tools.knowledge.catalogue_find import find, known_entries
from kda_tools.knowledge.extract_ops import extract
from kda_tools.knowledge.op_facts import FACTS, load_facts, to_toml
from kda_tools.knowledge.update_facts import pins
from kda_tools.knowledge.watchlist import FILE, load_watchlist, pulls_of_task
from kda_tools.traces import catalogue

ROOT = Path(__file__).resolve().parents[3]
KERNELS = "sglang/kernels/ops/diffusion"
SOURCES = {
    f"{KERNELS}/__init__.py": """
_CUDA = frozenset({CapabilityRequirement.CUDA})
_SPECS = (("diffusion.scale", KernelBackend.TRITON, "modulate.scale_triton:scale", _CUDA),)
_EXPORTS = {"scale": "modulate.scale_triton", "can_use_scale": "modulate.scale_triton", "FAST": "sites.fast_site",
            "turn": "rope.turn_jit"}
""",
    f"{KERNELS}/modulate/scale_triton.py": """
import triton
from sglang.kernels.ops.diffusion.common.platform import select_impl
_DTYPES = (torch.float16, torch.bfloat16)

@triton.jit
def _helper(x):
    return x

@triton.jit
def _scale_kernel(y, x):
    _helper(x)

def can_use_scale(x):
    if x.dtype not in _DTYPES or not x.is_contiguous():
        return False
    return x.shape[-1] % 8 == 0 and x.numel() > 0

def scale(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    if not can_use_scale(x):
        return scale_native(x, by)
    if by < 0:
        raise ValueError("negative")
    _scale_kernel[(1,)](x, x)
    return x

scale = select_impl(scale, npu=lazy_fallback("npu", "scale_npu"))
""",
    f"{KERNELS}/rope/turn_jit.py": """
from sglang.kernels.jit.utils import load_jit

def _module():
    return load_jit("turn", cuda_files=["diffusion/turn.cuh"], cuda_wrappers=[("turn", "Turn<1>::run")])

@register_custom_op(mutates_args=["x"])
def turn(x: torch.Tensor) -> None:
    _module().turn(x)
""",
    "sglang/kernels/jit/csrc/diffusion/turn.cuh": (
        'CHECK_HOST(x.size(-1) % 4 == 0) << "a, b"; RuntimeCheck(ok(x, 1), "no");'
    ),
    f"{KERNELS}/sites/fast_site.py": """
def _why_not(site):
    return "no vector" if site.weight.dim() != 1 else None

FAST = QualityGatedFusion(name="fast", reject_reason=_why_not)
""",
    f"{KERNELS}/common/platform.py": "def select_impl(one, **others):\n    return one",
    "sglang/multimodal_gen/runtime/pipelines_core/stages/denoising.py": (
        "from sglang.kernels.ops.diffusion import FAST\n_QUALITY_FUSION_HANDLERS = (('lossless', FAST),)\n"
    ),
    "sglang/multimodal_gen/runtime/layers/norm.py": """
from sglang.kernels.ops import diffusion as ops

class Scale:
    def forward(self, x):
        return ops.scale(x)

class Other:
    pass
""",
    "sglang/multimodal_gen/runtime/models/dits/one.py": """
from sglang.multimodal_gen.runtime.layers.norm import Scale

class One:
    def __init__(self):
        self.scale = Scale()
""",
    "sglang/multimodal_gen/runtime/models/dits/two.py": (
        "from sglang.multimodal_gen.runtime.layers.norm import Other\nTWO = Other"
    ),
}


def wheel(folder: Path, version: str, sources: dict[str, str]) -> Path:
    path = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in sources.items():
            archive.writestr(name, text)
    return path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_facts_of_a_made_up_release(tmp_path: Path) -> None:
    release = extract(wheel(tmp_path, "9.9", SOURCES))
    assert release.release == "sglang 9.9"
    assert [op.name for op in release.op] == ["scale", "turn", "FAST"]
    scale, turn, fast = release.op
    assert scale.signature == "(x: Tensor, by: float=1.0) -> Tensor"
    assert (scale.language, scale.kernels) == (("triton",), ("_scale_kernel",))
    assert scale.guards == ("can_use_scale",)
    assert scale.raises == ("by >= 0",)
    assert set(scale.needs) == {
        "x.dtype in (float16, bfloat16)",
        "x.is_contiguous()",
        "x.shape[-1] % 8 == 0",
        "x.numel() > 0",
    }
    assert scale.falls_back == (
        "scale_native",
        "the caller's own path, where can_use_scale says no",
        "npu: npu scale_npu",
    )
    assert [(one.op, one.backend, one.requires) for one in scale.backends] == [("diffusion.scale", "TRITON", "CUDA")]
    assert (scale.callers, scale.models) == (("layers/norm.py",), ("dits/one",))
    assert (turn.language, turn.kernels, turn.custom_op) == (("cuda",), ("turn",), ("turn",))
    assert turn.host_checks == ("x.size(-1) % 4 == 0", "ok(x, 1)")
    assert (fast.language, fast.quality) == (("site",), "lossless")
    assert fast.needs == ("site.weight.dim() == 1",)
    assert release.helpers == (f"{KERNELS}/common/platform.py",)


HELPERS = {
    f"{KERNELS}/__init__.py": '_EXPORTS = {"gate": "gate_triton", "maybe": "gate_triton", "plain": "gate_triton"}',
    f"{KERNELS}/gate_triton.py": """
import triton
from sglang.kernels.ops.diffusion.checks import LIMIT, check, plan
from sglang.kernels.ops.diffusion.common.ext import build

@triton.jit
def _kernel(x):
    return x

def _run(rows, out):
    assert rows.stride(-1) == 1
    if out is not None:
        assert out.shape == rows.shape
    _kernel[(1,)](rows)
    return rows

def gate(a: torch.Tensor, b=None):
    build(a)
    check(a, by=16, other=b)
    if a.dtype == torch.float16:
        return _run(a, None)
    return _run(a, b)

def maybe(a):
    if (ready := plan(a)) is None:
        return None
    return gate(a)

def plain(a):
    if a.is_cuda and a.numel() <= LIMIT:
        return _run(a, None)
    return a.float() + 1
""",
    f"{KERNELS}/checks.py": """
LIMIT = 4096

def check(x, by, other=None):
    batch, length, width = x.shape
    bad = False
    if width % by:
        bad = True
    if bad:
        raise ValueError("width")
    if other is not None and not (other.ndim == 4 and length % other.shape[1] == 0):
        raise ValueError("frames")

def plan(one):
    try:
        if one.ndim != 3:
            raise ValueError("caught")
    except ValueError:
        return None
    return one.shape
""",
    f"{KERNELS}/common/ext.py": "def build(x):\n    if x.broken:\n        raise RuntimeError('compiler')",
}


def test_conditions_of_helpers_are_the_ops_in_its_own_names(tmp_path: Path) -> None:
    gate, maybe, plain = extract(wheel(tmp_path, "9.9", HELPERS)).op
    asked = {
        "a.shape[2] % 16 == 0",
        "b is None or b.ndim == 4",
        "b is None or a.shape[1] % b.shape[1] == 0",
        "a.stride(-1) == 1",
    }
    assert (gate.needs, set(gate.raises)) == ((), asked | {"b is None or b.shape == a.shape"})
    assert gate.falls_back == ("nothing in the op: what it checks raises",)
    assert (maybe.needs, maybe.falls_back) == (("a.ndim == 3",), ("returns None: the caller takes its own path",))
    assert {"a.shape[2] % 16 == 0", "a.stride(-1) == 1"} == set(maybe.raises)
    assert (plain.needs, plain.raises) == (("a.is_cuda", "a.numel() <= 4096"), ("a.stride(-1) == 1",))
    assert plain.falls_back == ("PyTorch's operators, in the op itself",)


def test_a_release_beside_a_changed_one(tmp_path: Path) -> None:
    place = f"{KERNELS}/modulate/scale_triton.py"
    changed = dict(SOURCES) | {place: SOURCES[place].replace("% 8", "% 16")}
    changed[f"{KERNELS}/rope/turn_jit.py"] += "# only a comment\n"
    changed[f"{KERNELS}/__init__.py"] = changed[f"{KERNELS}/__init__.py"].replace('"FAST": "sites.fast_site",', "")
    found = difference(extract(wheel(tmp_path, "1.0", SOURCES)), extract(wheel(tmp_path, "2.0", changed)))
    assert ([op.name for op in found.gone], found.new, found.same) == (["FAST"], (), ())
    assert [(change.name, change.same_facts) for change in found.changed] == [("scale", False), ("turn", True)]
    assert found.changed[0].facts == {"needs": (("x.shape[-1] % 8 == 0",), ("x.shape[-1] % 16 == 0",))}


def test_a_wheel_of_another_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected sglang/kernels/ops/diffusion or sglang/jit_kernel/diffusion in it"):
        extract(wheel(tmp_path, "9.9", {"sglang/x.py": ""}))
    wheel(tmp_path, "9.9", SOURCES).rename(tmp_path / "y.whl")
    with pytest.raises(UsageError, match=r"y\.whl: expected a wheel's name, such as sglang-0\.5\.23"):
        extract(tmp_path / "y.whl")
    (tmp_path / "no.whl").write_text("no")
    with pytest.raises(UsageError, match=r"no\.whl: expected a wheel"):
        extract(tmp_path / "no.whl")


def test_the_facts_are_what_the_pinned_wheels_give() -> None:
    for name, pin in pins(find_tasks()).items():
        try:
            path = obtain(pin, cache_folder(ROOT), offline=True)
        except MissingRequirement as error:
            pytest.skip(f"the wheel is not in the cache: {error}")
        assert (ROOT / FACTS / name).read_text() == to_toml(extract(path, pin.package, pin.version)), name


def test_every_op_is_in_an_entry_and_every_entry_names_ops_that_are_there() -> None:
    releases = {release.release: release for release in load_facts(ROOT)}
    assert set(releases) == {f"sglang {version}" for version in ("0.5.12.post1", "0.5.23")}
    have = {(release.release, op.path, op.name) for release in releases.values() for op in release.op}
    entries = catalogue.load(ROOT)
    named = {(one.release, one.path, one.op) for entry in entries for one in entry.upstream}
    assert sorted(have - named) == []
    diffusion = {(one.release, one.path, one.op) for entry in of_diffusion(entries) for one in entry.upstream}
    assert sorted(diffusion - have) == []
    assert len(releases["sglang 0.5.23"].op) > 150


def test_every_op_states_what_it_asks_and_where_a_call_goes_otherwise() -> None:
    """As a fact, or where its code checks nothing by hand in its entry."""
    by_hand = {op.name for one in known_entries(ROOT) if one.entry.constraints for _, op in one.ops}
    for release in load_facts(ROOT):
        for op in release.op:
            assert op.needs or op.raises or op.host_checks or op.name in by_hand, (release.release, op.name)
            assert op.falls_back, (release.release, op.name)


def of_diffusion(entries: Iterable[catalogue.Entry]) -> list[catalogue.Entry]:
    """Those of files that the extraction covers: language models' ops and mere options are beside it."""
    names = {path.stem: path for path in (ROOT / catalogue.FOLDER).glob("diffusion*.toml")}
    text = "".join(path.read_text() for path in names.values())
    own = set(re.findall(r'^id = "([^"]+)"', text, re.MULTILINE))
    return [entry for entry in entries if entry.id in own]


def test_what_finds_a_pattern_in_a_trace_are_kernels_of_its_ops() -> None:
    """Of the entries for which no expression of somebody's experience stands: theirs are names of kernels alone."""
    known = {one.entry.id: one for one in known_entries(ROOT)}
    text = (ROOT / catalogue.FOLDER / "diffusion_ops.toml").read_text()
    for name in re.findall(r'^id = "([^"]+)"', text, re.MULTILINE):
        kernels = [kernel for _, op in known[name].ops for kernel in op.kernels]
        for pattern in known[name].entry.fast:
            assert any(re.search(pattern, kernel) for kernel in kernels), (name, pattern)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("norm scale shift", "norm-scale-shift"),
        ("qk norm rope", "qknorm-rope"),
        ("group_norm_silu", "group-norm-silu"),
        ("gelu cat", "gelu-tanh-cat"),
        ("fused_temb_table_slices", "temb-table-slices"),
    ],
)
def test_search_finds_the_pattern_that_was_meant(words: str, first: str) -> None:
    assert find(known_entries(ROOT), words, 3)[0].entry.id == first


def test_the_commands() -> None:
    said = run("catalogue", "find", "qk norm rope", "--most", "1", "--whole")
    assert said.startswith("qknorm-rope: ")
    assert "needs: head_dim in (64, 128, 256)" in said
    assert "task k03_qknorm_rope" in said
    assert "NVFP4_BIAS_GELU: a site that" in run("catalogue", "find", "nvfp4 bias gelu", "--whole")
    said = run("catalogue", "diff", "0.5.12.post1", "0.5.23")
    assert "gone: fused_norm_tanh_mul_add (cute)" in said
    with pytest.raises(UsageError, match="no entry of docs/catalogue has any of these words"):
        CliRunner().invoke(app, ["catalogue", "find", "zyzzyva"], catch_exceptions=False)
    with pytest.raises(
        UsageError, match=r"0\.4: expected a release that the catalogue has \(0\.5\.12\.post1, 0\.5\.23\)"
    ):
        find_release(ROOT, "0.4")


def test_the_pages_are_what_the_catalogue_gives(tmp_path: Path) -> None:
    assert catalogue_pages.publish(ROOT, find_tasks(), check=True) == []
    shutil.copytree(ROOT / catalogue.FOLDER, tmp_path / catalogue.FOLDER)
    for task in find_tasks():
        (tmp_path / task.family / task.folder).mkdir(parents=True)
        shutil.copy(task.path / "config.toml", tmp_path / task.family / task.folder)
    assert len(catalogue_pages.publish(tmp_path, [], check=True)) == 3


def test_the_pages_name_models_and_give_a_release_only_to_ops_that_the_latest_lacks() -> None:
    ops, models = ((ROOT / page).read_text() for page in (catalogue_pages.OPS, catalogue_pages.MODELS))
    assert re.search(r"^\| `dits/flux` \| .*`qknorm-rope`", models, re.MULTILINE)
    rows = [line.split(" | ") for line in ops.splitlines() if line.startswith("| `")]
    assert sum(int(row[4]) > 0 for row in rows) > 50
    assert "(0.5.23)" not in ops


def test_the_watchlist() -> None:
    entries = {entry.id for entry in catalogue.load(ROOT)}
    pulls = load_watchlist(ROOT)
    assert pulls
    for pull in pulls:
        assert set(pull.entries) <= entries
        assert pull.opened <= pull.seen
    assert [pull.number for pull in pulls_of_task(ROOT, "k02_rotary_embedding")] == [14302, 33815]
    assert pulls_of_task(ROOT, "k07_group_norm_silu") == ()


def test_a_broken_watchlist_is_refused_by_key(tmp_path: Path) -> None:
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text('[[pull]]\nrepository = "a/b"\nnumber = 0\ntitle = "t"\nentries = ["x"]\n')
    with pytest.raises(UsageError, match=r"number"):
        load_watchlist(tmp_path)


@pytest.mark.parametrize(
    ("entry", "seen", "message"),
    [
        ("no-such", "2026-02-02", r"watchlist\.toml: pull 7, key 'entries': expected ids of the catalogue, got"),
        ("rotary", "2026-01-01", "expected 2026-02-01, when it was opened, or later, got 2026-01-01"),
    ],
)
def test_a_watchlist_that_cannot_be_is_refused(tmp_path: Path, entry: str, seen: str, message: str) -> None:
    (tmp_path / catalogue.FOLDER).mkdir(parents=True)
    (tmp_path / catalogue.FOLDER / "a.toml").write_text('[[entry]]\nid = "rotary"\npattern = "p"\nkind = "rope"\n')
    (tmp_path / FILE).write_text(
        f'[[pull]]\nrepository = "a/b"\nnumber = 7\ntitle = "t"\nentries = ["{entry}"]\n'
        f"opened = 2026-02-01\nseen = {seen}\n"
    )
    with pytest.raises(UsageError, match=message):
        load_watchlist(tmp_path)
