"""Text between two marks, which is replaced; everything else in a file belongs to its author."""

from llm_perf_opt.core.errors import ConfigError

README_MARKS = (
    "<!-- llm-perf: begin. This block is regenerated; write your own text outside of it. -->",
    "<!-- llm-perf: end -->",
)
YAML_MARKS = (
    "# llm-perf: begin. Found in the data by `llm-perf dataset refresh`; not stated by the author of this file.",
    "# llm-perf: end",
)


def with_block(text: str, block: str, marks: tuple[str, str], where: str) -> str:
    """Return the text with the block between the marks, at the end if it has none. Raise a ConfigError if they are no pair."""
    begin, end = marks
    for mark in marks:  # a name in the data may look like one
        block = block.replace(mark, mark.replace(" llm-perf", ""))
    whole = f"{begin}\n{block.rstrip()}\n{end}\n"
    if begin not in text and end not in text:
        gap = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
        return f"{text}{gap}{whole}"
    first, last = text.find(begin), text.find(end)
    if text.count(begin) != 1 or text.count(end) != 1 or last < first:
        raise ConfigError(
            f"{where} cannot be updated: it must contain each of the two marks once, in their order.",
            f"Remove the lines that begin with `{begin.split('.')[0]}` and `{end}`, and try again.",
        )
    return text[:first] + whole + text[last + len(end) :].removeprefix("\n")
