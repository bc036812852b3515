"""What was run on what, in a sentence."""

from llm_perf_opt.core.records import CleanTimings
from llm_perf_opt.report.runtime import ran_by
from llm_perf_opt.report.text import count


def what_ran(timings: CleanTimings) -> str:
    """Model, device and workload as text that is not escaped for anything."""
    model, work = timings.model, timings.workload
    lengths = sorted(set(work.prompt_tokens))
    prompt = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return (
        f"{model.name} ({count(model.parameters)} parameters, {model.dtype}) on {model.device_name}: "
        f"batch {work.batch_size}, {prompt} prompt tokens, {work.new_tokens} new tokens, "
        f"{model.cache} cache, compile {model.compile}, attention {model.attention}{ran_by(timings)}."
    )
