"""What timing keeps alive, without a GPU."""

import gc
import weakref
from contextlib import nullcontext
from unittest.mock import MagicMock, call

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


def test_graphs_share_the_stream_of_their_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stream for each, a process would soon have used so many that its kernels take longer."""
    torch = MagicMock()
    torch.cuda.stream.return_value.__exit__.return_value = torch.cuda.graph.return_value.__exit__.return_value = False
    monkeypatch.setattr(clocks, "torch", torch)
    monkeypatch.setattr(clocks, "_cuda_synchronize", lambda: None)
    clocks._side.cache_clear()
    for _ in range(3):
        clocks.Graph(lambda: None, [()], {})
    torch.cuda.Stream.assert_called_once_with(torch.cuda.current_device.return_value)
    aside = [entered for entered in torch.cuda.stream.call_args_list if entered == call(torch.cuda.Stream.return_value)]
    assert len(aside) == 3, "each first call ran there"


@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_capture_ends_what_torch_leaves_recording(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = MagicMock()
    pool, device = torch.cuda.graph_pool_handle.return_value, torch.cuda.current_device.return_value
    torch.cuda.graph.return_value.__exit__.side_effect = RuntimeError("capture was invalidated") if fails else None
    torch.cuda.graph.return_value.__exit__.return_value = torch.cuda.stream.return_value.__exit__.return_value = False
    monkeypatch.setattr(clocks, "torch", torch)
    monkeypatch.setattr(clocks, "_cuda_synchronize", lambda: None)
    with pytest.raises(RuntimeError, match="invalidated") if fails else nullcontext():
        clocks.Graph(lambda _: None, [(1,)], {})
    torch.cuda.graph.assert_called_once_with(torch.cuda.CUDAGraph.return_value, pool=pool)
    for ended in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        assert ended.call_args_list == ([call(device, pool)] if fails else [])


@pytest.mark.gpu
@pytest.mark.parametrize("spoils", ["synchronises", "raises"])
def test_after_a_failed_capture_memory_pools_can_be_used(spoils: str) -> None:
    import torch

    x, stream = torch.ones(8, device="cuda"), torch.cuda.current_stream()

    def op(x: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            return x + 1
        if spoils == "raises":
            raise RuntimeError("not this one")
        return x * (x + 1).sum().item()

    with pytest.raises(RuntimeError):
        clocks.Graph(op, [(x,)], {})
    assert torch.cuda.current_stream() == stream
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        assert op(x).sum().item() == 16
    torch.cuda.empty_cache()
    graph = clocks.Graph(lambda x: x + 1, [(x,)], {})
    graph.replay(1)
    assert graph.out.sum().item() == 16
