"""The OpenVINO GenAI runtime on a CPU: whole requests through LLMPipeline, whose tokens a streamer timestamps.

The engine streams only single sequences. For a batch, its own timestamps are used; they are on the clock of this process.
"""

import re
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.runtimes import Runtime
from llm_perf_opt.config.schema import canonical_dtype
from llm_perf_opt.core.errors import CaptureError, ConfigError
from llm_perf_opt.core.records import Missing, ModelFacts, RuntimeFacts
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.units import duration
from llm_perf_opt.core.weight_records import WeightFacts
from llm_perf_opt.runners.base import Generated, RunnerRequest
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
    short_dtype,
    stated,
)
from llm_perf_opt.runners.measure.annotations import StageMarker
from llm_perf_opt.runners.models import weight_facts

if TYPE_CHECKING:
    import torch

    from llm_perf_opt.workspace.data.prompts import Prompts

MODEL_FILE = "openvino_model.xml"
STREAMED = (
    "a token is timestamped when the engine passes it to its streamer: prefill lasts until the first token, a decode step until "
    "the next"
)
OWN_TIMES = (
    "tokens have the timestamps of the engine (perf_metrics), because it streams single sequences only: prefill lasts until the "
    "first token of every sequence, a decode step until the next"
)
PADDED_NOTE = "Prompts of different length are padded on the left, and the padding is computed."
PRECISIONS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
"""Our names of dtypes → OpenVINO's."""
RESERVED = {"INFERENCE_NUM_THREADS": "hardware.threads", "PERF_COUNT": "profiling"}
_CONSTANT = re.compile(rb'<data element_type="(\w+)"[^>]*? size="(\d+)"')
"""A constant of a model in OpenVINO's XML: its type and its bytes in the file of weights."""
_NS_PER_MS = 1_000_000


class _Properties:
    """The arguments of the engine: properties of OpenVINO's CPU plugin and of LLMPipeline; see `EngineArguments`."""

    def known(self) -> None:
        """Return nothing: the engine checks the names."""

    def refuse(self, given: Mapping[str, Any], known: Collection[str] | None) -> None:
        """Raise a ConfigError for a property that llm-perf sets itself."""
        for name in given:
            if name in RESERVED:
                raise ConfigError(f"runtime.engine.{name} is set by {RESERVED[name]}.", f"Set {RESERVED[name]} instead.")


def _export(source: Path, target: Path, dtype: "torch.dtype") -> None:
    """Convert a Hugging Face folder with optimum-intel."""
    stored = "fp32" if short_dtype(dtype) == "fp32" else "fp16"
    options = ["-m", str(source), "--task", "text-generation-with-past", "--weight-format", stored, str(target)]
    run_module("optimum.commands.optimum_cli", ["export", "openvino", *options])


CONVERTER = Converter(
    "openvino_genai",
    "optimum-cli export openvino",
    modules=("optimum", "nncf", "openvino_tokenizers"),
    distributions=("optimum-intel", "openvino", "openvino-tokenizers"),
    expected=MODEL_FILE,
    command="optimum-cli export openvino -m HF_DIR --task text-generation-with-past --weight-format fp32 DIR",
    convert=_export,
)
RUNTIME = Runtime(
    "openvino_genai",
    "llm_perf_opt.runners.openvino_genai_runner:open_openvino_genai",
    steppable=False,
    needs="openvino_genai",
    install="pip install 'llm-perf-opt[openvino-genai]'",
    packages=("openvino-genai", "openvino", "openvino-tokenizers", "optimum-intel"),
    variables=("OPENVINO_", "OV_"),
    arguments=_Properties(),
    words=dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "ATTENTION_BACKEND", "PERFORMANCE_HINT"), r"\w+"),
)


class OpenVinoGenAiRunner:
    """A pipeline of OpenVINO GenAI; see `EngineRunner`."""

    def __init__(self, pipeline: Any, converted: ConvertedModel, request: RunnerRequest, properties: dict[str, Any]) -> None:
        import openvino_genai as engine

        self._pipeline = pipeline
        self._differences: list[tuple[int, int]] = []
        """Per request: decode on our clock and on the engine's, in ns."""
        dtype = cpu_engine_dtype(request, "OpenVINO GenAI", _supported())
        stored = stored_bytes(converted.folder / MODEL_FILE)
        words = EngineWords("OpenVINO's own", "stateful", "OpenVINO's own", "last token")
        self.facts: ModelFacts = replace(
            engine_model_facts(request.config.model, request.architecture, request.device, dtype, words),
            weights=_weights(request, stored, converted),
        )
        self.conversion_s = converted.seconds
        self.threads = int(properties["INFERENCE_NUM_THREADS"])
        uneven = [PADDED_NOTE] if len(set(request.prompts.lengths)) > 1 else []
        self._facts = RuntimeFacts(
            type="openvino_genai",
            version=str(engine.__version__),
            method=STREAMED if len(request.prompts.ids) == 1 else OWN_TIMES,
            uncosted=_uncosted(stored, short_dtype(dtype), properties),
            engine=properties,
            notes=(PARAMETERS_NOTE, *uneven),
            settings=tuple(stated({**_properties(dtype), **_GENERATION}, request.config.runtime.engine)),
        )
        self.profiler = Missing(
            "OpenVINO runs the model in its own code, and its pipelines offer no profile of its operators; "
            "the times of its tokens are in the unprofiled pass"
        )

    @property
    def runtime(self) -> RuntimeFacts:
        """The runtime; notes include how the engine's own times compare with ours, once there are any."""
        if not self._differences:
            return self._facts
        ours, theirs = (sorted(times)[len(times) // 2] for times in zip(*self._differences, strict=True))
        note = (
            f"Decode took {duration(ours)} on llm-perf's clock and {duration(theirs)} by the engine's own times of its tokens "
            f"(perf_metrics), medians of {len(self._differences)} requests, warm-up included."
        )
        return replace(self._facts, notes=(*self._facts.notes, note))

    def generate(self, prompts: "Prompts", new_tokens: int, marker: StageMarker) -> Generated:
        """Run all sequences at once, greedy, each to exactly `new_tokens`; only the whole request is marked."""
        import openvino_genai as engine

        wanted = engine.GenerationConfig()
        wanted.max_new_tokens = new_tokens
        for name, (value, _) in _GENERATION.items():
            setattr(wanted, name, value)
        inputs = _padded(prompts)
        streamer = _new_streamer() if len(prompts.ids) == 1 else None
        started = time.monotonic_ns()
        with marker(Stage.PROFILE.value):
            result = self._pipeline.generate(inputs, wanted, streamer) if streamer else self._pipeline.generate(inputs, wanted)
        own = [round(ms * _NS_PER_MS) for ms in result.perf_metrics.raw_metrics.m_new_token_times]
        tokens = tuple(tuple(map(int, row)) for row in result.tokens)
        if len(own) != new_tokens:
            raise CaptureError(
                f"OpenVINO GenAI timestamped {len(own)} tokens, not {new_tokens}.", "Use a version of 2026 or later."
            )
        if streamer is None:
            return Generated(started, (tuple(own),) * len(tokens), tokens)
        arrivals = tuple(streamer.arrivals)
        if new_tokens > 1 and len(arrivals) == new_tokens:
            self._differences.append((arrivals[-1] - arrivals[0], own[-1] - own[0]))
        return Generated(started, (arrivals,), tokens)


def _new_streamer() -> Any:
    import openvino_genai as engine

    class Streamer(engine.StreamerBase):  # type: ignore[misc, unused-ignore]
        """Timestamps each token that the engine passes on."""

        def __init__(self) -> None:
            super().__init__()
            self.arrivals: list[int] = []

        def write(self, token: Any) -> Any:
            """Take one token, or several that the engine passes on together."""
            self.arrivals += [time.monotonic_ns()] * (len(token) if isinstance(token, list) else 1)
            return engine.StreamingStatus.RUNNING

        def end(self) -> None:
            """Do nothing."""

    return Streamer()


def _padded(prompts: "Prompts") -> Any:
    """Return the prompts as the engine takes them, padded on the left."""
    import numpy as np
    import openvino
    import openvino_genai as engine

    width = max(prompts.lengths)
    ids = np.zeros((len(prompts.ids), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(prompts.ids):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return engine.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))


_GENERATION: Chosen = {"ignore_eos": (True, EXACTLY), "do_sample": (False, GREEDY)}
"""Parameters of each request."""


def _properties(dtype: "torch.dtype") -> Chosen:
    import torch

    precision, narrower = PRECISIONS[short_dtype(dtype)], "model.dtype; the engine's own may be less precise"
    return {
        "INFERENCE_NUM_THREADS": (torch.get_num_threads(), RUN_THREADS),
        "INFERENCE_PRECISION_HINT": (precision, narrower),
        "KV_CACHE_PRECISION": (precision, narrower),
        "ATTENTION_BACKEND": ("SDPA", "with which this runtime is tested"),
    }


def open_openvino_genai(request: RunnerRequest) -> OpenVinoGenAiRunner:
    """Return a runner of the request's model, converted if necessary, or raise the engine's error as a ResourceError."""
    dtype = cpu_engine_dtype(request, "OpenVINO GenAI", _supported())
    given = request.config.runtime.engine
    _Properties().refuse(given, None)
    properties: dict[str, Any] = {**{name: value for name, (value, _) in _properties(dtype).items()}, **given}
    converted = converted_model(request, dtype, CONVERTER)
    import openvino_genai as engine

    with opening(f"OpenVINO GenAI {engine.__version__}"):
        pipeline = engine.LLMPipeline(str(converted.folder), "CPU", **properties)
    return OpenVinoGenAiRunner(pipeline, converted, request, properties)


def _supported() -> "tuple[torch.dtype, ...]":
    import torch

    return torch.float32, torch.float16, torch.bfloat16


def stored_bytes(model: Path) -> dict[str, int]:
    """Return the bytes of the constants in a model's XML by type, largest first."""
    found: dict[str, int] = {}
    for kind, size in _CONSTANT.findall(model.read_bytes()):
        name = canonical_dtype(kind.decode())
        found[name] = found.get(name, 0) + int(size)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _weights(request: RunnerRequest, stored: dict[str, int], converted: ConvertedModel) -> WeightFacts:
    held = {} if request.config.model.source == "random" else stored
    return replace(weight_facts(request.config.model), stored_bytes=held, conversion=converted.conversion)


def _uncosted(stored: Mapping[str, int], dtype: str, properties: Mapping[str, Any]) -> str:
    """Return why the cost is unknown: weights, cache or computation in another format than the model's dtype."""
    held = next(iter(stored), dtype)
    if held not in PRECISIONS:
        return f"{QUANTIZED} ({held})"
    for name in ("KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT"):
        if properties[name] != PRECISIONS[dtype]:
            return f"runtime.engine.{name}={properties[name]} differs from model.dtype={dtype}, which the cost model counts"
    if held != dtype:
        return f"the weights are stored in {held} and run in {dtype}; which of them the engine reads in a step is not known"
    return ""
