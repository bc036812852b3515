"""How fast variants are made, beside Hugging Face datasets and pandas doing the same, and how much memory it takes.

    python benchmarks/data_speed.py [--megabytes 200] [--token-megabytes 20] [--sizes 100,500,2000] [--rounds 3]

Every measurement runs in a process of its own on the same file of JSON lines; the contestants alternate, so that whatever the
machine does meanwhile falls on all of them. All tokenize with the same byte-pair tokenizer, which takes most of that time, on a
smaller file; memory is measured with the byte tokenizer. Seconds do not include starting Python and importing. A contestant that
is not installed is left out and named.

Fails (exit code 1) when a transform of ours takes more than 1.1 times the memory on a larger input than on the smallest. What it
takes at all is Python and its packages, about 40 MB, and on top: for a subset a block of lines, for ids a block of texts and
of their ids, for Parquet the database with its buffers for lines of up to 16 MiB.
"""

import argparse
import importlib.util
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = ("subset", "tokenize", "convert")
CONTESTANTS = ("llm-perf", "datasets", "pandas")
SAMPLES = 1000
SEED = 0
FLAT = 1.1
"""A larger input may take this many times the memory of the smallest, no more."""
MEMORY_ROUNDS = 2
"""The peak of so many processes: where the allocator puts a block differs from one to the next."""
WORDS = (
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
)


def write_source(path: Path, megabytes: int) -> None:
    """JSON lines of about a kilobyte, the same for the same size."""
    draw = random.Random(SEED)
    size, number = 0, 0
    with path.open("wb") as out:
        while size < megabytes * 1_000_000:
            text = " ".join(draw.choices(WORDS, k=draw.randint(20, 440)))
            line = json.dumps({"text": text, "id": number, "url": f"http://example.org/{number}"}).encode() + b"\n"
            size += out.write(line)
            number += 1


def write_tokenizer(source: Path, path: Path) -> None:
    """A small byte-pair tokenizer, trained on the beginning of the source."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    with source.open("rb") as lines:
        texts = [json.loads(next(lines))["text"] for _ in range(1000)]
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    tokenizer.save(str(path))


def ours(operation: str, source: Path, tokenizer: Path, out: Path) -> Callable[[], object]:
    """What `llm-perf dataset prepare` does, without the hashing before and after."""
    from llm_perf_opt.workspace.data.conversion import Conversion, write_converted
    from llm_perf_opt.workspace.data.formats import DataFile
    from llm_perf_opt.workspace.data.inventory import ignore
    from llm_perf_opt.workspace.data.lines import BadRecords
    from llm_perf_opt.workspace.data.subset import Sample, write_subset
    from llm_perf_opt.workspace.data.tokenizing import load_tokenizer, write_tokenized

    files = [DataFile(source.name, source, "jsonl", "all")]
    bad = BadRecords(skip=False)
    if operation == "subset":
        return lambda: write_subset(files, out, Sample(SAMPLES, SEED), bad, ignore)
    if operation == "tokenize":
        encoder = load_tokenizer(str(tokenizer))
        return lambda: write_tokenized(files, out, encoder, "text", bad, ignore)
    return lambda: write_converted(files, out, Conversion("parquet", "text", False), bad, ignore)


def with_datasets(operation: str, source: Path, tokenizer: Path, out: Path) -> Callable[[], object]:
    """The same with Hugging Face datasets, from the file to the result; its cache is new each time."""
    import datasets
    import numpy as np
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()

    def loaded() -> Any:
        return datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out / "cache"))

    if operation == "subset":
        return lambda: loaded().shuffle(seed=SEED).select(range(SAMPLES)).to_json(str(out / "samples.jsonl"))
    if operation == "convert":
        return lambda: loaded().to_parquet(str(out / "all.parquet"))
    encoder: Any = Tokenizer.from_file(str(tokenizer))

    def tokenize() -> None:
        def encode(batch: dict[str, Any]) -> dict[str, Any]:
            return {"ids": [found.ids for found in encoder.encode_batch_fast(batch["text"])]}

        with (out / "all.bin").open("wb") as ids:
            encoded = loaded().map(encode, batched=True, remove_columns=["text", "id", "url"])
            for batch in encoded.iter(1000):
                ids.write(np.concatenate(batch["ids"]).astype("<u2").tobytes())

    return tokenize


def with_pandas(operation: str, source: Path, tokenizer: Path, out: Path) -> Callable[[], object]:
    """The same with pandas: chunk by chunk where it can, else whole."""
    import numpy as np
    import pandas as pd
    from tokenizers import Tokenizer

    if operation == "subset":
        return lambda: (
            pd.read_json(source, lines=True)
            .sample(SAMPLES, random_state=SEED)
            .to_json(out / "samples.jsonl", orient="records", lines=True)
        )
    if operation == "convert":
        return lambda: pd.read_json(source, lines=True).to_parquet(out / "all.parquet", compression="zstd")
    encoder: Any = Tokenizer.from_file(str(tokenizer))

    def tokenize() -> None:
        with (out / "all.bin").open("wb") as ids:
            for chunk in pd.read_json(source, lines=True, chunksize=5000):
                found = encoder.encode_batch_fast(chunk["text"].tolist())
                ids.write(np.concatenate([encoding.ids for encoding in found]).astype("<u2").tobytes())

    return tokenize


def child(who: str, operation: str, source: Path, tokenizer: Path, out: Path) -> None:
    """One measurement, told on standard output."""
    makers = {"llm-perf": ours, "datasets": with_datasets, "pandas": with_pandas}
    work = makers[who](operation, source, tokenizer, out)
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}))


def measure(who: str, operation: str, source: Path, tokenizer: Path, folder: Path) -> dict[str, float]:
    """One measurement in a process of its own."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    argv = [sys.executable, __file__, "--child", who, operation, str(source), str(tokenizer), str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{who} {operation} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def speeds(folder: Path, tokenizer: Path, megabytes: dict[str, int], rounds: int, installed: list[str]) -> dict[str, Any]:
    """Median seconds and memory of each contestant, and how many times longer than ours each takes."""
    result: dict[str, Any] = {}
    for operation in OPERATIONS:
        source = folder / f"{megabytes[operation]}.jsonl"
        found: dict[str, list[dict[str, float]]] = {who: [] for who in installed}
        for _ in range(rounds):
            for who in installed:
                found[who].append(measure(who, operation, source, tokenizer, folder))
        own = [entry["seconds"] for entry in found["llm-perf"]]
        result[operation] = {
            who: {
                "seconds": round(statistics.median(entry["seconds"] for entry in entries), 2),
                "mb_per_s": round(megabytes[operation] / statistics.median(entry["seconds"] for entry in entries), 1),
                "times_ours": round(
                    statistics.median(entry["seconds"] / mine for entry, mine in zip(entries, own, strict=True)), 2
                ),
                "rss_mb": round(max(entry["rss_mb"] for entry in entries)),
            }
            for who, entries in found.items()
        }
    return result


def memories(folder: Path, sizes: list[int]) -> dict[str, dict[int, float]]:
    """Our peak memory per transform and size of the input."""
    return {operation: {size: peak(operation, size, folder) for size in sizes} for operation in OPERATIONS}


def peak(operation: str, size: int, folder: Path) -> float:
    """The most memory that any of the processes took, in MB."""
    source = folder / f"{size}.jsonl"
    return max(measure("llm-perf", operation, source, Path("bytes"), folder)["rss_mb"] for _ in range(MEMORY_ROUNDS))


def growth(memory: dict[str, dict[int, float]]) -> dict[str, float]:
    """Per transform: how many times the memory of its smallest input any larger one takes at most."""
    return {operation: max(found.values()) / found[min(found)] for operation, found in memory.items()}


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="of the input of the comparison")
    parser.add_argument("--token-megabytes", type=int, default=20, help="of the input that is tokenized")
    parser.add_argument("--sizes", default="100,500,2000", help="of the inputs whose memory is compared, in MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        who, operation, *paths = arguments.child
        child(who, operation, *map(Path, paths))
        return
    sizes = sorted({int(size) for size in arguments.sizes.split(",")})
    if len(sizes) < 2:
        parser.error("--sizes needs a smaller and a larger input, or nothing is compared")
    installed = [who for who in CONTESTANTS if who == "llm-perf" or importlib.util.find_spec(who)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        megabytes = dict.fromkeys(OPERATIONS, arguments.megabytes) | {"tokenize": arguments.token_megabytes}
        for size in {*sizes, *megabytes.values()}:
            write_source(folder / f"{size}.jsonl", size)
        tokenizer = folder / "tokenizer.json"
        write_tokenizer(folder / f"{arguments.megabytes}.jsonl", tokenizer)
        speed = speeds(folder, tokenizer, megabytes, arguments.rounds, installed)
        memory = memories(folder, sizes)
    missing = [who for who in CONTESTANTS if who not in installed]
    grown = {operation: round(times, 3) for operation, times in growth(memory).items()}
    shown = {operation: {f"{size} MB": round(found) for size, found in sizes.items()} for operation, sizes in memory.items()}
    found = {"input_mb": megabytes, "not_installed": missing, "speed": speed, "rss_mb": shown, "rss_growth": grown}
    print(json.dumps(found, indent=1))
    growing = [operation for operation, times in growth(memory).items() if times > FLAT]
    sys.exit(f"memory grows with the input: {', '.join(growing)}" if growing else 0)


if __name__ == "__main__":
    main()
