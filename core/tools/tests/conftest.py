"""What these tests share with the judge's: a small real task in a temporary checkout."""

import signal
from collections.abc import Iterator

import pytest

from core.judge.tests.conftest import checkout, toy

__all__ = ["checkout", "toy"]


@pytest.fixture(autouse=True)
def _wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables do not wrap, whoever starts the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def as_kda() -> Iterator[None]:
    """SIGINT and SIGTERM as the command line has them, also in tests that a shell started in the background."""
    usual = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in usual.items():
        assert signal.signal(number, handler) is signal.default_int_handler
