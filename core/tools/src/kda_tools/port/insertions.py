"""Patches that only insert lines and create files: shows them as a diff, writes them, and undoes them byte for byte.

Each port records its insertions in `.kda-port/<op>.json` in the base folder, so ports can be undone in any order.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Strict, read_json

MEMORY = ".kda-port"


@dataclass(frozen=True)
class Insertion:
    """Lines that go before line `line` (from 0) of a file."""

    line: int
    text: str


@dataclass
class Patch:
    """What a port does to a tree. Paths are relative to the folder `base`."""

    base: Path
    created: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    """Files of several ports, as they are with this one too. `undo` gets them as they are without it."""
    inserted: dict[str, list[Insertion]] = field(default_factory=dict)

    def insert(self, path: str, *insertions: Insertion) -> None:
        """Add insertions into the file `path`, which must exist."""
        self.inserted.setdefault(path, []).extend(insertions)

    def texts(self) -> dict[str, str]:
        """Path -> the text of every touched file with the patch."""
        return {
            **self.created,
            **self.shared,
            **{path: with_insertions(self.read(path), all_) for path, all_ in self.inserted.items()},
        }

    def read(self, path: str) -> str:
        """A file's text, with its line ends unchanged."""
        return _text(self.base / path)

    def difference(self) -> str:
        """The patch in git's form."""
        parts = []
        for path, new in sorted(self.texts().items()):
            added = path in self.created or not (self.base / path).exists()
            if (old := "" if added else self.read(path)) == new:
                continue  # a shared file that has all that this port needs
            source = "/dev/null" if added else f"a/{path}"
            lines = difflib.unified_diff(
                old.splitlines(keepends=True), new.splitlines(keepends=True), source, f"b/{path}"
            )
            head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if added else "")
            parts.append(head + "".join(line if line.endswith("\n") else f"{line}\n" for line in lines))
        return "".join(parts)


class Written(Strict):
    """Record of what one port did to the files; `undo` needs it."""

    created: dict[str, str]
    """Path -> sha256 of the created file."""
    inserted: dict[str, list[str]]
    """Path -> the inserted texts; each occurs once in the file."""
    before: dict[str, str]
    """Path -> sha256 of the file before the first port inserted into it."""


def with_insertions(text: str, insertions: Sequence[Insertion]) -> str:
    """The text with all insertions, in order; their line numbers are those of the original text."""
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    for _, one in sorted(enumerate(insertions), key=lambda pair: (pair[1].line, pair[0]), reverse=True):
        lines.insert(one.line, one.text.replace("\n", end))
    return "".join(lines)


def memory(base: Path, op: str) -> Path:
    """The file that records a port of `op`."""
    return base / MEMORY / f"{op}.json"


def demand_none(base: Path, op: str) -> None:
    """Refuse a tree to which `op` is ported already.

    Raises:
        UsageError: `op` is ported to it.
    """
    if (place := memory(base, op)).exists():
        raise UsageError(f"{place}: {op} is ported to this tree already; undo that first, with --undo")


def write(patch: Patch, op: str) -> None:
    """Write the patch; `undo` removes it again.

    Raises:
        UsageError: `op` is ported already, a file to create exists, or an inserted text would occur more than once.
    """
    demand_none(patch.base, op)
    place = memory(patch.base, op)
    for path in patch.created:
        if (patch.base / path).exists():
            raise UsageError(f"{patch.base / path}: expected a place for a new file, found one that is not this port's")
    texts = patch.texts()
    inserted: dict[str, list[str]] = {}
    for path, insertions in patch.inserted.items():
        inserted[path] = [_as_in(patch.read(path), one.text) for one in insertions]
        for text in inserted[path]:
            if texts[path].count(text) != 1:
                raise UsageError(f"{patch.base / path}: cannot insert what would be there more than once:\n{text}")
    done = Written(
        created={path: _sha256(text.encode()) for path, text in patch.created.items()},
        inserted=inserted,
        before={path: _pristine(patch.base, path) for path in inserted},
    )
    place.parent.mkdir(exist_ok=True)
    place.write_text(
        done.model_dump_json(indent=1) + "\n", encoding="utf-8"
    )  # written first, so that a half-written port can be undone
    for path, text in texts.items():
        target = patch.base / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())


def undo(base: Path, op: str, shared: Callable[[], Mapping[str, str | None]] = dict) -> list[str]:
    """Remove a port from the tree; returns the paths that it touched.

    `shared` gives the files of several ports as they are without this one, None for those that go.

    Raises:
        UsageError: nothing to undo, or a file was changed since the port; then no file is written.
    """
    place = memory(base, op)
    if not place.is_file():
        raise UsageError(f"{place}: {op} is not ported to this tree; nothing to undo")
    done = read_json(Written, place)
    texts = {path: _without(base, op, path, texts) for path, texts in done.inserted.items()}
    others = {path for other in (base / MEMORY).glob("*.json") if other != place for path in _touched(other)}
    for path, text in texts.items():
        if path not in others and _sha256(text.encode()) != done.before[path]:
            raise UsageError(f"{base / path}: changed since {op} was ported; take your changes back first")
    for path, sha256 in done.created.items():
        target = base / path
        if target.exists() and _sha256(target.read_bytes()) != sha256:
            raise UsageError(f"{target}: changed since {op} was ported; keep your copy elsewhere, then remove it")
    kept = shared()
    for path, left in {**texts, **dict.fromkeys(done.created), **kept}.items():
        if left is not None:
            (base / path).write_bytes(left.encode())
            continue
        (base / path).unlink(missing_ok=True)
        _remove_empty(base, (base / path).parent)
    place.unlink()
    _remove_empty(base, place.parent)
    return [*done.inserted, *done.created, *kept]


def _without(base: Path, op: str, path: str, inserted: Sequence[str]) -> str:
    """The file without one port's insertions; unchanged if the port was interrupted before it reached this file."""
    text = _text(base / path)
    counts = [text.count(part) for part in inserted]
    if any(counts) and set(counts) != {1}:
        part = next(part for part, count in zip(inserted, counts, strict=True) if count != 1)
        raise UsageError(f"{base / path}: changed since {op} was ported; expected this once in it:\n{part}")
    for part in inserted:
        text = text.replace(part, "")
    return text


def text_without_ports(base: Path, path: str) -> bytes:
    """A file as it is without what ports have inserted into it."""
    text = _text(base / path)
    for port in sorted((base / MEMORY).glob("*.json")):
        for part in read_json(Written, port).inserted.get(path, ()):
            text = text.replace(part, "")
    return text.encode()


def _text(path: Path) -> str:
    """A file of the tree, with its line ends unchanged.

    Raises:
        UsageError: it cannot be read, or is no text; names it.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: expected a file of SGLang, got: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected text in UTF-8, got: {error}") from None


def _pristine(base: Path, path: str) -> str:
    """The hash of a file before the first port that inserted into it."""
    for other in sorted((base / MEMORY).glob("*.json")):
        before = read_json(Written, other).before
        if path in before:
            return before[path]
    return _sha256((base / path).read_bytes())


def _touched(place: Path) -> Mapping[str, object]:
    return read_json(Written, place).inserted


def _as_in(text: str, inserted: str) -> str:
    return inserted.replace("\n", "\r\n") if "\r\n" in text.partition("\n")[0] + "\n" else inserted


def _remove_empty(base: Path, folder: Path) -> None:
    """Remove the folder, and then its parents, while they hold nothing but bytecode; never the base itself."""
    while folder != base and base in folder.parents:
        rest = [one for one in folder.iterdir() if one.name != "__pycache__"] if folder.is_dir() else []
        if rest or not folder.is_dir():
            return
        cache = folder / "__pycache__"
        for one in cache.iterdir() if cache.is_dir() else ():
            one.unlink()
        if cache.is_dir():
            cache.rmdir()
        folder.rmdir()
        folder = folder.parent


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
