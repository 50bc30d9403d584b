"""The KV of a request as one contiguous buffer, for migration.

- layout.py: axes of the caches, layout of the buffer
- reference.py: packing in plain PyTorch, which is also the CPU's path
- pack.py: the entry functions
- triton_copy.py: the kernel, one launch for all layers
"""

from kernels.kv_pack.layout import BlockLayout, packed_shape
from kernels.kv_pack.pack import pack, unpack

__all__ = ["BlockLayout", "pack", "packed_shape", "unpack"]
