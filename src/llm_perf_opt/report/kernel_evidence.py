"""kernels.md and the report's kernels, with where they come from and what was left out."""

from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.kernels import kernels_page, top_kernels_section
from llm_perf_opt.report.text import escape


def kernels_md(found: Maybe[KernelEvidence]) -> str:
    """Every kernel of every stage."""
    if isinstance(found, Missing):
        return kernels_page(found)
    return kernels_page(found.stages, found.hfus, found.selftest) + "\n" + _provenance(found)


def kernels_section(found: Maybe[KernelEvidence]) -> str:
    """The longest kernels, for the report."""
    if isinstance(found, Missing):
        return top_kernels_section(found)
    return top_kernels_section(found.stages, found.hfus) + "\n" + _provenance(found)


def _provenance(found: KernelEvidence) -> str:
    lines = [f"- Kernels of {stage} are from {escape(source)}." for stage, source in found.sources.items()]
    lines += [f"- The timeline holds {found.decode_steps} decode steps."] if found.decode_steps else []
    lines += [f"- {escape(note)}" for note in found.notes]
    return "\n".join(lines) + "\n"
