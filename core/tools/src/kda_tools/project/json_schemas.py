"""Make the JSON Schemas of the TOML files and of a ledger's line from the pydantic models that read them.

They are checked in under `docs/schema/`, so that editors complete and check the TOML files (`.taplo.toml` says which
file has which schema) and other tools can read a ledger. A schema cannot express everything that a model checks (that a
name refers to a table, for example): a file that passes its schema may still be refused.

The ledger has one schema for each version of its lines. Only the schema of the current version is made here; the
schemas of earlier versions stay as they were checked in.
"""

import ast
import difflib
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from kda_judge.contract.config import Config
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import checkout_root
from kda_judge.contract.workloads import WorkloadFile
from kda_judge.evidence.run_record import SCHEMA_VERSION, RunRecord
from kda_tools.traces.catalogue import CatalogueFile

COMMAND = "kda schema"
"""The command that writes every schema."""
FOLDER = Path("docs") / "schema"
"""Folder of the schemas in the checkout."""
SHOWN_LINES = 12
"""Most lines shown of a difference; the first ones show what kind of change it is."""


def ledger_file(version: int) -> str:
    """Name of the schema of a ledger's lines of that version."""
    return f"ledger.v{version}.schema.json"


MODELS: dict[str, type[BaseModel]] = {
    "catalogue.schema.json": CatalogueFile,
    "config.schema.json": Config,
    "workloads.schema.json": WorkloadFile,
    ledger_file(SCHEMA_VERSION): RunRecord,
}


def write(check: bool) -> list[str]:
    """Write the schemas that differ from the models, and return their paths.

    With `check` nothing is written, and each such file is returned with the difference.

    Raises:
        UsageError: not inside a checkout, which is where the schemas are kept.
    """
    root = checkout_root()
    if root is None:
        raise UsageError(f"{COMMAND}: expected a checkout, where {FOLDER} is; there is none here or above")
    found = []
    for name, model in MODELS.items():
        path, new = root / FOLDER / name, text(model)
        old = path.read_text(encoding="utf-8") if path.is_file() else None
        if old == new:
            continue
        found.append(_difference(path, old, new) if check else str(path))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8", newline="\n")
    return found


def text(model: type[BaseModel]) -> str:
    """The model's schema as it is kept in its file."""
    schema = model.model_json_schema(schema_generator=_Documented)
    return json.dumps({"$schema": _Documented.schema_dialect, **schema}, indent=2, ensure_ascii=False) + "\n"


def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Attribute -> the string that follows it in the class's source. Inherited attributes are left out."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    return dict(_documented(definition.body))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, after in pairwise(body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                yield name, inspect.cleandoc(docstring)


class _Documented(GenerateJsonSchema):
    """Pydantic's schema with the attributes' docstrings as descriptions, and without titles that repeat the names.

    Pydantic's own `use_attribute_docstrings` would read the sources each time a worker imports the models.
    """

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002  # pydantic asks with it
        return False

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        made.pop("title", None)
        for name, docstring in attribute_docstrings(schema["cls"]).items():
            if name in made["properties"]:
                made["properties"][name]["description"] = docstring
        return made


def _difference(path: Path, old: str | None, new: str) -> str:
    if old is None:
        return f"{path}: file not found; run `{COMMAND}`"
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "the file", "the models", n=0, lineterm=""))
    shown = lines[:SHOWN_LINES] or ["line endings, or the newline at the end"]
    more = [f"... and {len(lines) - len(shown)} more lines"] if len(lines) > len(shown) else []
    return "\n".join([f"{path}: not what the models say; run `{COMMAND}`:", *shown, *more])
