"""What is hidden because it looks like a credential, and what must stay because it is a fact about the run."""

import shlex

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.secrets import hidden, hidden_argv, secret_name, secret_variable, shown_command
from llm_perf_opt.core.urls import HIDDEN
from planted_secrets import MARKS, PEM, TOKENS, leaks, planted_argv


def test_at_least_sixty_different_secrets_are_planted() -> None:
    assert len(set(MARKS)) >= 60
    assert len([word for word in planted_argv() if leaks({"": word})]) >= 50


@pytest.mark.parametrize("word", [word for word in planted_argv() if "=" in word or " " in word or "://" in word] + [*TOKENS])
def test_a_word_of_a_command_shows_no_credential(word: str) -> None:
    assert not leaks({"": hidden_argv([word])[0]})
    assert HIDDEN in hidden_argv([word])[0]


def test_a_command_with_all_of_them_shows_none() -> None:
    shown = shown_command(["prog", *planted_argv(), "--model", "a"])
    assert not leaks({"": shown})
    assert shlex.split(shown)[0] == "prog"
    assert shlex.split(shown)[-2:] == ["--model", "a"]
    assert len(shlex.split(shown)) == len(planted_argv()) + 3


@pytest.mark.parametrize("token", [*TOKENS, PEM])
def test_a_text_shows_no_token(token: str) -> None:
    assert not leaks({"": hidden(f"it failed with {token}, as before")})
    assert not leaks({"": hidden(f"'{token}'")})


def test_what_is_hidden_once_stays_as_it_is() -> None:
    once = hidden_argv(planted_argv())
    assert hidden_argv(once) == once


FACTS = [
    *("/data/hf_models_2024/llama", "runs/test_the_key_itself_wins0", "model.path=/data/npm_cache_v2/key_results_2"),
    *("--tokenizer", "/models/a", "--max-tokens", "20", "--token-budget", "512", "--max-token", "2000", "--eos-token", "</s>"),
    *("--config", "c.yaml", "--pass", "clean", "--out", "raw/clean", "-p", "8000", "-p", "no:cacheprovider", "-p", "runs/a"),
    *("--sort-key", "name", "--key-cache", "fp8", "--kv-key", "k", "--pin-memory", "always", "--author", "me", "--bypass", "x1"),
    *(
        "runtime.prompt_tokens=512",
        "model.tokenizer=/a/b",
        "runtime.engine.max_num_batched_tokens=8192",
        "+seed=1",
        "--use-auth=true",
    ),
    *("GPU-3f2a1b4c-1234-5678-9abc-def012345678", "MIG-GPU-3f2a1b4c-1234-5678-9abc-def012345678/7/0"),
    *("0e9e39f249a16976918f6564b8830bc894c89659", "sha256:" + "0123456789abcdef" * 4, "550e8400-e29b-41d4-a716-446655440000"),
    "/home/me/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976918f6564b8830bc894c89659",
    "hydra.run.dir=/data/runs/Qwen2.5-VL-7B-Instruct-GPTQ-Int4-128g/2026-01-01_00-00-00",
    "Qwen2.5-VL-7B-Instruct-GPTQ-Int4-128g-desc",
    *("http://127.0.0.1:8000/v1/completions", "https://host/x?model=a&max_tokens=20", "ssh://git@host/x.git", "a@host:/x"),
    *("--kernel-name", "regex:^(ampere_sgemm_128x64_tn|_ZN7cutlass6KernelINS_4gemm6device4GemmILi128ELi64ELi32EEEEEvT_)$"),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,dram__bytes.sum",
    *(
        "from vllm.benchmarks.serve import add_cli_args, main; parser = FlexibleArgumentParser(); main()",
        "Bearer tokens are used",
    ),
    *("settings are written KEY=VALUE", "token: unexpected end", "missing key: model", "Basic arguments", "scikit-learn-1.2"),
    *(
        "--nvtx-include",
        "prefill@LLM",
        "--capture-range=nvtx",
        "hf_transfer",
        "sk-learn",
        "key_cache",
        "hf_quantizer",
        "pat_matcher",
    ),
    *("-u", "train.py", "--user", "me", "--token", "$HF_TOKEN", "--api-key", "none", "HF_TOKEN=${HF_TOKEN}"),
    *("PATH=/usr/bin:/bin", "OMP_NUM_THREADS=8", "NCCL_SOCKET_IFNAME=eth0", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1"),
    *("fmhaSm90Kernel_QkvBfloat16OBfloat16H128PagedKvCausal", "LlavaNextForConditionalGeneration", "torch.float8_e4m3fn"),
]


@pytest.mark.parametrize("word", FACTS)
def test_a_fact_alone_is_shown(word: str) -> None:
    assert hidden_argv([word]) == [word]
    assert hidden(word) == word


def test_facts_in_a_command_are_shown() -> None:
    assert hidden_argv(FACTS) == FACTS


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "--api-key", "apiKey", "HF_TOKEN", "hfToken", "X-Amz-Signature", "X-Amz-Security-Token", "sig", "token"),
        *("db.password", "PGPASSWORD", "user_pass", "client-secret", "session_id", "SECRET_KEY", "Authorization", "pin", "dsn"),
    ],
)
def test_names_of_credentials(name: str) -> None:
    assert secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "tokenizer",
            "max_tokens",
            "token_budget",
            "prompt_tokens",
            "eos_token",
            "eos_token_id",
            "--pin-memory",
            "key_cache",
            "",
        ),
        *("sort_key", "password_file", "author", "passes", "keep", "keyboard", "spin", "signal", "design", "num_key_value_heads"),
    ],
)
def test_names_of_facts(name: str) -> None:
    assert not secret_name(name)


@pytest.mark.parametrize("name", ["NCCL_PIN", "CUDA_DB_PWD", "TORCH_DSN", "VLLM_API_KEY", "SLURM_JWT", "OMP_SESSION_ID"])
def test_variables_that_are_not_recorded(name: str) -> None:
    assert secret_variable(name, "a1b2")


@pytest.mark.parametrize(
    "name",
    [
        *("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ENABLE_MONITORING", "OMP_PROC_BIND", "SLURM_JOB_ID"),
        *("CUDA_PINNED_MEMORY", "SLURM_SUBMIT_DIR", "NVIDIA_VISIBLE_DEVICES", "KMP_AFFINITY", "SLURM_TASK_MAPPING"),
    ],
)
def test_variables_that_are_recorded(name: str) -> None:
    assert not secret_variable(name, "a1b2")


@pytest.mark.parametrize(("name", "value"), [("NCCL_IB_PKEY", "0"), ("TOKENIZERS_PARALLELISM", "false"), ("MAX_TOKENS", "512")])
def test_a_switch_or_a_count_is_recorded_whatever_its_name(name: str, value: str) -> None:
    assert not secret_variable(name, value)


_RANDOM, _WORDS, _HEX = "Zq7oHwLMeaZqo9DZDNj", "correct-horse9battery", "9fad8ba1c940d7bebe6c7ee123f6a486599eaedf"


@pytest.mark.parametrize("secret", [_RANDOM, _WORDS, _HEX])
@pytest.mark.parametrize(
    "words",
    [
        ("bash", "-c", "curl -u me:{} http://host"),
        ("bash", "-c", "mysql -p{} data; echo done"),
        ("bash", "-c", "cd /tmp && prog --secret {} --out a"),
        ("curl", "--user=me:{}"),
        ("curl", "-ume:{}"),
        ("env", "OTEL_EXPORTER_OTLP_HEADERS=x-honeycomb-team={}", "prog"),
        ("env", "https_proxy=me:{}@proxy:3128", "prog"),
        ("prog", "me:{}@db.example.org"),
        ("prog", "machine host login me password {}"),
        ("prog", "token: {}"),
        ("prog", "client_secret: {}"),
        ("prog", "client-key-data: {}"),
        ("prog", "--api-key:{}"),
        ("prog", "/apikey:{}"),
        ("openssl", "-passin", "pass:{}"),
        ("prog", '{{\\"api_key\\": \\"{}\\"}}'),
        ("python", "-c", "import os; os.environ['HF_TOKEN']='{}'"),
        ("python", "-c", 'import os; os.environ["HF_TOKEN"] = "{}"'),
        ("prog", "--pw", "{}"),
    ],
)
def test_a_credential_is_found_in_every_spelling(words: tuple[str, ...], secret: str) -> None:
    shown = hidden_argv([word.format(secret) for word in words])
    assert secret not in " ".join(shown)
    assert HIDDEN in " ".join(shown)
    assert len(shown) == len(words)


@pytest.mark.parametrize(
    "fact",
    [
        "MIG-8f3c1a2b-5d6e-7f80-91a2-b3c4d5e6f708",
        "UUID: GPU-8f3c1a2b-5d6e-7f80-91a2-b3c4d5e6f708",
        "input_sha256=Zm9vYmFyYmF6",
        "1 token = 4.2 ms",
        "Token: 15043 logprob",
        "KeyError: 'lm_head.weight2'",
        "missing key: model.layers.0.self_attn.k_proj.weight",
        "--user 1000:1000",
        "--range decode:step12@llm_perf",
        "nvcr.io/nvidia/pytorch:24.05-py3@sha256:0123456789abcdef",
        "session: 2026-01-01_00-00-00",
        "bash run.sh --model a --max-tokens 20 -p 8000",
    ],
)
def test_facts_in_texts_and_commands(fact: str) -> None:
    assert hidden(fact) == fact
    assert hidden_argv(fact.split(" ")) == fact.split(" ")
    assert hidden_argv([fact]) == [fact]


def test_errors_show_no_credential() -> None:
    error = ConfigError(f"http://me:{MARKS[-5]}@host is wrong", f"Write --token {MARKS[-6]}; not {TOKENS[0]}.")
    assert not leaks({"": str(error) + repr(error) + "".join(map(str, error.args))})
    assert "host is wrong" in error.fact


def test_long_texts_take_no_time_beyond_their_length() -> None:
    for piece in ("a=", "--a ", "key:", "eyJ", "://a:b", "aB3", "Bearer ", '"\\', "-----BEGIN ", "x-key-", "_" * 7):
        hidden(piece * 4_000)
