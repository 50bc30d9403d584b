"""The KV of a request as one contiguous buffer, for migration.

layout.py describes the caches and the buffer. On CUDA one launch copies all layers (triton_copy.py); elsewhere the
plain PyTorch reference in pack.py does.
"""

from kernels.kv_pack.layout import BlockLayout, packed_shape
from kernels.kv_pack.pack import pack, unpack

__all__ = ["BlockLayout", "pack", "packed_shape", "unpack"]
