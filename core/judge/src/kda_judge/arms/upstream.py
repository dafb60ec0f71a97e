"""The upstream arm: real upstream source from a pinned wheel, checked by sha256, and none of it in this repository.

`fetch` brings the listed files of a release into the cache, `activate` makes them importable in a fresh process.
The lock file is sha256sum's format, one `<sha256>  <path inside the wheel>` per line, `#` lines are comments.
"""

import hashlib
import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from kda_judge.contract.config import SHA256, Pin
from kda_judge.contract.errors import MissingRequirement, UpstreamError

REFRESH = "run `kda fetch --refresh` to extract it afresh"
STANDS_IN = "; what else they import of sglang is a stand-in in `kda_judge.arms.sglang_standins`"
FIRST_PYTHON = {"sglang 0.5.23": (3, 11)}
"""What the wheels say in Requires-Python, where that is more than this package asks for."""


def cache_folder(checkout: Path | None) -> Path:
    """Where upstream files live: `$KDA_CACHE`, else inside the checkout, else under the home folder."""
    named = os.environ.get("KDA_CACHE")
    if named:
        return Path(named).expanduser().resolve()
    return checkout / ".cache" / "upstream" if checkout else Path.home() / ".cache" / "kda" / "upstream"


def check_python(pin: Pin, arm: str) -> None:
    """Refuse an arm whose release does not support the Python that runs here."""
    first = FIRST_PYTHON.get(release := f"{pin.package} {pin.version}", (3,))
    if sys.version_info < first:
        raise MissingRequirement(
            f"arm {arm!r}: {release} needs Python {'.'.join(map(str, first))} or later, this is "
            f"{sys.version.split()[0]}; use a later one, or name other arms with --arm and --against"
        )


def fetch(
    pin: Pin, lock: Path, cache: Path, *, offline: bool = False, wheel: Path | None = None, refresh: bool = False
) -> Path:
    """The folder that holds exactly the files of `lock`, each verified now; downloads the wheel when it must.

    `wheel` replaces the download, `refresh` extracts again over a cache that no longer verifies. The folder's name
    contains a digest of the list, so two tasks of one release never share a folder. Writers race safely: each
    writes beside the cache and renames, and who comes second verifies what the first one wrote.
    """
    entries = read_lock(lock)
    tree = cache / f"{pin.package}-{pin.version}-{_digest(pin, entries)}"
    if tree.exists() and not refresh:
        _verify(tree, entries)
        return tree
    source = wheel or obtain(pin, cache, offline=offline)
    check_wheel(source, pin)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as temporary:
        extracted = Path(temporary) / "tree"
        _extract(source, entries, extracted, lock)
        if refresh and tree.exists():
            tree.rename(Path(temporary) / "old")
        try:
            extracted.rename(tree)
        except OSError:
            if not tree.is_dir():
                raise
            _verify(tree, entries)
    return tree


def read_lock(lock: Path) -> dict[str, str]:
    """Path inside the wheel -> sha256. Paths that could leave the cache folder are refused."""
    try:
        text = lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UpstreamError(f"{lock}: lock file not found; `kda lock` writes one") from None
    entries: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#") or not line.strip():
            continue
        match = re.fullmatch(f"({SHA256}) [ *](.+)", line)
        if match is None:
            raise UpstreamError(f"{lock}:{number}: expected '<64 hex digits>  <path>', got {line!r}")
        digest, name = match.groups()
        if "\\" in name or name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
            raise UpstreamError(f"{lock}:{number}: expected a plain path inside the wheel, got {name!r}")
        if name in entries:
            raise UpstreamError(f"{lock}:{number}: {name!r} is listed twice")
        entries[name] = digest
    if not entries:
        raise UpstreamError(f"{lock}: expected at least one '<64 hex digits>  <path>' line, got none")
    return entries


def baseline_source(pin: Pin, lock: Path) -> str:
    """Markdown: where the upstream arm's source comes from, to the byte."""
    entries = read_lock(lock)
    rows = "".join(f"| `{name}` | `{entries[name]}` |\n" for name in sorted(entries))
    return (
        f"## {pin.package} {pin.version}\n\n"
        f"- wheel: `{pin.wheel}`\n"
        f"- sha256: `{pin.wheel_sha256}`\n"
        f"- licence: {pin.licence}\n"
        f"- files: {len(entries)}, extracted unchanged{STANDS_IN if pin.package == 'sglang' else ''}\n\n"
        f"| file | sha256 |\n|---|---|\n{rows}"
    )


def _digest(pin: Pin, entries: Mapping[str, str]) -> str:
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(entries.items()))
    return hashlib.sha256(f"{pin.wheel_sha256}\n{text}".encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _verify(tree: Path, entries: Mapping[str, str]) -> None:
    """Every listed file with its sha256, and no other file."""
    present = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if not path.is_dir()}
    problems = [f"{tree / name}: not in the lock file" for name in sorted(present - set(entries))]
    for name, expected in entries.items():
        got = _sha256(tree / name) if name in present else "no file"
        if got != expected:
            problems.append(f"{tree / name}: expected sha256 {expected}, got {got}")
    if problems:
        more = f"\n... and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UpstreamError("\n".join(problems[:5]) + f"{more}\nThe cache was changed; {REFRESH}.")


def is_intact(tree: Path, lock: Path) -> bool:
    """Whether the folder still holds exactly the files of `lock`. Fetches no missing ones."""
    try:
        _verify(tree, read_lock(lock))
    except UpstreamError:
        return False
    return True


def obtain(pin: Pin, cache: Path, *, offline: bool) -> Path:
    """The pinned wheel, kept in the cache so that the next task of this release needs no network."""
    kept = cache / "wheels" / pin.wheel
    if kept.is_file() and _sha256(kept) == pin.wheel_sha256:
        return kept
    if offline:
        raise MissingRequirement(
            f"offline, and no good {pin.wheel} in {kept.parent}; run `kda fetch` once with a network"
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=kept.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", f"{pin.package}=={pin.version}", "--dest", temporary]
        command += ["--no-deps", "--only-binary=:all:", "--python-version", pin.python, "--implementation", "cp"]
        command += ["--platform", pin.platform, "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        got = sorted(path.name for path in Path(temporary).iterdir())
        if ran.returncode or got != [pin.wheel]:
            output = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()
            raise MissingRequirement(
                f"expected pip to download {pin.wheel}, got {got or 'no file'} (exit code {ran.returncode})\n"
                + "".join(f"pip: {line}\n" for line in dict.fromkeys((output[0], output[-1])))  # the cause, the verdict
                + "Check the network, or bring the wheel and run `kda fetch --wheel FILE`."
            )
        check_wheel(Path(temporary) / pin.wheel, pin)
        (Path(temporary) / pin.wheel).replace(kept)
    return kept


def check_wheel(wheel: Path, pin: Pin) -> None:
    """The name, the bytes and the metadata must all be the pin's."""
    if not wheel.is_file():
        raise UpstreamError(f"{wheel}: expected the wheel {pin.wheel}, got no file")
    if wheel.name.split("-")[:2] != [pin.package, pin.version]:
        raise UpstreamError(f"{wheel}: expected {pin.package} {pin.version} ({pin.wheel}), got {wheel.name}")
    got = _sha256(wheel)
    if got != pin.wheel_sha256:
        raise UpstreamError(f"{wheel}: expected sha256 {pin.wheel_sha256}, got {got}; delete it and fetch again")
    with zipfile.ZipFile(wheel) as archive:
        path = f"{pin.package}-{pin.version}.dist-info/METADATA"
        text = archive.read(path).decode() if path in archive.namelist() else ""
    metadata = HeaderParser().parsestr(text)
    if (str(metadata["Name"]).replace("-", "_"), metadata["Version"]) != (pin.package, pin.version):
        raise UpstreamError(
            f"{wheel}: expected metadata of {pin.package} {pin.version}, got {metadata['Name']} {metadata['Version']}"
        )


def _extract(wheel: Path, entries: Mapping[str, str], folder: Path, lock: Path) -> None:
    """Write the listed files, read-only, each checked before it is written."""
    with zipfile.ZipFile(wheel) as archive:
        absent = sorted(set(entries) - set(archive.namelist()))
        if absent:
            raise UpstreamError(f"{lock}: lists {', '.join(absent[:5])}, which {wheel.name} does not hold")
        for name, expected in entries.items():
            content = archive.read(name)
            got = hashlib.sha256(content).hexdigest()
            if got != expected:
                raise UpstreamError(f"{wheel.name}: {name}: expected sha256 {expected} ({lock}), got {got}")
            target = folder / PurePosixPath(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
            target.chmod(0o444)


def activate(root: Path, version: str, module: str = "sglang") -> None:
    """Make imports of `module` in this fresh process come from `root`, of sglang from the stand-ins too.

    They never come from an installed package. Also drops `SGLANG_*` settings, keeps JIT builds beside the cache
    (`TVM_FFI_CACHE_DIR` wins) and puts this environment's ninja on the path.
    """
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == module)
    if loaded:
        origin = getattr(sys.modules[loaded[0]], "__file__", None) or "an earlier activation"
        raise UpstreamError(
            f"{module} is already imported (from {origin}); activate {module} {version} in a fresh process"
        )
    from kda_judge.arms.sglang_standins import Finder  # imports torch, which this module must not need

    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        del os.environ[name]
    builds = os.environ.setdefault("TVM_FFI_CACHE_DIR", str(root.resolve().parent / "jit"))
    os.environ["SGLANG_JIT_CACHE_DIR"] = builds
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    sys.meta_path.insert(0, Finder(root.resolve(), version, module))
    importlib.import_module(module)  # from here on a second activation is refused
