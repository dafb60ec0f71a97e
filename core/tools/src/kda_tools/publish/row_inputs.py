"""Describe the inputs of a row in one line."""

from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload

SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def inputs(row: Workload) -> str:
    """`q, k: bf16 [19, 24, 128]; positions: int64 [19]`: inputs of equal dtype, shape and strides are grouped."""
    kinds: dict[str, list[str]] = {}
    for name, spec in row.inputs.items():
        kinds.setdefault(_kind(spec), []).append(name)
    return "; ".join(f"{', '.join(names)}: {kind}" for kind, names in kinds.items())


def _kind(spec: TensorSpec) -> str:
    strides = f" strides {list(spec.stride)}" if spec.stride is not None else ""
    return f"{SHORT.get(spec.dtype, spec.dtype)} {list(spec.shape)}{strides}"
