"""A solution's tuning tables: which configuration of its kernel a call takes, read from `tuned.toml` beside it.

    TUNED = Table(__file__, "norm", Config)
    config = TUNED.select(major, width=5120, bytes=x.nbytes)

The file is written by `kda tune` from recorded sweeps and holds, for every table, lines in the order in which they are
tried:

    [[norm]]
    capability = 9                       # major number of the compute capability
    at_most = { width = 512 }            # largest values of `select`'s features; one left out has no bound
    config = { warps = 8, vectors = 1 }  # fields left out have the dataclass's defaults
    device = "NVIDIA H200"
    date = "2026-11-20"
    reason = "..."

Launch plans are remembered, so a solution selects only in its cold path: this is written to be clear, not fast.
Imports the standard library alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    C = TypeVar("C", bound=DataclassInstance)
    D = TypeVar("D", bound=DataclassInstance)
else:
    C, D = TypeVar("C"), TypeVar("D")

FILE = "tuned.toml"
DEFAULT_CAPABILITY = 9
"""Capability whose lines are used on devices without lines of their own (B200, capability 10, until it is measured):
the H200's."""

Value = bool | int | float | str
Features = Mapping[str, float]
"""What a choice depends on, by name: sizes of the call such as width or bytes."""


class TableError(ValueError):
    """A table is missing or wrong, or no line fits; names the file and the key, what was expected and what came."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a table."""

    capability: int
    """Major number of the compute capability."""
    at_most: Mapping[str, int | float] = field(default_factory=dict)
    """Feature -> largest value that the line is for."""
    config: Mapping[str, Value] = field(default_factory=dict)
    """Fields of the table's dataclass that have no default or depart from it."""
    device: str
    date: str
    reason: str

    def holds(self, features: Features) -> bool:
        """Whether every bound holds. Raises KeyError for a feature that was not given."""
        return all(features[name] <= bound for name, bound in self.at_most.items())


class Table(Generic[C]):
    """One table of `tuned.toml`, with configurations of the type `config`, a frozen dataclass of plain values.

    The file is read when the table is first used, so that a broken file can still be replaced by `kda tune`.
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
            TableError: the file is missing or wrong, or no line fits.
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
            raise TableError(f"{where}: key 'at_most': expected one of {sorted(features)}, got {missing}") from None
        except StopIteration:
            raise TableError(f"{where}: no line of capability {wanted} fits {features}; run `kda tune`") from None

    @cached_property
    def lines(self) -> tuple[tuple[Line, C], ...]:
        """Every line with its configuration, in the file's order."""
        lines = read(self.path).get(self.name, ())
        if not lines:
            raise TableError(f"{self.path}: missing table [[{self.name}]]")
        return tuple((line, self.parse(line.config, line.at_most)) for line in lines)

    @property
    def configs(self) -> tuple[C, ...]:
        """The different configurations of all lines."""
        return tuple({repr(config): config for _, config in self.lines}.values())

    def parse(self, values: Mapping[str, Value], bounds: Mapping[str, float]) -> C:
        """The configuration of a line with these bounds, from its fields; a TableError names an unknown one."""
        return _checked(self.config, values, f"{self.path}: [[{self.name}]], at_most {dict(bounds)}, key 'config'")

    @contextmanager
    def forced(self, config: C) -> Iterator[list[dict[str, float]]]:
        """Make `select` return `config` inside the `with` block; the list receives the features of every request.

        The solution's remembered plans are cleared at the beginning and at the end.
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
    """The lines of every table in a `tuned.toml`.

    Raises:
        TableError: names the file and the key.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TableError(f"{path}: file not found") from None
    except OSError as error:
        raise TableError(f"{path}: expected a file of TOML, got: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too many digits; too deep
        raise TableError(f"{path}: not valid TOML: {error}") from None
    for name, lines in tables.items():
        if not isinstance(lines, list):
            raise TableError(f"{path}: key {name!r}: expected tables [[{name}]], got {lines!r}")
    return {
        name: tuple(_line(line, f"{path}: [[{name}]], line {number}") for number, line in enumerate(lines, start=1))
        for name, lines in tables.items()
    }


def forget_plans(folder: Path) -> None:
    """Let the ops of a solution in this folder forget earlier calls, where any are loaded."""
    op = sys.modules.get(f"{__package__}.op")
    if op is not None:
        op.forget_plans(folder)


def _line(values: object, where: str) -> Line:
    if not isinstance(values, dict):
        raise TableError(f"{where}: expected a table, got {values!r}")
    line = _checked(Line, values, where)
    if line.capability <= 0:
        raise TableError(f"{where}: key 'capability': expected a positive number, got {line.capability}")
    for key in ("at_most", "config"):
        kinds = (int, float) if key == "at_most" else (bool, int, float, str)
        for name, value in getattr(line, key).items():
            if not isinstance(value, kinds) or (key == "at_most" and isinstance(value, bool)):
                expected = "a number" if key == "at_most" else "a plain value"
                raise TableError(f"{where}: key '{key}.{name}': expected {expected}, got {value!r}")
    return line


def _checked(kind: type[D], values: Mapping[str, Any], where: str) -> D:
    """A frozen dataclass of these values, whose names and types must be its fields'."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            raise TableError(f"{where}: unknown key {name!r}{f'; did you mean {near[0]}?' if near else ''}")
        wanted = hints[name]
        if (
            wanted in (bool, int, float, str)
            and type(value) is not wanted
            and not (wanted is float and type(value) is int)
        ):
            raise TableError(f"{where}: key {name!r}: expected {wanted.__name__}, got {value!r}")
        if wanted not in (bool, int, float, str) and not isinstance(value, dict):
            raise TableError(f"{where}: key {name!r}: expected a table, got {value!r}")
    for one in dataclasses.fields(kind):
        if one.name not in values and one.default is one.default_factory is dataclasses.MISSING:
            raise TableError(f"{where}: missing key {one.name!r}")
    return kind(**values)
