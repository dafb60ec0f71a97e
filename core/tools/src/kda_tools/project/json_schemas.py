"""Make the JSON Schemas of the TOML files and of a ledger's line from the pydantic models that read them.

They are checked in under `docs/schema/`, so that editors complete and check the TOML files (`.taplo.toml` says which
file has which schema) and other tools can read a ledger. A schema cannot express everything that a model checks (that a
name refers to a table, for example): a file that passes its schema may still be refused.

The ledger has one schema for each version of its lines. Only the schema of the current version is made here; the
schemas of earlier versions stay as they were checked in.
"""

import ast
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
from kda_judge.contract.workloads import WorkloadFile
from kda_judge.evidence.run_record import SCHEMA_VERSION, RunRecord
from kda_tools import checkout_folder
from kda_tools.publish.write_pages import write_pages
from kda_tools.traces.catalogue import CatalogueFile

COMMAND = "kda schema"
"""The command that writes every schema."""
FOLDER = Path("docs") / "schema"
"""Folder of the schemas in the checkout."""


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

    With `check` nothing is written, and each such file is returned with its first differing line.

    Raises:
        UsageError: not inside a checkout, which is where the schemas are kept.
    """
    root = checkout_folder.root()
    return write_pages({root / FOLDER / name: text(model) for name, model in MODELS.items()}, check, COMMAND)


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
