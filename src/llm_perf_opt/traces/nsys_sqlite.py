"""The SQLite export of Nsight Systems → `Trace`, for the layouts of 2022 to 2025.

nsys creates only tables that have rows, columns differ between versions, and rows are unordered. A damaged row is left out and
reported as a problem; a damaged file raises a ParseError.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import (
    NO_NAME,
    Bool,
    DeviceWork,
    HostCalls,
    Int32,
    Int64,
    NameCodes,
    Operators,
    RangeKind,
    Ranges,
    Trace,
    TraceProblem,
    WorkKind,
    different,
)
from llm_perf_opt.traces.nsys_rows import RowChecks, gpu_numbers, message_problems, read_facts, read_samples, renumbered_devices
from llm_perf_opt.traces.projection import is_kernel_launch
from llm_perf_opt.traces.sqlite_tables import Database, Integer, Product, open_database

_CUPTI = "CUPTI_ACTIVITY_KIND_"
_KNOWN_TABLES = ("StringIds", "NVTX_EVENTS", f"{_CUPTI}KERNEL", f"{_CUPTI}RUNTIME")
_THREAD_BITS = 0xFFFFFF
"""The low bits of a global thread id; the other bits identify the process."""
_NO_PROCESS = -1
_PUSH_POP, _START_END, _DOMAIN_CREATE = 59, 60, 75
_LONGEST_NAME = 65_536

_TIMES = {"start": Integer(("start",)), "end": Integer(("end",))}
_ON_DEVICE = {
    **_TIMES,
    "process": Integer(("globalPid",), _NO_PROCESS),
    "device": Integer(("deviceId",), 0),
    "stream": Integer(("streamId",), 0),
    "correlation": Integer(("correlationId",), 0),
    "graph_node": Integer(("graphNodeId",), 0),
}
_KERNEL: dict[str, Integer | Product] = {
    **_ON_DEVICE,
    "name": Integer(("demangledName", "shortName", "mangledName", "nameId"), NO_NAME),
    "grid": Product(("gridX", "gridY", "gridZ")),
    "block": Product(("blockX", "blockY", "blockZ")),
}
_COPY = {**_ON_DEVICE, "bytes": Integer(("bytes",), -1), "kind": Integer(("copyKind",), 0)}
_SET = {**_ON_DEVICE, "bytes": Integer(("bytes",), -1)}
_CALL = {
    **_TIMES,
    "thread": Integer(("globalTid",)),
    "correlation": Integer(("correlationId",), 0),
    "name": Integer(("nameId",), NO_NAME),
    "failed": Integer(("returnValue",), 0),
}
_RANGE = {
    **_TIMES,
    "kind": Integer(("eventType",)),
    "thread": Integer(("globalTid",), 0),
    "text_id": Integer(("textId",), NO_NAME),
    "domain": Integer(("domainId",), 0),
    "row": Integer(("rowid",)),
}
# The copy kinds of CUPTI by number, with the names that nsys uses.
_COPY_KINDS = ("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_UNIFIED_COPIES = {11: "Unified HtoD", 12: "Unified DtoH", 13: "Unified DtoD"}


def read_nsys(path: Path) -> Trace:
    """Return the trace in an export (`.sqlite`, `.db`, or gzipped), or raise a ParseError. `health` checks its content."""
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise ParseError(f"{path} is not exported.", f"nsys export --type sqlite -o {path.stem}.sqlite {path.name}")
    with open_database(path) as database:
        if not _is_export(database):
            found = ", ".join(sorted(database.tables)[:5]) or "none"
            raise ParseError(
                f"{path} is a database, but not an export of Nsight Systems. Its tables: {found}.",
                "Export the report: nsys export --type sqlite -o FILE REPORT.nsys-rep",
            )
        return _Reader(database, path).trace()


def is_nsys_export(path: Path) -> bool:
    """Return whether a database has a table of Nsight Systems, or raise a ParseError if it cannot be read."""
    with open_database(path) as database:
        return _is_export(database)


def _is_export(database: Database) -> bool:
    return any(database.has(table) for table in _KNOWN_TABLES)


class _Reader:
    """Reads one database into a Trace."""

    def __init__(self, database: Database, path: Path) -> None:
        self._database = database
        self._names = NameCodes(str(path))
        self._checks = RowChecks()
        self._strings: dict[int, int] = {}
        """String id → the index of its name."""

    def trace(self) -> Trace:
        database, checks = self._database, self._checks
        kernels = checks.valid_rows(f"{_CUPTI}KERNEL", database.integers(f"{_CUPTI}KERNEL", _KERNEL), work=True)
        copies = checks.valid_rows(f"{_CUPTI}MEMCPY", database.integers(f"{_CUPTI}MEMCPY", _COPY), work=True)
        sets = checks.valid_rows(f"{_CUPTI}MEMSET", database.integers(f"{_CUPTI}MEMSET", _SET), work=True)
        calls = [checks.valid_rows(table, database.integers(table, _CALL)) for table in (f"{_CUPTI}RUNTIME", f"{_CUPTI}DRIVER")]
        ranges = self._range_rows()
        self._strings = self._needed_strings([kernels["name"], *[table["name"] for table in calls], ranges["text_id"]])
        host = self._calls(calls)
        renumbering = gpu_numbers(database)
        work = renumbered_devices(self._work(kernels, copies, sets, host), renumbering)
        labels = self._ranges(ranges)
        samples, unreadable = read_samples(database, work, self._names.__getitem__, by_gpu=bool(renumbering))
        processes = different(np.concatenate([work.process, host.process, labels.process])).tolist()
        problems = [*checks.problems, *self._tool_problems(), *self._text_problems(), *([unreadable] if unreadable else [])]
        return Trace(
            "nsys",
            tuple(self._names.names),
            work,
            host,
            labels,
            Operators.none(),
            tuple(problems),
            read_facts(database, processes, by_gpu=bool(renumbering)),
            samples,
        )

    # --- device work --------------------------------------------------------------------------------------------------

    def _work(self, kernels: "_Columns", copies: "_Columns", sets: "_Columns", calls: HostCalls) -> DeviceWork:
        copy_kinds, which = np.unique(copies["kind"], return_inverse=True)
        copy_names = np.array([self._names[_copy_name(kind)] for kind in copy_kinds.tolist()], np.int32)
        set_name = self._names["[CUDA memset]"] if len(sets["start"]) else NO_NAME
        unknown = np.full(len(kernels["start"]), -1, np.int64)
        parts = [
            _device_work(kernels, WorkKind.KERNEL, self._named(kernels["name"]), unknown, kernels["grid"], kernels["block"]),
            _device_work(copies, WorkKind.MEMCPY, copy_names[which.reshape(-1)], copies["bytes"]),
            _device_work(sets, WorkKind.MEMSET, np.full(len(sets["start"]), set_name, np.int32), sets["bytes"]),
        ]
        columns = {name: np.concatenate([part.columns()[name] for part in parts]) for name in parts[0].columns()}
        unknown_process = columns["process"] == _NO_PROCESS
        known = different(calls.process)
        if unknown_process.any() and len(known) == 1:  # a layout without globalPid, but only one process
            columns["process"] = np.where(unknown_process, known[0], columns["process"])
        work = DeviceWork(**columns)
        return work.rows(np.lexsort((work.end_ns, work.start_ns)))

    # --- calls --------------------------------------------------------------------------------------------------------

    def _calls(self, tables: Sequence["_Columns"]) -> HostCalls:
        joined = {name: np.concatenate([table[name] for table in tables]) for name in _CALL}
        names = self._named(joined["name"])
        failed = (joined["failed"] != 0) & np.isin(
            names, [index for index, text in enumerate(self._names.names) if is_kernel_launch(text)]
        )
        if failed.any():
            self._checks.note(
                "failed_launches", f"{np.count_nonzero(failed):,} kernel launches returned an error and ran nothing", fatal=False
            )
        process = joined["thread"] & ~np.int64(_THREAD_BITS)
        calls = HostCalls(joined["start"], joined["end"], names, process, joined["thread"], joined["correlation"])
        return calls.rows(np.lexsort((-calls.end_ns, calls.start_ns)))

    # --- ranges -------------------------------------------------------------------------------------------------------

    def _range_rows(self) -> "_Columns":
        wanted = f"eventType IN ({_PUSH_POP}, {_START_END})"
        if self._database.has("NVTX_EVENTS", "end"):
            still_open = self._database.integers("NVTX_EVENTS", {"kind": _RANGE["kind"]}, f'{wanted} AND "end" IS NULL')
            if len(still_open):
                self._checks.note(
                    "open_ranges",
                    f"{len(still_open):,} ranges had not ended when recording stopped and are left out",
                    fatal=False,
                )
            wanted += ' AND "end" IS NOT NULL'
        return self._checks.valid_rows("NVTX_EVENTS", self._database.integers("NVTX_EVENTS", _RANGE, wanted))

    def _ranges(self, rows: "_Columns") -> Ranges:
        labeled = f"typeof(text) = 'text' AND eventType IN ({_PUSH_POP}, {_START_END})"
        with closing(self._database.rows("NVTX_EVENTS", ("rowid", "text"), labeled, _LONGEST_NAME)) as texts:
            inline = {row: self._names[text] for row, text in texts}
        own = np.array([inline.get(row, NO_NAME) for row in rows["row"].tolist()], np.int32)
        names = np.where(own != NO_NAME, own, self._named(rows["text_id"], already_named=own != NO_NAME)).astype(np.int32)
        process = rows["thread"] & ~np.int64(_THREAD_BITS)
        kind = np.where(rows["kind"] == _PUSH_POP, RangeKind.PUSH_POP, RangeKind.START_END).astype(np.uint8)
        ranges = Ranges(rows["start"], rows["end"], names, self._domains(process, rows["domain"]), kind, process, rows["thread"])
        return ranges.rows(np.lexsort((-ranges.end_ns, ranges.start_ns)))

    def _domains(self, process: Int64, domain: Int64) -> Int32:
        """Return the names of the domains of the ranges. Domains are numbered per process; 0 has no name."""
        text_id = "textId" if self._database.has("NVTX_EVENTS", "textId") else "domainId"
        columns = ("globalTid", "domainId", "text", text_id)
        with closing(self._database.rows("NVTX_EVENTS", columns, f"eventType = {_DOMAIN_CREATE}")) as rows:
            created = [(*row[:2], self._names[row[2]] if isinstance(row[2], str) else None, row[3]) for row in rows]
        missing = [row[3] for row in created if row[2] is None and isinstance(row[3], int)]
        strings = self._needed_strings([np.array(missing, np.int64)])
        names: dict[tuple[int, int], int] = {}
        for thread, number, text, string in created:
            if isinstance(thread, int) and isinstance(number, int):
                named = strings.get(string) if text is None else text
                if named is not None and self._names.names[named]:
                    names[(thread & ~_THREAD_BITS, number)] = named
        if not len(domain):
            return np.empty(0, np.int32)
        pairs, which = np.unique(np.stack([process, domain]), axis=1, return_inverse=True)
        codes = [names.get((owner, number), NO_NAME) for owner, number in zip(*pairs.tolist(), strict=True)]
        return np.array(codes, np.int32)[which.reshape(-1)]

    # --- names --------------------------------------------------------------------------------------------------------

    def _needed_strings(self, columns: Sequence[Int64]) -> dict[int, int]:
        """Return the names of the strings with these ids. Only these are kept: a report may contain whole source files."""
        wanted = set(different(np.concatenate(columns)).tolist()) - {NO_NAME} if columns else set()
        if not wanted:
            return {}
        with closing(self._database.rows("StringIds", ("id", "value"), longest=_LONGEST_NAME)) as rows:
            return {number: self._names[text] for number, text in rows if number in wanted and isinstance(text, str)}

    def _named(self, ids: Int64, already_named: Bool | None = None) -> Int32:
        """Return the index of the name of each string id. Report ids without a string, except those that are `already_named`."""
        distinct, which = np.unique(ids, return_inverse=True)
        unnamed = np.isin(ids, [number for number in distinct.tolist() if number not in self._strings])
        if already_named is not None:
            unnamed &= ~already_named
        if unnamed.any():
            what = f"the names of {np.count_nonzero(unnamed):,} events are not in the report"
            self._checks.note("unnamed", what, fatal=False)
        indices = [
            self._strings[number] if number in self._strings else self._names[_substitute(number)] for number in distinct.tolist()
        ]
        return np.array(indices, np.int32)[which.reshape(-1)] if len(ids) else np.empty(0, np.int32)

    # --- problems -----------------------------------------------------------------------------------------------------

    def _tool_problems(self) -> list[TraceProblem]:
        severities = dict(self._database.rows("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", ("id", "name")))
        events = self._database.rows("DIAGNOSTIC_EVENT", ("severity", "text"))
        problems = list(message_problems((str(severities.get(level, "warning")), str(text)) for level, text in events))
        graphs = self._database.integers(f"{_CUPTI}GRAPH_TRACE", _TIMES)
        if len(graphs):
            hidden = int((graphs.columns["end"] - graphs.columns["start"]).clip(0).sum())
            problems.append(
                TraceProblem(
                    "graphs_not_expanded",
                    f"{len(graphs):,} launches of CUDA graphs, {hidden / 1e6:.3f} ms, were recorded without their kernels",
                    fatal=True,
                    remedy="Record with --cuda-graph-trace=node.",
                )
            )
        return problems

    def _text_problems(self) -> list[TraceProblem]:
        damaged = self._database.damaged_texts
        what = f"{damaged:,} strings in the report are not valid UTF-8; invalid characters are replaced"
        return [TraceProblem("invalid_text", what, fatal=False)] if damaged else []


_Columns = dict[str, Int64]


def _device_work(
    rows: _Columns, kind: WorkKind, names: Int32, size: Int64, grid: Int64 | None = None, block: Int64 | None = None
) -> DeviceWork:
    count = len(rows["start"])
    none = np.zeros(count, np.int64)
    return DeviceWork(
        start_ns=rows["start"],
        end_ns=rows["end"],
        kind=np.full(count, kind, np.uint8),
        name=names,
        process=np.where(rows["process"] == _NO_PROCESS, _NO_PROCESS, rows["process"] & ~np.int64(_THREAD_BITS)),
        device=rows["device"].astype(np.int32),
        stream=rows["stream"],
        correlation=rows["correlation"],
        graph_node=rows["graph_node"],
        size_bytes=size,
        grid=none if grid is None else grid,
        block=none if block is None else block,
    )


def _substitute(string: int) -> str:
    """Return what stands for a name that is not there."""
    return "[no name]" if string == NO_NAME else f"[name {string} is not in the report]"


def _copy_name(kind: int) -> str:
    spelled = _COPY_KINDS[kind] if 0 <= kind < len(_COPY_KINDS) else _UNIFIED_COPIES.get(kind, f"kind {kind}")
    return f"[CUDA memcpy {spelled}]"
