"""Regenerate the packaged counter names from an installed Nsight Compute.

python scripts/counter_names.py gh100 gb100

A new chip also needs its roles (counters/catalog.py) and its products (counters/catalog.py); a newer tool needs the constant
LISTED_BY. The tests show what is missing.
"""

import gzip
import sys
from pathlib import Path

from llm_perf_opt.core.records import Missing
from llm_perf_opt.profiling.requested_metrics import names_known_to
from llm_perf_opt.profiling.vendor.probe import find_tool, tool_version

FOLDER = Path(__file__).parents[1] / "src" / "llm_perf_opt" / "counters" / "names"


def main(chips: list[str]) -> None:
    """One file per chip; the same names give the same bytes."""
    ncu = find_tool("ncu")
    if ncu is None or not chips:
        sys.exit("usage: counter_names.py CHIP... (and ncu must be on the PATH or in the variable NCU)")
    for chip in chips:
        names = names_known_to(ncu, chip)
        if isinstance(names, Missing):
            sys.exit(names.why)
        lines = [f"# Nsight Compute {tool_version(ncu)}: ncu --query-metrics --chips {chip}", *sorted(names)]
        (FOLDER / f"{chip}.txt.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), 9, mtime=0))
        print(f"{chip}: {len(names):,} names")


if __name__ == "__main__":
    main(sys.argv[1:])
