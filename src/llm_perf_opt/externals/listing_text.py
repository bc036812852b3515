"""Changing externals.yaml as text, so that comments, order and spacing stay as somebody wrote them."""

from dataclasses import replace
from typing import Any

from llm_perf_opt.errors import ConfigError
from llm_perf_opt.externals.entry import External
from llm_perf_opt.externals.listing import read_listing

_BY_HAND = "Write the entry in plain block style, or change it by hand and run `llm-perf externals update`."


def with_commit(text: str, where: str, name: str, commit: str) -> str:
    """The text with one entry's commit replaced and not a character else."""
    import yaml

    before = read_listing(text, where)
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)  # noqa: S101 - read_listing found the entry in it
    node = _value(_value(root, name), "commit")
    if node is None:  # it comes through a merge key or an anchor
        raise ConfigError(f"{where} cannot be changed in place: {name} has no commit of its own.", _BY_HAND)
    changed = text[: node.start_mark.index] + f'"{commit}"' + text[node.end_mark.index :]
    return _verified(changed, where, {**before, name: replace(before[name], commit=commit)})


def _value(mapping: Any, name: str) -> Any:
    return next((value for key, value in mapping.value if key.value == name), None)


def with_hub_entry(text: str, where: str, entry: External) -> str:
    """The text with a Hub snapshot added at its end."""
    before = read_listing(text, where)
    lead = text if not text or text.endswith("\n") else text + "\n"
    added = f'{lead}\n{entry.name}:\n  way: hub\n  repo: {entry.source}\n  commit: "{entry.commit}"\n'
    return _verified(added, where, {**before, entry.name: entry})


def _verified(text: str, where: str, expected: dict[str, External]) -> str:
    """An anchor or a mapping in braces can make a change land elsewhere; then nothing is written."""
    try:
        found = read_listing(text, where)
    except ConfigError as error:
        raise ConfigError(f"{where} cannot be changed in place: {error.fact}", _BY_HAND) from error
    if found != expected:
        raise ConfigError(f"{where} cannot be changed in place without changing another entry.", _BY_HAND)
    return text
