"""Start one process per rank, watch them, and end all of them if one dies, hangs or fails.

Ranks report what they do. One that is behind the others for longer than `runtime.rank_timeout_s` hangs: while it loads, between
requests, or in a request, where the collectives of the others run into the same limit. Before the ranks are ended, each that
still runs writes its Python stack to its log.
"""

import json
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from llm_perf_opt.config.parallel import device_of_rank, ranks_of
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, error_from
from llm_perf_opt.core.inside import PRIVATE, make_folder, open_to_append
from llm_perf_opt.core.processes import Process, has_ended, is_stopped, module_argv, start_member
from llm_perf_opt.core.secrets import concealed, printed_credentials
from llm_perf_opt.runners.child import MESSAGE_PREFIX, PARENT_VARIABLE, send

_MODULE = "llm_perf_opt.runners.rank_process"
_TICK_S = 0.5
_SETTLE_S = 3.0
"""How long the others may take to fail too after the first: the cause is one of them."""
_STACK_S = 10.0
"""How long ranks may take to write their stacks; one that waits for a device writes none."""
_END_S = 5.0
_LOG_LINES = 3
_KEPT_LINES = 200
_STACK = "Stack (most recent call first):"
"""The line before a stack that a rank writes on request."""
_LONGEST_LINE = 200
_FORWARDED = ("phase", "progress", "stages")
_POSITIONS = ("phase", "progress", "position")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass
class Rank:
    """A running rank."""

    number: int
    child: Process
    log: IO[bytes]
    rest: bytes = b""
    steps: int = 0
    """Messages that show progress; all ranks send the same ones."""
    doing: str = "starting"
    behind_since: float | None = None
    """When another rank got ahead of it; None: it is not behind."""
    stopped_since: float | None = None
    """When its process was found stopped; None: it is not."""
    error: dict[str, Any] | None = None
    tail: list[str] = field(default_factory=list)
    ended_by_us: bool = False

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.child.returncode

    @property
    def failed(self) -> bool:
        """Whether it ended, but not successfully or by an interruption."""
        return self.code is not None and self.code not in (0, 130) and not self.ended_by_us

    @property
    def state(self) -> str:
        """What it does, or how it ended."""
        if self.code is None or self.ended_by_us:
            return f"was running ({self.doing})"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name} ({self.doing})"
        return "has finished" if self.code == 0 else f"ended with exit code {self.code} ({self.doing})"


def supervise(config: RunConfig, words: Sequence[str], out: Path) -> int:
    """Run a pass on all ranks of the configuration and return its exit code; raise the error of the rank that caused it."""
    make_folder(out, out)
    with tempfile.TemporaryDirectory(prefix="llm-perf-ranks-") as meeting:
        ranks: list[Rank] = []
        try:
            for number in range(ranks_of(config)):
                argv = module_argv(_MODULE, *words, "--rank", str(number), "--meeting", meeting)
                log = open_to_append(out, out / f"rank{number}.log", PRIVATE)
                ranks.append(Rank(number, start_member(argv, _environment(config, number)), log))
            send("workers", pids=[rank.child.pid for rank in ranks])
            return _Watch(ranks, config.runtime.rank_timeout_s).run()
        finally:
            _end(ranks)
            for rank in ranks:
                rank.log.close()


def _environment(config: RunConfig, rank: int) -> dict[str, str]:
    """Return the environment of a rank: its number, its device, and the loopback interface for what ranks exchange."""
    size = str(ranks_of(config))
    index = str(device_of_rank(config, rank) if config.hardware.device != "cpu" else rank)
    own = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": index, "LOCAL_WORLD_SIZE": size}
    own[PARENT_VARIABLE] = str(os.getpid())  # a rank must not outlive this process, whatever ends it
    defaults = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
    return {**defaults, **os.environ, **own}


class _Watch:
    """Follows the ranks until all have ended, or until one has failed."""

    def __init__(self, ranks: list[Rank], limit_s: float) -> None:
        self._ranks = ranks
        self._limit_s = limit_s
        self._interrupted = False
        self._selector = selectors.DefaultSelector()
        self._credentials = printed_credentials((), os.environ)
        for rank in ranks:
            assert rank.child.stdout is not None  # noqa: S101 - opened with PIPE
            os.set_blocking(rank.child.stdout.fileno(), False)
            self._selector.register(rank.child.stdout, selectors.EVENT_READ, rank)

    def run(self) -> int:
        """Return the exit code of the pass, or raise why it failed."""
        while any(rank.code is None for rank in self._ranks):
            try:
                self._read(_TICK_S)
                self._check()
            except KeyboardInterrupt:  # the ranks get the signal too, and keep what they have
                self._interrupted = True
        self._read(0)
        self._check()
        codes = {rank.code for rank in self._ranks}
        if self._interrupted or 130 in codes:
            return Interrupted.exit_code
        return 0

    def _read(self, wait_s: float) -> bool:
        """Read what ranks say, waiting at most this long, and return whether one said something."""
        ready = self._selector.select(wait_s)
        for key, _ in ready:
            self._take(key.data, key.fd)
        for rank in self._ranks:
            rank.child.poll()
        return bool(ready)

    def _take(self, rank: Rank, pipe: int) -> None:
        with suppress(BlockingIOError):
            chunk = os.read(pipe, 65536)
            if not chunk:
                self._selector.unregister(pipe)
                if rank.rest:  # the last words of a rank that was killed
                    self._line(rank, rank.rest)
                return
            *lines, rank.rest = (rank.rest + chunk).split(b"\n")
            for line in lines:
                self._line(rank, line)

    def _line(self, rank: Rank, line: bytes) -> None:
        message = _message(line.decode(errors="replace"))
        if message is None:
            line = concealed(line, self._credentials)
            text = line.decode(errors="replace")
            rank.log.write(line + b"\n")
            rank.tail = [*rank.tail, text.strip()][-_KEPT_LINES:] if text.strip() else rank.tail
            if rank.number == 0:
                print(text, flush=True)
            return
        event = message.get("event")
        if event in _POSITIONS:
            rank.steps, rank.behind_since = rank.steps + 1, None
            rank.doing = str(message.get("text") or f"{message.get('phase')} {message.get('done')}")
        if event == "error":
            rank.error = message
        elif event == "workers" or (rank.number == 0 and event in _FORWARDED):
            send(str(message.pop("event")), **message)

    # --- failures ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise if a rank has failed or hangs. After an interruption, ranks end one after the other and lose each other."""
        if self._interrupted:
            return
        if any(rank.failed for rank in self._ranks):
            until = time.monotonic() + _SETTLE_S
            while time.monotonic() < until and any(rank.code is None for rank in self._ranks):
                self._read(_TICK_S)
            self._read(0)
            raise self._failure()
        stopped = self._stopped(time.monotonic())
        if stopped is not None:
            raise CaptureError(
                f"Rank {stopped.number} of {len(self._ranks)} hangs ({stopped.doing}): its process has been stopped for "
                f"{self._limit_s:g} s. {self._details(stopped)}",
                "Find out what stopped it: SIGSTOP, or a debugger.",
            )
        late = self._late(time.monotonic())
        if late is not None:
            raise self._hanging([late], f"the others have waited for it for {self._limit_s:g} s.")

    def _late(self, now: float) -> Rank | None:
        """Return a rank that has been behind another for too long."""
        ahead = max(rank.steps + (rank.code == 0) for rank in self._ranks)
        for rank in self._ranks:
            if rank.code is None and rank.steps < ahead and rank.behind_since is None:
                rank.behind_since = now
        waited = [rank for rank in self._ranks if rank.code is None and rank.behind_since is not None]
        # Ranks themselves give up after the limit and say for whom they waited, so they come first.
        return next((rank for rank in waited if now - (rank.behind_since or now) > self._limit_s + 2 * _SETTLE_S), None)

    def _stopped(self, now: float) -> Rank | None:
        """Return a rank whose process has been stopped for too long. Rank 0 serves the store: without it, no other gives up."""
        for rank in self._ranks:
            if rank.code is not None or not is_stopped(rank.child.pid):
                rank.stopped_since = None
            elif rank.stopped_since is None:
                rank.stopped_since = now
        found = [rank for rank in self._ranks if rank.stopped_since is not None]
        return next((rank for rank in found if now - (rank.stopped_since or now) > self._limit_s), None)

    def _failure(self) -> LlmPerfError:
        """Return the error of the rank that caused the failure: one that was killed, then one with an error of its own."""
        failed = [rank for rank in self._ranks if rank.failed]
        killed = [rank for rank in failed if rank.code is not None and rank.code < 0]
        own = [rank for rank in failed if rank.error is not None and not rank.error.get("of_another")]
        silent = [rank for rank in failed if rank.error is None and rank not in killed]
        if killed or silent:
            return self._died((killed or silent)[0])
        if own:
            return self._own_error(own)
        named = {number for rank in failed for number in (rank.error or {}).get("missing", ())}
        hanging = [rank for rank in self._ranks if rank.code is None and (not named or rank.number in named)]
        if hanging:
            why = str((failed[0].error or {}).get("fact", ""))
            return self._hanging(hanging, f"rank {failed[0].number} gave up: {why.rstrip('.')}.")
        return self._own_error(failed)

    def _died(self, rank: Rank) -> CaptureError:
        killed = rank.code is not None and rank.code < 0
        memory = " The system may have run out of memory." if rank.code == -signal.SIGKILL else ""
        remedy = f"See {rank.log.name}.{memory}" if killed else f"See {rank.log.name}."
        return CaptureError(f"Rank {rank.number} of {len(self._ranks)} {rank.state}. {self._details(rank)}", remedy)

    def _own_error(self, failed: list[Rank]) -> LlmPerfError:
        """Return the error that a rank sent; if every rank has the same one, it is not about that rank."""
        first = failed[0]
        sent = first.error or {}
        kind, fact, remedy = (str(sent.get(name, "")) for name in ("kind", "fact", "remedy"))
        alike = len(failed) == len(self._ranks) and len({str((rank.error or {}).get("fact")) for rank in failed}) == 1
        if alike:
            return error_from(kind, fact, remedy)
        return error_from(kind, f"Rank {first.number} of {len(self._ranks)} failed: {fact} {self._details(first)}", remedy)

    def _hanging(self, hanging: list[Rank], why: str) -> CaptureError:
        """Return the error for ranks that do not go on, with the stacks of all in their logs."""
        self._ask_for_stacks()
        rank = hanging[0]
        who = f"Rank {rank.number}" if len(hanging) == 1 else f"Ranks {', '.join(str(each.number) for each in hanging)}"
        stack = ": it ends with the stack of the rank" if _stack(rank.tail) else ""
        return CaptureError(
            f"{who} of {len(self._ranks)} {'hangs' if len(hanging) == 1 else 'hang'} ({rank.doing}): {why} {self._details(rank)}",
            f"See {rank.log.name}{stack}. If it only needs longer, raise runtime.rank_timeout_s.",
        )

    def _ask_for_stacks(self) -> None:
        """Let every rank that runs write its stack to its log, and read until all have done so and say no more."""
        running = [rank for rank in self._ranks if rank.code is None and not is_stopped(rank.child.pid)]
        asked = running if hasattr(signal, "SIGUSR1") else []
        for rank in asked:
            with suppress(ProcessLookupError):
                rank.child.send_signal(signal.SIGUSR1)
        until = time.monotonic() + _STACK_S
        while time.monotonic() < until:
            heard = self._read(_TICK_S)
            if not heard and all(rank.code is not None or _stack(rank.tail) for rank in asked):
                return

    def _details(self, culprit: Rank) -> str:
        """Return the end of a rank's log and the state of the others."""
        end = " | ".join(line[:_LONGEST_LINE] for line in _telling(culprit.tail))
        others = "; ".join(f"rank {rank.number} {rank.state}" for rank in self._ranks if rank is not culprit)
        return f"{'The end of its log: ' + end + '. ' if end else 'Its log is empty. '}The others: {others}."


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """Return the last lines of a log; if a stack is at its end, the first lines of that: where the rank is."""
    return _stack(lines)[:_LOG_LINES] or lines[-_LOG_LINES:]


def _stack(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of the stack at the end of a log; none if there is no stack."""
    headers = [place for place, line in enumerate(lines) if line.endswith(_STACK)]
    return lines[headers[-1] + 1 :] if headers else ()


def _message(text: str) -> dict[str, Any] | None:
    if not text.startswith(MESSAGE_PREFIX):
        return None
    try:
        found = json.loads(text[len(MESSAGE_PREFIX) :])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _end(ranks: Sequence[Rank]) -> None:
    """End every rank that still runs. One that is stopped or hangs ends by SIGKILL only."""
    running = [rank for rank in ranks if rank.child.poll() is None]
    for number, patience in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        for rank in running:
            if rank.child.poll() is None:
                rank.ended_by_us = True
                rank.child.send_signal(number)
        until = time.monotonic() + patience
        for rank in running:
            has_ended(rank.child, until - time.monotonic())
