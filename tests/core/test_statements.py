"""Statements end at once on a signal, and when their time is over."""

import os
import signal
import threading

import duckdb
import pytest

from llm_perf_opt.core.statements import OverdueError, run_statements

ENDLESS = "select count(*) from range(100000) a, range(100000) b, range(100000) c"


class Connection:
    """A connection whose statement ends when it is interrupted, and misses the first interrupt."""

    def __init__(self) -> None:
        self.interrupts = 0
        self._ended = threading.Event()

    def interrupt(self) -> None:
        """End the statement."""
        self.interrupts += 1
        if self.interrupts > 1:
            self._ended.set()

    def run(self) -> None:
        """Wait for the second interrupt."""
        self._ended.wait()
        raise InterruptedError


def test_the_result_of_the_statements() -> None:
    connection = duckdb.connect()
    assert run_statements(connection, lambda: connection.execute("select 3").fetchall()) == [(3,)]
    with pytest.raises(duckdb.ParserException):
        run_statements(connection, lambda: connection.execute("selec 3"), within_s=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_statement_and_is_handled_afterwards(number: signal.Signals) -> None:
    connection = Connection()
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_statements(connection, connection.run, tick=lambda: os.kill(os.getpid(), number))
    finally:
        signal.signal(number, before)
    assert connection.interrupts == 2


def test_a_statement_ends_when_its_time_is_over() -> None:
    connection = duckdb.connect()
    with pytest.raises(OverdueError):
        run_statements(connection, lambda: connection.execute(ENDLESS).fetchall(), within_s=0.3)
    assert connection.execute("select 3").fetchall() == [(3,)]


def test_statements_run_outside_the_main_thread() -> None:
    connection, found = duckdb.connect(), list[object]()
    thread = threading.Thread(
        target=lambda: found.append(run_statements(connection, lambda: connection.execute("select 3").fetchall()))
    )
    thread.start()
    thread.join()
    assert found == [[(3,)]]
