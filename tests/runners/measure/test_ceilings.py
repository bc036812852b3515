"""Measured peaks of the CPU, in a fraction of the usual time, and their cache."""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command import HANG_S
from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.host import cache_bytes, cpu_has_native_bf16, usable_cpus
from llm_perf_opt.core.machine_records import (
    CacheLevel,
    CeilingRow,
    Ceilings,
    FoundCeilings,
    LinearLayer,
    ModelLinears,
    read_ceilings,
)
from llm_perf_opt.core.records import Distribution, Missing
from llm_perf_opt.runners.measure import ceiling_cpu, ceiling_model, ceilings, clock, host_load
from llm_perf_opt.runners.measure.ceiling_kernels import Arena, Room, gemm_trial
from llm_perf_opt.runners.measure.ceiling_timing import Measured, Quantity
from writing import write_record

CPU = torch.device("cpu")
TINY_S = 0.2
KEYS = {
    "gemm_bf16", "gemm_fp16", "gemm_tf32", "gemm_fp32", "gemm_int8", "gemm_fp8", "read", "copy", "gemv",
    "launch_eager", "launch_graph", "dispatch", "view_call", "module_call", "sync", "launch_sync", "item",
}  # fmt: skip
MODEL = ModelLinears("m", "fp32", 100_000, (LinearLayer(64, 512, 1, 1, 1), LinearLayer(64, 32, 6, 4, 1)))


def expected_keys() -> set[str]:
    """The keys of a CPU, with the caches and processors of this machine."""
    levels = cache_bytes()
    caches = (1, 2, 3) if isinstance(levels, Missing) else levels
    counts = ceiling_cpu.thread_counts()
    threads = {f"threads_{count}_{kind}" for count in counts for kind in ("gemm", "gemv")}
    return KEYS | {f"read_l{level}" for level in caches} | threads


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "llm-perf-opt" / "ceilings"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on this machine is not looked at."""
    monkeypatch.setattr(host_load.OtherProcesses, "cpus", lambda _: 0.0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, alone: None) -> list[float]:
    """Measuring replaced by one row that costs nothing; holds the budget of every measurement."""
    budgets: list[float] = []

    def quantities(*_: Any) -> tuple[Quantity, ...]:
        def measure(seconds: float) -> Measured:
            budgets.append(seconds)
            return Measured(distribution(len(budgets) * 1e9), "made up")

        return (Quantity("read", "read bandwidth", "B/s", 1.0, measure),)

    monkeypatch.setattr(ceiling_cpu, "cpu_quantities", quantities)
    return budgets


def distribution(median: float) -> Distribution:
    none = Missing("made up")
    return Distribution(9, median, none, none, median, median, median, median, none, none)


@pytest.fixture(scope="module")
def measured() -> Ceilings:
    """One real measurement, shared."""
    return ceilings.measure(CPU, ceilings.identify(CPU), TINY_S, lambda *_: None)[0]


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_quantity_has_a_row_and_every_row_a_value_or_a_reason(measured: Ceilings) -> None:
    assert {row.key for row in measured.rows} == expected_keys()
    for row in measured.rows:
        if isinstance(row.value, Missing):
            assert row.value.why
        else:
            assert row.value.minimum <= row.value.median <= row.value.maximum
            assert row.value.median > 0  # single differences of two times may be negative on a busy machine
            assert row.value.n >= 9
            assert row.how


@pytest.mark.slow
def test_what_a_cpu_has_is_measured_and_what_it_lacks_says_so(measured: Ceilings) -> None:
    values = {row.key: row.value for row in measured.rows}
    for key in ("gemm_fp32", "gemm_bf16", "gemm_fp16", "read", "copy", "gemv", "dispatch", "view_call", "threads_1_gemm"):
        assert isinstance(values[key], Distribution), values[key]
    bf16 = measured.row("gemm_bf16")
    assert bf16 is not None
    assert bf16.native in (cpu_has_native_bf16(), None)
    assert values["launch_eager"] == values["sync"] == values["item"] == Missing("the run is on the CPU")


def test_the_figures_are_of_a_processor(measured: Ceilings) -> None:
    """Orders of magnitude only: this may run beside anything, on anything."""
    rows = {row.key: row.value.median for row in measured.rows if isinstance(row.value, Distribution)}
    assert 1e8 < rows["gemm_fp32"] < 1e15
    assert 1e8 < rows["read"] < 1e13
    assert 1e8 < rows["copy"] < 1e13
    assert 50 < rows["dispatch"] < 1e6


def test_it_says_where_and_how_it_was_taken(measured: Ceilings) -> None:
    assert measured.device_kind == "cpu"
    assert measured.threads == torch.get_num_threads()
    assert measured.torch_version == torch.__version__
    assert measured.budget_s == TINY_S
    assert "threads" in measured.conditions[0]
    assert "last-level cache" in measured.conditions[1]
    assert measured.processors == usable_cpus()
    assert torch.get_num_threads() == measured.threads, "the comparison of thread counts restores the setting"


def test_thread_counts_are_powers_of_two_the_cores_and_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_cpu, "usable_cpus", lambda: 24)
    monkeypatch.setattr(ceiling_cpu, "physical_cores", lambda: 12)
    assert ceiling_cpu.thread_counts() == (1, 2, 4, 8, 12, 16, 24)
    monkeypatch.setattr(ceiling_cpu, "usable_cpus", lambda: 1)
    monkeypatch.setattr(ceiling_cpu, "physical_cores", lambda: Missing("not reported"))
    assert ceiling_cpu.thread_counts() == (1,)


def test_a_quantity_that_fails_leaves_the_others(cache: Path, monkeypatch: pytest.MonkeyPatch, counted: list[float]) -> None:
    def fail(_: float) -> Measured:
        raise RuntimeError("no such\nkernel")

    planned = ceiling_cpu.cpu_quantities

    def with_failure(*_: Any) -> tuple[Quantity, ...]:
        return (Quantity("gemm_fp8", "GEMM fp8", "FLOP/s", 1.0, fail), *planned(CPU, Room(0, 0)))

    monkeypatch.setattr(ceiling_cpu, "cpu_quantities", with_failure)
    found = ceilings.load_or_measure(CPU, False)
    fp8 = found.ceilings.row("gemm_fp8")
    assert fp8 is not None
    assert fp8.value == Missing("RuntimeError: no such kernel")
    assert isinstance(found.ceilings.rows[1].value, Distribution)
    assert found.notes == ("Not cached: GEMM fp8 failed and may work next time.",)
    assert not list(cache.glob("*.json"))


def test_nothing_measured_at_all_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Quantity("read", "read bandwidth", "B/s", 0.0, lambda _: Missing("no room"))
    other = Quantity("copy", "copy bandwidth", "B/s", 1.0, lambda _: Missing("no room"))
    monkeypatch.setattr(ceiling_cpu, "cpu_quantities", lambda *_: (nothing, other))
    with pytest.raises(CaptureError, match="no room"):
        ceilings.load_or_measure(CPU, False)


# --- the data they are measured on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_arena_is_filled_with_random_numbers_to_its_end(dtype: torch.dtype) -> None:
    arena = Arena(Room(40 * 2**20, 2**20), CPU, 4)
    values = arena.filled(dtype).float()
    for part in (values[:10_000], values[-10_000:]):
        assert part.isfinite().all()
        assert 0.9 < part.std() < 1.1
        assert part.unique().numel() > 50
    chunks = arena.chunks(dtype, 512)
    assert len(chunks) == 4
    assert len({chunk.data_ptr() for chunk in chunks}) == 4
    assert sum(chunk.nbytes for chunk in chunks) <= 40 * 2**20


def test_a_product_goes_through_the_arena_and_is_right() -> None:
    arena = Arena(Room(4 * 2**20, 2**20), CPU, 4)
    trial = gemm_trial(arena, (64, 32, 128), torch.float32)
    assert trial.work == 2 * 64 * 32 * 128
    values = arena.filled(torch.float32)
    size = (64 + 32) * 128
    for number in (0, 1, 7):
        left = values[number * size :][: 64 * 128].view(64, 128)
        right = values[number * size + 64 * 128 :][: 32 * 128].view(32, 128)
        got = trial.call(number)
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, left @ right.t())


def test_bandwidth_is_missing_where_memory_does_not_reach_beyond_the_cache() -> None:
    shortage = Room(100 * 2**20, 64 * 2**20).shortage
    assert shortage == Missing("exceeding the last-level cache needs 128 MiB, but only 100 MiB can be used")
    assert Room(128 * 2**20, 64 * 2**20).shortage is None


def test_an_untold_cache_is_assumed_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_cpu, "last_level_cache_bytes", lambda: Missing("the system does not tell its caches"))
    room = ceiling_cpu.host_room()
    assert room.cache_bytes == 64 * 2**20
    notes = ceiling_cpu.host_conditions(room, others=0.0).notes[1]
    assert "64 MiB (assumed, because the system does not tell its caches)" in notes


# --- keeping ----------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_kept_and_found_again(cache: Path, counted: list[float]) -> None:
    first = ceilings.load_or_measure(CPU, False)
    second = ceilings.load_or_measure(CPU, False)
    assert (first.cached, second.cached) == (False, True)
    assert second.ceilings == first.ceilings
    assert len(counted) == 1
    assert second.cache_file == str(next(cache.glob("*.json")))


def test_the_rows_of_a_model_join_those_of_the_device_which_models_share(
    cache: Path, counted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[str] = []

    def quantities(model: ModelLinears, *_: Any) -> tuple[Quantity, ...]:
        shapes.append(model.name)
        return (Quantity("model_gemv_fp32", "decode", "ns", 1.0, lambda _: Measured(distribution(5e6), "made up"), work=1e6),)

    monkeypatch.setattr(ceiling_model, "model_quantities", quantities)
    first = ceilings.load_or_measure(CPU, False, model=MODEL)
    second = ceilings.load_or_measure(CPU, False, model=MODEL)
    other = ceilings.load_or_measure(CPU, False, model=replace(MODEL, name="other"))
    assert (first.cached, second.cached, other.cached) == (False, True, False)
    assert (len(counted), shapes) == (1, ["m", "other"])
    assert [row.key for row in second.ceilings.rows] == ["read", "model_gemv_fp32"]
    assert second.ceilings == first.ceilings
    assert second.ceilings.model == MODEL
    assert second.ceilings.rows[1].rate == pytest.approx(1e6 / 5e-3)
    assert ceilings.load_or_measure(CPU, False).ceilings.model is None
    assert len(list(cache.glob("*.json"))) == 3


def test_shapes_that_cannot_be_measured_leave_the_peaks_of_the_device(
    cache: Path, counted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Quantity("model_gemv_fp32", "decode", "ns", 1.0, lambda _: Missing("no room"))
    monkeypatch.setattr(ceiling_model, "model_quantities", lambda *_: (nothing,))
    found = ceilings.load_or_measure(CPU, False, model=MODEL)
    assert [row.key for row in found.ceilings.rows] == ["read"]
    assert "no room" in found.notes[0]


def test_refresh_measures_anew_and_replaces(cache: Path, counted: list[float]) -> None:
    ceilings.load_or_measure(CPU, False)
    again = ceilings.load_or_measure(CPU, True)
    assert not again.cached
    assert ceilings.load_or_measure(CPU, False).ceilings == again.ceilings
    assert len(counted) == 2
    assert len(list(cache.glob("*.json"))) == 1


def test_a_hasty_result_does_not_serve_a_thorough_request(cache: Path, counted: list[float]) -> None:
    ceilings.load_or_measure(CPU, False, budget_s=1.0)
    assert not ceilings.load_or_measure(CPU, False, budget_s=2.0).cached
    assert ceilings.load_or_measure(CPU, False, budget_s=1.0).cached


@pytest.mark.parametrize(
    "field", ["name", "device_id", "driver", "torch_version", "threads", "cpus", "wait_policy", "model", "kind", "node"]
)
def test_another_device_driver_torch_or_thread_count_is_another_file(field: str) -> None:
    identity = ceilings.Identity("cpu", "a processor", "2 processors", "580.1", "2.13.0", 2)
    other: dict[str, Any] = {field: {"threads": 3, "kind": "cuda", "cpus": (1,), "model": MODEL}.get(field, "another")}
    assert replace(identity, **other).digest != identity.digest


def test_the_wait_policy_and_the_kernels_of_a_run_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    passive = ceilings.identify(CPU)
    assert passive.wait_policy == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert ceilings.identify(CPU).digest != passive.digest
    digests = {replace(passive, model=replace(MODEL, compiled=compiled)).digest for compiled in (False, True)}
    assert len(digests) == 2


def test_threads_of_the_host_do_not_divide_the_results_of_a_gpu() -> None:
    identity = ceilings.Identity("cuda", "a card", "GPU-1", "580.1", "2.11.0", 2)
    assert replace(identity, threads=16).digest == identity.digest


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: "", "cannot be read"),
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "\0" * 100, "cannot be read"),
        (lambda text: "[]", "cannot be read"),
        (lambda text: text.replace('"median": 1000000000.0', '"median": "fast"'), "cannot be read"),
        (lambda text: text.replace('"median": 1000000000.0', '"median": -1.0'), "read is -1.0"),
        (lambda text: text.replace('"device_name": "', '"device_name": "not '), "another device"),
        (lambda text: text.replace('"taken": "', '"taken": "once '), "no valid time"),
        (lambda text: text.replace("+00:00", ""), "no time zone"),
    ],
)
def test_a_damaged_cache_is_measured_anew_and_said(cache: Path, counted: list[float], damage: Any, said: str) -> None:
    ceilings.load_or_measure(CPU, False)
    file = next(cache.glob("*.json"))
    whole = file.read_text()
    damaged = damage(whole)
    assert damaged != whole
    file.write_text(damaged)
    found = ceilings.load_or_measure(CPU, False)
    assert not found.cached
    assert len(found.notes) == 1
    assert "measured again" in found.notes[0]
    assert said in found.notes[0]
    assert ceilings.load_or_measure(CPU, False).cached  # and mended


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[float]) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = ceilings.load_or_measure(CPU, False)
    assert not found.cached
    assert found.cache_file == Missing("not cached")
    assert found.notes[0].startswith("The peaks are not cached: ")
    assert "cannot be written" in found.notes[0]


def test_what_was_measured_beside_a_busy_neighbor_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, counted: list[float]
) -> None:
    good = ceilings.load_or_measure(CPU, False)
    monkeypatch.setattr(host_load.OtherProcesses, "cpus", lambda _: 0.97)
    disturbed = ceilings.load_or_measure(CPU, True)
    assert "other processes used 0.97 CPUs meanwhile" in disturbed.notes[0]
    assert ceilings.load_or_measure(CPU, False).ceilings == good.ceilings


@pytest.mark.parametrize(("loads", "said"), [((1.70, 1.54), "used 1.54 to 1.70 CPUs"), ((0.97, 0.97), "used 0.97 CPUs")])
def test_a_load_that_disturbed_both_measurements_is_one_doubt(
    cache: Path, monkeypatch: pytest.MonkeyPatch, counted: list[float], loads: tuple[float, float], said: str
) -> None:
    monkeypatch.setattr(ceiling_model, "model_quantities", lambda _, device, room: ceiling_cpu.cpu_quantities(device, room))
    rest = iter(loads)
    monkeypatch.setattr(host_load.OtherProcesses, "cpus", lambda _: next(rest))
    found = ceilings.load_or_measure(CPU, True, model=MODEL)
    assert len(found.doubts) == len(found.notes) == 1
    assert said in found.doubts[0]
    assert said in found.notes[0]


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert ceilings.cache_folder() == tmp_path / ".cache" / "llm-perf-opt" / "ceilings"


def test_a_stored_row_comes_back_whole(tmp_path: Path) -> None:
    rows = (
        CeilingRow("read", "read bandwidth", "B/s", distribution(4.348e12), "sum", "SM 1980 MHz, 560 W"),
        CeilingRow("gemm_fp8", "GEMM fp8", "FLOP/s", Missing("compute capability 8.0 has none"), ""),
        CeilingRow("model_gemv_bf16", "decode", "ns", distribution(1e6), "linear", "", "AVX2", False, 1e6),
    )
    stored = Ceilings("cuda", "NVIDIA H200", "GPU-1", "580.1", "2.11.0", 16, "2026-01-01T00:00:00+00:00", 9.0, 7.5, ("a",), rows)
    stored = replace(stored, caches=(CacheLevel(3, 2**25),), processors=4, core_cpus=(0, 2), model=MODEL)
    found = FoundCeilings(stored, False, Missing("not cached"), ("a note",))
    write_record(tmp_path / "c.json", found)
    back = read_ceilings(tmp_path / "c.json")
    assert back.ceilings.rows == rows
    assert tuple(back.ceilings.caches) == stored.caches
    assert (back.ceilings.processors, tuple(back.ceilings.core_cpus), back.ceilings.model) == (4, (0, 2), MODEL)
    assert back.ceilings.driver == "580.1"
    assert (back.cache_file, tuple(back.notes)) == (Missing("not cached"), ("a note",))


def test_a_file_of_an_earlier_version_is_read() -> None:
    found = read_ceilings(Path(__file__).parents[2] / "fixtures/old_run/run/raw/ceilings/ceilings.json").ceilings
    assert (found.caches, found.processors, found.core_cpus, found.model) == ((), 0, (), None)
    assert all((row.instructions, row.native, row.work) == ("", None, None) for row in found.rows)


# --- against a loop of torch alone ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_peak_of_products_is_that_of_a_bare_loop(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one thread and by its CPU time. A program on the other half of the core changes that, so the loop runs before and after
    it, and all is repeated if the machine changed in between."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic_ns=time.thread_time_ns))
    pairs: list[tuple[float, float]] = []
    with ceiling_cpu.using_threads(1):
        while len(pairs) < 5:
            before = rate_of_products()
            found = ceilings.measure(CPU, ceilings.identify(CPU), 3.0, lambda *_: None)[0].row("gemm_fp32")
            assert found is not None
            assert isinstance(found.value, Distribution)
            pairs.append((found.value.median, max(before, rate_of_products())))
            if pairs[-1][0] == pytest.approx(pairs[-1][1], rel=0.25):
                return
    pytest.fail(f"the peak and the rate of the loop: {pairs}")


def rate_of_products() -> float:
    return max(2 * size**3 / statistics.median(cpu_times_of_product(size)) for size in (512, 1024, 2048))


def cpu_times_of_product(size: int) -> list[float]:
    left, right = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(12):
        begun = time.thread_time()
        torch.mm(left, right.t())
        times.append(time.thread_time() - begun)
    return times[2:]


# --- as a process -----------------------------------------------------------------------------------------------------


def run_module(*arguments: str, cache: Path) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-m", "llm_perf_opt.runners.measure.ceilings", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        timeout=HANG_S,
        check=False,
    )
    prefix = "@llm-perf "
    return done.returncode, [json.loads(line[len(prefix) :]) for line in done.stdout.splitlines() if line.startswith(prefix)]


@pytest.mark.slow
def test_the_process_measures_tells_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, messages = run_module("--device", "cpu", "--threads", "1", "--budget-s", "0.05", "--out", str(out), cache=tmp_path)
    assert code == 0
    assert messages[0] == {"event": "phase", "text": "device cpu"}
    labels = [message["text"] for message in messages if message["event"] == "progress"]
    assert {"GEMM fp32", "read bandwidth", "copy bandwidth", "GEMV bandwidth"} <= set(labels)
    found = read_ceilings(out)
    assert found.ceilings.threads == 1
    assert {row.key for row in found.ceilings.rows} == expected_keys()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_a_gpu_that_is_not_there_is_refused_by_the_process(tmp_path: Path) -> None:
    code, messages = run_module("--device", "cuda", "--out", str(tmp_path / "out.json"), cache=tmp_path)
    assert code == 3
    assert messages[-1]["event"] == "error"
    assert messages[-1]["fact"].startswith("--device cuda, but ")
    assert "--device cpu" in messages[-1]["remedy"]
    assert not (tmp_path / "out.json").exists()
