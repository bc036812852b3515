"""Stream the records of any format in blocks, each record checked: objects, texts or unchanged lines."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.core.errors import ConfigError, ParseError, nearest
from llm_perf_opt.workspace.data import arrow_files, parquet_files
from llm_perf_opt.workspace.data.formats import JSON_FORMATS, SUFFIXES, WHOLE, DataFile, suffix_of
from llm_perf_opt.workspace.data.inventory import Advance
from llm_perf_opt.workspace.data.json_arrays import element_blocks, is_array
from llm_perf_opt.workspace.data.lines import FIELD_OPTION, MAX_LINE_BYTES, BadRecords, line_blocks

_DECODER = msgspec.json.Decoder(dict[str, Any])

_HALF = "it contains an unpaired surrogate, \\uD800 to \\uDFFF, which is not a character"
TEXT_FIELD = "text"
"""The field of a line of plain text in a format with fields."""


def checked_lines(file: DataFile, bad: BadRecords, advance: Advance) -> Iterator[list[tuple[int, bytes]]]:
    """Yield blocks of (number, line) of lines or of a JSON array: valid JSON objects or UTF-8; empty lines are skipped."""
    parse = _object_of if file.format in JSON_FORMATS else _text_of
    for block in _parsed(file, parse, bad, advance):
        yield [(number, line) for number, line, _ in block]


def objects(file: DataFile, bad: BadRecords, advance: Advance) -> Iterator[list[dict[str, Any]]]:
    """Yield blocks of records as objects; a line of text becomes one with the field `text`."""
    if file.format == "arrow":
        yield from arrow_files.objects(file.path, advance)
    elif file.format == "parquet":
        yield from parquet_files.objects(file.path, advance)
    else:
        parse = _object_of if file.format in JSON_FORMATS else lambda line: {TEXT_FIELD: _text_of(line)}
        for block in _parsed(file, parse, bad, advance):
            yield [record for _, _, record in block]


def texts(file: DataFile, field: str, bad: BadRecords, advance: Advance) -> Iterator[list[str]]:
    """Yield blocks of the texts of a file: lines of a .txt, otherwise the field `field` of every record."""
    if file.format == "txt":
        for block in _parsed(file, _text_of, bad, advance):
            yield [text for _, _, text in block]
    elif file.format in JSON_FORMATS:
        _, unit = _reader(file)
        for block in _parsed(file, _object_of, bad, advance):
            yield list(_field(((f"{file.name}, {unit} {number}", record) for number, _, record in block), field, bad))
    else:
        reader = arrow_files if file.format == "arrow" else parquet_files
        row = 0
        for values in reader.column(file.path, field, advance):
            named = ((f"{file.name}, row {row + index}", {field: value}) for index, value in enumerate(values, 1))
            yield list(_field(named, field, bad))
            row += len(values)


def count_records(file: DataFile, advance: Advance) -> int:
    """Return the number of records of a file: non-empty lines, or rows."""
    if file.format in (*JSON_FORMATS, "txt"):
        read, _ = _reader(file)
        return sum(
            sum(1 for line in lines if line is None or (line and not line.isspace())) for _, lines in read(file.path, advance)
        )
    advance(file.bytes)
    return arrow_files.count_rows(file.path) if file.format == "arrow" else parquet_files.count_rows(file.path)


def single_file(path: Path) -> DataFile | None:
    """Return one file with texts, by its name; None if it has no format that is read alone."""
    kind = SUFFIXES.get(suffix_of(path.name))
    return None if kind in (None, "arrow", "tokens") else DataFile(path.name, path, kind, WHOLE)


def check_text_field(files: Sequence[DataFile], field: str, option: str = FIELD_OPTION) -> None:
    """Raise if the first record does not have the text field; `option` is how the user names another."""
    bad = BadRecords(skip=True)
    for file in files:
        if file.format == "txt":
            return
        for block in objects(file, bad, lambda _: None):
            if block:
                _check_text(file, block[0], field, option)
                return
    if bad.count:
        raise ParseError(
            f"None of the {bad.count} records can be read; {bad.first[0]}.",
            "Write one JSON object per line, or in a .json file an array of objects, in UTF-8.",
        )


def _check_text(file: DataFile, record: dict[str, Any], field: str, option: str) -> None:
    if isinstance(record.get(field), str):
        return
    if field in record:
        what = f"its first record has no text in the field {field!r}, but {_kind(record[field])}"
    else:
        what = f"its first record has no text in the field {field!r} (it has: {', '.join(record)[:200]})"
    hint = nearest(field, [name for name, value in record.items() if isinstance(value, str)])
    raise ConfigError(f"{file.name}: {what}.{hint}", f"Name the field with the text: {option}.")


def _kind(value: object) -> str:
    names = {bool: "a Boolean", int: "a number", float: "a number", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


Blocks = Callable[[Path, Advance], Iterator[tuple[int, list[bytes | None]]]]


def _reader(file: DataFile) -> tuple[Blocks, str]:
    """Return the function that yields the records of a file as lines, and what the numbers of its records count."""
    return (element_blocks, "record") if file.format == "json" and is_array(file.path) else (line_blocks, "line")


def _parsed(
    file: DataFile, parse: Callable[[bytes], Any], bad: BadRecords, advance: Advance
) -> Iterator[Iterator[tuple[int, bytes, Any]]]:
    """Yield blocks of (number, line, what `parse` makes of it)."""
    read, unit = _reader(file)
    for first, lines in read(file.path, advance):
        yield _parsed_lines(f"{file.name}, {unit}", first, lines, parse, bad)


def _parsed_lines(
    where: str, first: int, lines: Sequence[bytes | None], parse: Callable[[bytes], Any], bad: BadRecords
) -> Iterator[tuple[int, bytes, Any]]:
    for number, line in enumerate(lines, first):
        if line is None:
            bad.note(f"{where} {number}", f"longer than {MAX_LINE_BYTES // 2**20} MiB", "Split it.")
        elif line and not line.isspace():
            try:
                yield number, line, parse(line)
            except UnicodeDecodeError as error:
                bad.note(f"{where} {number}", f"not UTF-8 ({error.reason})")
            except (msgspec.MsgspecError, RecursionError, ValueError) as error:
                why = _HALF if _half_character(line) else str(error)
                bad.note(f"{where} {number}", f"not a JSON object ({why})", "Write one object per line.")


def _half_character(line: bytes) -> bool:
    """Return whether the line is JSON except for an unpaired surrogate, which the fast reader reports as truncated."""
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _field(records: Iterator[tuple[str, dict[str, Any]]], field: str, bad: BadRecords) -> Iterator[str]:
    for where, record in records:
        text = record.get(field)
        if isinstance(text, str):
            yield text
        else:
            known = ", ".join(map(str, record))[:200]
            bad.note(where, f"no text in the field {field!r} (it has: {known})", f"Name the field: {bad.field_option}.")


def _object_of(line: bytes) -> dict[str, Any]:
    return _DECODER.decode(line)


def _text_of(line: bytes) -> str:
    return line.decode()
