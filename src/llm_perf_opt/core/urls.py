"""URLs as data: parsed or refused with one error, and shown without the password in them."""

import re
from urllib.parse import SplitResult, urlsplit

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.secrets import HIDDEN, without_password

__all__ = ["HIDDEN", "parsed_url", "without_password"]

_ODD = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029\ud800-\udfff]")
"""urlsplit removes some of these silently; others fail when the URL is used."""


def parsed_url(text: str) -> SplitResult:
    """Return the parts of a URL, with a valid host and port if there are any; raise a ConfigError if it is not valid."""
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
