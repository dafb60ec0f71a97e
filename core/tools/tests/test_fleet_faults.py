"""A real Ray on this machine, whose workers are killed, hang and are interrupted; the pieces are toys that sleep."""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from kda_judge.arms.process_tree import trees
from kda_tools.fleet.checkout import Baggage
from kda_tools.fleet.drive import Driver
from kda_tools.fleet.pieces import Job, Order, Piece, Question, remaining
from kda_tools.fleet.places import places
from kda_tools.fleet.ray_pool import STARTS, RayPool, cluster
from kda_tools.fleet.run_folder import RunFolder
from kda_tools.fleet.schedule import Schedule

Cluster = pytest.importorskip("ray.cluster_utils").Cluster
TOY = str(Path(__file__).parent / "fleet_toy.py")
ORDER = Order(job=Job.VALIDATE, names=("toy",), kind="cpu", command="kda fleet run validate toy")
KILLS = 50
LEAST_AT_WORK = KILLS // 5
"""Kills that have to hit a worker that has a piece."""
ACTOR = b"ray::GpuWorker"
pytestmark = pytest.mark.timeout(900)  # for busy machines


@pytest.fixture(scope="module")
def nodes():
    """Ray's own cluster of several nodes on one machine; one node at first."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def ray(nodes):
    with cluster(nodes.address, None, Baggage({})) as connected:
        yield connected


def ask(piece, attempt, worker):
    return Question(order=ORDER, piece=piece, node=worker.node, attempt=attempt, slot=worker.slot, slots=worker.slots)


def drive(ray, path, pieces, *, attempts=3, timeout_s=60.0, begun=lambda pool: None, most=2, starts=STARTS):
    """Run the pieces on so many workers; the schedule afterwards, and whether the loop came to its end."""
    with RunFolder(path).open() as folder:
        pool = RayPool(ray, ORDER, places(ray.nodes(), "cpu", most, None), Baggage({}), folder, [TOY], starts)
        schedule = Schedule.of(
            [remaining(piece, folder.results) for piece in pieces], folder.complete_pieces, folder.attempts, attempts
        )
        begun(pool)
        try:
            return schedule, Driver(folder, pool, ask, timeout_s).run(schedule)
        finally:
            pool.close()


def read(path):
    with RunFolder(path).open() as folder:
        return folder.events, folder.results


def running():
    """Pids of the actors, and of what they have started."""
    below = trees([os.getpid()])[os.getpid()]
    actors = [pid for pid in below if command(pid).startswith(ACTOR)]
    return actors, [pid for pid in below if TOY.encode() in command(pid)]


def nothing_runs():
    """Whether all actors and their processes end within a while."""
    for _ in range(200):
        if running() == ([], []):
            return True
        time.sleep(0.1)
    return False


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_workers_killed_fifty_times_lose_and_double_nothing(ray, tmp_path):
    """Actors and their processes, by SIGKILL, at random moments of starting, working and handing over.

    The first ones wait until a piece is at work, or on a busy machine nearly all would hit workers that start.
    """
    gate, told = tmp_path / "gate", tmp_path / "run" / "events.jsonl"
    pieces = [Piece(id=f"toy {number}", subject="toy", items=(f"row-{number}",)) for number in range(60)]
    pieces += [Piece(id="the last", subject="gate", items=(str(gate),))]
    draws, killed = random.Random(22), list[int]()
    kinds = [0, 1] * (KILLS // 2)  # actors and processes
    draws.shuffle(kinds)

    def now():
        count = Counter(re.findall(r'"event":"(\w+)"', told.read_text() if told.exists() else ""))
        return count["lost"] >= LEAST_AT_WORK or count["started"] > count["finished"] + count["lost"]

    def kill():
        while len(killed) < KILLS:
            time.sleep(draws.uniform(0, 0.2))
            if now() and (pids := running()[kinds[len(killed)]]):
                with suppress(ProcessLookupError):
                    os.kill(draws.choice(pids), signal.SIGKILL)
                    killed.append(kinds[len(killed)])
        gate.touch()

    killer = threading.Thread(target=kill, daemon=True)
    schedule, ended = drive(
        ray, tmp_path / "run", pieces, attempts=KILLS + 1, begun=lambda _: killer.start(), starts=KILLS + 1
    )
    assert ended
    assert (schedule.failed, len(killed)) == ({}, KILLS)
    events, results = read(tmp_path / "run")
    assert Counter(result.piece for result in results) == Counter(piece.id for piece in pieces)
    for result in results:
        assert json.loads(result.line)["piece"] == result.piece
        assert json.loads(result.line)["attempt"] == result.attempt
    count = {what: Counter(event.piece for event in events if event.event == what) for what in ("started", "lost")}
    assert count["lost"].total() >= LEAST_AT_WORK
    for result in results:
        assert count["started"][result.piece] == count["lost"][result.piece] + 1 == result.attempt
    assert nothing_runs()


def test_a_hanging_piece_is_ended_with_its_process_and_tried_elsewhere(ray, tmp_path):
    schedule, ended = drive(ray, tmp_path, [Piece(id="stuck", subject="hangs")], attempts=99, timeout_s=1.5)
    assert ended
    assert not schedule.failed
    events, (result,) = read(tmp_path)
    lost = [event.attempt for event in events if event.event == "lost" and event.why == "no answer within 1.5 s"]
    assert [*lost, result.attempt] == [*range(1, result.attempt + 1)]  # on a busy machine a later one may be late, too
    assert lost
    assert nothing_runs()


def test_what_is_refused_is_not_tried_again_and_what_is_lost_too_often_is_given_up(ray, tmp_path):
    no, stuck = Piece(id="no", subject="refuses"), Piece(id="stuck", subject="gate", items=("/nowhere/at/all",))
    schedule, ended = drive(ray, tmp_path, [no])
    assert ended
    assert schedule.failed == {"no": ("the toy refuses", 2)}
    schedule, ended = drive(ray, tmp_path, [stuck], attempts=2, timeout_s=0.5)
    assert ended
    assert schedule.failed == {"stuck": ("no answer within 0.5 s", 5)}
    events, results = read(tmp_path)
    assert results == ()
    assert [event.attempt for event in events if event.event == "started" and event.piece == "no"] == [1]
    assert [event.event for event in events if event.piece == "stuck"] == [*("started", "lost") * 2, "given-up"]


@pytest.mark.usefixtures("as_kda")
def test_ctrl_c_keeps_what_came_and_resume_does_the_rest(ray, tmp_path):
    working = tmp_path / "working"
    pieces = [Piece(id="long", subject="long", items=(str(working), "b", "c")), Piece(id="short", subject="toy")]

    def interrupt(_pool):
        def when_it_runs():
            events = tmp_path / "events.jsonl"
            while not working.exists() or "finished" not in events.read_text():  # the short one
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=when_it_runs, daemon=True).start()

    _, ended = drive(ray, tmp_path, pieces, begun=interrupt)
    assert not ended
    _, results = read(tmp_path)
    assert {(result.piece, result.complete, result.items) for result in results} == {
        ("long", False, (str(working),)),
        ("short", True, ()),
    }
    rest = [pieces[0].model_copy(update={"subject": "toy"}), pieces[1]]
    schedule, ended = drive(ray, tmp_path, rest)
    assert ended
    assert schedule.over
    events, results = read(tmp_path)
    assert [(result.piece, result.complete) for result in results][-1] == ("long", True)
    assert len(results) == 3
    assert json.loads(results[-1].line) == {"piece": "long", "attempt": 2, "items": ["b", "c"]}
    assert [event.attempt for event in events if event.event == "started" and event.piece == "short"] == [1]


def test_a_node_that_leaves_takes_no_piece_along(ray, nodes, tmp_path):
    left, gate, path = nodes.add_node(num_cpus=2), tmp_path / "gate", tmp_path / "run"
    nodes.wait_for_nodes()
    pieces = [Piece(id=f"toy {number}", subject="gate", items=(str(gate),)) for number in range(8)]

    def leave(_pool):
        def when_all_work():
            events = path / "events.jsonl"
            while not events.exists() or events.read_text().count("started") < 4:
                time.sleep(0.05)
            nodes.remove_node(left, allow_graceful=False)
            while events.read_text().count('"event":"lost"') < 2:
                time.sleep(0.05)
            gate.touch()

        threading.Thread(target=when_all_work, daemon=True).start()

    schedule, ended = drive(ray, path, pieces, begun=leave, most=4)
    assert ended
    assert not schedule.failed
    events, results = read(path)
    assert Counter(result.piece for result in results) == Counter(piece.id for piece in pieces)
    at = {what: {event.node for event in events if event.event == what} for what in ("joined", "lost", "retired")}
    assert len(at["joined"]) == 2
    assert len(at["lost"]) == 1
    assert at["retired"] <= at["lost"]
    assert {result.node for result in results if result.attempt == 2} == at["joined"] - at["lost"]
