"""One rank of a pass: runs the pass together with the other ranks and reports to the process that started it."""

import argparse
import faulthandler
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.runners.child import die_with_parent, enable_interrupts, send
from llm_perf_opt.runners.llm_profile_runner import PASSES, read_config, run_pass, translate
from llm_perf_opt.runners.rank_group import LostRankError, of_rank, open_group

_OF_ANOTHER = ("DistBackendError", "DistNetworkError", "DistStoreError")
"""Errors of torch.distributed that another rank causes."""
_GLOO = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def main() -> None:
    """Command line of a rank; `rank_supervisor` starts it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("code", nargs="*", help="settings of the configuration that can run code")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--pass", dest="which", choices=PASSES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--decode-steps", type=int)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--meeting", type=Path, required=True, help="an empty folder that all ranks know")
    arguments = parser.parse_intermixed_args()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    try:
        die_with_parent()
        enable_interrupts()
        _run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - reported to the parent; the traceback is in the log
        _fail(error)


def _run(arguments: argparse.Namespace) -> None:
    config = of_rank(read_config(arguments.config, arguments.code), arguments.rank)
    from llm_perf_opt.runners.cpus import prepare_threads

    prepare_threads(config.hardware.cpus, config.hardware.threads)  # before torch is imported
    group = open_group(config, arguments.rank, arguments.meeting)
    finished = run_pass(config, arguments.which, arguments.out, arguments.decode_steps, ranks=group)
    if finished:
        send("position", text="finished")
        group.wait_for_all("the end of the pass")
        group.leave()
    _leave()
    sys.exit(0 if finished else 130)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _fail(raised: Exception) -> NoReturn:
    traceback.print_exc(file=sys.stderr)
    error = raised if isinstance(raised, LlmPerfError) else translate(raised)
    missing = raised.missing if isinstance(raised, LostRankError) else ()
    send(
        "error",
        kind="CaptureError" if isinstance(raised, LostRankError) else type(error).__name__,
        fact=error.fact,
        remedy=error.remedy,
        of_another=_of_another(raised),
        missing=missing,
    )
    sys.stdout.flush()
    sys.exit(error.exit_code)


def _of_another(error: Exception) -> bool:
    """Return whether another rank probably caused the error: a collective or an exchange did not complete."""
    if isinstance(error, LostRankError) or type(error).__name__ in _OF_ANOTHER:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _GLOO)


if __name__ == "__main__":
    main()
