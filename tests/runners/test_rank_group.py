"""How ranks meet and wait for each other: a real store on the loopback interface, each rank a thread."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from builders import default_config, with_value
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners import rank_group
from llm_perf_opt.runners.rank_group import LostRankError, RankGroup, of_rank, open_group
from llm_perf_opt.runners.tensor_parallel import check_heads


def on_ranks(meeting: Path, work: Callable[[RankGroup], Any], size: int = 2, limit_s: float = 600.0) -> list[Any]:
    config = with_value(with_value(default_config(), "runtime.tensor_parallel", size), "runtime.rank_timeout_s", limit_s)

    def run(rank: int) -> Any:
        group = open_group(config, rank, meeting)
        try:
            return work(group)
        finally:
            group.timeout_s = 600.0
            group.leave()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_every_rank_gets_the_values_of_all_in_order(tmp_path: Path) -> None:
    def work(group: RankGroup) -> Any:
        first = group.gather_as(group.rank * 10, int, "numbers")
        group.wait_for_all("each other")
        return first, group.agree(group.rank + 7, int)

    assert on_ranks(tmp_path, work, size=3) == [([0, 10, 20], 7)] * 3


def test_a_rank_that_does_not_answer_is_named(tmp_path: Path) -> None:
    done = threading.Event()

    def work(group: RankGroup) -> Any:
        group.wait_for_all("the start")
        if group.rank == 1:
            done.wait(600)
            return None
        group.timeout_s = 0.3
        try:
            with pytest.raises(LostRankError) as caught:
                group.gather(None, "the end of a request")
            return caught.value
        finally:
            done.set()

    error = on_ranks(tmp_path, work)[0]
    assert error.missing == (1,)
    assert error.fact == "Rank 1 did not answer within 0.3 s (the end of a request)."
    assert "rank_timeout_s" in error.remedy


def test_a_first_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    config = with_value(with_value(default_config(), "runtime.tensor_parallel", 2), "runtime.rank_timeout_s", 1.0)
    with pytest.raises(LostRankError) as caught:
        open_group(config, 1, tmp_path)
    assert caught.value.missing == (0,)


def test_the_store_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    import psutil

    def work(group: RankGroup) -> Any:
        group.wait_for_all("the start")
        listening = [entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
        group.wait_for_all("the end")
        return [place.ip for place in listening if place.port == int((tmp_path / "port").read_text())]

    assert on_ranks(tmp_path, work) == [["127.0.0.1"]] * 2


def test_ranks_divide_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads on each of two ranks, not four on both: OpenMP threads would spin against each other."""
    monkeypatch.setattr(rank_group, "allowed_cpus", lambda: frozenset(range(4)))
    config = with_value(with_value(default_config(), "hardware.device", "cpu"), "runtime.tensor_parallel", 2)
    assert [of_rank(config, rank).hardware.threads for rank in (0, 1)] == [2, 2]
    assert of_rank(config, 0).hardware.cpus is None
    pinned = with_value(config, "hardware.cpus", "0-3,8,9")
    assert [of_rank(pinned, rank).hardware.cpus for rank in (0, 1)] == ["0-2", "3,8-9"]
    assert of_rank(pinned, 1).hardware.threads == 3
    assert of_rank(with_value(pinned, "hardware.threads", 1), 1).hardware.threads == 1
    crowded = with_value(config, "runtime.tensor_parallel", 8)
    assert of_rank(crowded, 7).hardware.threads == 1


def test_each_rank_has_its_gpu() -> None:
    config = with_value(with_value(default_config(), "hardware.device", "cuda"), "hardware.devices", 2)
    config = with_value(with_value(config, "hardware.device_index", 1), "runtime.tensor_parallel", 2)
    assert [of_rank(config, rank).hardware.device_index for rank in (0, 1)] == [1, 2]


def test_heads_that_ranks_cannot_divide_are_refused_with_the_sizes_that_fit() -> None:
    check_heads({"num_attention_heads": 8, "num_key_value_heads": 2}, 2)
    with pytest.raises(ConfigError) as caught:
        check_heads({"num_attention_heads": 12, "num_key_value_heads": 4}, 3)
    assert "12 attention heads and 4 key-value heads" in caught.value.fact
    assert caught.value.remedy == "It fits: 1, 2, 4."
    check_heads({}, 3)
    assert "RANK" not in os.environ
