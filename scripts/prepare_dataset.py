"""Derive a variant of a dataset: the same as `llm-perf dataset prepare`.

python scripts/prepare_dataset.py --dataset openwebtext --variant subset-1k [--num-samples N]
"""

import sys

from llm_perf_opt.cli.app import main


def _arguments(words: list[str]) -> list[str]:
    """Return the arguments of the verb, with `--dataset NAME` as its first argument."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--dataset":
            found += [value for value in (next(rest, None),) if value is not None]
        elif word.startswith("--dataset="):
            found.append(word.removeprefix("--dataset="))
        else:
            found.append(word)
    return found


if __name__ == "__main__":
    sys.argv = ["llm-perf", "dataset", "prepare", *_arguments(sys.argv[1:])]
    main()
