"""Samples of the GPU's own metrics (`nsys profile --gpu-metrics-devices`): SM and tensor activity, memory traffic, clocks.

`GPU_METRICS` holds time, type, metric and value; `TARGET_INFO_GPU_METRICS` names the metrics of each type. The low byte of a type
is the GPU's number in the report.
"""

from collections.abc import Callable

import numpy as np

from llm_perf_opt.events import DeviceSamples, DeviceWork, TraceProblem
from llm_perf_opt.parsers.sqlite_tables import Database, Integer

TABLE = "GPU_METRICS"
_SAMPLE = {
    "time": Integer(("timestamp",)),
    "type": Integer(("typeId",)),
    "metric": Integer(("metricId",)),
    "value": Integer(("value",)),
}
_GPU_BITS = 0xFF


def read_samples(
    database: Database, work: DeviceWork, name: Callable[[str], int], by_gpu: bool
) -> tuple[DeviceSamples, TraceProblem | None]:
    """The samples while the device work ran, in the order of their time, and what is wrong with them; `name` numbers a name.

    Devices are numbered as those of the work: by CUDA, or, `by_gpu`, by the report.
    """
    if not len(work) or not database.has(TABLE, *(column.names[0] for column in _SAMPLE.values())):
        return DeviceSamples.none(), None
    first, last = int(work.start_ns.min()), int(work.end_ns.max())
    read = database.integers(TABLE, _SAMPLE, f"timestamp BETWEEN {first} AND {last}")
    rows, problem = read.columns, None
    if read.dropped:
        what = f"{read.dropped:,} of {read.dropped + len(read):,} samples of the GPU's metrics cannot be read, and are left out"
        problem = TraceProblem("unreadable_samples", what, fatal=False)
    kinds, place = np.unique(np.stack([rows["type"], rows["metric"]]), axis=1, return_inverse=True)
    texts = _names(database)
    numbers = {} if by_gpu else _cuda_numbers(database)
    metrics, devices = [], []
    for kind, metric in zip(*kinds.tolist(), strict=True):
        metrics.append(name(texts.get((kind, metric), f"[metric {metric} is not in the report]")))
        gpu = kind & _GPU_BITS
        devices.append(numbers.get(gpu, gpu))
    place = place.reshape(-1)
    samples = DeviceSamples(
        time_ns=rows["time"],
        device=np.array(devices, np.int32)[place] if devices else np.empty(0, np.int32),
        metric=np.array(metrics, np.int32)[place] if metrics else np.empty(0, np.int32),
        value=rows["value"],
    )
    return samples.rows(np.argsort(samples.time_ns, kind="stable")), problem


def _names(database: Database) -> dict[tuple[int, int], str]:
    found = {}
    for kind, metric, text in database.rows("TARGET_INFO_GPU_METRICS", ("typeId", "metricId", "metricName")):
        if isinstance(kind, int) and isinstance(metric, int) and isinstance(text, str):
            found[(kind, metric)] = text
    return found


def _cuda_numbers(database: Database) -> dict[int, int]:
    """The report's number of a GPU → CUDA's."""
    rows = database.rows("TARGET_INFO_GPU", ("id", "cuDevice"))
    return {gpu: device for gpu, device in rows if isinstance(gpu, int) and isinstance(device, int) and 0 <= device < 2**31}
