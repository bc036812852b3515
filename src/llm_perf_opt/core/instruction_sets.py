"""The instruction set that multiplies a number format on a CPU, from the flags that the kernel lists.

Sources: the names of `arch/x86/include/asm/cpufeatures.h` and `arch/arm64/kernel/cpuinfo.c` of Linux.
"""

from collections.abc import Set
from dataclasses import dataclass

from llm_perf_opt.core.host import cpu_flags
from llm_perf_opt.core.records import Maybe, Missing

_FP32 = (
    ({"avx512f"}, "AVX-512"),
    ({"avx2", "fma"}, "AVX2"),
    ({"avx"}, "AVX"),
    ({"sse2"}, "SSE2"),
    ({"sve2"}, "SVE2"),
    ({"sve"}, "SVE"),
    ({"asimd"}, "ASIMD"),
    ({"neon"}, "NEON"),
)
_NATIVE = {
    "fp32": _FP32,
    "bf16": (
        ({"amx_bf16"}, "AMX-BF16"),
        ({"avx512_bf16"}, "AVX-512-BF16"),
        ({"svebf16"}, "SVE bf16"),
        ({"bf16"}, "ASIMD bf16"),
    ),
    "fp16": (
        ({"amx_fp16"}, "AMX-FP16"),
        ({"avx512_fp16"}, "AVX-512-FP16"),
        ({"sve"}, "SVE fp16"),
        ({"asimdhp"}, "ASIMD fp16"),
    ),
    "int8": (
        ({"amx_int8"}, "AMX-INT8"),
        ({"avx512_vnni"}, "AVX-512-VNNI"),
        ({"avx_vnni"}, "AVX-VNNI"),
        ({"svei8mm"}, "SVE i8mm"),
        ({"i8mm"}, "ASIMD i8mm"),
        ({"asimddp"}, "ASIMD dot product"),
    ),
}
"""Number format → flags and the name of the instruction set that multiplies it, best first."""


@dataclass(frozen=True)
class InstructionSet:
    """The best instructions of this CPU for products in a number format."""

    name: str
    native: bool
    """Whether they multiply the format itself. Otherwise libraries convert it, and the name is that for fp32."""


def instruction_set(dtype: str, flags: Set[str] | None = None) -> Maybe[InstructionSet]:
    """Return the instruction set that libraries can use for a number format on this CPU."""
    listed = cpu_flags() if flags is None else flags
    if not listed:
        return Missing("the system does not list the CPU's instruction sets")
    for native, choices in ((True, _NATIVE.get(dtype, ())), (False, _FP32)):
        for needed, name in choices:
            if needed <= listed:
                return InstructionSet(name, native)
    return Missing("the CPU lists no known vector instructions")
