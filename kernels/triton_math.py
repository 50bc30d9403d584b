"""Functions that Triton kernels share. Imports Triton, so only kernel modules import this.

Triton's interpreter does not fully support bfloat16: it multiplies the bits of bfloat16 matrices as if they were
integers, and truncates where it should round. `dot` and `narrow` give the result of a GPU there.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b):
    """Return a @ b with float32 sums; float32 operands are multiplied as such, not as TF32."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 to `dtype`, to nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(dtype)
