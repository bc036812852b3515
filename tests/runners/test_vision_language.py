"""The small vision-language model: same tokens as transformers' generate, and sub-stages under prefill."""

from pathlib import Path

import pytest
import torch

from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import CleanTimings
from llm_perf_opt.core.run_folder import read_record
from llm_perf_opt.runners.llm_profile_runner import run_pass
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner
from llm_perf_opt.runners.session import Session, open_session

WORDS = [
    "model=tiny_vlm", "hardware=cpu", "model.dtype=fp32", "runtime.batch_size=2", "runtime.prompt_tokens=72",
    "runtime.num_new_tokens=4", "runtime.max_warmup=1", "runtime.min_repeats=2", "runtime.max_repeats=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def session() -> Session:
    opened = open_session(compose(WORDS).config)
    with torch.no_grad():
        for name, tensor in opened.model.named_parameters():
            if tensor.dim() > 1 and "embed_tokens" not in name:
                tensor.normal_(std=0.2)  # so that what goes in, not the last token alone, decides what comes out
    return opened


def stepped(session: Session) -> list[list[int]]:
    runner = session.runner
    assert isinstance(runner, PyTorchRunner)
    runner.begin()
    tokens = [runner.prefill(session.batch)]
    for _ in range(3):
        tokens.append(runner.decode_step(tokens[-1]))
    return runner.to_lists(tokens)


def test_tokens_are_those_of_transformers_generate(session: Session) -> None:
    batch = session.batch
    with torch.inference_mode():
        whole = session.model.generate(
            input_ids=batch.input_ids, pixel_values=batch.pixels, attention_mask=torch.ones_like(batch.input_ids),
            max_new_tokens=4, min_new_tokens=4, do_sample=False,
        )  # fmt: skip
    expected = whole[:, 72:].tolist()
    assert len({token for row in expected for token in row}) > 4, "a constant answer would prove nothing"
    assert stepped(session) == expected


def test_the_picture_decides_the_tokens(session: Session) -> None:
    before = stepped(session)
    kept = session.batch.pixels.clone()
    session.batch.pixels.neg_()
    changed = stepped(session)
    session.batch.pixels.copy_(kept)
    assert changed != before
    assert stepped(session) == before


def test_the_sub_stages_are_timed_in_prefill_alone(tmp_path: Path) -> None:
    assert run_pass(compose(WORDS).config, "clean", tmp_path)
    timings = read_record(tmp_path / "timings.json", CleanTimings)
    for iteration in timings.iterations:
        assert [(span.name, span.stage) for span in iteration.substages] == [("vision", "prefill"), ("projector", "prefill")]
        assert sum(span.duration_ns for span in iteration.substages) < iteration.prefill_ns
    assert timings.runtime is not None
    assert "vision tower" in timings.runtime.uncosted
    assert "one image of random pixels each" in timings.workload.source


def test_a_prompt_without_room_for_the_picture_is_refused() -> None:
    with pytest.raises(ConfigError, match="An image takes 64 tokens"):
        open_session(compose([*WORDS, "runtime.prompt_tokens=40"]).config)
