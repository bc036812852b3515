#!/usr/bin/env bash
# Link folders of weights outside the project into models/, each under its own name: the same as `llm-perf model link NAME DIR`.
#
#   scripts/make_symlinks.sh /data/weights                          every folder in it that has a config.json
#   scripts/make_symlinks.sh /data/weights qwen2_5_7b llama3_70b    only these
#
# A name that exists in models/ is left as it is. PYTHON selects the interpreter.
set -euo pipefail
PYTHON="${PYTHON:-python}"

if [ $# -lt 1 ] || [ ! -d "$1" ]; then
  echo "usage: scripts/make_symlinks.sh FOLDER [NAME ...]" >&2
  exit 2
fi
folder="$(cd "$1" && pwd)"
shift
if [ $# -eq 0 ]; then
  for config in "$folder"/*/config.json; do
    [ -f "$config" ] && set -- "$@" "$(basename "$(dirname "$config")")"
  done
fi
if [ $# -eq 0 ]; then
  echo "error: no folder in $folder has a config.json" >&2
  exit 3
fi
for name in "$@"; do
  if [ -e "models/$name" ] || [ -L "models/$name" ]; then
    echo "models/$name exists and is left as it is"
  else
    "$PYTHON" -m llm_perf_opt model link "$name" "$folder/$name"
  fi
done
