"""Upstream pins: small wheels made here, fetched for real. `test_pinned_arms.py` has the pinned releases."""

import hashlib
import importlib.util
import os
import py_compile
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kda_judge.arms import upstream
from kda_judge.arms.upstream import baseline_source, cache_folder, check_python, fetch, read_lock
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import MissingRequirement, UpstreamError
from kda_judge.contract.task_import import import_path

ROOT = Path(__file__).resolve().parents[3]
PLATFORM = "manylinux_2_34_x86_64"
TAG = f"cp312-cp312-{PLATFORM}"
FILES = {
    "sglang/kernel.py": "from sglang.srt.utils.common import is_cuda\nVALUE = 7\n",
    "sglang/include/kernel.cuh": "#pragma once\n",
    "sglang/unlisted.py": "raise SystemExit\n",
}


def make_wheel(folder: Path, version: str = "1.0", claims: str = "1.0", **changed: str) -> Path:
    """A wheel named after `version` whose metadata says `claims`."""
    folder.mkdir(exist_ok=True)
    wheel = folder / f"sglang-{version}-{TAG}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**FILES, **changed}.items():
            archive.writestr(name, content)
        info = f"sglang-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.4\nName: sglang\nVersion: {claims}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {TAG}\n")
    return wheel


def make_pin(wheel: Path, version: str = "1.0") -> Pin:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Pin(
        package="sglang",
        version=version,
        wheel_sha256=digest,
        python="312",
        platform=PLATFORM,
        licence="MIT",
        files="x",
    )


def lines(*names: str) -> str:
    """The lock file of these files."""
    return "".join(f"{hashlib.sha256(FILES[name].encode()).hexdigest()}  {name}\n" for name in names)


class Case:
    """A good pin, wheel and lock file, and an empty cache."""

    def __init__(self, folder: Path) -> None:
        self.wheel = make_wheel(folder / "wheels")
        self.pin = make_pin(self.wheel)
        self.lock = folder / "files.sha256"
        self.lock.write_text(lines("sglang/kernel.py", "sglang/include/kernel.cuh"))
        self.cache = folder / "cache"

    def fetch(self, **options: bool) -> Path:
        return fetch(self.pin, self.lock, self.cache, wheel=self.wheel, **options)

    def trees(self) -> list[str]:
        return sorted(path.name for path in self.cache.glob("*"))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_only_the_listed_files_arrive_and_need_no_wheel_again(case: Case) -> None:
    tree = case.fetch()
    got = {path.relative_to(tree).as_posix(): path.read_text() for path in tree.rglob("*") if path.is_file()}
    assert got == {name: FILES[name] for name in ("sglang/kernel.py", "sglang/include/kernel.cuh")}
    assert case.trees() == [tree.name]  # no temporary folder is left
    assert fetch(case.pin, case.lock, case.cache, offline=True) == tree


def test_two_lists_of_one_release_have_two_folders(case: Case) -> None:
    first = case.fetch()
    case.lock.write_text(lines("sglang/kernel.py"))
    assert case.fetch() != first
    assert fetch(case.pin, case.lock, case.cache, offline=True).is_dir()


def test_tampered_wheel(case: Case) -> None:
    got = make_pin(make_wheel(case.wheel.parent, **{"sglang/kernel.py": "VALUE = 8\n"})).wheel_sha256
    with pytest.raises(UpstreamError, match=f"expected sha256 {case.pin.wheel_sha256}, got {got}"):
        case.fetch()
    assert not case.cache.exists()


def _edit(tree: Path) -> None:
    (tree / "sglang/kernel.py").chmod(0o644)
    (tree / "sglang/kernel.py").write_text("VALUE = 8\n")


def _remove(tree: Path) -> None:
    (tree / "sglang/kernel.py").unlink()


def _add(tree: Path) -> None:
    (tree / "sglang/extra.py").write_text("")


def _empty(tree: Path) -> None:
    (tree / "sglang/include/kernel.cuh").unlink()
    _remove(tree)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_edit, r"sglang/kernel\.py: expected sha256 [0-9a-f]{64}, got [0-9a-f]{64}"),
        (_remove, r"sglang/kernel\.py: expected sha256 [0-9a-f]{64}, got no file"),
        (_add, r"sglang/extra\.py: not in the lock file"),
        (_empty, r"sglang/kernel\.py: .* got no file"),
    ],
)
def test_a_changed_cache_is_named_until_it_is_refreshed(case: Case, harm: Callable[[Path], None], message: str) -> None:
    tree = case.fetch()
    harm(tree)
    with pytest.raises(UpstreamError, match=message) as caught:
        case.fetch()
    assert "kda fetch --refresh" in str(caught.value)
    assert case.fetch(refresh=True) == tree
    assert (tree / "sglang/kernel.py").read_text() == FILES["sglang/kernel.py"]
    assert case.trees() == [tree.name]


def test_an_interrupted_fetch_leaves_no_tree(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            case.fetch()
    assert case.trees() == []
    assert case.fetch().is_dir()


def test_import_reads_the_source_and_writes_nothing(case: Case, tmp_path: Path) -> None:
    tree = case.fetch()
    see = f"activate(Path({str(tree)!r}), '1.0'); import sglang.kernel; print(sglang.kernel.VALUE)"
    assert run(see) == "7\n"
    assert case.fetch() == tree  # still no file that is not listed
    forged = tmp_path / "forged.py"
    forged.write_text("VALUE = 8\n")
    bytecode = importlib.util.cache_from_source(tree / "sglang" / "kernel.py")
    py_compile.compile(str(forged), cfile=bytecode, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert run(see) == "7\n"


def test_lock_lists_a_file_the_wheel_lacks(case: Case) -> None:
    case.lock.write_text(f"{'0' * 64}  sglang/absent.py\n")
    with pytest.raises(
        UpstreamError, match=r"files\.sha256: lists sglang/absent\.py, which sglang-1\.0.* does not hold"
    ):
        case.fetch()


def test_lock_disagrees_with_the_wheel(case: Case) -> None:
    case.lock.write_text(f"{'0' * 64}  sglang/kernel.py\n")
    with pytest.raises(UpstreamError, match=r"sglang/kernel\.py: expected sha256 0{64}"):
        case.fetch()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# comment\nnonsense\n", r"files\.sha256:2: expected .* got 'nonsense'"),
        (f"{'A' * 64}  sglang/kernel.py\n", r"files\.sha256:1: expected '<64 hex digits>"),
        (f"{'0' * 64}  ../escape.py\n", r"files\.sha256:1: expected a plain path .* got '\.\./escape\.py'"),
        (f"{'0' * 64}  /etc/escape\n", r"files\.sha256:1: expected a plain path"),
        (f"{'0' * 64}  sglang/../../escape\n", r"files\.sha256:1: expected a plain path"),
        (f"{'0' * 64}  sglang\\escape\n", r"files\.sha256:1: expected a plain path"),
        (f"{'0' * 64}  a\n{'1' * 64}  a\n", r"files\.sha256:2: 'a' is listed twice"),
        ("# nothing\n", r"files\.sha256: expected at least one"),
    ],
)
def test_bad_lock(case: Case, text: str, message: str) -> None:
    case.lock.write_text(text)
    with pytest.raises(UpstreamError, match=message):
        case.fetch()


def test_missing_lock(case: Case) -> None:
    case.lock.unlink()
    with pytest.raises(UpstreamError, match=r"files\.sha256: lock file not found"):
        case.fetch()


def test_wheel_of_another_version(case: Case) -> None:
    case.wheel = make_wheel(case.wheel.parent, version="2.0", claims="2.0")
    with pytest.raises(UpstreamError, match=r"expected sglang 1\.0 .*, got sglang-2\.0-"):
        case.fetch()


def test_metadata_of_another_version(case: Case) -> None:
    case.wheel = make_wheel(case.wheel.parent, claims="2.0")
    case.pin = make_pin(case.wheel)
    with pytest.raises(UpstreamError, match=r"expected metadata of sglang 1\.0, got sglang 2\.0"):
        case.fetch()


def test_absent_wheel(case: Case) -> None:
    case.wheel.unlink()
    with pytest.raises(
        UpstreamError, match=r"expected the wheel sglang-1\.0-cp312-cp312-manylinux_2_34_x86_64\.whl, got no file"
    ):
        case.fetch()


def test_offline_without_a_cache(case: Case) -> None:
    with pytest.raises(
        MissingRequirement, match=r"offline, and no good sglang-1\.0-cp312-cp312-manylinux_2_34_x86_64\.whl in .*cache"
    ):
        fetch(case.pin, case.lock, case.cache, offline=True)


@pytest.mark.parametrize("kept", [True, False])
def test_a_kept_wheel_is_used_only_when_it_is_the_pinned_one(case: Case, kept: bool) -> None:
    folder = case.cache / "wheels"
    folder.mkdir(parents=True)
    (folder / case.pin.wheel).write_bytes(case.wheel.read_bytes() if kept else b"tampered")
    if kept:
        assert fetch(case.pin, case.lock, case.cache, offline=True).is_dir()
    else:
        with pytest.raises(MissingRequirement):
            fetch(case.pin, case.lock, case.cache, offline=True)


def test_pip_failure_shows_what_pip_said(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(MissingRequirement) as caught:
        fetch(case.pin, case.lock, case.cache)
    assert "pip: ERROR: No matching distribution found for sglang==1.0" in str(caught.value)
    assert "kda fetch --wheel FILE" in str(caught.value)


def test_pip_download_is_kept_for_the_next_task(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(case.wheel.parent))
    tree = fetch(case.pin, case.lock, case.cache)
    assert (tree / "sglang/kernel.py").is_file()
    assert (case.cache / "wheels" / case.pin.wheel).read_bytes() == case.wheel.read_bytes()


@pytest.mark.parametrize("winner_is_good", [True, False])
def test_who_loses_the_race_verifies_the_winner(
    case: Case, monkeypatch: pytest.MonkeyPatch, winner_is_good: bool
) -> None:
    rename = Path.rename

    def lose(source: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        tree = case.fetch()
        if not winner_is_good:
            _edit(tree)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", lose)
    if winner_is_good:
        assert case.fetch().is_dir()
    else:
        with pytest.raises(UpstreamError, match=r"sglang/kernel\.py: expected sha256"):
            case.fetch()


def test_concurrent_fetchers_agree(case: Case) -> None:
    code = (
        "import sys; from pathlib import Path; from kda_judge.arms.upstream import fetch\n"
        "from kda_judge.contract.config import Pin\n"
        "pin, lock, cache, wheel = sys.argv[1:]\n"
        "print(fetch(Pin.model_validate_json(pin), Path(lock), Path(cache), wheel=Path(wheel)))"
    )
    command = [sys.executable, "-c", code, case.pin.model_dump_json(), *map(str, (case.lock, case.cache, case.wheel))]
    running = [
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": import_path()}, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert answers == {str(case.fetch())}
    assert len(case.trees()) == 1


def test_baseline_source_names_every_byte(case: Case) -> None:
    text = baseline_source(case.pin, case.lock)
    assert all(part in text for part in (case.pin.wheel, case.pin.wheel_sha256, "licence: MIT"))
    assert all(f"| `{name}` | `{digest}` |" in text for name, digest in read_lock(case.lock).items())
    case.lock.write_text("".join(reversed(case.lock.read_text().splitlines(keepends=True))))
    assert baseline_source(case.pin, case.lock) == text


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KDA_CACHE", raising=False)
    assert cache_folder(tmp_path) == tmp_path / ".cache" / "upstream"
    assert cache_folder(None) == Path.home() / ".cache" / "kda" / "upstream"
    monkeypatch.setenv("KDA_CACHE", str(tmp_path / "named"))
    assert cache_folder(tmp_path) == tmp_path / "named"


def run(code: str, *paths: Path, **environment: str) -> str:
    """Run `code` in a fresh process that can import kda_judge and the tasks; its output."""
    pytest.importorskip("torch")
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os, sys\nfrom pathlib import Path\nfrom kda_judge.arms.upstream import activate\n{code}",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), import_path()]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_an_arm_whose_release_needs_a_later_python_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "sys", SimpleNamespace(version_info=(3, 10, 13), version="3.10.13 (main)"))
    latest = case.pin.model_copy(update={"version": "0.5.23"})
    said = r"^arm 'upstream_latest': sglang 0\.5\.23 needs Python 3\.11 or later, this is 3\.10\.13; "
    with pytest.raises(MissingRequirement, match=said):
        check_python(latest, "upstream_latest")
    check_python(case.pin.model_copy(update={"version": "0.5.12.post1"}), "baseline")
    monkeypatch.setattr(upstream.sys, "version_info", (3, 11, 0))
    check_python(latest, "upstream_latest")


def test_an_installed_sglang_is_never_used(case: Case, tmp_path: Path) -> None:
    installed = tmp_path / "site" / "sglang"
    (installed / "srt").mkdir(parents=True)
    for name in ("__init__.py", "kernel.py", "unlisted.py", "srt/__init__.py", "srt/environ.py"):
        (installed / name).write_text("VALUE = 'installed'\n")
    out = run(
        f"activate(Path({str(case.fetch())!r}), '1.0')\n"
        "import sglang.kernel, sglang.srt.environ\n"
        "print(sglang.__version__, sglang.kernel.VALUE, hasattr(sglang.srt.environ, 'VALUE'))\n"
        "try:\n    import sglang.unlisted\nexcept ModuleNotFoundError as error:\n    print(error)\n",
        installed.parent,
    )
    first, second = out.splitlines()
    assert first == "1.0 7 False"
    assert second.startswith("sglang.unlisted: neither in the lock file of sglang 1.0 nor a stand-in")


def test_activation_needs_a_fresh_process(case: Case, tmp_path: Path) -> None:
    installed = tmp_path / "site" / "sglang" / "__init__.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    again = "try:\n    activate(root, '1.0')\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    root = f"root = Path({str(case.fetch())!r})\n"
    twice = run(root + "activate(root, '1.0')\n" + again)
    assert twice.startswith("UpstreamError sglang is already imported (from an earlier activation)")
    foreign = run(root + "import sglang\n" + again, installed.parent.parent)
    assert f"already imported (from {installed})" in foreign
    assert "fresh process" in foreign


def test_activation_prepares_the_process(case: Case) -> None:
    tree = case.fetch()
    out = run(
        f"activate(Path({str(tree)!r}), '1.0')\n"
        "from sglang.srt.environ import envs\n"
        "print(envs.SGLANG_JIT_FORCE_RECOMPILE.get(), envs.SGLANG_JIT_CACHE_DIR.get())\n"
        "print(os.environ['TVM_FFI_CACHE_DIR'])\n"
        "print(os.environ['PATH'])",
        SGLANG_JIT_FORCE_RECOMPILE="1",
        TVM_FFI_CACHE_DIR="/builds",
    )
    settings, builds, path = out.splitlines()
    assert (settings, builds) == ("None /builds", "/builds")
    assert path.split(os.pathsep)[0] == sysconfig.get_path("scripts")


def test_stand_in_registers_a_real_custom_op(case: Case) -> None:
    out = run(
        f"activate(Path({str(case.fetch())!r}), '1.0')\n"
        "import torch\n"
        "from sglang.srt.utils.common import direct_register_custom_op\n"
        "def double_(x: torch.Tensor, *, by: float = 2.0) -> None: x.mul_(by)\n"
        "direct_register_custom_op('double_', double_, ['x'], lambda x, *, by=2.0: None)\n"
        "print(torch.ops.sglang.double_.default._schema)\n"
        "print(torch.ops.sglang.double_(torch.empty(2, device='meta')))\n"
        "try:\n    torch.ops.sglang.double_(torch.ones(2))\n"
        "except NotImplementedError:\n    print('no CPU implementation')"
    )
    assert out.splitlines() == [
        "sglang::double_(Tensor(a0!) x, *, float by=2.) -> ()",
        "None",
        "no CPU implementation",
    ]


def test_the_module_needs_no_torch() -> None:
    assert run("print('torch' in sys.modules)") == "False\n"


def test_a_wheel_of_another_package_for_all_platforms(tmp_path: Path) -> None:
    """Its name on the index, that of its file and that of its module differ; nothing stands in for what it lacks."""
    wheel, source = tmp_path / "tile_kernels-2.1-py3-none-any.whl", "VALUE = 7\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiles/__init__.py", "raise SystemExit('everything would be imported')\n")
        archive.writestr("tiles/norm.py", source)
        archive.writestr(
            "tile_kernels-2.1.dist-info/METADATA", "Metadata-Version: 2.4\nName: tile-kernels\nVersion: 2.1\n"
        )
    pin = Pin(
        package="tile_kernels",
        imported="tiles",
        version="2.1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        python="312",
        platform="any",
        licence="MIT",
        files="x",
    )
    lock = tmp_path / "x"
    lock.write_text(f"{hashlib.sha256(source.encode()).hexdigest()}  tiles/norm.py\n")
    tree = fetch(pin, lock, tmp_path / "cache", wheel=wheel)
    said = run(
        f"activate(Path({str(tree)!r}), '2.1', {pin.module!r})\n"
        "import tiles.norm; print(tiles.norm.VALUE, tiles.__version__)\n"
        "try:\n    import tiles.rope\nexcept ImportError as error:\n    print(error)\n"
    )
    assert said.startswith("7 2.1\ntiles.rope: neither in the lock file of tiles 2.1 nor a stand-in")
