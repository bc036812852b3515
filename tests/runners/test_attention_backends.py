"""The kernels of scaled_dot_product_attention that a run may choose."""

from collections.abc import Iterator

import pytest
import torch

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.attention_backends import explained_backend, use_attention_backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    use_attention_backend("auto", "sdpa", CPU)


def attend() -> torch.Tensor:
    query = torch.ones(1, 1, 2, 4)
    return torch.nn.functional.scaled_dot_product_attention(query, query, query)


@pytest.mark.parametrize("name", ["auto", "flash", "math"])
def test_those_of_a_cpu_compute(name: str) -> None:
    use_attention_backend(name, "sdpa", CPU)  # type: ignore[arg-type]
    assert torch.equal(attend(), torch.ones(1, 1, 2, 4))
    assert torch.backends.cuda.math_sdp_enabled() is (name != "flash")
    assert torch.backends.cuda.flash_sdp_enabled() is (name != "math")


def test_those_of_a_gpu_and_other_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="cudnn needs a GPU"):
        use_attention_backend("cudnn", "sdpa", CPU)
    with pytest.raises(ConfigError, match="the attention of this model is eager"):
        use_attention_backend("math", "eager", CPU)


def test_kernels_that_cannot_compute_a_call_are_explained() -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    with pytest.raises(ConfigError, match="does not support the attention of this model"), explained_backend("flash"):
        attend()
    with pytest.raises(RuntimeError, match="something else"), explained_backend("flash"):
        raise RuntimeError("something else")
