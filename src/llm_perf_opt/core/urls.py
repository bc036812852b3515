"""URLs as data: parsed or refused with one error, and shown without the password in them."""

import re
from urllib.parse import SplitResult, urlsplit

HIDDEN = "***"
"""Shown in place of what is hidden."""
_USER = re.compile(
    r'://(?:([^\s/?#"<>]*)@'  # to the last @ before the path
    r'|([^\s/?#:@\[\]"]*:(?!\d{1,5}(?:[/?#\s]|$))[^\s"<>]{0,512})@)'  # a password with a slash, which is no port
)
_SCHEMES_WITH_USERS = ("ssh", "sftp", "rsync")
"""Their URLs name a user without a password: ssh://git@host. In other URLs, a user alone may be a token."""
_ODD = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029\ud800-\udfff]")
"""urlsplit removes some of these silently; others fail when the URL is used."""


def parsed_url(text: str) -> SplitResult:
    """Return the parts of a URL, with a valid host and port if there are any; raise a ConfigError if it is not valid."""
    from llm_perf_opt.core.errors import ConfigError  # errors hide passwords with this module

    odd = _ODD.search(text)
    why = f"it contains the character U+{ord(odd[0]):04X}" if odd else ""
    try:
        parts = urlsplit("" if odd else text)
        if parts.port is None or parts.port:
            (parts.hostname or "localhost").encode("idna")
        else:
            why = "its port is 0"
    except ValueError as error:  # of a port, brackets or a host name
        why = _reason(error)
    if why:
        raise ConfigError(f"{without_password(text)!r} is not a URL: {why}.", "Write SCHEME://HOST:PORT/PATH.")
    return parts


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeError):
        return "its host name is not valid"
    found = str(error).partition(" with value")[0]  # its value is in the message already
    return f"{found[:1].lower()}{found[1:]}" if "'" not in found and '"' not in found else "its host or port is not valid"


def without_password(url: str) -> str:
    """Return a URL, or a text with URLs, with `***` in place of users and passwords."""
    return _USER.sub(_shown, url)


def _shown(found: re.Match[str]) -> str:
    user = next(group for group in found.groups() if group is not None)
    scheme = found.string[max(0, found.start() - 16) : found.start()].lower()
    named = user and ":" not in user and scheme.endswith(_SCHEMES_WITH_USERS)
    return found[0] if named or not user else f"://{HIDDEN}@"
