"""Checks of names, paths and URLs. They reach git, the file system and the terminal, so the rules are strict."""

import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from llm_perf_opt.core.errors import ConfigError

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
        raise ConfigError(f"{where} holds {value!r:.60}, which is not a path.", "Write a path with forward slashes.")
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
    _no_odd_characters(where, value)
    if any(char.isspace() for char in value):
        raise ConfigError(f"{where}: {value!r} contains a space.", "Write %20 for a space in a URL.")
    if value.startswith("/") or _SSH_SHORT.fullmatch(value):
        return value
    parts = urlsplit(value)
    if parts.scheme not in ("https", "ssh", "file") or "::" in value.split("/", 1)[0]:
        raise ConfigError(f"{where}: {value!r} is not an accepted URL.", "Use https://, ssh:// or file://, or an absolute path.")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ConfigError(f"{where}: {value!r} names no local folder.", "Write file:///absolute/path.")
        return value
    user, _, host = parts.netloc.rpartition("@")
    if ":" in user or (user and parts.scheme == "https"):
        raise ConfigError(
            f"{where} holds a user name or password.", "Remove it: the file is shared, and git uses your credential helper."
        )
    if user.startswith("-") or not _HOST.fullmatch(host.rsplit(":", 1)[0] if not host.endswith("]") else host):
        raise ConfigError(f"{where}: {value!r} names no host.", "Write https://HOST/PATH.")
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
    if not value.isprintable():
        raise ConfigError(f"{where}: {value!r:.60} contains a character that cannot be shown.", "Use plain characters.")
    if value.startswith("-"):
        raise ConfigError(f"{where}: {value!r:.60} begins with '-'.", "Programs would read it as an option.")
