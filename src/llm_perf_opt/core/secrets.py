"""Credentials in texts, commands and environment variables: what looks like one is written and shown as `***`.

What is executed keeps its true values. Everything that is written to a run folder or printed and that a user may have put a
credential into (a command line, an environment variable, the text of an error) goes through this module.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

from llm_perf_opt.core.word_search import NAME, in_words, last_word, replaced, spans_of

HIDDEN = "***"
"""Shown in place of what is hidden."""
NOTE = f"# {HIDDEN}: a value that looks like a credential; give it again to rerun the command"
"""For a file that holds a command with hidden values."""

# --- names ------------------------------------------------------------------------------------------------------------

_ANYWHERE = re.compile(
    "|".join(
        (
            *(
                "password",
                "passwd",
                "passphrase",
                "passcode",
                "secret",
                "credential",
                "cookie",
                "bearer",
                "signature",
                "authorization",
            ),
            *(
                "apikey",
                "accesskey",
                "privatekey",
                "secretkey",
                "accesstoken",
                "authtoken",
                "sessiontoken",
                "sessionid",
                "sessionkey",
            ),
            "keydata",  # client-key-data of Kubernetes
        )
    )
)
"""In a name without separators."""
_LAST = frozenset(
    (
        *("token", "key", "pass", "pwd", "pw", "pin", "dsn", "session", "auth", "sig", "salt", "otp", "psk", "pat", "sas", "jwt"),
        *("creds", "headers"),  # as in OTEL_EXPORTER_OTLP_HEADERS
    )
)
"""As the last word of a name: `hf_token` is a credential, `token_budget` is none."""
_ORDINARY = frozenset(
    (
        *("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "stop", "start", "end", "special", "max"),
        *("min", "new", "per", "prompt", "first", "last", "next", "draft", "output", "input", "num", "time", "each", "by"),
        *("sort", "cache", "primary", "partition", "group", "kv", "order", "record", "dict", "foreign", "shard", "hash", "join"),
        *("merge", "routing", "column", "public", "forward", "backward", "prefill", "decode", "warmup", "two", "single", "multi"),
    )
)
"""Before `token`, `key`, `pass`: words of language models, data and passes over them."""
_ABOUT = frozenset(("file", "path", "dir", "folder", "name", "type", "len", "length", "size", "count", "limit", "format"))
"""As the last word: a fact about a credential, not the credential."""
_IN_VARIABLES = (
    *("KEY", "TOKEN", "SECRET", "PASS", "PWD", "CREDENTIAL", "AUTH", "JWT", "DSN", "COOKIE", "SESSION", "BEARER", "SIGNATURE"),
    *("SALT", "PRIVATE"),
)
_WORDS_OF_VARIABLES = frozenset(("PIN", "PAT", "SAS", "SIG", "OTP", "PSK", "PW", "CERT", "PEM", "CREDS", "LICENSE"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLAIN = re.compile(
    r"[-+]?\d*\.\d+|true|false|yes|no|on|off|none|null|auto|default|VALUE|KEY|TOKEN|PASSWORD|SECRET|X|…|\.\.\.|\$\{?[A-Z_][A-Z0-9_]*\}?|\*+",
    re.IGNORECASE,
)
"""Values that are no credential whatever their name: fractions, switches, placeholders, references to a variable."""
_LEAST_NUMBER = 1000
"""A smaller number is a count or a switch."""


def secret_name(name: str) -> bool:
    """Return whether a value of this name is a credential: of an option, a setting, a query parameter or a header."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2]) if not word.isdigit()]
    if not words or words[-1] in _ABOUT:
        return False
    if _ANYWHERE.search("".join(words)):
        return True
    if len(words) > 1 and words[-2] in _ORDINARY:
        return False
    return words[-1] in _LAST or words[-1].endswith(("token", "pwd"))


def secret_variable(name: str, value: str) -> bool:
    """Return whether an environment variable is not recorded; stricter than `secret_name`, as hardly anything needs it."""
    if _is_plain(value):
        return False
    upper = name.upper()
    return any(part in upper for part in _IN_VARIABLES) or not _WORDS_OF_VARIABLES.isdisjoint(re.split(r"[^A-Z]+", upper))


def _hides(name: str, value: str) -> bool:
    if _is_plain(value) or not secret_name(name):
        return False
    own = name.lstrip("-+").lower()  # `--pass clean`: what it is for depends on the program
    return not (own == "pass" and value.isalpha() and value.islower())


def _is_plain(value: str) -> bool:
    """Return whether a value is no credential whatever its name."""
    value = value.rstrip(".,;:!?")
    return not value or bool(_PLAIN.fullmatch(value)) or (value.isdigit() and len(value) < len(str(_LEAST_NUMBER)))


# --- URLs ---------------------------------------------------------------------------------------------------------------

_USER = re.compile(
    r'://(?:([^\s/?#"<>]*)@'  # to the last @ before the path
    r'|([^\s/?#:@\[\]"]*:(?!\d{1,5}(?:[/?#\s]|$))[^\s"<>]{0,512})@)'  # a password with a slash, which is no port
)
_HOST_WITH_USER = re.compile(
    r"(?<![\w/@.:%-])([\w.%+-]+:[^\s/@:\"'<>]{3,128})@(?=[\w-]+(?:\.[\w-]+)*:\d{1,5}\b|[\w-]+(?:\.[\w-]+)+)"
)
"""NAME:PASSWORD@HOST without a scheme, as proxies are written; not NAME@DOMAIN of a range."""
_SCHEMES_WITH_USERS = ("ssh", "sftp", "rsync")
"""Their URLs name a user without a password: ssh://git@host. In other URLs, a user alone may be a token."""


def without_password(url: str) -> str:
    """Return a URL, or a text with URLs, with `***` in place of users and passwords."""
    if "@" not in url:
        return url
    lines = url.split("\n")  # a user has no space
    return "\n".join(_HOST_WITH_USER.sub(f"{HIDDEN}@", _USER.sub(_shown, line)) if "@" in line else line for line in lines)


def _shown(found: re.Match[str]) -> str:
    user = next(group for group in found.groups() if group is not None)
    scheme = found.string[max(0, found.start() - 16) : found.start()].lower()
    named = user and ":" not in user and scheme.endswith(_SCHEMES_WITH_USERS)
    return found[0] if named or not user else f"://{HIDDEN}@"


# --- values -----------------------------------------------------------------------------------------------------------

_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL)
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?"  # a JSON web token
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|AIza[\w-]{20,}|ya29\.[\w-]{10,}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|(?:sk|pk|rk)[-_](?:live|test|proj|ant|or|lf)[-_][\w-]{8,}"
    r"|(?:github_pat|gh[opsur]|hf|api_org|glpat|npm|pypi|dop_v1|dckr_pat|xox[a-z]|xapp|nvapi|gsk|r8|tskey|shp[a-z]{2}|lin_api|sk|pplx"
    r"|pat|key|wandb_v1|ATATT|tgp_v1|fw|csk|ntn|secret)[-_][\w-]{8,}"
    r")"
)
"""Credentials that say so at their start."""
_SCHEME = r"(?:Bearer|Basic|Token|Digest|Negotiate|ApiKey)"
_IS_SCHEME = re.compile(_SCHEME, re.IGNORECASE)
_AUTHORIZED = re.compile(rf"(?<![\w-])({_SCHEME}\s+)([\w.~+/=-]{{6,}})", re.IGNORECASE)
_QUOTED = r'"(?:[^"\\\n]|\\.){0,8192}"' + r"|'[^'\n]{0,8192}'"
_ESCAPED = r'\\"[^"\\\n]{0,8192}\\"'
_NAMED = re.compile(
    r"(?<![\w.-])(?P<assigned>-{0,2}\w[\w.-]{0,127})(?:\\?[\"']\]?\s?[:=]|\s?=)\s?"  # name=value, "name": value, ["name"] = value
    r"|(?<![\w.-])(?P<field>-{0,2}[A-Za-z][\w.-]{1,127}):(?![:/])\s?"  # name: value, /name:value
    r"|(?<![\w-])(?P<option>--?[A-Za-z][\w.-]{1,127})\s+(?!-)"  # --name value
)
_DOT_BEFORE_OPTION = re.compile(r"\.(?=-)")
_VALUE = re.compile(rf"{_ESCAPED}|{_QUOTED}|{_SCHEME}\s+[^\s\"']+|[^\s\"'&;,)}}\]<>|]+")
_IN_JSON = re.compile(r'("([\w.-]{1,128})"\s{0,8}:\s{0,8})"((?:[^"\\\n]|\\.){1,8192})"')
_HEADER_NAME = r"(?:proxy-)?authorization|(?:set-)?cookie|x-[a-z-]*(?:key|token|auth|secret|session)|[a-z]+-(?:key|token)"
_IS_HEADER = re.compile(_HEADER_NAME, re.IGNORECASE)
_HEADER = re.compile(rf"(?<![\w-])(?P<name>{_HEADER_NAME})(?P<sep>\s?:\s?)(?P<value>[^\"'\n\r]+)", re.IGNORECASE)
_LOGIN_IN_TEXT = re.compile(r"(login(?<![\w-]login)\s+\S{1,256}\s+password\s+)\S+")
"""A line of a .netrc file."""
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_CHECKSUM = re.compile(r"\w*(?:sha\d+|md5|crc\d*|checksum|digest)[=-]", re.IGNORECASE)
_LONG_WORD = re.compile(
    r"(?<![\w/+=.-])[A-Za-z0-9_+=-]{24,512}(?![\w/+=-])"
    r"|(?<![\w/+=.])(?:[A-Za-z0-9/+]{40}|[A-Za-z0-9/+]{22,512}={1,2})(?![\w/+=])"
)
_LEAST_KNOWN, _LEAST_LONG_WORD = 11, 23
"""Characters of what `_KNOWN` and `_LONG_WORD` match."""
_LEAST_CHANGES, _LEAST_CHANGES_OF_BASE64 = 0.43, 0.28
"""Of neighbors, how many differ in kind (upper, lower, digit): 0.62 on average in random text, below 0.3 in identifiers."""
_BASE64 = re.compile(r"[A-Za-z0-9/+]{40}|[A-Za-z0-9/+]+=+")
_WORD_OF_NAME = re.compile(r"[A-Za-z]?[a-z]{0,14}\d{0,4}")
_LONG = 32
"""Characters after a known start that need no digit to be a credential."""


def hidden(text: str) -> str:
    """Return a text with `***` in place of everything that looks like a credential."""
    found = _PEM.sub(HIDDEN, without_password(text)) if "-----BEGIN" in text else without_password(text)
    names = set(
        NAME.findall("\n".join(set(found.split())))
    )  # few words of a text are different, and few of these are names of credentials
    headers, schemes = ({name for name in names if kind.fullmatch(last_word(name))} for kind in (_IS_HEADER, _IS_SCHEME))
    found = "".join(replaced(found, headers, _HEADER, lambda one: f"{one['name']}{one['sep']}{HIDDEN}"))
    found = _LOGIN_IN_TEXT.sub(rf"\1{HIDDEN}", found)
    found = "".join(_without_named_values(found, set(filter(secret_name, names))))
    found = "".join(replaced(found, schemes, _AUTHORIZED, lambda one: f"{one[1]}{HIDDEN}" if _mixed(one[2]) else one[0]))
    found = _without_known(found)
    return in_words(found, _LONG_WORD, _LEAST_LONG_WORD, lambda one: HIDDEN if _random(one[0]) else one[0])


def hidden_json(text: str) -> str:
    """Return JSON that another tool wrote without the credentials of its settings; texts of prompts and answers stay."""
    named = _IN_JSON.sub(lambda one: f'{one[1]}"{HIDDEN}"' if _mixed(one[3]) and _hides(one[2], one[3]) else one[0], text)
    return _without_known(without_password(named))


def hidden_value(name: str, value: str) -> str:
    """Return the value of a setting to be shown: `***` if its name or the value looks like a credential."""
    return HIDDEN if _hides(name, value) else hidden(value)


def credentials_in(values: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted names of plain nested values that look like credentials."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from credentials_in(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from credentials_in(value, name)
    elif isinstance(values, str) and hidden_value(name, values) != values:
        yield name


def _without_known(text: str) -> str:
    def shown(one: re.Match[str]) -> str:
        return HIDDEN if _mixed(one[0].partition("_")[2] or one[0]) and not _words(one[0]) else one[0]

    return in_words(text, _KNOWN, _LEAST_KNOWN, shown)


def _without_named_values(text: str, names: Set[str]) -> Iterator[str]:
    """Yield the text in pieces, with `***` for values whose names say that they are credentials."""
    done = 0
    for begin, end in spans_of(text, names, NAME):
        starts = (begin, *(dot.end() for dot in _DOT_BEFORE_OPTION.finditer(text, begin, end)))
        found = next(filter(None, (_NAMED.match(text, start) for start in starts)), None)
        if found is None or found.start() < done:  # a value is looked at once, however many names precede it
            continue
        name = found["assigned"] or found["field"] or found["option"]
        value = _VALUE.match(text, found.end())
        bare = value[0].strip("\\\"'") if value else ""
        if value is None or not _hides(name, bare):
            continue
        if found["field"] and not _is_field(name, bare, spaced=text[found.end() - 1].isspace()):
            continue
        quote = value[0][: value[0].index(bare)] if bare else ""
        yield f"{text[done : found.end()]}{quote}{HIDDEN}{quote}"
        done = value.end()
    yield text[done:]


def _is_field(name: str, value: str, *, spaced: bool) -> bool:
    """Return whether `name: value` in a text is a credential. `token: 15043` and `key: layers.0` are not.

    `pass:x` of openssl is one, `pass: x` is about a pass.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if spaced and words[-1] == "pass":
        return False
    if _ANYWHERE.search("".join(words)):
        return len(value) >= _LEAST_LENGTH
    sure = len(words) > 1 or words[-1] not in ("key", "session", "auth")
    return sure and len(value) >= _LEAST_FIELD and _mixed(value) and any(map(str.isalpha, value)) and "." not in value


def _mixed(word: str) -> bool:
    """Return whether a word has letters and digits, or letters of both cases other than a capital at its start."""
    rest = word[1:]
    return any(map(str.isdigit, word)) or (rest != rest.lower() and rest != rest.upper()) or len(word) >= _LONG


def _words(name: str) -> bool:
    """Return whether a name consists of words and short numbers, such as `hf_models_v2`: a folder, and no credential."""
    return all(_WORD_OF_NAME.fullmatch(part) for part in re.split("[-_]", name))


def _random(word: str) -> bool:
    """Return whether a long word looks random: all kinds of characters, changing more often than in names. No hex, no path."""
    if word.startswith("_Z") or not (any(map(str.isupper, word)) and any(map(str.islower, word)) and any(map(str.isdigit, word))):
        return False
    if _CHECKSUM.match(word) or _UUID.search(word):
        return False
    kinds = [2 * char.isupper() + char.islower() if char.isalpha() else 4 * char.isdigit() for char in word]
    changes = sum(0 not in pair and pair[0] != pair[1] for pair in pairwise(kinds)) / (len(word) - 1)
    return changes >= (_LEAST_CHANGES_OF_BASE64 if _BASE64.fullmatch(word) else _LEAST_CHANGES)


# --- commands ---------------------------------------------------------------------------------------------------------

_LEAST_LENGTH = 6
"""Of a credential that is hidden in what a program prints: a shorter text also occurs by chance."""
_LEAST_FIELD = 8
_MOST_SCRIPT = 1 << 13
"""Characters of a word that is looked at as a command of its own, as after `bash -c`."""
_LOGIN = ("-u", "--user", "--proxy-user", "-U")
"""Options whose value is NAME:PASSWORD."""
_JOINED_LOGIN = re.compile(r"(?:--user=|--proxy-user=|-u(?=[\w.-]*:\S*\d))[^\s:/=]+:[^\s/]\S*")
_JOINED_PASSWORD = re.compile(r"-p(?=[^=]*\d)(?=[^=]*[A-Za-z])[^-=\s/:][^\s/]{5,}")
_NO_PASSWORD = re.compile(r"\d{1,5}(?::\d+)*|no:.*|.*[/.].*")
"""After `-p`: a port, a plugin or a path."""


def hidden_argv(argv: Sequence[str]) -> list[str]:
    """Return the words of a command with `***` in place of what looks like a credential."""
    return list(_hidden_words(argv))


def printed_credentials(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return the credentials of a command as it would print them, the longest first."""
    return tuple(text.encode(errors="surrogateescape") for text in credentials_of(argv, environment))


def credentials_of(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the credentials in a command and in its environment, the longest first, to hide them in what the command prints."""
    pairs = [*zip(argv, hidden_argv(argv), strict=True)]
    pairs += [(value, HIDDEN) for name, value in environment.items() if secret_name(name) and _mixed(value)]
    found = {part for word, shown in pairs if shown != word for part in _hidden_parts(word, shown)}
    return tuple(sorted((part for part in found if len(part) >= _LEAST_LENGTH), key=len, reverse=True))


def concealed(line: bytes, credentials: Sequence[bytes]) -> bytes:
    """Return a line that a program printed with `***` in place of known credentials."""
    for credential in credentials:
        line = line.replace(credential, HIDDEN.encode())
    return line


def _hidden_parts(word: str, shown: str) -> Iterator[str]:
    """Yield what `***` stands for in a shown word, and the password of NAME:PASSWORD."""
    parts = re.fullmatch("(.*?)".join(map(re.escape, shown.split(HIDDEN))), word, re.DOTALL)
    for part in parts.groups() if parts else ():
        yield from (part, part.partition(":")[2], *part.split("\n"))


def shown_command(argv: Sequence[str]) -> str:
    """Return a command as a text to be shown or stored, without credentials."""
    return shlex.join(hidden_argv(argv))


def _hidden_words(argv: Sequence[str]) -> Iterator[str]:
    before = ""
    for word in argv:
        yield _hidden_word(before, word)
        before = word


def _hidden_word(before: str, word: str) -> str:
    if before.startswith("-") and "=" not in before and not word.startswith("--") and _is_value_of(before, word):
        return HIDDEN
    login = _JOINED_LOGIN.fullmatch(word)
    if login or (before in _LOGIN and ":" in word):
        user, _, password = word.partition(":")
        return word if password.isdigit() and len(password) < _LEAST_FIELD else f"{user}:{HIDDEN}"  # digits: a group
    name, equals, value = word.partition("=")
    if equals and value and not re.search(r"[\s:/?&\"']", name) and _hides(name, value):
        return f"{name}={HIDDEN}"
    if _JOINED_PASSWORD.fullmatch(word):
        return f"-p{HIDDEN}"
    return _hidden_script(word)


def _hidden_script(word: str) -> str:
    """Return a word without credentials: also those that it would have as a command of its own, as after `bash -c`."""
    found = hidden(word)
    if len(word) > _MOST_SCRIPT or not any(map(str.isspace, word)):
        return found
    try:
        inner = shlex.split(word)
    except ValueError:  # no command
        return found
    if len(inner) > 1:
        for one in credentials_of(inner, {}):
            found = found.replace(one, HIDDEN)
    return found


def _is_value_of(option: str, word: str) -> bool:
    if option == "-p":
        return not (_NO_PASSWORD.fullmatch(word) or word.startswith("-") or _PLAIN.fullmatch(word))
    return len(option) > len("-x") and _hides(option, word)
