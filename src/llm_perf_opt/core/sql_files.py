"""Files in DuckDB's SQL: exactly one file, by its name, and nothing read from the name itself.

DuckDB takes a path for a pattern ("d[1].parquet" is also d1.parquet, or only that) and a folder called "lang=en" for a column of
every file below it. Either gives another file's data without a word.
"""

from pathlib import Path

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.user_files import check_ordinary

AS_WRITTEN = "hive_partitioning=false"
"""For every read: columns come from the file, none from the names of its folders."""
_WILD = "[*?"


def pattern_of(path: Path) -> str:
    """The pattern that only this file fits; or a ParseError where there is none, or the file is no ordinary one."""
    check_ordinary(path)
    text = str(path.absolute())  # a relative path may begin with ~, which stands for the home folder there
    if not any(sign in text for sign in _WILD):
        return text
    if "\\" in text:
        raise ParseError(
            f"{path} cannot be read: its name has both a backslash and one of [ * ?.", "Rename the file or its folder."
        )
    return "".join(f"[{sign}]" if sign in _WILD else sign for sign in text)


def literal(text: str) -> str:
    """A text in SQL, or a ParseError where it is none that a database takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParseError(f"{text} cannot be a table: its name is no UTF-8.", "Rename the file or its folder.") from error
    return "'" + text.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def parquet_rows(path: Path, *options: str) -> str:
    """What stands after FROM for the rows of one Parquet file."""
    return f"read_parquet({', '.join((literal(pattern_of(path)), AS_WRITTEN, *options))})"
