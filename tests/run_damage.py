"""Ways in which the files of a run come to be something else: a value of another type, half a file, a folder in its place."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

RAW_VALUES = (
    "null",
    "true",
    "-1",
    "0",
    "1e308",
    "-1e308",
    "NaN",
    "9" * 5000,
    str(2**70),
    '""',
    '"\\ud800"',
    '"\\u001b[31m\\u202e"',
    "[]",
    "{}",
    "[[]]",
    '{"a": {"b": [1]}}',
    "[" * 400 + "]" * 400,
)
"""As they stand in a file: what no writer of ours would put there."""
SAME_TYPE = {
    float: ("0", "-1", "1e308", "-1e308", "5e-324", "1", str(2**63 - 1), str(-(2**63))),
    int: ("0", "-1", "1", str(2**31), str(2**63 - 1), str(-(2**63)), str(2**64 - 1)),
    str: ('""', '"\\u001b[31m\\u202e"', '"n/a"', '"' + "x" * 3000 + '"', '"../.."', '"/"', '"a\\u0000b"', '"2026-99-99T99"'),
    list: ("[]",),
    dict: ("{}", '{"why": "x"}'),
    bool: ("true", "false"),
}
"""Values that a reader of types lets through."""
_MARK = "@here@"


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside, the outermost first."""
    yield above
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places(one, (*above, key))


def value_at(values: Any, place: tuple[Any, ...]) -> Any:
    """What stands in one place."""
    for key in place:
        values = values[key]
    return values


def with_value(text: str, place: tuple[Any, ...], raw: str, *, is_yaml: bool = False) -> str:
    """The document with other text in one place."""
    values = yaml.safe_load(text) if is_yaml else json.loads(text)
    if not place:
        return raw
    inner = values
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = _MARK
    return json.dumps(values, default=str).replace(f'"{_MARK}"', raw)  # JSON is YAML, too


def truncated(path: Path, chance: random.Random) -> None:
    """Cut somewhere."""
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content) or 1)])


def emptied(path: Path, _: random.Random) -> None:
    """No bytes."""
    path.write_bytes(b"")


def scrambled(path: Path, chance: random.Random) -> None:
    """Some bytes are others."""
    content = bytearray(path.read_bytes())
    for _ in range(5):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(bytes(content))


def made_folder(path: Path, _: random.Random) -> None:
    """A folder where a file should be."""
    path.unlink()
    path.mkdir()


def looped(path: Path, _: random.Random) -> None:
    """A link to itself."""
    path.unlink()
    path.symlink_to(path.name)


def dangling(path: Path, _: random.Random) -> None:
    """A link to nothing."""
    path.unlink()
    path.symlink_to("gone")


def unreadable(path: Path, _: random.Random) -> None:
    """Nobody may read it; root may all the same."""
    path.chmod(0)


def parent_made_file(path: Path, _: random.Random) -> None:
    """A file where a folder should be."""
    folder = path.parent
    shutil.rmtree(folder)
    folder.write_bytes(b"x")


WHOLE_FILE: tuple[Callable[[Path, random.Random], None], ...] = (
    truncated, emptied, scrambled, made_folder, looped, dangling, unreadable,
)  # fmt: skip
