"""The llama.cpp runtime on a CPU, through xllamacpp: whole requests to its server, which runs in this process.

Requests are made by a function call, not over the network. The server also opens a port on 127.0.0.1. Without a random key, it
says there only that it runs (`/health`).
"""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from llm_perf_opt.config.runtimes import Runtime
from llm_perf_opt.core.engine_records import EngineSetting
from llm_perf_opt.core.errors import CaptureError, ConfigError
from llm_perf_opt.core.records import Missing, ModelFacts, RuntimeFacts
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.units import duration
from llm_perf_opt.core.weight_records import WeightFacts
from llm_perf_opt.runners.base import Generated, RunnerRequest
from llm_perf_opt.runners.conversion import ConvertedModel, Converter, converted_model
from llm_perf_opt.runners.engines import (
    PARAMETERS_NOTE,
    QUANTIZED,
    UNPADDED,
    EngineWords,
    cpu_engine_dtype,
    engine_model_facts,
    opening,
    short_dtype,
)
from llm_perf_opt.runners.gguf_files import TYPES, refuse_model, stored_types, write_gguf
from llm_perf_opt.runners.llamacpp_settings import (
    CACHE_BITS,
    NAMED,
    REQUESTED,
    VARIABLES,
    SettingNames,
    chosen_settings,
    parameters,
)
from llm_perf_opt.runners.measure.annotations import StageMarker
from llm_perf_opt.runners.models import weight_facts

if TYPE_CHECKING:
    import torch

    from llm_perf_opt.workspace.data.prompts import Prompts

METHOD = (
    "a token is timestamped when the engine's server passes it to the caller: prefill lasts until the first token, a decode step "
    "until the next"
)
SERVER_NOTE = (
    "xllamacpp has no call for a single step. A step includes the work of llama.cpp's server: selecting the token and "
    "passing it to the caller's thread."
)
PIECES_NOTE = (
    "The server holds back a token whose text ends inside a character. Such a token has the time of the next. The tokens "
    "themselves come from a second request, which is not streamed and not timed."
)
_FEATURE = re.compile(r"(\w+) = 1\b")
"""A feature of the engine, as it reports it: `NEON = 1 | ARM_FMA = 1`."""
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
"""How llama.cpp ends the names of the files that a model is split into."""
_NS_PER_MS = 1_000_000

CONVERTER = Converter(
    "llamacpp",
    "gguf",
    modules=("gguf",),
    distributions=("gguf", "llm-perf-opt"),
    expected="*.gguf",
    command="python convert_hf_to_gguf.py HF_DIR --outtype f32 --outfile DIR/model.gguf",
    convert=write_gguf,
    refuse=refuse_model,
)
RUNTIME = Runtime(
    "llamacpp",
    "llm_perf_opt.runners.llamacpp_runner:open_llamacpp",
    steppable=False,
    needs="xllamacpp",
    install="pip install 'llm-perf-opt[llamacpp]'",
    packages=("xllamacpp", "gguf"),
    variables=("GGML_", "LLAMA_"),
    arguments=SettingNames(),
    words=dict.fromkeys(NAMED, r"\w+"),
    separate="Set runtime.engine.n_batch to at least the tokens of all prompts.",
)


# --- what the server sends ------------------------------------------------------------------------------------------------


class _Timings(msgspec.Struct):
    """The engine's own times of a request, in its final message."""

    prompt_n: int
    prompt_ms: float
    predicted_ms: float


class _Progress(msgspec.Struct):
    index: int
    tokens: list[int]
    tokens_predicted: int
    timings: _Timings | None = None


class _Failure(msgspec.Struct):
    message: str


class _Message(msgspec.Struct):
    progress: _Progress | None = msgspec.field(name="__verbose", default=None)
    error: _Failure | None = None


_READER = msgspec.json.Decoder(_Message | list[_Message] | None)


def _messages(text: bytes) -> list[_Message]:
    """Return the messages in one piece of an answer; a request with several prompts begins with an empty one."""
    try:
        found = _READER.decode(text)
    except msgspec.MsgspecError as error:
        raise CaptureError(
            f"llama.cpp's server sent a message that cannot be read: {error}.", "Use the version of xllamacpp in constraints.txt."
        ) from error
    return found if isinstance(found, list) else [found] if found else []


@dataclass(frozen=True)
class Streams:
    """The sequences of a request, as they arrived."""

    arrivals: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    """Fewer than arrival times if the server held tokens back."""
    timings: tuple[_Timings, ...]

    @property
    def complete(self) -> bool:
        """Whether every token arrived."""
        return all(len(tokens) == len(times) for tokens, times in zip(self.tokens, self.arrivals, strict=True))


def read_streams(received: list[tuple[int, bytes]], sequences: int) -> Streams:
    """Return the sequences from messages and the times at which they arrived."""
    arrivals: list[list[int]] = [[] for _ in range(sequences)]
    tokens: list[list[int]] = [[] for _ in range(sequences)]
    timings: dict[int, _Timings] = {}
    for moment, text in received:
        for message in _messages(text):
            if message.error is not None:
                said = message.error.message.rstrip(".")
                raise CaptureError(f"llama.cpp refused the request: {said}.", "Check runtime.engine.*, and see the log.txt.")
            if message.progress is not None:
                row = message.progress
                arrivals[row.index] += [moment] * (row.tokens_predicted - len(arrivals[row.index]))
                tokens[row.index] += row.tokens
                if row.timings is not None:
                    timings[row.index] = row.timings
    ended = tuple(timings[row] for row in sorted(timings))
    return Streams(tuple(map(tuple, arrivals)), tuple(map(tuple, tokens)), ended)


# --- the runner -----------------------------------------------------------------------------------------------------------


class LlamaCppRunner:
    """A server of llama.cpp in this process; see `EngineRunner`."""

    def __init__(self, server: Any, opened: "OpenedModel", request: RunnerRequest) -> None:
        import xllamacpp as engine

        self._server = server
        self._caller = ThreadPoolExecutor(1)
        """Calls the server: an exception in its callback, such as that of Ctrl-C in the main thread, would be lost."""
        self._own_times: list[tuple[int, int, int, int]] = []
        """Per request, of the first sequence: prefill and decode on our clock, then on the engine's, in ns."""
        self._whole: dict[int, tuple[tuple[int, ...], ...]] = {}
        """Number of new tokens → the tokens, if the server held some back."""
        words = EngineWords("llama.cpp's own", "preallocated", "none", "last token")
        self.facts: ModelFacts = replace(
            engine_model_facts(request.config.model, request.architecture, request.device, opened.dtype, words),
            weights=opened.weights(request),
        )
        self.conversion_s = opened.converted.seconds
        self.threads = opened.threads
        built = ", ".join(_FEATURE.findall(engine.get_system_info()))
        self._facts = RuntimeFacts(
            type="llamacpp",
            version=f"xllamacpp {engine.__version__}",
            method=METHOD,
            uncosted=opened.uncosted(request),
            engine=opened.values,
            variables=VARIABLES,
            settings=opened.settings,
            notes=(PARAMETERS_NOTE, SERVER_NOTE, f"The engine is compiled with: {built}."),
        )
        self.profiler = Missing("llama.cpp runs the model in its own code and offers no profile of its operators")

    @property
    def runtime(self) -> RuntimeFacts:
        """The runtime; notes include how the engine's own times compare with ours, once there are any."""
        notes = [PIECES_NOTE] if self._whole else []
        if self._own_times:
            prefill, decode, their_prefill, their_decode = (
                duration(round(median(times))) for times in zip(*self._own_times, strict=True)
            )
            notes.append(
                f"Prefill took {prefill} on llm-perf's clock and {their_prefill} by the engine's own times, decode {decode} and "
                f"{their_decode}: medians of the first sequence in {len(self._own_times)} requests, warm-up included."
            )
        return replace(self._facts, notes=(*self._facts.notes, *notes))

    def generate(self, prompts: "Prompts", new_tokens: int, marker: StageMarker) -> Generated:
        """Run all sequences at once, greedy, each to exactly `new_tokens`; only the whole request is marked."""
        wanted = request_body(prompts.ids, new_tokens, stream=True)
        with marker(Stage.PROFILE.value):
            started, received = self._send(wanted)
        found = read_streams(received, len(prompts.ids))
        self._check(found, prompts, started)
        if found.complete:
            return Generated(started, found.arrivals, found.tokens)
        ended = time.monotonic_ns()
        return Generated(started, found.arrivals, self._all_tokens(prompts, new_tokens), ended_ns=ended)

    def _send(self, wanted: bytes) -> tuple[int, list[tuple[int, bytes]]]:
        """Return the time at which the request was sent, and the messages with the times at which they arrived."""
        received: list[tuple[int, bytes]] = []
        interrupted = False

        def receive(message: bytes) -> bool:
            received.append((time.monotonic_ns(), message))
            return interrupted  # true: the server ends the request

        def call() -> int:
            started = time.monotonic_ns()
            self._server.handle_completions(wanted, receive)
            return started

        try:
            return self._caller.submit(call).result(), received
        except BaseException:
            interrupted = True
            raise

    def _check(self, found: Streams, prompts: "Prompts", started: int) -> None:
        """Raise if a prompt was not computed as a whole; keep the engine's own times."""
        computed = [timings.prompt_n for timings in found.timings]
        if computed != [*prompts.lengths]:
            raise CaptureError(
                f"llama.cpp computed {computed} tokens of prompts that have {[*prompts.lengths]}.", "See the pass's log.txt."
            )
        first, theirs = found.arrivals[0], found.timings[0]
        if not first:
            return  # the meter raises
        own = (round(theirs.prompt_ms * _NS_PER_MS), round(theirs.predicted_ms * _NS_PER_MS))
        self._own_times.append((first[0] - started, first[-1] - first[0], *own))

    def _all_tokens(self, prompts: "Prompts", new_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Return the tokens from a request without a stream, whose answer has all of them; it is sent once."""
        if new_tokens not in self._whole:
            _, answer = self._send(request_body(prompts.ids, new_tokens, stream=False))
            self._whole[new_tokens] = read_streams(answer, len(prompts.ids)).tokens
        return self._whole[new_tokens]


def request_body(prompts: Any, new_tokens: int, stream: bool) -> bytes:
    """Return a greedy request of exactly `new_tokens` that computes the whole prompts and returns token ids."""
    return json.dumps(
        {
            "prompt": [list(ids) for ids in prompts],
            "max_tokens": new_tokens,
            "stream": stream,
            "return_tokens": True,
            "verbose": True,  # the ids are in a part of the message that is otherwise left out
            "cache_prompt": False,
            "ignore_eos": True,
            "samplers": ["top_k"],
            "top_k": 1,
        }
    ).encode()


# --- opening --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedModel:
    """A model and the settings it runs with."""

    converted: ConvertedModel
    dtype: "torch.dtype"
    stored: dict[str, int]
    values: dict[str, Any]
    """Every setting, including those of llm-perf."""
    settings: tuple[EngineSetting, ...]
    threads: int

    def weights(self, request: RunnerRequest) -> WeightFacts:
        """Return where the weights came from; a user's GGUF file is read for their types."""
        found = replace(weight_facts(request.config.model), conversion=self.converted.conversion)
        return found if found.conversion else replace(found, stored_bytes=self.stored)

    def uncosted(self, request: RunnerRequest) -> str:
        """Return why the cost is unknown, or an empty string."""
        dtype = short_dtype(self.dtype)
        quantized = [name for name in self.stored if name not in TYPES]
        if quantized:
            return f"{QUANTIZED} ({', '.join(quantized)})"
        if set(self.stored) - {dtype}:
            held = ", ".join(self.stored)
            return f"the weights run as they are stored, in {held}, but the cost model counts model.dtype={dtype}"
        for name in ("cache_type_k", "cache_type_v"):
            kept = self.values.get(name, "f16")
            if CACHE_BITS.get(kept) != self.dtype.itemsize * 8:
                return f"runtime.engine.{name}={kept} differs from model.dtype={dtype}, which the cost model counts"
        return UNPADDED if len(set(request.prompts.lengths)) > 1 else ""


def open_llamacpp(request: RunnerRequest) -> LlamaCppRunner:
    """Return a runner of the request's model, converted if necessary, or raise the engine's error as a ResourceError."""
    import torch

    supported = (torch.float32, torch.float16, torch.bfloat16)
    dtype = cpu_engine_dtype(request, "llama.cpp", supported)
    given = request.config.runtime.engine
    SettingNames().refuse(given, None)
    converted = converted_model(request, dtype, CONVERTER)
    import xllamacpp as engine

    with opening(f"xllamacpp {engine.__version__}"):
        files = model_files(converted.folder)
        stored = stored_types(files)
        if converted.conversion is None and request.config.model.dtype == "auto":
            dtype = {short_dtype(known): known for known in supported}.get(next(iter(stored), ""), dtype)
        chosen = chosen_settings(request, dtype)
        values = {**{name: value for name, (value, _) in chosen.items()}, **given}
        settings = tuple(EngineSetting(name, str(value), why) for name, (value, why) in chosen.items() if name not in given)
        opened = OpenedModel(converted, dtype, stored, values, (*settings, *REQUESTED), torch.get_num_threads())
        return LlamaCppRunner(engine.Server(parameters(files[0], opened.values, opened.threads)), opened, request)


def model_files(folder: Path) -> list[Path]:
    """Return the folder's GGUF file, or those that it is split into, in order."""
    found = sorted(folder.glob("*.gguf"))
    parts = [_PART.sub("", path.name) for path in found if _PART.search(path.name)]
    if len(found) == 1 or (len(parts) == len(found) and len(set(parts)) == 1):
        return found
    names = ", ".join(path.name for path in found)
    raise ConfigError(f"{folder} has several models: {names}.", "Put the one to run into a folder of its own, with config.json.")
