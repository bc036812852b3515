"""Run a deep profiling session and check that its run folder is complete. See README.md in this folder."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

FILES = (
    *("run.json", "config.yaml", "env.json", "inputs.yaml", "report.md", "report.html", "stakeholder_summary.md"),
    *("operators.md", "kernels.md", "ops.csv", "nvml.csv"),
)
EXPECTED_CODES = (0, 3)
"""Complete, or partial because a tool or a GPU is missing."""


def main(overrides: list[str]) -> int:
    """Return the exit code: 0 if everything is there, or missing with a reason."""
    folder = Path("tmp") / "stage2" / datetime.now().strftime("%Y%m%d-%H%M%S")
    chosen = [text.partition("=")[2] for text in overrides if text.startswith("hydra.run.dir=")]
    folder = Path(chosen[-1]) if chosen else folder
    module = "llm_perf_opt.runners.deep_profile_runner"
    argv = [sys.executable, "-m", module, *overrides, *([] if chosen else [f"hydra.run.dir={folder}"])]
    code = subprocess.run(argv, check=False).returncode
    missing = [name for name in FILES if not (folder / name).is_file() or not (folder / name).stat().st_size]
    if "run.json" in missing:
        print(f"{folder} has no run.json; exit code {code}")
        return 1
    manifest = json.loads((folder / "run.json").read_text())
    for entry in manifest["passes"]:
        print(f"{entry['name']:14} {entry['status']:9} {entry.get('why', '')}")
    print(f"status {manifest['status']}, exit code {code}, missing files: {', '.join(missing) or 'none'}")
    unexplained = [entry["name"] for entry in manifest["passes"] if entry["status"] != "complete" and not entry.get("why")]
    return 0 if code in EXPECTED_CODES and not missing and not unexplained else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
