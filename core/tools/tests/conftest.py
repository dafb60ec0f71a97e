"""What these tests share with the judge's: a small real task in a temporary checkout."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from core.judge.tests.conftest import checkout, toy
from core.judge.tests.records_factory import make_checkout
from kda_judge.contract.tasks import Task
from kda_runtime.op import Op
from kda_tools import cli

__all__ = ["checkout", "toy"]


class Answer(NamedTuple):
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str


Kda = Callable[..., Answer]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The made-up task `fake`, in a checkout of its own that commands take for the checkout."""
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    return make_checkout(tmp_path)


@pytest.fixture
def kda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kda:
    """`kda(*arguments)` in this process."""

    def run(*arguments: str) -> Answer:
        monkeypatch.setattr("sys.argv", ["kda", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return Answer(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def _wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables do not wrap, whoever starts the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def keep_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Called with public functions of solutions: what `kda apply`'s hook changes about their ops is taken back."""
    monkeypatch.setattr(Op, "refusal", None)  # the hook sets it for all ops
    kept: list[tuple[Any, str, Any]] = []

    def keep(*functions: Any) -> None:
        kept.extend((one.kda_op, name, getattr(one.kda_op, name)) for one in functions for name in ("plain", "run"))

    yield keep
    for op, name, value in kept:
        object.__setattr__(op, name, value)  # a plain assignment fails: the dataclass is frozen


@pytest.fixture
def as_kda() -> Iterator[None]:
    """SIGINT and SIGTERM as the command line has them, also in tests that a shell started in the background."""
    usual = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in usual.items():
        assert signal.signal(number, handler) is signal.default_int_handler
