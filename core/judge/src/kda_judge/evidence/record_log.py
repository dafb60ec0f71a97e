"""Append-only files of typed records, one JSON object a line, beside a task's ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kda_judge.contract.errors import LedgerError
from kda_judge.contract.strict_models import Strict
from kda_judge.evidence import append_only
from kda_judge.evidence.claims import misdated

Record = TypeVar("Record", bound=Strict)


def append(path: Path, record: Strict) -> None:
    """Add one line, under a lock on the file, and wait until it is on disk; makes the file and its folder."""
    line = record.model_dump_json().encode() + b"\n"
    with append_only.locked(path) as file:
        append_only.write(file, line)


def read(path: Path, model: type[Record]) -> list[Record]:
    """Every record, in file order; none when the file does not exist.

    Raises:
        LedgerError: a line that is no `model`; names file, line and key. Nothing is ever skipped.
    """
    found = []
    for number, line in enumerate(append_only.content(path).splitlines(), start=1):
        try:
            found.append(model.model_validate_json(line))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, item['loc'])) or 'line'}: {item['msg']}" for item in error.errors()]
            raise LedgerError(f"{path}:{number}: {'; '.join(problems[:3])} ({len(problems)} in all)") from None
        dated = found[-1].model_dump(include={"run_id", "utc"})
        if "run_id" in dated and (why := misdated(**dated)):
            raise LedgerError(f"{path}:{number}: {why}")
    return found
