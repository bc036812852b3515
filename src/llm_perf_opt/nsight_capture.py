"""The passes of NVIDIA's tools: a timeline by Nsight Systems, then counters by Nsight Compute of the kernels that carry the time.

Both end with exit code 0 after recording nothing, so each pass is judged by what it left: is the report there, does it open, can
its numbers be believed. A pass that cannot is marked failed with the reason, and nothing is added up from it.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llm_perf_opt.analysis.counter_selftest import judge
from llm_perf_opt.analysis.kernel_selection import Selection, expected_passes, select
from llm_perf_opt.analysis.projection import project
from llm_perf_opt.analysis.stage_launches import stage_launches
from llm_perf_opt.analysis.trace_health import Expected, examined
from llm_perf_opt.config import RunConfig
from llm_perf_opt.counters.catalogue import chip_of_device, names_listed
from llm_perf_opt.counters.manifest import ResolvedMetrics, resolve
from llm_perf_opt.counters.roles import roles
from llm_perf_opt.errors import CaptureError, ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.events import Trace
from llm_perf_opt.listener import Listener
from llm_perf_opt.parsers.ncu_csv import read_ncu
from llm_perf_opt.parsers.nsys_sqlite import read_nsys
from llm_perf_opt.passes import LABELS, PassPlan, run_pass, skip_pass
from llm_perf_opt.profiling.gpu import describe, gpu_count, handle_of, nvml
from llm_perf_opt.profiling.vendor.compatibility import check_ranges_visible
from llm_perf_opt.profiling.vendor.disk_watch import BYTES_PER_GB, DiskWatch
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API, Gate, on_stage
from llm_perf_opt.profiling.vendor.launch import REPORT_GRACE_S, ask, build_work_argv
from llm_perf_opt.profiling.vendor.logs import log_error, ncu_log_problems, nsys_log_problems
from llm_perf_opt.profiling.vendor.ncu import REPORT_ENDING as NCU_ENDING
from llm_perf_opt.profiling.vendor.ncu import build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import REPORT_ENDING as NSYS_ENDING
from llm_perf_opt.profiling.vendor.nsys import STREAM_ENDING, build_nsys_cmd
from llm_perf_opt.profiling.vendor.permission import counter_permission, permission_error
from llm_perf_opt.profiling.vendor.probe import NcuProbe, NsysProbe, find_tool, probe_ncu, probe_nsys
from llm_perf_opt.profiling.vendor.reports import export_nsys, import_ncu_csv, import_qdstrm
from llm_perf_opt.records import Maybe, Missing
from llm_perf_opt.run_folder import RunFolder, read_record, write_record
from llm_perf_opt.stages import Stage, ncu_range

