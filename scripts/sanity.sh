#!/usr/bin/env bash
# Quick smoke runs of the built-in tiny model: is everything installed, does a run end with its reports? About a minute.
#
#   scripts/sanity.sh [KEY=VALUE ...]    overrides for each run: hardware=cpu, model=qwen2_5_0_5b, ...
#
# The runs are written to runs/sanity. PYTHON selects the interpreter.
set -euo pipefail
PYTHON="${PYTHON:-python}"
short=(experiment=sanity runtime.prompt_tokens=16 runtime.num_new_tokens=4 runtime.max_repeats=3 runtime.max_warmup=3)

"$PYTHON" -m llm_perf_opt doctor
"$PYTHON" -m llm_perf_opt run --quiet "${short[@]}" profiling=none "$@"
"$PYTHON" -m llm_perf_opt run --quiet "${short[@]}" profiling=minimal profiling.ceilings_s=0.5 "$@"
echo "sanity: ok"
