"""Read TOML and JSON into strict pydantic models; errors name the file, the key, the expected and the given value."""

import difflib
import json
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomli
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kda_judge.contract.errors import UsageError

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Base of every model read from a file: frozen, no coercion, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse `path`; a missing or malformed file is a UsageError that names it."""
    try:
        return tomli.loads(_text(path, "TOML"))
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too many digits; too deep
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def read_json(model: type[Model], path: Path) -> Model:
    """The JSON of `path` as `model`; a file that is missing, malformed or of another form is a UsageError naming it."""
    try:
        data = json.loads(_text(path, "JSON"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid JSON: {error}") from None
    return validate(model, data, path)


def _text(path: Path, kind: str) -> str:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UsageError(f"{path}: expected a file of {kind}, got a pipe or a device")  # reading it would block
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: file not found") from None
    except OSError as error:
        raise UsageError(f"{path}: expected a file of {kind}, got: {error.strerror}") from None


def validate(model: type[Model], data: object, where: Path | str) -> Model:
    """Validate `data` as `model`.

    The data goes through JSON because pydantic's strict mode then still takes an array for a tuple
    and a string for an enum, which TOML cannot spell otherwise.
    """
    try:
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise UsageError("\n".join(f"{where}: {line}" for line in _explain(error, model))) from None
    except (ValueError, RecursionError) as error:  # `dumps` raises them as `loads` does
        raise UsageError(f"{where}: {error}") from None


def _explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(top level)"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _all_keys(model), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            lines.append(f"unknown key {key!r}{hint}")
        elif item["type"] == "missing":
            lines.append(f"missing key {key!r}")
        else:
            whole = item["type"] == "value_error" and isinstance(item["input"], dict)
            # The message of a check of a whole table names the wrong value; printing the table would bury it.
            lines.append(f"key {key!r}: {item['msg']}" + ("" if whole else f", got {item['input']!r}"))
    return lines


def _all_keys(model: type[BaseModel]) -> set[str]:
    """Every field name of `model` and of the models inside it, for near-miss suggestions."""
    names: set[str] = set()
    for part in model.model_json_schema().get("$defs", {}).values():
        names |= set(part.get("properties", {}))
    return names | set(model.model_fields)
