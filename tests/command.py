"""The command `llm-perf` inside the test's own process: imports are paid once, not by each test.

Everything a user sees is the same: arguments, folder, environment, what is printed, the exit code, the run folder. The
measured process of a pass runs in this process, too. Tests of signals, of killed processes and of a fresh interpreter
start real ones (`tests/test_cli.py`).
"""

import io
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from llm_perf_opt.cli import shared
from llm_perf_opt.cli.app import BUG, main
from llm_perf_opt.profiling import passes
from llm_perf_opt.profiling.vendor.child import LineReader
from llm_perf_opt.profiling.vendor.launch import Callbacks, Finished, child_environment, run_child

MEASURED = ["-m", "llm_perf_opt.runners.llm_profile_runner"]
HANG_S = 900
"""A limit on waiting that only a hang reaches, however busy the machine is."""


def llm_perf(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, encoding: str = "utf-8"
) -> "subprocess.CompletedProcess[str]":
    """Run the command; `env` adds to the environment, `encoding` is the terminal's."""
    out, err = _stream(encoding), _stream(encoding)
    argv = ["llm-perf", *map(str, words)]
    with _place(cwd, env or {}), _arguments(argv), measured_here(), redirect_stdout(out), redirect_stderr(err):
        code = _exit_code(main)
    return subprocess.CompletedProcess(argv, code, _text(out), _text(err))


def llm_perf_process(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, as a shell does; `env` adds to the environment."""
    argv = [sys.executable, "-m", "llm_perf_opt", *map(str, words)]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)


def profile_runner(*words: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run `python -m llm_perf_opt.runners.llm_profile_runner` on its own, in this process."""
    import torch

    from llm_perf_opt.runners import llm_profile_runner

    out, err, threads = _stream(), _stream(), torch.get_num_threads()
    argv = [MEASURED[1], *map(str, words)]
    with _place(cwd, {}), _arguments(argv), redirect_stdout(out), redirect_stderr(err):
        code = _exit_code(llm_profile_runner.main)
    torch.set_num_threads(threads)
    return subprocess.CompletedProcess(argv, code, _text(out), _text(err))


def clean_end(done: "subprocess.CompletedProcess[str]", codes: Sequence[int] = (0, 2, 3, 4, 5, 6)) -> bool:
    """Whether it ended well or with an error of its own, and not with one of Python's."""
    return done.returncode in codes and BUG not in done.stderr and "Traceback" not in done.stderr


@contextmanager
def measured_here() -> Iterator[None]:
    """Passes of PyTorch run in this process, which has imported torch already."""
    with patch.object(passes, "run_child", _run_measured):
        yield


def _run_measured(
    argv: Sequence[str],
    *,
    log: Path,
    callbacks: Callbacks,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> Finished:
    """As `run_child`, without a process where the measured one was asked for."""
    if list(argv[1:3]) != MEASURED:
        return run_child(argv, log=log, callbacks=callbacks, environment=environment, **more)
    import torch

    from llm_perf_opt.runners import llm_profile_runner

    begun, said, threads = time.monotonic(), _stream(), torch.get_num_threads()
    callbacks.on_start(os.getpid())
    with (
        _place(None, environment or child_environment()),
        _arguments(list(argv[2:])),
        patch.object(llm_profile_runner, "die_with_parent"),
        patch.object(llm_profile_runner, "enable_interrupts"),
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        code = _exit_code(llm_profile_runner.main)
    torch.set_num_threads(threads)
    with log.open("ab", buffering=0) as file:
        reader = LineReader(file, callbacks.on_message)
        reader.feed(_text(said).encode())
        reader.close()
    return Finished(code, time.monotonic() - begun, False)


def _exit_code(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except Exception:  # noqa: BLE001 - shown as an interpreter does
        traceback.print_exc()
        return 1
    return 0


def _stream(encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding, newline="\n", write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(stream.encoding)


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    before = sys.argv, shared._debug
    sys.argv, shared._debug = argv, False
    try:
        yield
    finally:
        sys.argv, shared._debug = before


@contextmanager
def _place(cwd: Path | None, env: Mapping[str, str]) -> Iterator[None]:
    folder, environment = Path.cwd(), dict(os.environ)
    try:
        os.environ.update(env)
        tempfile.tempdir = None  # TMPDIR is read again
        if cwd is not None:
            os.chdir(cwd)
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
