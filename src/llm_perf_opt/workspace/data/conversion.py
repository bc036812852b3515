"""The transform `converted`: the same records in another format, file by file, so that splits are kept."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.inside import make_folder, move, open_new, remove
from llm_perf_opt.core.user_files import open_ordinary, quoted
from llm_perf_opt.workspace.data import parquet_files
from llm_perf_opt.workspace.data.compressed import is_plain
from llm_perf_opt.workspace.data.formats import JSON_FORMATS, DataFile, Format
from llm_perf_opt.workspace.data.inventory import Advance, ignore
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.record_streams import checked_lines, objects, texts

_EXACT_IN_DOUBLE = 2**53
_MOST_FIELDS = 200
"""An object with more fields than this is a dictionary, not a record: its keys are data."""


class Seen:
    """The kinds of values seen at one place of the records."""

    def __init__(self) -> None:
        self.scalars: set[str] = set()
        self.item: Seen | None = None
        self.fields: dict[str, Seen] | None = None

    def note(self, value: Any) -> None:
        """Record a value."""
        kind = type(value)
        if kind is str:
            self.scalars.add("VARCHAR")
        elif kind is dict:
            self.note_object(value)
        elif kind is list:
            self.item = self.item or Seen()
            for item in value:
                self.item.note(item)
        elif value is not None:
            self.scalars.add(_scalar(value))

    def note_object(self, record: dict[str, Any]) -> None:
        """Record an object."""
        if self.fields is None:
            self.fields = {}
        if len(self.fields) > _MOST_FIELDS:
            return  # the column is JSON already
        for name, value in record.items():
            field = self.fields.get(name)
            if field is None:
                field = self.fields[name] = Seen()
            field.note(value)

    def column_type(self) -> str:
        """Return the DuckDB type."""
        whole = (self.item is not None) + (self.fields is not None) + bool(self.scalars)
        if whole == 0:
            return "VARCHAR"  # nothing but null
        if whole > 1:
            return "JSON"
        if self.item is not None:
            return f"{self.item.column_type()}[]"
        if self.fields is not None:
            return self._struct(self.fields)
        return _one_scalar(self.scalars)

    @staticmethod
    def _struct(fields: dict[str, "Seen"]) -> str:
        names = list(fields)
        if not names or len(names) > _MOST_FIELDS or "" in names or len({name.casefold() for name in names}) < len(names):
            return "JSON"
        return f"STRUCT({', '.join(f'{quoted(name)} {field.column_type()}' for name, field in fields.items())})"


def columns(seen: Seen, where: str) -> dict[str, str]:
    """Return name and type of each column, or raise a ConfigError if the records cannot form columns."""
    fields = seen.fields or {}
    if not fields:
        raise ConfigError(f"{where} has no record with a field.", "A table needs at least one column.")
    if len(fields) > _MOST_FIELDS:
        raise ConfigError(f"The records of {where} have more than {_MOST_FIELDS} fields.", "Keep it as JSONL.")
    if "" in fields:
        raise ConfigError(f"{where} has a field without a name.", "Columns need names: rename it, or keep the data as JSONL.")
    for one, other in _alike(fields):
        raise ConfigError(
            f"{where} has the fields {one!r} and {other!r}, which Parquet cannot distinguish.", "Rename one of them."
        )
    return {name: field.column_type() for name, field in fields.items()}


def _alike(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    folded: dict[str, str] = {}
    for name in names:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            yield other, name


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, float):
        return "DOUBLE"
    if isinstance(value, int):
        if -_EXACT_IN_DOUBLE <= value <= _EXACT_IN_DOUBLE:
            return "INTEGER"
        return "BIGINT" if -(2**63) <= value < 2**63 else "JSON"
    return "JSON"


def _one_scalar(kinds: set[str]) -> str:
    if kinds == {"INTEGER", "DOUBLE"}:
        return "DOUBLE"
    if kinds <= {"INTEGER", "BIGINT"}:
        return "BIGINT"
    return next(iter(kinds)) if len(kinds) == 1 else "JSON"


TARGETS: tuple[Format, ...] = ("jsonl", "parquet", "txt")
_SPILL = ".spill"
_LINE_END = re.compile(r"\r?\n")


@dataclass(frozen=True)
class Conversion:
    """The requested conversion."""

    to: Format
    text_field: str
    join_lines: bool
    """Whether to join a text of several lines; otherwise such a text is an error if each line is a record."""


def write_converted(
    files: Sequence[DataFile], out: Path, conversion: Conversion, bad: BadRecords, advance: Advance
) -> tuple[Format, dict[str, int]]:
    """Write each file under its own name in the other format."""
    targets = _targets(files, conversion.to)
    for target in targets.values():
        make_folder(out, (out / target).parent)
    splits: dict[str, int] = dict.fromkeys((file.split for file in files), 0)
    if conversion.to == "parquet":
        written = _to_parquet(files, targets, out, bad, advance)
    else:
        written = {}
        for file in files:
            path = out / targets[file.name]
            if conversion.to == "jsonl":
                written[file.name] = _to_jsonl(file, path, bad, advance)
            else:
                written[file.name] = _to_txt(file, path, conversion, bad, advance)
    for file in files:
        splits[file.split] += written[file.name]
    return conversion.to, splits


def _targets(files: Sequence[DataFile], to: Format) -> dict[str, str]:
    if all(file.name.lower().endswith(f".{to}") for file in files):
        raise ConfigError(
            f"The data is already {to}.", f"Convert to one of: {', '.join(kind for kind in TARGETS if kind != to)}."
        )
    return {file.name: name for file, name in renamed(files, to).items()}


def renamed(files: Sequence[DataFile], to: Format) -> dict[DataFile, str]:
    """Return the name of each file in another format, or raise a ConfigError if two would be the same."""
    targets: dict[DataFile, str] = {}
    for file in files:
        name = f"{file.stem}.{to}"
        for other in (known for known, taken in targets.items() if taken == name):
            raise ConfigError(f"{other.name} and {file.name} would both become {name}.", "Rename one of them in the source.")
        targets[file] = name
    return targets


def _to_jsonl(file: DataFile, target: Path, bad: BadRecords, advance: Advance) -> int:
    if file.format == "parquet":
        parquet_files.write_json(file.path, target, advance)
        made = DataFile(file.name, target, "jsonl", file.split)
        before = bad.count
        rows = sum(len(block) for block in objects(made, bad, ignore))  # finds what JSON cannot represent
        _check_count(made, rows + bad.count - before, parquet_files.count_rows(file.path))
        if bad.count > before:
            _keep_good_lines(made)
        return rows
    with open_new(target.parent, target) as out:
        return _write_objects(file, out, bad, advance)


def write_selected(files: Sequence[DataFile], out: Path, bad: BadRecords, advance: Advance) -> tuple[Format, dict[str, int]]:
    """Write every record of these files: lines unchanged, rows as JSON lines."""
    kind: Format = "txt" if files[0].format == "txt" else "jsonl"
    splits: dict[str, int] = dict.fromkeys((file.split for file in files), 0)
    for file, name in renamed(files, kind).items():
        target = out / name
        make_folder(out, target.parent)
        if file.format in (*JSON_FORMATS, "txt"):
            splits[file.split] += _copied_lines(file, target, bad, advance)
        else:
            splits[file.split] += _to_jsonl(file, target, bad, advance)
    return kind, splits


def _copied_lines(file: DataFile, target: Path, bad: BadRecords, advance: Advance) -> int:
    count = 0
    with open_new(target.parent, target) as out:
        for block in checked_lines(file, bad, advance):
            out.writelines(line + b"\n" for _, line in block)
            count += len(block)
    return count


def _keep_good_lines(made: DataFile) -> None:
    """Remove the lines that were found bad, and counted, before."""
    kept = made.path.with_name(_SPILL)
    with open_new(kept.parent, kept) as out:
        for block in checked_lines(made, BadRecords(skip=True), ignore):
            out.writelines(line + b"\n" for _, line in block)
    move(kept.parent, kept, made.path)


def _write_objects(file: DataFile, out: BinaryIO, bad: BadRecords, advance: Advance, seen: Seen | None = None) -> int:
    count = 0
    for block in objects(file, bad, advance):
        for record in block:
            if seen is not None:
                seen.note_object(record)
            out.write(msgspec.json.encode(record) + b"\n")
        count += len(block)
    return count


def _one_line(text: str) -> str:
    """Return the lines of a text joined by a space; lines end where the reader of a .txt sees their end."""
    lines = _LINE_END.split(text)
    return " ".join(lines if lines[-1] else lines[:-1]).rstrip("\r")


def _to_txt(file: DataFile, target: Path, conversion: Conversion, bad: BadRecords, advance: Advance) -> int:
    count = 0
    with open_new(target.parent, target) as out:
        for block in texts(file, conversion.text_field, bad, advance):
            for text in block:
                if conversion.join_lines:
                    text = _one_line(text)
                elif "\n" in text or "\r" in text:
                    raise ConfigError(
                        f"{file.name}: record {count + 1} has several lines, but in a .txt each line is a record.",
                        "Use --join-lines to join them with a space, or convert to jsonl or parquet.",
                    )
                if not text.strip():
                    bad.note(f"{file.name}, record {count + 1}", "an empty text, which a .txt cannot represent")
                    continue
                out.write(text.encode() + b"\n")
                count += 1
    return count


def _to_parquet(
    files: Sequence[DataFile], targets: dict[str, str], out: Path, bad: BadRecords, advance: Advance
) -> dict[str, int]:
    """Write all files with the same columns: the first pass finds them, the second writes."""
    seen, counts, ready = Seen(), {}, {}
    for number, file in enumerate(files):
        spill = out / f"{_SPILL}{number}"
        counts[file.name], ready[file.name] = _lines_for_database(file, spill, seen, bad, advance)
    kinds = columns(seen, "The dataset")
    for file in files:
        lines, target = ready[file.name], out / targets[file.name]
        parquet_files.write_parquet(lines, kinds, counts[file.name], target, ignore)
        _check_count(file, parquet_files.count_rows(target), counts[file.name])
        if lines != file.path:
            remove(out, lines)
    return counts


def _lines_for_database(file: DataFile, spill: Path, seen: Seen, bad: BadRecords, advance: Advance) -> tuple[int, Path]:
    """Return a file with only the good records as JSON lines: the file itself if possible, otherwise a copy."""
    if file.format == "jsonl" and is_plain(file.path):
        before, count = bad.count, 0
        for block in objects(file, bad, advance):
            for record in block:
                seen.note_object(record)
            count += len(block)
        with open_ordinary(file.path) as start:
            marked = start.read(1) not in (b"{", b"")
        if bad.count == before and not marked:
            return count, file.path
        advance = ignore
        bad = BadRecords(skip=True)  # already counted
    with open_new(spill.parent, spill) as out:
        return _write_objects(file, out, bad, advance, seen), spill


def _check_count(file: DataFile, found: int, expected: int) -> None:
    if found != expected:
        raise ParseError(
            f"{file.name}: {expected} records were read, but {found} were written.", "Please report this with the file."
        )
