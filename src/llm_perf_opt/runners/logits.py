"""Record logits after the times were measured: the same tokens are fed to each configuration, so that they can be compared.

A request is repeated, but each step is fed the reference's token instead of the one that the model chose. Otherwise two
configurations that round differently would continue with different texts after the first near tie.
"""

import gc
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from llm_perf_opt.core.errors import ParseError, words_of
from llm_perf_opt.core.host import available_memory_bytes
from llm_perf_opt.core.logit_records import LogitFacts, Logits
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.units import byte_count
from llm_perf_opt.runners.logit_tap import TappedRunner
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner
from llm_perf_opt.runners.session import Session
from llm_perf_opt.traces.logit_file import read_logits, write_logits, write_no_logits

TOP, COMMON = 32, 992
"""Recorded ids at each position: those with the largest logits in the reference, and others that are the same everywhere."""
MOST_POSITIONS = 2**15
"""Positions over all sequences; of a larger batch, the first sequences are recorded."""
MOST_VALUES = 2**20
_SEED = 20
_METHOD = {
    False: "the model's forward, called as in the measurement",
    True: "the compiled functions that were measured, of which the logits were an output",
}
_RESERVE_BYTES = 2**28
Tokens = list[list[int]]


def record_logits(session: Session, tokens: Tokens, out: Path) -> None:
    """Write the logits of the first sequences, or why there are none. Nothing is measured after this."""
    found = _recorded(session, tokens)
    if isinstance(found, Missing):
        write_no_logits(out, found.why)
    else:
        write_logits(out, found)


def _recorded(session: Session, tokens: Tokens) -> Maybe[Logits]:
    if session.ranks is not None:
        return Missing(f"the model is split over {session.ranks.size} ranks, each of which has a part of the logits")
    if not isinstance(session.runner, TappedRunner):
        return Missing(f"the runtime {session.runner.runtime.type} does not return logits")
    reference = _reference(session)
    if isinstance(reference, Missing):
        return reference
    fed = tokens if reference is None else reference.fed.tolist()
    try:
        with _not_compiled_again(session):
            forced = _Forced(cast("PyTorchRunner", session.runner), session.batch, fed, reference)
    except _OtherVocabularyError:
        return Missing("the reference has another vocabulary")
    except torch.OutOfMemoryError:
        return Missing("the device has too little memory left to record logits")
    except RuntimeError as error:
        if "fail_on_recompile" not in str(error):
            raise
        return Missing("the compiled functions would have been compiled again to record logits")
    fp32: Maybe[Any] = Missing("only a reference has logits in fp32")
    if reference is None:
        fp32 = _in_fp32(session, forced)
    facts = LogitFacts(
        method=_METHOD[session.config.runtime.compile != "none"],
        reference=session.config.profiling.logits_reference or "",
        prompts_sha256=session.prompts.sha256(),
        sequences=forced.sequences,
        batch_size=session.workload.batch_size,
        positions=session.workload.new_tokens,
        vocabulary=forced.vocabulary,
        dtype=session.runner.facts.dtype,
        fp32_why=fp32.why if isinstance(fp32, Missing) else "",
    )
    arrays = (np.array(fed)[: forced.sequences], forced.chosen, forced.top, forced.common, forced.values)
    return Logits(facts, *arrays, fp32)


def _not_compiled_again(session: Session) -> AbstractContextManager[Any]:
    """Return a context in which compiling raises: what is recorded must be what was measured."""
    compiled = session.config.runtime.compile != "none"
    return torch.compiler.set_stance("fail_on_recompile") if compiled else nullcontext()


def _reference(session: Session) -> Maybe[Logits] | None:
    """Return the recording whose tokens are fed; None: this run is the reference."""
    path = session.config.profiling.logits_reference
    if path is None:
        return None
    try:
        found = read_logits(RunFolder(Path(path)).clean_logits_file)
    except ParseError as error:
        return Missing(f"the reference cannot be read: {error.fact}")
    if isinstance(found, Missing):
        return Missing(f"the reference has no logits: {found.why}")
    facts, workload = found.facts, session.workload
    if facts.prompts_sha256 != session.prompts.sha256():
        return Missing("the reference has other prompts")
    if (facts.batch_size, facts.positions) != (workload.batch_size, workload.new_tokens):
        return Missing("the reference has another batch or another number of new tokens")
    return found


class _OtherVocabularyError(Exception):
    """The ids of the reference are not those of this model."""


class _Forced:
    """One request whose steps are fed given tokens, and the logits of its recorded ids."""

    def __init__(self, runner: PyTorchRunner, batch: Any, fed: Tokens, reference: Logits | None) -> None:
        positions, rows = len(fed[0]), batch.input_ids.shape[0]
        self.sequences = min(len(fed), max(1, MOST_POSITIONS // positions))
        self.fed, self._reference = fed, reference
        self._device = batch.input_ids.device
        self.vocabulary = 0
        self.common: Any = np.zeros(0, np.int32)
        tops, chosen, values = [], [], []
        # Sequences that are not recorded run with the tokens of the first one: a step needs the whole batch.
        every = [fed[row] if row < len(fed) else fed[0] for row in range(rows)]
        with runner.tapped() as kept:
            runner.begin()
            for position in range(positions):
                if position == 0:
                    token = runner.prefill(batch)
                else:
                    token = runner.decode_step(torch.tensor([[row[position - 1]] for row in every], device=self._device))
                logits = kept.pop()[: self.sequences].float()
                if position == 0:
                    self._choose_ids(logits.shape[1], positions)
                top = self._top(logits, position)
                tops.append(top)
                ids = torch.cat([top, self._common.expand(self.sequences, -1)], dim=1)
                values.append(logits.gather(1, ids))
                chosen.append(token[: self.sequences])
        self.chosen = torch.cat(chosen, dim=1).cpu().numpy()
        self.top = torch.stack(tops, dim=1).cpu().numpy().astype(np.int32)
        self.values = torch.stack(values, dim=1).cpu().numpy()

    def _choose_ids(self, vocabulary: int, positions: int) -> None:
        self.vocabulary = vocabulary
        if self._reference is not None:
            if self._reference.facts.vocabulary != vocabulary:
                raise _OtherVocabularyError
            self.common = self._reference.common
        else:
            most = max(0, MOST_VALUES // (self.sequences * positions) - TOP)
            drawn = np.random.default_rng(_SEED).choice(vocabulary, min(COMMON, most, vocabulary), replace=False)
            whole = vocabulary <= TOP + min(COMMON, most)
            self.common = np.arange(vocabulary) if whole else np.sort(drawn)
        self._common = torch.as_tensor(self.common.astype(np.int64), device=self._device)
        self._most_top = 0 if self.common.size == vocabulary else min(TOP, vocabulary)

    def _top(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        if self._reference is not None:
            return torch.as_tensor(self._reference.top[:, position].astype(np.int64), device=self._device)
        return logits.topk(self._most_top, dim=1).indices

    def ids(self, sequence: int) -> torch.Tensor:
        """Return the recorded ids of a sequence, [position, id]."""
        top = torch.as_tensor(self.top[sequence].astype(np.int64), device=self._device)
        return torch.cat([top, self._common.expand(top.shape[0], -1)], dim=1)


def _in_fp32(session: Session, forced: _Forced) -> Maybe[Any]:
    """Return the same logits with weights and operations in fp32, without a cache or compiled code. Changes the model."""
    runner, prompts = cast("PyTorchRunner", session.runner), session.prompts
    model: Any = runner.model
    if prompts.images is not None:
        return Missing("a reference in fp32 is not supported for prompts with images")
    floating = all(tensor.is_floating_point() for tensor in model.parameters())
    if session.config.runtime.quantization != "none" or getattr(model.config, "quantization_config", None) or not floating:
        return Missing("the weights are quantized, so there are none in higher precision")
    runner.release()
    gc.collect()
    if session.cuda:
        torch.cuda.empty_cache()
    length = max(prompts.lengths) + session.workload.new_tokens
    why = _too_large(session, model, length, forced.vocabulary)
    if why:
        return Missing(why)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.inference_mode(False), torch.no_grad():
            model.float()
            model.set_attn_implementation("eager")
            if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
                model.set_experts_implementation("eager")  # fused kernels of experts may not take fp32
            rows = [_teacher_forced(model, prompts.ids[row], forced, row) for row in range(forced.sequences)]
    except torch.OutOfMemoryError:
        return Missing("the device has too little memory for the model in fp32")
    except RuntimeError as error:  # a kernel without fp32; the times are measured, and the reason is recorded
        first_line = words_of(error).partition("\n")[0]
        return Missing(f"the model does not run in fp32: {first_line}")
    return np.stack(rows)


def _too_large(session: Session, model: Any, length: int, vocabulary: int) -> str:
    """Return why the model in fp32 does not fit next to what is there; empty if it does."""
    weights = sum(tensor.numel() * (4 - tensor.element_size()) for tensor in model.parameters())
    heads = int(getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 1))
    need = weights + 4 * (2 * session.workload.new_tokens * vocabulary + 3 * heads * length**2) + _RESERVE_BYTES
    free = torch.cuda.mem_get_info(session.device)[0] if session.cuda else available_memory_bytes()
    if need <= free:
        return ""
    return f"the model in fp32 needs {byte_count(need)} more memory, but only {byte_count(free)} are free"


def _teacher_forced(model: Any, prompt: Sequence[int], forced: _Forced, row: int) -> Any:
    """Return the logits of one sequence at its new tokens, from one forward."""
    tokens = forced.fed[row]
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    keep = {"logits_to_keep": len(tokens)} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(input_ids=ids, use_cache=False, **keep).logits[0, -len(tokens) :]
    return logits.float().gather(1, forced.ids(row)).cpu().numpy()
