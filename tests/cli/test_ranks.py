"""The command and ranks: torchrun around it is refused with the command to use instead."""

import pytest

import command


@pytest.mark.parametrize("given", [[], ["runtime.tensor_parallel=7"]])
def test_torchrun_around_a_run_is_refused_with_the_right_command(given: list[str]) -> None:
    env = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    done = command.llm_perf("run", "model=tiny", "hardware=cpu", *given, env=env)
    assert done.returncode == 2
    assert "2 competing runs" in done.stderr
    assert "llm-perf run model=tiny hardware=cpu runtime.tensor_parallel=2" in done.stderr


def test_a_single_process_of_torchrun_is_no_rank() -> None:
    env = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1"}
    assert command.llm_perf("run", "--dry-run", "model=tiny", "hardware=cpu", env=env).returncode == 0
