"""What the installed Nsight Compute itself calls its counters."""

from functools import lru_cache
from pathlib import Path

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.processes import ask
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.counters.catalog import names_listed


@lru_cache(maxsize=8)
def names_known_to(ncu: Path, chip: str) -> Maybe[frozenset[str]]:
    """The base names this ncu lists for a chip, or why it lists none. It needs no GPU for that."""
    answer = ask([str(ncu), "--query-metrics", "--chips", chip], timeout_s=60)
    if answer is None:
        return Missing(f"{ncu} lists no counters for {chip}: it is older than that chip, or it does not start")
    try:
        return names_listed(answer)
    except ParseError as error:
        return Missing(error.fact)
