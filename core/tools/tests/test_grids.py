"""What a regression grid has to hold so that reading one operand as another one shows."""

from itertools import combinations

import pytest

from core.tools.tests.every_task import TASKS
from kda_judge.arms.input_values import Family, make
from kda_judge.contract.workloads import shrink
from kda_judge.judge.oracle import load_reference
from kda_judge.session import Request, open_session
from kda_tools.lab.grid.grid_rows import grid_rows, whole_grid

ALIKE = {
    "fuse_layernorm_scale_shift_gate_select01_kernel": {"scale0", "shift0", "gate0", "scale1", "shift1", "gate1"},
    "fuse_residual_layernorm_scale_shift_gate_select01_kernel": {
        *("scale0", "shift0", "gate0", "scale1", "shift1", "gate1"),
        *("x", "residual", "residual_gate"),
    },
    "topk_softmax": {"topk_ids", "topk_weights"},  # outputs that upstream wants contiguous
}
"""Op -> operands whose layouts upstream wants alike, or reads rightly only then: the task's tests have others."""
OPS = [(task, op) for task in TASKS for op in task.config.ops]


def steps(spec):
    """How far apart in memory the neighbours along each dimension but the last are, from the last but one outwards."""
    sized = zip(spec.shape[:-1], spec.strides[:-1], strict=True)
    return tuple(step if size > 1 else 0 for size, step in sized)[::-1]


@pytest.mark.parametrize(("task", "op"), OPS, ids=[f"{task.op}-{op}" for task, op in OPS])
def test_operands_of_several_lines_lie_differently_in_some_row(task, op):
    """A kernel that finds an operand's lines by another one's strides is wrong in that row."""
    load_reference(task)  # makes the task importable
    grid = task.load("bench.grid")
    rows = [row for row in grid.thin(grid.grid()) if row.op == op]
    lined = {name for row in rows for name, spec in row.inputs.items() if any(steps(spec))}
    for one, other in combinations(sorted(lined), 2):
        if {one, other} <= ALIKE.get(op, set()):
            continue
        pairs = [(row.inputs[one], row.inputs[other]) for row in rows if {one, other} <= row.inputs.keys()]
        assert any(steps(a) != steps(b) for a, b in pairs), (one, other)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.op)
def test_every_row_keeps_the_contract_of_its_op(task):
    """With a row that does not, `kda validate` ends before it checks any."""
    session = open_session(Request(task=task, device="cpu"))
    assert len(grid_rows(session, full=True)) == len(whole_grid(session, full=True))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.op)
@pytest.mark.parametrize("family", Family)
def test_inputs_of_every_row_can_be_made(task, family):
    """Of the whole grid: the thinned one, which machines without a GPU check, may lack a combination that cannot."""
    grid = task.load("bench.grid")
    kinds = {}
    for row in (*task.workloads, *grid.grid()):
        made = tuple((name, spec.fill, len(spec.shape), spec.dtype) for name, spec in row.inputs.items())
        kinds.setdefault((row.op, made), row)
    for row in kinds.values():
        assert set(make(shrink(row, task.config.cpu.keep, task.config.cpu.shrink), family, 1, "cpu")) == set(row.inputs)
