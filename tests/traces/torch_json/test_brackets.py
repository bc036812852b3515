"""Finding the ends of events by brackets, compared with reading byte by byte."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.traces.torch_json import brackets
from llm_perf_opt.traces.torch_json.brackets import event_ends


def plain_ends(text: bytes) -> list[int]:
    """Return the same, slowly."""
    ends: list[int] = []
    depth, is_inside, is_escaped = 0, False, False
    for place, byte in enumerate(text):
        char = chr(byte)
        if char == '"' and not is_escaped:
            is_inside = not is_inside
        elif not is_inside and char in "[{":
            depth += 1
        elif not is_inside and char in "]}":
            depth -= 1
            if depth < 0:
                return ends
            if depth == 0:
                ends.append(place + 1)
        is_escaped = char == "\\" and not is_escaped
    return ends


@settings(deadline=None)
@given(st.text(alphabet='{}[]"\\a', max_size=60), st.integers(1, 70))
def test_ends_of_any_text_in_blocks_of_any_size(text: str, block: int) -> None:
    with patch.object(brackets, "_BLOCK_BYTES", block):
        assert event_ends(text.encode()).tolist() == plain_ends(text.encode())
