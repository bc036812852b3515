"""The ONNX Runtime GenAI runtime on a CPU: `append_tokens` runs the prompt, `generate_next_token` runs one decode step."""

import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.runtimes import Runtime
from llm_perf_opt.core.errors import CaptureError, ConfigError, ParseError, nearest
from llm_perf_opt.core.records import Missing, RuntimeFacts
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.runners.base import EngineProfiler, RunnerRequest
from llm_perf_opt.runners.conversion import ConvertedModel, Converter, converted_model, run_module
from llm_perf_opt.runners.engines import (
    EXACTLY,
    GREEDY,
    PARAMETERS_NOTE,
    QUANTIZED,
    RUN_THREADS,
    Chosen,
    EngineWords,
    cpu_engine_dtype,
    engine_model_facts,
    opening,
    stated,
)
from llm_perf_opt.runners.models import weight_facts

if TYPE_CHECKING:
    import torch

    from llm_perf_opt.workspace.data.prompts import Prompts

METHOD = "llm-perf calls prefill (append_tokens and the first generate_next_token) and every decode step (generate_next_token)"
NOTES = (
    "A step includes the engine's selection of the next token. The generator, which allocates the cache, is created before the "
    "request is timed.",
    "In the torch pass, operators are the nodes that ONNX Runtime's own profiler records; torch.profiler does not see them. The "
    "selection of a token is not among them.",
)
CONFIG = "genai_config.json"
QUANTIZED_OPERATORS = ("MatMulNBits", "MatMulInteger", "QMoE", "QLinear", "GatherBlockQuantized", "DequantizeLinear")
"""Operators of quantized weights, as ONNX and ONNX Runtime name them."""
PADDED = "the engine pads sequences of different length on the right and skips the padding in attention only"
SESSION_OPTIONS = (
    "intra_op_num_threads", "inter_op_num_threads", "enable_cpu_mem_arena", "enable_mem_pattern", "graph_optimization_level",
    "log_id", "log_severity_level", "log_verbosity_level",
)  # fmt: skip
"""The session options that the engine knows by name; entries with a dot are passed to ONNX Runtime."""
RESERVED = {"enable_profiling": "profiling.torch.enable", "provider_options": "hardware"}
"""Session option → the key of llm-perf's own configuration that sets it."""
_PROFILE = "onnxruntime_profile"
_SEARCH: Chosen = {"do_sample": (False, GREEDY), "num_beams": (1, GREEDY), "repetition_penalty": (1.0, GREEDY)}
"""Search options of each request."""


class _SessionOptions:
    """The arguments of the engine: session options of ONNX Runtime; see `EngineArguments`."""

    def known(self) -> frozenset[str]:
        """Return the names without a dot."""
        return frozenset(SESSION_OPTIONS)

    def refuse(self, given: Mapping[str, Any], known: Collection[str] | None) -> None:
        """Raise a ConfigError for an option that llm-perf sets itself or that is unknown."""
        for name, value in given.items():
            if name in RESERVED:
                raise ConfigError(f"runtime.engine.{name} is set by {RESERVED[name]}.", f"Set {RESERVED[name]} instead.")
            if name not in SESSION_OPTIONS and not isinstance(value, Mapping):
                raise ConfigError(
                    f"runtime.engine.{name}: ONNX Runtime GenAI has no such session option.{nearest(name, SESSION_OPTIONS)}",
                    f"Known: {', '.join(SESSION_OPTIONS)}, and entries of ONNX Runtime, such as "
                    "runtime.engine.session.set_denormal_as_zero=1.",
                )


def _build(source: Path, target: Path, _: "torch.dtype") -> None:
    """Convert a Hugging Face folder with the engine's model builder."""
    options = ["-m", source.name, "-i", str(source), "-o", str(target), "-p", "fp32", "-e", "cpu", "-c", f"{target}.cache"]
    run_module("onnxruntime_genai.models.builder", [*options, "--extra_options", "hf_remote=false", "hf_token=false"])


CONVERTER = Converter(
    "onnxruntime_genai",
    "onnxruntime_genai.models.builder",
    modules=("onnxruntime_genai", "onnx", "onnx_ir", "tokenizers"),
    distributions=("onnxruntime-genai", "onnxruntime", "onnx"),
    expected=CONFIG,
    command="python -m onnxruntime_genai.models.builder -m NAME -i HF_DIR -o DIR -p fp32 -e cpu",
    convert=_build,
)
RUNTIME = Runtime(
    "onnxruntime_genai",
    "llm_perf_opt.runners.onnxruntime_genai_runner:open_onnxruntime_genai",
    steppable=False,  # llm-perf calls its steps, but there are no modules to time, and prompts are token ids
    needs="onnxruntime_genai",
    install="pip install 'llm-perf-opt[onnxruntime-genai]'",
    packages=CONVERTER.distributions,
    arguments=_SessionOptions(),
    words={"graph_optimization_level": r"\w+"},
    marks_stages=lambda _: True,
)


class OnnxRuntimeGenAiRunner:
    """A generator of ONNX Runtime GenAI; see `SteppableRunner`."""

    model = None

    def __init__(self, converted: ConvertedModel, dtype: "torch.dtype", request: RunnerRequest, options: dict[str, Any]) -> None:
        import onnxruntime
        import onnxruntime_genai as engine

        self._folder, self._options = converted.folder, options
        self._sequences = len(request.prompts.ids)
        self._longest = max(max(request.prompts.lengths), 2) + request.config.runtime.num_new_tokens
        self._padding = _unused_id(request.prompts)
        self._generator: Any = None
        self.load()
        words = EngineWords(
            "ONNX Runtime's GroupQueryAttention",
            "one buffer of the whole length",
            "ONNX Runtime's own",
            self._logits(request.prompts.ids[0][0]),
        )
        self.conversion_s = converted.seconds
        self.threads = int(options["intra_op_num_threads"])
        self.facts = replace(
            engine_model_facts(request.config.model, request.architecture, request.device, dtype, words),
            weights=replace(weight_facts(request.config.model), conversion=converted.conversion),
        )
        self.runtime = RuntimeFacts(
            type="onnxruntime_genai",
            version=f"{engine.__version__} (ONNX Runtime {onnxruntime.__version__})",
            method=METHOD,
            uncosted=_uncosted(converted.folder, request.prompts),
            engine=options,
            notes=(PARAMETERS_NOTE, *NOTES),
            settings=tuple(stated(self._chosen(), request.config.runtime.engine)),
        )
        self.profiler: EngineProfiler | Missing = Missing("the model was not opened for the torch pass")
        if request.trace_dir is not None:
            self.profiler = _SessionProfiler(self, request.trace_dir)

    def _chosen(self) -> Chosen:
        dropped = "those of genai_config.json may name libraries to load, or devices"
        return {
            "intra_op_num_threads": (self.threads, RUN_THREADS),
            "session_options": ("those of runtime.engine", dropped),
            "eos_token_id": (None, EXACTLY),
            "pad_token_id": (self._padding, "an id that no prompt has: the engine takes leading ones of it for padding"),
            "max_length": (self._longest, "the cache is allocated for the whole request in advance"),
            **_SEARCH,
        }

    def load(self, profile: Path | None = None) -> None:
        """Load the model. ONNX Runtime writes its profile to a file whose name begins with `profile`."""
        import onnxruntime_genai as engine

        self.release()
        session = {**self._options, **({"enable_profiling": str(profile)} if profile else {})}
        with tempfile.TemporaryDirectory(prefix="llm-perf-onnx-") as folder:
            write_links(self._folder, Path(folder), session, self._padding)
            self._loaded = engine.Model(engine.Config(folder))
        self._parameters = engine.GeneratorParams(self._loaded)
        self._parameters.set_search_options(
            batch_size=self._sequences, max_length=self._longest, **{name: value for name, (value, _) in _SEARCH.items()}
        )

    def release(self) -> None:
        """Release the model; ONNX Runtime then writes its profile."""
        self._generator = self._parameters = self._loaded = None

    def place(self, prompts: "Prompts") -> Any:
        """Return the prompts as an array, [batch, longest], padded on the right."""
        import numpy as np

        width = max(prompts.lengths)
        return np.array([[*ids, *[self._padding] * (width - len(ids))] for ids in prompts.ids], dtype=np.int32)

    def begin(self) -> None:
        """Create a generator with an empty cache."""
        import onnxruntime_genai as engine

        self._generator = None  # releases its cache before the next one is allocated
        self._generator = engine.Generator(self._loaded, self._parameters)

    def prefill(self, prompts: Any) -> Any:
        """Run the whole prompt and return the first new token of each sequence."""
        self._generator.append_tokens(prompts)
        return self._next()

    def decode_step(self, token: Any) -> Any:
        """Run the token that the generator selected last, and return the next of each sequence."""
        return self._next()

    def _next(self) -> Any:
        self._generator.generate_next_token()
        return self._generator.get_next_tokens().copy()

    def to_lists(self, tokens: list[Any]) -> list[list[int]]:
        """Return the tokens of each sequence."""
        return [[int(token) for token in row] for row in zip(*tokens, strict=True)]

    def _logits(self, token: int) -> str:
        """Return for which tokens of a prompt the model computes logits, from the output of a prompt of two tokens."""
        import numpy as np

        self.begin()
        self._generator.append_tokens(np.full((self._sequences, 2), token, dtype=np.int32))
        computed = self._generator.get_output("logits").shape[1]
        self._generator = None
        return "whole prompt" if computed > 1 else "last token"


def open_onnxruntime_genai(request: RunnerRequest) -> OnnxRuntimeGenAiRunner:
    """Return a runner of the request's model, converted if necessary, or raise the engine's error as a ResourceError."""
    import torch

    dtype = cpu_engine_dtype(request, "ONNX Runtime GenAI", (torch.float32,))
    given = request.config.runtime.engine
    _SessionOptions().refuse(given, None)
    options = {"intra_op_num_threads": torch.get_num_threads(), **_flat(given)}
    converted = converted_model(request, dtype, CONVERTER)
    import onnxruntime_genai as engine

    getattr(engine, "disable_telemetry_events", bool)()
    with opening(f"ONNX Runtime GenAI {engine.__version__}"):
        return OnnxRuntimeGenAiRunner(converted, dtype, request, options)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options under their names with dots, whose values ONNX Runtime takes as text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value) if prefix else value
    return found


def _unused_id(prompts: "Prompts") -> int:
    """Return a token id that no prompt has: the engine takes leading ones of it for padding."""
    used = {token for ids in prompts.ids for token in ids}
    return next(number for number in range(len(used) + 1) if number not in used)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        found["model"]["decoder"]["filename"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParseError(
            f"{folder / CONFIG} cannot be read: {error!r}.", f"Convert the model again: {CONVERTER.command}"
        ) from error
    return dict(found)


def write_links(model: Path, folder: Path, session: Mapping[str, Any], padding: int) -> None:
    """Write links to the model's files, and a configuration under which no token ends a sequence.

    The engine only takes the end of a sequence from that file. Its own session options are dropped: they may name libraries
    to load, or devices.
    """
    config = _read_config(model)
    config["model"].pop("eos_token_id", None)
    config["model"]["pad_token_id"] = padding
    config["model"]["decoder"]["session_options"] = {**session, "provider_options": []}
    for path in model.iterdir():
        if path.is_file() and path.name != CONFIG:
            (folder / path.name).symlink_to(path.resolve())
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _uncosted(folder: Path, prompts: "Prompts") -> str:
    content = (folder / str(_read_config(folder)["model"]["decoder"]["filename"])).read_bytes()
    quantized = [name for name in QUANTIZED_OPERATORS if name.encode() in content]
    if quantized:
        return f"{QUANTIZED} ({', '.join(quantized)})"
    return PADDED if len(set(prompts.lengths)) > 1 else ""


# --- ONNX Runtime's profiler --------------------------------------------------------------------------------------------


class _SessionProfiler:
    """ONNX Runtime's own profiler. A recording lasts as long as the model is loaded, so each one loads it again."""

    def __init__(self, runner: OnnxRuntimeGenAiRunner, folder: Path) -> None:
        self._runner = runner
        self._folder = folder

    def start(self) -> None:
        """Load the model with its profiler on."""
        for left in self._folder.glob(f"{_PROFILE}_*.json"):
            left.unlink()
        self._runner.load(self._folder.resolve() / _PROFILE)

    def stop(self) -> Path:
        """Release the model, which writes the profile, and return it as a trace in the form of torch.profiler."""
        self._runner.release()
        written = sorted(self._folder.glob(f"{_PROFILE}_*.json"))
        if not written:
            raise CaptureError("ONNX Runtime wrote no profile.", "See the pass's log.txt.")
        self._runner.load()
        kept = self._folder / f"{_PROFILE}.json"
        shutil.move(written[0], kept)
        trace = self._folder / "trace.json"
        trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": trace_events(json.loads(kept.read_text()))}))
        return trace


def trace_events(profile: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes of a profile as operators, inside the stages: the first run of the model is prefill, the others are steps.

    Selecting a token is not part of the model, so the profile does not have it.
    """
    runs = sorted((event for event in profile if event.get("name") == "model_run"), key=lambda event: int(event["ts"]))
    if not runs:
        raise CaptureError("ONNX Runtime's profile has no run of the model.", "See the pass's log.txt.")
    begin, end = int(runs[0]["ts"]), max(int(run["ts"]) + int(run["dur"]) for run in runs)
    place = {"ph": "X", "pid": runs[0]["pid"], "tid": runs[0]["tid"]}

    def label(name: str, start: int, until: int) -> dict[str, Any]:
        return {**place, "cat": "user_annotation", "name": name, "ts": start, "dur": until - start}

    found = [label(Stage.PROFILE.value, begin, end)]
    for number, run in enumerate(runs):
        stage = Stage.DECODE_STEP if number else Stage.PREFILL
        found.append(label(stage.value, int(run["ts"]), int(run["ts"]) + int(run["dur"])))
    if len(runs) > 1:
        found.append(label(Stage.DECODE.value, int(runs[1]["ts"]), end))
    for event in profile:
        kind = event.get("args", {}).get("op_name")
        if event.get("cat") == "Node" and kind and int(event["ts"]) >= begin:
            node = str(event["name"]).removesuffix("_kernel_time")
            found.append({**event, "cat": "cpu_op", "name": f"onnx::{kind}", "args": {"node": node}})
    return found
