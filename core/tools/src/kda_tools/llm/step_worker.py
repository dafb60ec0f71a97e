"""One fresh process of `kda llm step`: `python -m kda_tools.llm.step_worker REQUEST ANSWER`, both JSON files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kda_judge.contract.errors import ArmFailed, MissingRequirement
from kda_tools.llm.capture import out_of_memory
from kda_tools.llm.known_llms import load_llms
from kda_tools.llm.served_names import PREFIX
from kda_tools.llm.served_step import ServedStep
from kda_tools.llm.solution_ops import SolutionOps, functions, step_tasks
from kda_tools.llm.step_ops import PlainOps, StepOps, UpstreamOps
from kda_tools.llm.step_protocol import Checked, Phase, PhaseAnswer, StepAnswer, StepRequest
from kda_tools.models import drift
from kda_tools.models.calls import Log, Rows
from kda_tools.models.interleaved import interleaved, replayed
from kda_tools.models.kernels import middle, profiled
from kda_tools.models.step_record import Profile, Share
from kda_tools.models.worker_process import await_turn, tell, work

PROFILES = 3
"""Number of profiles of a step of each arm; the arms take turns."""
UPSTREAM, SOLUTION = "upstream", "solution"
Step = Callable[[], torch.Tensor]


def answer(request: StepRequest) -> StepAnswer:
    """Do what is asked in this process.

    Raises:
        MissingRequirement: the weights do not fit.
        ArmFailed: an output is not finite.
    """
    config, tasks = load_llms().model(request.model).config, step_tasks()
    gpu = request.tree is not None
    if gpu and not torch.cuda.is_available():
        raise MissingRequirement(f"there is a GPU, which torch {torch.__version__} cannot use; install a CUDA build")
    base: StepOps = PlainOps() if request.tree is None else UpstreamOps(Path(request.tree), request.release)
    arms: dict[str, StepOps] = {UPSTREAM: base, SOLUTION: SolutionOps(base, functions(tasks))}
    await_turn()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    found = []
    with torch.inference_mode():
        tell("weights")
        try:
            served = ServedStep(config, request.layers, base, device, dtype, request.seed)
        except RuntimeError as error:
            raise MissingRequirement(f"{request.model}: {out_of_memory(error)}; ask for fewer with --layers") from None
        for phase in request.phases:
            tell(phase.name)
            try:
                found.append(_phase(request, served, phase, arms))
            except RuntimeError as error:
                found.append(PhaseAnswer(left_out=out_of_memory(error)))
                torch.cuda.empty_cache()
    return StepAnswer(phases=tuple(found))


def _phase(request: StepRequest, served: ServedStep, phase: Phase, arms: dict[str, StepOps]) -> PhaseAnswer:
    step = served.step(phase.batch, phase.new_tokens, phase.kv_tokens)
    checked = _checked(served, step, arms) if request.check else None
    timed = {}
    for mode in request.modes:
        runner = partial(_runner, mode, served, step, arms)
        timed[mode] = interleaved(runner, SOLUTION, request.samples, request.seed)
    return PhaseAnswer(checked=checked, timed=timed)


def _runner(mode: str, served: ServedStep, step: Step, arms: dict[str, StepOps], arm: str) -> Callable[[int], None]:
    served.ops = arms[arm]
    if mode == "graph":
        return replayed(step)

    def stepped(steps: int) -> None:
        served.ops = arms[arm]
        for _ in range(steps):
            step()

    return stepped


def _checked(served: ServedStep, step: Step, arms: dict[str, StepOps]) -> Checked:
    """Calls and outputs of a step and, on a GPU, the profile of both arms."""
    log, tasks = Log(), step_tasks()
    served.ops = arms[UPSTREAM]
    theirs = step()
    served.ops = _in_pytorch(arms[UPSTREAM])
    plain = step()
    served.ops = SolutionOps(arms[UPSTREAM], functions(tasks, log))
    ours = step()
    apart, usual = drift.relative(ours, theirs), drift.relative(plain, theirs)
    if apart is None or usual is None:
        raise ArmFailed("one step: the probabilities of an arm are not finite")
    profile = None
    if served.device.type == "cuda":
        shares: dict[str, list[Share]] = {arm: [] for arm in arms}
        served.calls.on = True
        try:
            for _ in range(PROFILES):
                for arm, ops in arms.items():
                    served.ops = ops
                    shares[arm].append(profiled(step, PREFIX))
        finally:
            served.calls.on = False
        profile = Profile(upstream=middle(shares[UPSTREAM]), subject=middle(shares[SOLUTION]))
    return Checked(
        calls=log.calls(Rows(tasks)),
        fallbacks=log.fallbacks(),
        difference=apart,
        same_token=_same_token(ours, theirs),
        plain_difference=usual,
        plain_same_token=_same_token(plain, theirs),
        profile=profile,
    )


def _in_pytorch(base: StepOps) -> StepOps:
    """Norms, activations and rope in PyTorch; the experts' GEMMs, which take long there, stay `base`'s."""
    plain = PlainOps()
    plain.moe_align, plain.moe_gemm, plain.moe_block = base.moe_align, base.moe_gemm, base.moe_block  # type: ignore[method-assign]
    return plain


def _same_token(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.argmax(-1) == other.argmax(-1)).float().mean().item()


if __name__ == "__main__":
    work(StepRequest, StepAnswer, answer)
