"""How many calls a sample gets."""

from types import SimpleNamespace

import pytest

from kda_judge.arms.protocol import Ready, Timed
from kda_judge.judge.row_notes import ArmNotes
from kda_judge.judge.sampler import MAX_CALLS, Sampler

CALL_US = 5.0


class Arm:
    """A process whose calls take `CALL_US`; the host holds up the loops with these numbers for 30 ms."""

    def __init__(self, held_up):
        self.held_up, self.loops = held_up, 0

    def ask(self, command, reply, count=None, **rest):
        if command == "pin":
            return Ready(), 0.0
        late = 30_000.0 * (self.loops in self.held_up)
        self.loops += 1
        return Timed(calls=count, total_us=CALL_US * count + late), 1.0


@pytest.mark.parametrize("held_up", [(), (0,), (1,), (2, 4)])
def test_a_loop_that_the_host_held_up_does_not_make_samples_short(held_up):
    """With the first loop held up, samples were single calls, and the row INVALID: the stream was idle around them."""
    settings, cores = SimpleNamespace(target_sample_us=10_000), SimpleNamespace(core=0)
    case = SimpleNamespace(most_calls=lambda calls: calls, restore=lambda: None, row=SimpleNamespace(inplace=()))
    notes = ArmNotes()
    Sampler(SimpleNamespace(settings=settings, cores=cores), None)._prepare(case, notes, Arm(held_up), [])
    assert 10_000 / CALL_US <= notes.calls <= MAX_CALLS
