"""Ask an OpenAI-compatible server: is it ready, which model does it serve, how long does one request take."""

import http.client
import io
import json
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import partial
from typing import Any

from llm_perf_opt.config.serving import COMPLETIONS, LOOPBACK, MODELS
from llm_perf_opt.core.errors import CaptureError, ConfigError, ResourceError
from llm_perf_opt.core.processes import argument_problem
from llm_perf_opt.core.urls import parsed_url

_MOST_BYTES = 16 * 2**20
"""The largest answer that is read."""
_ASK_S = 5.0
_CONNECT_S = 5.0
_LIST_S = 30.0
"""For the list of models: a server under load answers late."""
_LEAST_S = 0.001
"""Zero would mean to return at once."""


@dataclass(frozen=True)
class Answered:
    """An answer of a server; code 0: none arrived."""

    code: int
    body: bytes = b""
    why: str = ""
    """Why none arrived."""

    def json(self) -> Any:
        """Return the body as JSON, or None."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def text(self) -> str:
        """The start of the body, or why there is none, on one line."""
        return " ".join(self.body.decode(errors="replace").split())[:300] or self.why


class _Timed(io.RawIOBase):
    """A socket that is read until a deadline."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = connected, deadline
        self._raw = connected.makefile("rb", buffering=0)

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out: the answer did not end")
        self._socket.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Direct(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections whose answers, headers included, end within the time limit of the request."""

    def do_open(self, http_class: Any, req: urllib.request.Request, **named: Any) -> http.client.HTTPResponse:
        deadline = time.monotonic() + (req.timeout or _ASK_S)

        def connection(host: str, **words: Any) -> http.client.HTTPConnection:
            made: http.client.HTTPConnection = http_class(host, **{**words, "timeout": min(words["timeout"], _CONNECT_S)})
            made.response_class = partial(_timed_response, deadline)  # type: ignore[assignment]
            return made

        try:
            return super().do_open(connection, req, **named)
        finally:
            req.timeout = max(deadline - time.monotonic(), _LEAST_S)  # what is left for a redirected request


def _timed_response(deadline: float, connected: socket.socket, **words: Any) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(_Timed(connected, deadline), **words)  # type: ignore[arg-type]


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Direct())
"""Without a proxy: a server on this machine cannot be reached through one."""


def ask(url: str, *, body: dict[str, Any] | None = None, post: bool = False, timeout_s: float = _ASK_S) -> Answered:
    """Return the answer to a GET, or to a POST with this body. Never raises for what a server does.

    The limit is for the whole answer, headers included: a server that sends a byte now and then does not extend it.
    """
    data = json.dumps(body).encode() if body is not None else b"" if post else None
    headers = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(url, data=data, headers=headers, method="POST" if data is not None else "GET")  # noqa: S310
    try:
        with _DIRECT.open(request, timeout=timeout_s) as response:
            return Answered(response.status, _body(response))
    except urllib.error.HTTPError as error:
        with error:
            return Answered(error.code, _rest(error))
    except (OSError, ValueError) as error:  # refused, reset, timed out; http.client raises ValueErrors
        return Answered(0, why=str(getattr(error, "reason", "") or error) or type(error).__name__)
    except http.client.HTTPException as error:  # a broken answer is no answer
        return Answered(0, why=f"{type(error).__name__}: {error}")


def _body(response: Any) -> bytes:
    """Return what arrives, as far as it fits; raise a TimeoutError if it does not end in time."""
    found = bytearray()
    while len(found) < _MOST_BYTES:
        piece = response.read1(_MOST_BYTES - len(found))
        if not piece:
            break
        found += piece
    return bytes(found)


def _rest(error: urllib.error.HTTPError) -> bytes:
    try:
        return _body(error.fp) if hasattr(error.fp, "read1") else b""
    except (OSError, ValueError, http.client.HTTPException):  # the code is the answer; its text may be cut off
        return b""


def check_url(url: str) -> str:
    """Return the address of a server without its path, or raise a ConfigError."""
    try:
        parts = parsed_url(url)
    except ConfigError as error:
        raise ConfigError(f"--url: {error.fact}", "Write --url http://HOST:PORT.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url} is not the address of a server.", "Write --url http://HOST:PORT.")
    if "@" in parts.netloc or parts.query or parts.fragment or parts.path.strip("/") not in ("", "v1"):
        raise ConfigError(f"--url {url}: expected the address alone.", "Write --url http://HOST:PORT, without user and path.")
    return f"{parts.scheme}://{parts.netloc}"


def free_port(wanted: int | None) -> int:
    """Return the wanted port, or a free one; raise a ResourceError if the wanted one is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was closed a moment ago is free
        try:
            probe.bind((LOOPBACK, wanted or 0))
        except OSError as error:
            raise ResourceError(
                f"Port {wanted} of {LOOPBACK} is taken: {error.strerror}.",
                "Choose another one with --port, leave it out for a free one, or attach to the server there with --url.",
            ) from error
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class ServedModel:
    """What a server says about itself."""

    name: str
    owner: str
    root: str
    """Where its weights come from, as the server names it."""
    context: int | None = None
    """The most tokens of a request with its answer, if the server says."""


def served_model(url: str, wanted: str | None = None) -> ServedModel:
    """Return the model that a server serves; raise if it cannot be reached, or if several are served and none is named."""
    answer = ask(url + MODELS, timeout_s=_LIST_S)
    content = answer.json() if answer.code == 200 else None
    listed = content.get("data") if isinstance(content, dict) else None
    found = (
        [entry for entry in listed if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        if isinstance(listed, list)
        else []
    )
    if not found:
        said = f"answered {answer.code}: {answer.text}" if answer.code else f"cannot be reached: {answer.why}"
        raise ResourceError(f"{url}{MODELS} {said}.", "Check the address, and that an OpenAI-compatible server listens there.")
    names = [entry["id"] for entry in found]
    if wanted is not None and wanted not in names:
        raise ConfigError(f"The server has no model '{wanted}'.", f"It serves {', '.join(names[:10])}.")
    if wanted is None and len(names) > 1:
        raise ConfigError(f"The server serves {len(names)} models.", f"Choose one with --served-model: {', '.join(names[:10])}.")
    entry = found[names.index(wanted) if wanted else 0]
    return _model(entry)


def _model(entry: dict[str, Any]) -> ServedModel:
    name: str = entry["id"]
    if problem := argument_problem(name):
        raise ResourceError(f"The server's model {name[:100]!r} cannot be used: {problem}.", "Rename it on the server.")
    context = entry.get("max_model_len")
    known = isinstance(context, int) and not isinstance(context, bool) and context > 0
    return ServedModel(name, str(entry.get("owned_by") or ""), str(entry.get("root") or ""), context if known else None)


def check_lengths(model: ServedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raise a ConfigError if requests of these lengths do not fit the model's context."""
    if model.context is not None and prompt_tokens + new_tokens > model.context:
        raise ConfigError(
            f"{prompt_tokens} prompt and {new_tokens} new tokens do not fit '{model.name}': its context is {model.context}.",
            "Lower runtime.prompt_tokens or runtime.num_new_tokens, or start the server with a longer context.",
        )


def check_request(url: str, model: str, prompt_tokens: int, new_tokens: int, timeout_s: float) -> float:
    """Send one request twice and return the seconds of the second; raise if the server does not answer it."""
    body = {
        "model": model,
        "prompt": "a " * max(prompt_tokens // 2, 1),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    seconds = 0.0
    for _ in range(2):
        begun = time.monotonic()
        answer = ask(url + COMPLETIONS, body=body, timeout_s=timeout_s)
        seconds = time.monotonic() - begun
        if answer.code != 200:
            said = f"answered {answer.code}: {answer.text}" if answer.code else f"did not answer: {answer.why}"
            raise CaptureError(
                f"The server {said} to a request of {prompt_tokens} prompt tokens and {new_tokens} new tokens.",
                "Check the model's limits, runtime.prompt_tokens and runtime.num_new_tokens, and the server's log.",
            )
    return seconds
