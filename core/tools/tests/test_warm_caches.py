"""`kda warm`: every arm calls every row, and who fails is named. On the CPU: the toy task."""

import pytest

from kda_judge.contract.errors import MissingRequirement
from kda_judge.evidence import gpu_state
from kda_judge.session import Request, open_session
from kda_tools import cli
from kda_tools.lab import warm_caches
from kda_tools.lab.inspect.cuda_tools import Ran


@pytest.fixture
def filled(toy, monkeypatch):
    """How many processes fail, what is shown, and the rows whose streams would be compiled."""
    streamed = []
    monkeypatch.setattr(warm_caches, "run_tool", lambda words, _: streamed.append(words[3:]) or Ran(0, "", ()))
    monkeypatch.setattr(warm_caches, "ROWS_EACH", 1)

    def run():
        shown = []
        session = open_session(Request(task=toy, against=["eager"], device="cpu"))
        return warm_caches.fill([session], 2, shown.append), shown, streamed

    return run


def test_every_arm_calls_every_row(toy, filled):
    failed, shown, streamed = filled()
    ids = [row.id for row in toy.workloads]
    assert failed == 0
    expected = ["axpy, limit", *(f"axpy, {arm}: {one} and 0 more" for arm in ("eager", "solution") for one in ids)]
    assert sorted(line.partition("] ")[2] for line in shown) == sorted(expected)
    assert streamed == [["axpy", *ids]]


def test_an_arm_that_fails_is_named_and_the_others_go_on(toy, filled):
    (toy.path / "solution" / "__init__.py").write_text("raise ImportError('no libfoo')\n")
    failed, shown, _ = filled()
    assert failed == len(toy.workloads)
    wrong = [line for line in shown if "exit code" in line]
    assert len(wrong) == failed
    assert all("axpy, solution: " in line and "ImportError: no libfoo" in line for line in wrong)


def test_without_a_gpu_nothing_is_begun(toy, monkeypatch, capsys):
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)
    monkeypatch.setattr("sys.argv", ["kda", "warm", "axpy"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == MissingRequirement.exit_code
    assert "kda: needs a GPU; without one `kda compile`" in capsys.readouterr().err
