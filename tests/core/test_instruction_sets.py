"""Instruction sets per number format, from the flags of known processors."""

import pytest

from llm_perf_opt.core.instruction_sets import InstructionSet, instruction_set
from llm_perf_opt.core.records import Missing

N1 = {"fp", "asimd", "fphp", "asimdhp", "asimdrdm", "asimddp"}
V1 = {*N1, "sve", "svei8mm", "svebf16", "i8mm", "bf16"}
HASWELL = {"sse2", "avx", "f16c", "fma", "avx2"}
ICE_LAKE = {*HASWELL, "avx512f", "avx512_vnni"}
SAPPHIRE_RAPIDS = {*ICE_LAKE, "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile", "amx_int8"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (N1, {"fp32": "ASIMD", "fp16": "ASIMD fp16", "int8": "ASIMD dot product"}),
        (V1, {"fp32": "SVE", "bf16": "SVE bf16", "fp16": "SVE fp16", "int8": "SVE i8mm"}),
        (HASWELL, {"fp32": "AVX2"}),
        (ICE_LAKE, {"fp32": "AVX-512", "int8": "AVX-512-VNNI"}),
        (SAPPHIRE_RAPIDS, {"fp32": "AVX-512", "bf16": "AMX-BF16", "fp16": "AVX-512-FP16", "int8": "AMX-INT8"}),
    ],
)
def test_native_formats_name_their_instructions_and_others_are_converted(flags: set[str], expected: dict[str, str]) -> None:
    for dtype in ("fp32", "bf16", "fp16", "int8"):
        native = dtype in expected
        assert instruction_set(dtype, flags) == InstructionSet(expected[dtype if native else "fp32"], native)


@pytest.mark.parametrize("flags", [set(), {"fpu"}])
def test_unknown_instructions_are_missing(flags: set[str]) -> None:
    assert isinstance(instruction_set("fp32", flags), Missing)
