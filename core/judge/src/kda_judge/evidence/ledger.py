"""A task's `docs/ledger.jsonl`: one JSON line per recorded run, only ever appended to."""

import json
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from kda_judge.contract.errors import LedgerError, UsageError
from kda_judge.evidence import append_only
from kda_judge.evidence.derive import rounded
from kda_judge.evidence.ledger_migrations import MIGRATIONS, is_known, migrate
from kda_judge.evidence.run_record import SCHEMA_VERSION, RunRecord


def encode(record: RunRecord) -> bytes:
    """The record as its ledger line: rounded, compact JSON, `NaN` and `Infinity` as Python spells them."""
    data = rounded(record).model_dump(mode="json")
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def append(path: Path, record: RunRecord) -> None:
    """Add one line and wait until it is on disk; makes the file and its folder.

    Writers exclude each other by a lock on the file. A last line that some crash left unfinished is not continued:
    the new record starts on a line of its own, so that it is kept and `read` names the broken one.
    """
    line = encode(record)
    _decode(line, "the new record")
    with append_only.locked(path) as file:
        append_only.write(file, line)


def read(path: Path) -> list[RunRecord]:
    """Every record, in file order and in the form of the current schema version; none when the file does not exist.

    Waits while another process writes, so that no half line is seen.

    Raises:
        LedgerError: a line that is broken, unfinished or of an unknown schema version, or a run id that occurs twice;
            names file and line. Nothing is ever skipped.
    """
    return [record for record, _ in _lines(append_only.content(path), path).values()]


def merge(path: Path, other: Path, unfit: Callable[[RunRecord], str | None]) -> int:
    """Append the lines of `other` whose run id `path` lacks, byte for byte; returns how many.

    Lines are never removed from a ledger, so each new one has to be fit for it: `unfit` says why one is not. Line ends
    that a transfer changed are mended: they may be CRLF, and the last one may be missing. Lines of an older schema
    version stay what they are.

    Raises:
        UsageError: `other` does not exist, is no file, or holds no line.
        LedgerError: either file is broken, both hold the same run id with different content, or a new line is unfit;
            nothing is appended then.
    """
    if not other.is_file():
        missing = "expected a file with the lines of runs, got none" if other.exists() else "file not found"
        raise UsageError(f"{other}: {missing}")
    received = append_only.content(other)
    if not received.strip():
        raise UsageError(f"{other}: expected the line of a run, or several, got an empty file")
    theirs = _lines(received if received.endswith(b"\n") else received + b"\n", other)
    known = _lines(append_only.content(path), path)
    refused = [
        f"{other}:{number}: run {run_id} is refused: {why}"
        for number, (run_id, (record, _)) in enumerate(theirs.items(), start=1)
        if run_id not in known and (why := unfit(record))
    ]
    if refused:  # before the lock, which makes the file where there is none
        raise LedgerError("\n".join([*refused, f"nothing was appended to {path}"]))
    with append_only.locked(path) as file:
        ours = _lines(append_only.all_of(file), path)
        for run_id in theirs.keys() & ours.keys():
            if theirs[run_id][1] != ours[run_id][1]:
                raise LedgerError(f"{other}: run {run_id} differs from the line of that run in {path}; one was edited")
        new = [line for run_id, (_, line) in theirs.items() if run_id not in ours]
        if new:
            append_only.write(file, b"".join(new))
    return len(new)


def _lines(content: bytes, path: Path) -> dict[str, tuple[RunRecord, bytes]]:
    """Run id -> the record and its line, which ends in a newline alone."""
    found: dict[str, tuple[RunRecord, bytes]] = {}
    numbers: dict[str, int] = {}
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        record = _decode(line, f"{path}:{number}")
        if record.run_id in found:
            raise LedgerError(f"{path}:{number}: run {record.run_id} is already on line {numbers[record.run_id]}")
        found[record.run_id] = (record, line.rstrip(b"\r\n") + b"\n")
        numbers[record.run_id] = number
    return found


def _decode(line: bytes, where: str) -> RunRecord:
    if not line.endswith(b"\n"):
        raise LedgerError(f"{where}: unfinished line of {len(line)} bytes: expected a newline at its end")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{where}: not valid JSON: {error}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not is_known(version):
        known = f"{min(MIGRATIONS)} to {SCHEMA_VERSION}"
        raise LedgerError(f"{where}: expected an object with schema_version {known}, got {version!r}")
    try:
        # An old line goes through JSON once more: only there does a strict model take an array for a tuple.
        return RunRecord.model_validate_json(line if version == SCHEMA_VERSION else json.dumps(migrate(data)))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise LedgerError(f"{where}: {'; '.join(problems[:3])}{more}") from None
    except ValueError as error:
        raise LedgerError(f"{where}: {error}") from None
