"""A stand-in for TensorRT-LLM: the documented calls that the runner uses, and nothing else.

A keyword that is not documented is an error, as it is in the real one. Tokens are computed by transformers, one token for every
sequence in turn, so that they can be held against the PyTorch runner's.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tensorrt_llm.llmapi import KvCacheConfig

__version__ = "0.0-stand-in"


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int = 32
    top_k: int | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    end_id: int | None = None
    pad_id: int | None = None
    detokenize: bool = True


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False


class LLM:
    """Documented arguments of `tensorrt_llm.LLM`, of which it heeds some."""

    opened: ClassVar[list[Any]] = []

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        *,
        pipeline_parallel_size: int = 1,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        max_seq_len: int | None = None,
        load_format: str = "auto",
        kv_cache_config: KvCacheConfig | None = None,
        model_kwargs: dict[str, Any] | None = None,
        sparse_attention_config: Any = None,
        enable_attention_dp: bool = False,
    ) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if not isinstance(kv_cache_config, KvCacheConfig):
            raise ValueError("kv_cache_config must be a KvCacheConfig")
        self.kv_cache_config = kv_cache_config
        self.max_batch_size, self.max_seq_len = max_batch_size or 1, max_seq_len or 0
        if load_format == "dummy":
            self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=getattr(torch, dtype))
        else:
            self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.running = 0
        self.most_running = 0
        self.is_shut_down = False
        LLM.opened.append(self)

    async def generate_async(
        self, inputs: list[int], sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> AsyncIterator[RequestOutput]:
        """Token ids in; with streaming, an output for each new token, holding all so far."""
        if sampling_params is None or sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if not streaming or sampling_params.top_k != 1 or not sampling_params.ignore_eos:
            raise ValueError("this stand-in streams, greedy, to the last token")
        if len(inputs) + sampling_params.max_tokens > self.max_seq_len:
            raise ValueError("longer than max_seq_len")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        output = RequestOutput(inputs, [CompletionOutput(0)])
        for _ in range(sampling_params.max_tokens):
            output.outputs[0].token_ids = [*output.outputs[0].token_ids, self._next(inputs + output.outputs[0].token_ids)]
            yield output
            await asyncio.sleep(0)
        self.running -= 1

    def _next(self, ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            return int(self._model(torch.tensor([ids])).logits[0, -1].argmax())

    def shutdown(self) -> None:
        self.is_shut_down = True
