"""The gated SiLU as a Triton device function: by Triton's own exponential and division, or by those of a CUDA build."""

from __future__ import annotations

import triton
import triton.language as tl

FAST_MATH: tl.constexpr = tl.constexpr("""{
    .reg .f32 value;
    mul.ftz.f32 value, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 value, value;
    add.ftz.f32 value, value, 0f3F800000;
    div.approx.ftz.f32 value, $1, value;
    mul.ftz.f32 $0, value, $2;
}""")
"""What nvcc 13 makes of `gate / (1.0f + expf(-gate)) * up` with `--use_fast_math`; the first constant is -log2(e)."""


@triton.jit  # type: ignore[untyped-decorator]
def silu_times(gate, up, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU of gate, times up, in float32; EXACT: by the instructions of a build with `--use_fast_math`."""
    if EXACT:
        return tl.inline_asm_elementwise(FAST_MATH, "=f,f,f", [gate, up], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return gate / (1 + tl.exp(-gate)) * up
