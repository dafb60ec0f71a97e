"""A narrow Qwen-Image of the pinned wheel with a right and a wrong solution, for test_model_step.py."""

import functools
import json
import sys
import types
from pathlib import Path

import torch

from kda_judge.contract.tasks import find_tasks
from kda_tools.models import boot, builders, drift, known_models
from kda_tools.models.calls import Log, Rows
from kda_tools.models.seams import ARMS, Seams, solutions_of
from kda_tools.models.stepping import Stepper

STEPS = 3


def set_to_bits(function) -> bool:
    op = function.kda_op
    return op.exact is not None and (op.plan, op.plain) == op.exact


def main() -> None:
    torch.set_num_threads(1)
    known = known_models.load_models()
    model = known.model("qwen-image")
    narrow = model.model_copy(update={"arch": {**model.arch, "num_attention_heads": 2}})
    boot.boot(Path(sys.argv[1]), "0.5.12.post1")
    tasks = [task for task in find_tasks() if task.family == "diffusion"]
    cpu = torch.device("cpu")
    request = builders.Request(narrow.tiny, "0.5.12.post1", 0, cpu, torch.bfloat16)
    layers = narrow.shortened(1)
    right = solutions_of(tasks, {})
    scale_shift = right["k05_norm_scale_shift"]
    wrong = types.ModuleType("wrong")
    vars(wrong).update({name: getattr(scale_shift, name) for name in scale_shift.__all__})

    @functools.wraps(scale_shift.fused_norm_scale_shift)
    def too_large(*args, **kwargs):
        return scale_shift.fused_norm_scale_shift(*args, **kwargs) * 1.5

    wrong.fused_norm_scale_shift = too_large
    found: dict[str, object] = {"weights": builders.weight_bytes(narrow, layers, request)}
    built = builders.build(narrow, layers, request)
    found["parameters"] = sum(p.numel() * p.element_size() for p in built.module.parameters())
    for name, solutions in (("right", right), ("wrong", {**right, "k05_norm_scale_shift": wrong})):
        seams = Seams(tasks, "0.5.12.post1", solutions, cpu)
        seams.attach(built.module)
        stepper = Stepper(built, cpu, torch.bfloat16, autocast=False)
        log = Log()
        seams.use("solution", log=log)
        stepper.step()
        found[f"calls {name}"] = [call.model_dump() for call in log.calls(Rows(tasks))]
        latents = {}
        for arm in ARMS:
            seams.use(arm)
            latents[arm] = stepper.denoise(STEPS)
        found[name] = drift.drift(latents).model_dump()
        seams.restore()
    exact = Seams(tasks, "0.5.12.post1", right, cpu, exact=True)
    found["exact"] = {
        seam.op: seam.arms["solution"] is not seam.arms["upstream"] and set_to_bits(getattr(seam.solution, seam.op))
        for seam in exact.seams
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
