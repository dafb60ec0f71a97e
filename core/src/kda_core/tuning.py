"""A solution's tuning tables: which configuration of its kernel a call takes, read from `tuned.toml` beside it.

    TUNED = Table(__file__, "norm", Config)
    config = TUNED.select(major, width=5120, bytes=x.nbytes)

The file is written by `kda tune` from recorded sweeps and holds, for every table, lines in the order in which they are
tried:

    [[norm]]
    capability = 9                       # major number of the compute capability
    at_most = { width = 512 }            # bounds on what `select` is given; a feature left out has none
    config = { warps = 8, vectors = 1 }  # fields left out have the dataclass's defaults
    device = "NVIDIA H200"
    date = "2026-11-20"
    reason = "..."

Only the cold path of a solution selects, since launch plans are remembered, so this is written to be clear, not fast.
Imports neither torch nor triton.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel, Field, RootModel, create_model

from kda_core.errors import UsageError
from kda_core.toml import Strict, read_toml, validate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    C = TypeVar("C", bound=DataclassInstance)
else:
    C = TypeVar("C")

FILE = "tuned.toml"
DEFAULT_CAPABILITY = 9
"""Devices without lines of their own (B200, capability 10, until it is measured) take those of the H200."""

Value = bool | int | float | str
Features = Mapping[str, float]
"""What a choice depends on, by name: sizes of the call such as width or bytes."""


class Line(Strict):
    """One line of a table."""

    capability: Annotated[int, Field(gt=0)]
    """Major number of the compute capability."""
    at_most: dict[str, int | float] = {}
    """Feature -> largest value that the line is for."""
    config: dict[str, Value] = {}
    """Fields of the table's dataclass that have no default or depart from it."""
    device: str
    date: str
    reason: str

    def holds(self, features: Features) -> bool:
        """Whether every bound holds; a KeyError is a feature that was not given."""
        return all(features[name] <= bound for name, bound in self.at_most.items())


class TunedFile(RootModel[dict[str, tuple[Line, ...]]]):
    """The whole of `tuned.toml`: table name -> its lines."""

    model_config = {"frozen": True, "strict": True}


class Table(Generic[C]):
    """One table of `tuned.toml`, with configurations of the type `config`, a frozen dataclass of plain values.

    The file is read when the table is first asked, so that a broken file can still be replaced by `kda tune`.
    """

    def __init__(self, solution_file: str, name: str, config: type[C]) -> None:
        """`solution_file` is the solution's `__file__`; the table is `[[name]]` in `tuned.toml` beside it."""
        self.path = Path(solution_file).parent / FILE
        self.name = name
        self.config = config
        self._forced: C | None = None
        self._asked: list[dict[str, float]] = []

    def select(self, capability: int, **features: float) -> C:
        """The configuration of the first line whose every bound holds.

        Lines are those of `capability` (major number), or of `DEFAULT_CAPABILITY` where it has none.

        Raises:
            UsageError: the file is missing or wrong, or no line fits; names the file and the key.
        """
        if self._forced is not None:
            self._asked.append(features)
            return self._forced
        capabilities = {line.capability for line, _ in self.lines}
        wanted = capability if capability in capabilities else DEFAULT_CAPABILITY
        where = f"{self.path}: [[{self.name}]]"
        try:
            return next(config for line, config in self.lines if line.capability == wanted and line.holds(features))
        except KeyError as missing:
            raise UsageError(f"{where}: key 'at_most': expected one of {sorted(features)}, got {missing}") from None
        except StopIteration:
            raise UsageError(f"{where}: no line of capability {wanted} fits {features}; run `kda tune`") from None

    @cached_property
    def lines(self) -> tuple[tuple[Line, C], ...]:
        """Every line with its configuration, in the file's order."""
        lines = read(self.path).get(self.name, ())
        if not lines:
            raise UsageError(f"{self.path}: missing table [[{self.name}]]")
        return tuple((line, self.parse(line.config, line.at_most)) for line in lines)

    @property
    def configs(self) -> tuple[C, ...]:
        """The different configurations of all lines."""
        return tuple({repr(config): config for _, config in self.lines}.values())

    def parse(self, values: Mapping[str, Value], bounds: Mapping[str, float]) -> C:
        """The configuration of a line with these bounds, from its fields; a UsageError names an unknown one."""
        where = f"{self.path}: [[{self.name}]], at_most {dict(bounds)}, key 'config'"
        return self.config(**dict(validate(_model(self.config), values, where)))

    @contextmanager
    def forced(self, config: C) -> Iterator[list[dict[str, float]]]:
        """Let `select` return `config` meanwhile, whatever it is asked; the list receives the features asked for.

        What the solution remembers of earlier calls is forgotten on the way in and on the way out.
        """
        before = self._forced, self._asked
        self._forced, self._asked = config, []
        forget_plans(self.path.parent)
        try:
            yield self._asked
        finally:
            self._forced, self._asked = before
            forget_plans(self.path.parent)


def read(path: Path) -> dict[str, tuple[Line, ...]]:
    """The lines of every table in a `tuned.toml`; a UsageError names the file and the key."""
    return validate(TunedFile, read_toml(path), path).root


def forget_plans(folder: Path) -> None:
    """Clear the `launch.Plans` of every loaded module in a solution's folder.

    Found are those that a module holds under a name of its own, or in a dict, list or tuple.
    """
    launch = sys.modules.get("kda_core.launch")
    if launch is None:
        return
    inside = f"{folder}{os.sep}"
    for module in list(sys.modules.values()):
        # The dictionary, because asking some modules for an attribute imports others.
        names = getattr(module, "__dict__", {})
        if not (names.get("__file__") or "").startswith(inside):
            continue
        for held in names.values():
            several = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else (held,)
            for value in several:
                if isinstance(value, launch.Plans):
                    value.clear()


def _model(config: type[DataclassInstance]) -> type[BaseModel]:
    """The dataclass as a strict model, which refuses unknown fields and wrong types by name."""
    hints = get_type_hints(config)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(config)
    }
    return create_model(config.__name__, __base__=Strict, **fields)
