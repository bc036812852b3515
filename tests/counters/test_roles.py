"""Counters by meaning: they exist, can be added, and read the expected value where measured."""

import csv
from dataclasses import asdict
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.counters.catalog import CounterRoles, base_names, chips, has, roles

CHIPS = tuple(chips())
MEASURED = Path(__file__).parents[1] / "fixtures" / "h200" / "ncu_gemm_copy_gemv_raw.csv"


def names_of(of: CounterRoles) -> list[str]:
    values = [value for key, value in asdict(of).items() if key not in ("chip", "note")]
    return [name for value in values for name in (value if isinstance(value, dict) else [value]) if name is not None]


@pytest.mark.parametrize("chip", CHIPS)
def test_every_role_exists_on_its_chip(chip: str) -> None:
    found = names_of(roles(chip))
    assert len(found) > 20
    assert [name for name in found if not has(chip, name)] == []


@pytest.mark.parametrize("chip", CHIPS)
def test_no_tensor_counter_is_part_of_another(chip: str) -> None:
    of = roles(chip)
    sources = [*of.tensor_flops, *of.tensor_int_ops]
    assert not [name for name in sources if any(part in name for part in ("_op_", "_sparsity_", "_realtime"))]
    bases = [name.removesuffix(".sum") for name in sources]
    assert not [(one, other) for one in bases for other in bases if one != other and other.startswith(f"{one}_")]


@pytest.mark.parametrize("chip", CHIPS)
def test_every_top_level_tensor_source_has_its_place(chip: str) -> None:
    """The work of a source type that is in the list but not in the roles would not be counted."""
    of = roles(chip)
    counted = {name.removesuffix(".sum") for name in (*of.tensor_flops, *of.tensor_int_ops)}
    listed = {name for name in base_names(chip) if name.startswith("sm__ops_path_tensor_src_") and "_realtime" not in name}
    assert {name for name in listed if "_sparsity_" not in name} == counted


@pytest.mark.parametrize("chip", CHIPS)
def test_factors_are_one_for_an_operation_and_two_for_a_fused_one_times_the_lanes(chip: str) -> None:
    assert not any("_op_h" in name for name in roles(chip).vector_flops), "half precision is an upper bound and stays apart"
    assert all("_op_h" in name for name in roles(chip).half_flops)
    for name, flops in {**roles(chip).vector_flops, **roles(chip).half_flops}.items():
        operation = name.split("_op_")[1].split("_")[0]
        lanes = 2 if operation.startswith("h") or operation.endswith("2") else 1
        assert flops == lanes * (2 if "fma" in operation else 1), name


def test_the_measured_gemm_reads_two_m_n_k() -> None:
    """Three kernels of known size, counted on an H200: a 4096³ bf16 GEMM, a copy of 1 GiB, a GEMV."""
    lines = MEASURED.read_text().splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith('"ID"')) :]
    gemm, copy, _ = csv.DictReader(table[:1] + table[2:])  # the second row holds units
    of = roles("gh100")

    def read(row: dict[str, str], name: str) -> float:
        return float(row[name].replace(",", ""))

    assert sum(factor * read(gemm, name) for name, factor in of.tensor_flops.items() if name in gemm) == 2 * 4096**3
    for name in (of.dram_read_bytes, of.dram_write_bytes):
        assert read(copy, name) == pytest.approx(2**30, rel=0.05)
    assert "exactly" in of.note


@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip != "gh100"])
def test_a_chip_that_was_not_measured_says_so(chip: str) -> None:
    assert "measured on gh100 only" in roles(chip).note


def test_an_unknown_chip_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gv100") as caught:
        roles("gv100")
    assert all(chip in caught.value.remedy for chip in CHIPS)
