"""Read and check externals.yaml."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.urls import parsed_url, without_password
from llm_perf_opt.core.yaml_text import check_yaml, invalid_yaml

COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SSH_SHORT = re.compile(r"[A-Za-z0-9][\w.-]*@[A-Za-z0-9][\w.-]*:(?![-/])[\w./~-]+")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:]+\]")
_GLOB = set("*?[]!\\")


def check_commit(where: str, value: object) -> str:
    """Return a full commit id; branches, tags and abbreviated ids can change their meaning."""
    if isinstance(value, str) and COMMIT.fullmatch(value):
        return value
    if isinstance(value, int | float):
        raise ConfigError(f"{where} is read as a number.", "Put the commit in quotes.")
    shown = "missing" if value is None else f"{value!r:.60}"
    raise ConfigError(
        f"{where} is {shown}, not a commit.", "Give all 40 hexadecimal digits, in lower case; branches and tags can move."
    )


def check_name(where: str, value: object) -> str:
    """Return a name that is one plain word."""
    if isinstance(value, str) and NAME.fullmatch(value) and not value.endswith((".", ".lock", ".git")):
        return value
    raise ConfigError(
        f"{where}: {value!r:.60} is not a valid name.", "Use letters, digits, '.', '_' and '-', beginning with a letter or digit."
    )


def check_inner_path(where: str, value: object) -> str:
    """Return a path that stays in its folder: relative, without `..`, git folders or patterns."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} contains {value!r:.60}, which is not a path.", "Write a path with forward slashes.")
    _no_odd_characters(where, value)
    parts = PurePosixPath(value).parts
    if value.startswith(("/", "~")) or ".." in parts or not parts:
        raise ConfigError(f"{where}: {value!r} leaves its folder.", "Write a relative path without '..'.")
    if any(part.lower() == ".git" or part.startswith("-") for part in parts) or set(value) & _GLOB:
        raise ConfigError(
            f"{where}: {value!r} is not allowed.", "Write plain folder names: no pattern, no '.git', no leading '-'."
        )
    return "/".join(parts)


def check_address(where: str, value: object) -> str:
    """Return a URL for git: https, ssh, file or a local path; nothing that git would read as an option or a program."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} is missing.", "Give an https://, ssh:// or file:// URL, or an absolute path.")
    shown = without_password(value)
    _no_odd_characters(where, value)
    if any(char.isspace() for char in value):
        raise ConfigError(f"{where}: {shown!r} contains a space.", "Write %20 for a space in a URL.")
    if value.startswith("/") or _SSH_SHORT.fullmatch(value):
        return value
    try:
        parts = parsed_url(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.fact}", error.remedy) from error
    if parts.scheme not in ("https", "ssh", "file") or "::" in value.split("/", 1)[0]:
        raise ConfigError(f"{where}: {shown!r} is not an accepted URL.", "Use https://, ssh:// or file://, or an absolute path.")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ConfigError(f"{where}: {shown!r} names no local folder.", "Write file:///absolute/path.")
        return value
    user, _, host = parts.netloc.rpartition("@")
    if ":" in user or (user and parts.scheme == "https"):
        raise ConfigError(
            f"{where} contains a user name or password.", "Remove it: the file is shared, and git uses your credential helper."
        )
    if user.startswith("-") or not _HOST.fullmatch(host.rsplit(":", 1)[0] if not host.endswith("]") else host):
        raise ConfigError(f"{where}: {shown!r} names no host.", "Write https://HOST/PATH.")
    return value


def check_link_target(where: str, value: object) -> str:
    """Return the target of a link: absolute, in the home folder, or relative to the project."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} is missing.", "Give the folder that the link points to.")
    _no_odd_characters(where, value)
    return value


def check_repository(where: str, value: object) -> str:
    """Return a name OWNER/NAME on the Hub."""
    if isinstance(value, str) and REPOSITORY.fullmatch(value) and ".." not in value and "--" not in value:
        return value
    raise ConfigError(
        f"{where}: {value!r:.100} is not OWNER/NAME.", "Give a repository as the Hub names it, such as Qwen/Qwen2.5-7B."
    )


def schemes_for(address: str) -> str:
    """Return the protocols that git may use for this URL; insteadOf may turn https into ssh, never into a local file."""
    return "file" if address.startswith(("/", "file:")) else "https:ssh"


def _no_odd_characters(where: str, value: str) -> None:
    shown = without_password(value)
    if not value.isprintable():
        raise ConfigError(f"{where}: {shown!r:.60} contains a character that cannot be shown.", "Use plain characters.")
    if value.startswith("-"):
        raise ConfigError(f"{where}: {shown!r:.60} begins with '-'.", "Programs would read it as an option.")


Way = Literal["submodule", "subtree", "sparse", "symlink", "hub"]
WAYS: tuple[Way, ...] = get_args(Way)
TRACKED_WAYS: frozenset[Way] = frozenset({"submodule", "subtree", "hub"})
"""Ways that the project's git records; sparse clones and links are local to a machine and ignored by git."""

State = Literal["ok", "missing", "other commit", "edited", "dangling", "unregistered", "foreign", "unverified", "unlisted"]


@dataclass(frozen=True)
class External:
    """An entry of externals.yaml, checked."""

    name: str
    way: Way
    source: str
    """A git URL, the target of a link, or OWNER/NAME on the Hub."""
    commit: str
    into: str
    """Its folder under third_party/, with forward slashes."""
    paths: tuple[str, ...] = ()
    """Folders of a sparse checkout."""
    licenses: tuple[str, ...] = ()
    """License files; if none is named, those at the top level."""
    submodules: bool = False
    """Whether to fetch the submodules of a submodule too."""


@dataclass(frozen=True)
class Standing:
    """The state of an entry, what is wrong, and the commit found."""

    state: State
    detail: str = ""
    commit: str | None = None

    @property
    def differs(self) -> bool:
        """Whether it differs from externals.yaml."""
        return self.state != "ok"


LARGEST_LISTING = 1_000_000
"""Bytes; no list of repositories is that large."""
RESERVED = frozenset({"licenses", "externals.yaml", "externals.lock.json"})
"""Reserved names under third_party/."""
_SOURCE_KEYS: dict[Way, str] = {"submodule": "url", "subtree": "url", "sparse": "url", "symlink": "path", "hub": "repo"}
_CHECKS = {"url": check_address, "path": check_link_target, "repo": check_repository}


def template() -> str:
    """Return the template of externals.yaml."""
    return resources.files("llm_perf_opt.workspace.externals").joinpath("template.yaml").read_text(encoding="utf-8")


def read_listing(text: str, where: str) -> dict[str, External]:
    """Return every entry by name, in file order, or raise an error with the entry and the key."""
    content = _parsed(text, where)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where} is not a mapping.", "Write NAME: and its keys below it; `llm-perf externals init --template` shows how."
        )
    found: dict[str, External] = {}
    for name, body in content.items():
        check_name(where, name)
        entry = _read_entry(f"{where}: {name}", name, body)
        for other in found.values():
            _no_overlap(where, entry, other)
        found[name] = entry
    return found


def keys_of(way: Way) -> tuple[str, ...]:
    """Return the keys of an entry of this way."""
    extra = {"sparse": ("paths",), "submodule": ("submodules",)}.get(way, ())
    return ("way", _SOURCE_KEYS[way], "commit", "into", "licenses", *extra)


def _parsed(text: str, where: str) -> Any:
    import yaml

    if len(text) > LARGEST_LISTING:
        raise ConfigError(
            f"{where} is larger than {LARGEST_LISTING / 1e6:.0f} MB.", "It should contain only a list of repositories."
        )

    class Loader(yaml.SafeLoader):
        """Rejects duplicate keys, of which YAML would silently keep the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise ConfigError(f"{where}: {key.value!r:.60} appears twice (line {key.start_mark.line + 1}).", "Keep one.")
                if isinstance(key.value, str):
                    seen.add(key.value)
            return dict(super().construct_mapping(node, deep))

    try:
        check_yaml(text)
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except invalid_yaml() as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())[:300]}.", "Fix the file at this line.") from error


def _read_entry(where: str, name: str, body: Any) -> External:
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is not a mapping.", "Give it way, commit, and url, path or repo.")
    way = _way(where, body)
    known = keys_of(way)
    for key in body:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key {key!r:.60} for way {way}.{nearest(str(key), known)}", f"Known keys: {', '.join(known)}."
            )
    source_key = _SOURCE_KEYS[way]
    source = _CHECKS[source_key](f"{where}: {source_key}", body.get(source_key))
    into = check_inner_path(f"{where}: into", body.get("into", f"hf/{source}" if way == "hub" else f"github/{name}"))
    if into.split("/")[0].lower() in RESERVED or into.startswith("."):
        raise ConfigError(f"{where}: into is {into!r}, which is reserved.", "Choose another folder, such as github/NAME.")
    return External(
        name=name,
        way=way,
        source=source,
        commit=check_commit(f"{where}: commit", body.get("commit")),
        into=into,
        paths=_sparse_paths(where, way, body),
        licenses=_paths(where, "licenses", body),
        submodules=_switch(where, body),
    )


def _way(where: str, body: Mapping[Any, Any]) -> Way:
    value = body.get("way")
    for way in WAYS:
        if value == way:
            return way
    problem = "the way is missing." if value is None else f"unknown way {value!r:.60}.{nearest(str(value), WAYS)}"
    raise ConfigError(f"{where}: {problem}", f"Known ways: {', '.join(WAYS)}.")


def _paths(where: str, key: str, body: Mapping[Any, Any]) -> tuple[str, ...]:
    value = body.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {key} is not a list.", f"Write {key}: [ONE, TWO].")
    return tuple(dict.fromkeys(check_inner_path(f"{where}: {key}", path) for path in value))


def _sparse_paths(where: str, way: Way, body: Mapping[Any, Any]) -> tuple[str, ...]:
    found = _paths(where, "paths", body)
    if way == "sparse" and not found:
        raise ConfigError(
            f"{where}: a sparse checkout needs paths.", "Write paths: [src/FOLDER], or use way: submodule for all of it."
        )
    return found


def _switch(where: str, body: Mapping[Any, Any]) -> bool:
    value = body.get("submodules", False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: submodules is {value!r:.60}.", "Write true or false.")
    return value


def _no_overlap(where: str, one: External, other: External) -> None:
    first, second = (PurePosixPath(entry.into.lower()) for entry in (one, other))
    if one.name.lower() == other.name.lower():
        raise ConfigError(f"{where}: {one.name} and {other.name} differ only in case.", "Rename one of them.")
    if first == second or first in second.parents or second in first.parents:
        raise ConfigError(
            f"{where}: {one.name} ({one.into}) and {other.name} ({other.into}) are nested in each other.", "Change `into` of one."
        )


_BY_HAND = "Write the entry in plain block style, or change it by hand and run `llm-perf externals update`."


def with_commit(text: str, where: str, name: str, commit: str) -> str:
    """Return the text with the commit of one entry replaced and nothing else changed."""
    import yaml

    before = read_listing(text, where)
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)  # noqa: S101 - read_listing accepted it
    node = _value(_value(root, name), "commit")
    if node is None:  # it comes through a merge key or an anchor
        raise ConfigError(f"{where} cannot be changed in place: {name} has no commit of its own.", _BY_HAND)
    changed = text[: node.start_mark.index] + f'"{commit}"' + text[node.end_mark.index :]
    return _verified(changed, where, {**before, name: replace(before[name], commit=commit)})


def _value(mapping: Any, name: str) -> Any:
    return next((value for key, value in mapping.value if key.value == name), None)


def with_hub_entry(text: str, where: str, entry: External) -> str:
    """Return the text with a Hub snapshot appended."""
    before = read_listing(text, where)
    lead = text if not text or text.endswith("\n") else text + "\n"
    added = f'{lead}\n{entry.name}:\n  way: hub\n  repo: {entry.source}\n  commit: "{entry.commit}"\n'
    return _verified(added, where, {**before, entry.name: entry})


def _verified(text: str, where: str, expected: dict[str, External]) -> str:
    """Raise if a change would affect another entry, through an anchor or a mapping in braces."""
    try:
        found = read_listing(text, where)
    except ConfigError as error:
        raise ConfigError(f"{where} cannot be changed in place: {error.fact}", _BY_HAND) from error
    if found != expected:
        raise ConfigError(f"{where} cannot be changed in place without changing another entry.", _BY_HAND)
    return text
