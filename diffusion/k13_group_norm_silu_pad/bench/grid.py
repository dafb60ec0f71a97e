"""The regression grid: correctness-only rows over the ops' whole envelope.

`group_norm_silu_pad`: clips (`CLIPS`) x channels in groups (`CHANNELS`) x {float16, bfloat16, float32}; for some of
them two margins more, an eps of 0.5, or a bias of x; some of the model's tiles. `upsample_pad`: the clips x factors
(`FACTORS`) x two margins x the dtypes, with 24 channels. Channels that are no power of two, and no multiple of a
vector, are among them. `bias_residual`: the clips x channels x the dtypes, with a residual, one with a bias, or none; a
residual in another order.

Thinning for machines without a GPU (`thin`): outputs of up to 6000 elements.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload

CLIPS = ((1, 1, 1, 1), (2, 1, 3, 2), (1, 3, 7, 9), (1, 5, 12, 10), (2, 2, 33, 17), (1, 9, 48, 40))
"""Batch, frames, lines and columns."""
CHANNELS = ((32, 32), (96, 32), (30, 5), (128, 32), (512, 32), (1024, 1))
"""Channels, and groups of them."""
MARGINS = ((2, 1, 1), (0, 0, 0), (1, 3, 2))
"""Frames, lines and columns."""
FACTORS = ((1, 1), (1, 2), (2, 2), (3, 3))
"""Of frames and pixels."""
DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
VECTORS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "residual": ("residual",),
    "both": ("residual", "residual_bias"),
}
"""Inputs of a sum besides x and its bias."""
TILES = ((1, 5, 32, 32, 512), (1, 17, 96, 80, 128))
THIN_ELEMENTS = 6000


def grid() -> Iterator[Workload]:
    """All rows; ids name the input's shape, what is done with it, and the dtype."""
    for clip, (channels, groups), dtype in product(CLIPS, CHANNELS, DTYPES):
        yield _row((*clip, channels), MARGINS[0], dtype, groups=groups)
    for clip, margins, dtype in product(CLIPS, MARGINS[1:], DTYPES):
        yield _row((*clip, 32), margins, dtype, groups=8)
    for clip, margins, factors, dtype in product(CLIPS, MARGINS[::2], FACTORS, DTYPES):
        yield _row((*clip, 24), margins, dtype, factors=factors)
    for shape, dtype in product(TILES, DTYPES):
        yield _row(shape, MARGINS[0], dtype, groups=32)
    for dtype in DTYPES:
        yield _row((1, 3, 7, 9, 64), MARGINS[0], dtype, groups=4, eps=0.5)
        for clip, (channels, groups) in product(CLIPS[1:4], CHANNELS[1:4]):
            yield _row((*clip, channels), MARGINS[0], dtype, groups=groups, biased=True)
    for clip, (channels, _), how, dtype in product(CLIPS, CHANNELS, VECTORS, DTYPES):
        yield _sum((*clip, channels), how, dtype)
    for how, dtype in product(("residual", "both"), DTYPES):
        yield _sum((1, 3, 7, 9, 24), how, dtype, stride=(4536, 63, 9, 1, 189))


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if all(prod(spec.shape) <= THIN_ELEMENTS for spec in row.outputs.values())]


def _row(
    shape: tuple[int, ...],
    margins: tuple[int, int, int],
    dtype: DType,
    *,
    groups: int = 0,
    eps: float = 1e-5,
    biased: bool = False,
    factors: tuple[int, int] = (1, 1),
) -> Workload:
    batch, t, h, w, channels = shape
    frames, height, width = margins
    up_frames, up_space = factors
    sizes = (frames + 1 + (t - 1) * up_frames, h * up_space + 2 * height, w * up_space + 2 * width)
    scalars: dict[str, int | float] = {"frames": frames, "height": height, "width": width}
    vector = TensorSpec(shape=(channels,), dtype=dtype)
    inputs = {"x": TensorSpec(shape=shape, dtype=dtype), "weight": vector, "bias": vector}
    if groups:
        scalars |= {"num_groups": groups, "eps": eps}
        inputs |= {"x_bias": vector} if biased else {}
        how = f"in{groups}-eps{eps:g}{'-biased' if biased else ''}"
    else:
        scalars |= {"up_frames": up_frames, "up_space": up_space}
        inputs = {"source": inputs["x"]}
        how = f"by{up_frames}x{up_space}"
    return Workload(
        id=f"{'x'.join(map(str, shape))}-{how}-and{'x'.join(map(str, margins))}-{dtype}",
        op="group_norm_silu_pad" if groups else "upsample_pad",
        inputs=inputs,
        outputs={"y" if groups else "upsampled": OutputSpec(shape=(batch, *sizes, channels), dtype=dtype)},
        scalars=scalars,
    )


def _sum(shape: tuple[int, ...], how: str, dtype: DType, stride: tuple[int, ...] | None = None) -> Workload:
    x, vector = TensorSpec(shape=shape, dtype=dtype), TensorSpec(shape=shape[-1:], dtype=dtype)
    residual = x if stride is None else TensorSpec(shape=shape, stride=stride, dtype=dtype)
    more = {name: residual if name == "residual" else vector for name in VECTORS[how]}
    return Workload(
        id=f"{'x'.join(map(str, shape))}-sum-{how}{'-of-another-order' if stride else ''}-{dtype}",
        op="bias_residual",
        inputs={"x": x, "bias": vector, **more},
        outputs={"sum": OutputSpec(shape=shape, dtype=dtype)},
    )
