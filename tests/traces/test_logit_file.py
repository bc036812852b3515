"""Recorded logits are read back as they were written; a damaged file is refused and never trusted."""

import io
import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.logit_records import Logits
from llm_perf_opt.core.records import Missing
from llm_perf_opt.traces.logit_file import ARRAYS, FACTS, read_logits, write_logits
from tuning_builders import fake_logits


@pytest.mark.parametrize("engine", [{}, {"fast": 1}], ids=["reference", "trial"])
def test_what_was_written_is_read(tmp_path: Path, engine: dict[str, int]) -> None:
    written = fake_logits(engine)
    write_logits(tmp_path, written)
    found = read_logits(tmp_path / FACTS)
    assert isinstance(found, Logits)
    assert found.facts == written.facts
    for name in ("fed", "chosen", "top", "common", "values", "fp32"):
        one, other = getattr(written, name), getattr(found, name)
        assert one == other if isinstance(one, Missing) else np.array_equal(one, other), name


def npz(**arrays: object) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def header(shape: str) -> bytes:
    """An array that states a shape it does not have."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_logits(tmp_path, fake_logits({}))
    path = tmp_path / ARRAYS
    whole = path.read_bytes()
    draw = random.Random(5)
    damaged = [whole[: draw.randrange(len(whole))] for _ in range(20)]
    damaged += [b"", b"PK", npz(values=np.array([{}], object)), npz(values=np.zeros((2, 5, 16)))]
    short = npz(**{name: getattr(fake_logits({}), name) for name in ("fed", "chosen", "top", "common", "values")})
    damaged += [short, whole.replace(b"(2, 5, 16)", b"(9, 5, 16)"), whole.replace(b"'<f4'", b"'|O8'")]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ParseError, match=r"logits\.npz cannot be read"):
            read_logits(tmp_path / FACTS)
    for _ in range(60):
        place = draw.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :])
        with suppress(ParseError):
            assert isinstance(read_logits(tmp_path / FACTS), Logits)


def test_a_stated_shape_is_not_allocated(tmp_path: Path) -> None:
    import zipfile

    write_logits(tmp_path, fake_logits({}))
    with zipfile.ZipFile(tmp_path / ARRAYS, "w") as archive:
        archive.writestr("values.npy", header("(1000000, 1000000, 1000000)"))
    with pytest.raises(ParseError, match="cannot be read"):
        read_logits(tmp_path / FACTS)
