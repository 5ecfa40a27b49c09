"""Compile options for the CPU plugin, as the bytes of a CompileOptionsProto.

The proto is written by hand because jaxlib's own would bring every debug option of a newer XLA with
it, which replaces the plugin's defaults (and makes it log errors about values that it does not
know). Field numbers are those of xla/pjrt/proto/compile_options.proto.

The plugin's oneDNN fusions would make products 5 to 10% faster, but abort the process when a
product feeds another directly ("partition compile failed", then an illegal instruction), so they
are left off.
"""

import math
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.kernel import Kernel

FLAGS: dict[str, bool | int | str] = {
    # This pass keeps sums accurate by window reductions, in which a softmax takes 16 times as long;
    # sums are lowered in blocks instead (reductions.py).
    "xla_disable_hlo_passes": "tree_reduction_rewriter",
    "xla_cpu_prefer_vector_width": 512,
    # With 3, rows of a few vectors are unrolled into code of tens of thousands of instructions: a
    # tanh of 64 x 32 numbers compiles in 0.4 s, with 2 in 0.04 s. Kernels run as fast.
    "xla_backend_optimization_level": 2,
    # jaxlib's own value: with the plugin's default, jnp.maximum treats NaN otherwise than jax.jit.
    "xla_cpu_enable_fast_min_max": False,
    # Its products pack a right-hand side that is a parameter, and pack it again only when the
    # address changes. Here an address holds one tensor after another, and an older one would be
    # multiplied.
    "xla_cpu_use_xnnpack": False,
    # By default a module is compiled in up to 32 parts, each with memory mappings of its own, of
    # which Linux allows 65,530 (mappings.py). Kernels are compiled side by side as it is.
    "xla_cpu_parallel_codegen_split_count": 1,
}

FORMER_EMITTERS = {"xla_cpu_use_fusion_emitters": False}
"""Flags with which kernels are compiled in two thirds of the time. The code has the same bits and
speed, but of reductions. Elements of less than a byte it does not know, and floats of one it rounds
twice: 480 to 512 become 0 in float8_e4m3fn, negative underflow NaN where no zero is negative."""
NOT_AT_ALL = {"xla_backend_optimization_level": 0}
UNOPTIMIZED = FORMER_EMITTERS | NOT_AT_ALL
"""In less than half of the time: slower by about what a vertex's launch takes, where kernels are as
small as that. Sums would have one accumulator where optimized ones have one for each lane."""
FORMER_EMITTERS_BYTES, UNOPTIMIZED_BYTES = 2**20, 2**14
"""What kernels read and write that are compiled with them, at most."""
ELEMENTWISE_BYTES = 2**30
"""The same of former emitters for elementwise kernels: of arrays of 16 MiB they took 0.66 to 1.04
of the time with the same bits."""


def flags_for(kernel: Kernel, flags: dict[str, bool | int | str] = FLAGS) -> dict[str, Any]:
    """The flags for a kernel, by its traffic and what it does; where JAX is to optimize little
    (`jax_disable_most_optimizations`), the same for any."""
    if compat.optimizes_little():  # by the former emitters where they know the elements
        return flags | (NOT_AT_ALL if math.isinf(kernel.traffic) else UNOPTIMIZED)
    if kernel.traffic <= UNOPTIMIZED_BYTES and not kernel.adds:
        return flags | UNOPTIMIZED
    most = ELEMENTWISE_BYTES if kernel.elementwise else FORMER_EMITTERS_BYTES
    if kernel.traffic <= most and not kernel.reduces:
        return flags | FORMER_EMITTERS
    return flags


def compile_options(flags: dict[str, bool | int | str] = FLAGS) -> bytes:
    """CompileOptionsProto for one replica, one partition and the default device."""
    build = _integer(1, -1) + _integer(4, 1) + _integer(5, 1)
    proto = _message(3, build) + _integer(4, 1)
    for name, value in flags.items():
        if isinstance(value, bool):
            option = _integer(2, int(value))
        elif isinstance(value, int):
            option = _integer(3, value)
        else:
            option = _message(1, value.encode())
        proto += _message(7, _message(1, name.encode()) + _message(2, option))
    return proto


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body
