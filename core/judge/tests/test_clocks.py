"""What timing keeps alive, without a GPU."""

import gc
import weakref
from unittest.mock import MagicMock

import pytest

from kda_judge.arms import clocks


class Tensor:
    """Stands for one that only a call refers to."""


def test_a_graph_keeps_what_its_calls_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "torch", MagicMock())
    monkeypatch.setattr(clocks, "_cuda_synchronize", lambda: None)

    def made() -> tuple[clocks.Graph, list[weakref.ref[Tensor]]]:
        closed_over, argument = Tensor(), Tensor()

        def op(_: object) -> object:
            return type(closed_over)

        return clocks.Graph(op, [(argument,)] * 2, {}), [weakref.ref(closed_over), weakref.ref(argument)]

    graph, alive = made()
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del graph
    gc.collect()
    assert all(ref() is None for ref in alive)
