"""What each device did by itself. Devices work side by side: the account of all together says only when one of them was busy."""

from collections.abc import Sequence

from llm_perf_opt.analysis.trace.accounting import Account, DeviceTime, StageTime, stages_by_device
from llm_perf_opt.analysis.trace.document import DeviceLine, DeviceStageLine, IdleLine
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.events import Trace


def device_lines(trace: Trace, stages: TraceStages, whole: Account) -> list[DeviceLine]:
    """Every device with work; where there are several, with what each stage did on it."""
    found = stages_by_device(trace, stages) if len(whole.devices) > 1 else {}
    return [_line(trace, one, _stages(found.get(one.device, ()) if one.device is not None else ())) for one in whole.devices]


def device_name(trace: Trace, device: int) -> str:
    """What the trace calls a device: nsys names each, torch lists all that the program saw; empty where neither does."""
    listed = [name.strip() for name in trace.facts.get("devices", "").split(", ")]
    return trace.facts.get(f"device.{device}", "") or (listed[device] if 0 <= device < len(listed) else "")


def _line(trace: Trace, one: DeviceTime, stages: list[DeviceStageLine]) -> DeviceLine:
    number = -1 if one.device is None else one.device
    return DeviceLine(
        device=number,
        name=device_name(trace, number),
        kernels=one.kernels.count,
        kernel_ns=one.kernels.sum_ns,
        busy_ns=one.busy_ns,
        idle_ns=one.idle_ns,
        span_ns=one.span_ns,
        idle=[IdleLine(cause.label, ns) for cause, ns in one.idle.items() if ns],
        stages=stages,
    )


def _stages(found: Sequence[StageTime]) -> list[DeviceStageLine]:
    return [
        DeviceStageLine(stage.name, stage.busy_ns, stage.idle_ns, stage.span_ns, stage.kernels, stage.kernel_ns)
        for stage in found
    ]
