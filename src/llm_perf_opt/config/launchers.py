"""Checks of the launcher of a sweep, and its texts as numbers. No I/O."""

import re

from llm_perf_opt.config.parallel import devices_used
from llm_perf_opt.config.schema import LauncherConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError

LAUNCHER = "launcher"
_MEMORY = re.compile(r"(\d{1,7})([KMGT])i?B?", re.IGNORECASE)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,4}):(\d\d):(\d\d)")
_MOST_MINUTES = 366 * 24 * 60
_OPTION = re.compile(r"[a-z][a-z0-9_-]*")
_SET_BY_LLM_PERF = ("array", "job-name", "output", "error", "signal", "open-mode", "wait", "chdir", "nodes")
"""Options of sbatch that the launcher sets, or that would start a point more than once."""
SCHEDULER_WORDS = dict.fromkeys(
    (
        *("account", "qos", "constraint", "reservation", "licenses", "gres", "mem-per-cpu", "mem_per_cpu", "nodelist", "exclude"),
        *("mail-type", "mail_type", "mail-user", "mail_user", "comment", "nice", "accelerator_type", "scheduling_strategy"),
    ),
    r"[\w.,:@&|()\[\]*+ -]+",
)
"""Options of sbatch and Ray that a file may set to a text of this form. Others may run programs, or set their environment."""
_ONLY_SLURM = ("partition", "time", "exclusive")
_RAY_OPTIONS = ("resources", "scheduling_strategy", "accelerator_type", "label_selector")
_NOT_FOR = {
    "local": ("partition", "time", "gpus", "cpus", "memory", "exclusive", "parallel", "address", "extra"),
    "slurm": ("address",),
    "ray": _ONLY_SLURM,
}
_REMEDY = {
    "local": "Add launcher=slurm or launcher=ray, or leave it out.",
    "slurm": "Leave it out: it is for launcher=ray.",
    "ray": "Leave it out: it is for launcher=slurm.",
}


def check_launcher(launcher: LauncherConfig) -> None:
    """Raise a ConfigError for a value that is malformed, or that the launcher does not use."""
    usual = LauncherConfig(launcher.type)
    for name in _NOT_FOR[launcher.type]:
        value = getattr(launcher, name)
        if value != getattr(usual, name):
            raise ConfigError(f"launcher.{name}={value} has no effect on launcher.type={launcher.type}.", _REMEDY[launcher.type])
    for name in ("partition", "address"):
        _check_word(f"launcher.{name}", getattr(launcher, name))
    minutes(launcher)
    memory_bytes(launcher)
    if launcher.type == "slurm":
        _check_sbatch_options(launcher.extra)
    for name in launcher.extra if launcher.type == "ray" else ():
        if name not in _RAY_OPTIONS:
            raise ConfigError(f"launcher.extra.{name} is not an option for Ray here.", f"Known: {', '.join(_RAY_OPTIONS)}.")


def _check_sbatch_options(extra: dict[str, object]) -> None:
    for name, value in extra.items():
        option = name.replace("_", "-")
        if not _OPTION.fullmatch(name):
            raise ConfigError(f"launcher.extra: {name!r} is not an option of sbatch.", "Write its long name, such as account.")
        if option in _SET_BY_LLM_PERF or option.startswith(("ntasks", "tasks-per")):
            raise ConfigError(f"launcher.extra.{name} is set by llm-perf.", "Leave it out.")
        if isinstance(value, (dict, list)) or value is None or value is False:
            raise ConfigError(f"launcher.extra.{name}={value!r} is not a value.", "Write text, a number, or true for a flag.")
        _check_word(f"launcher.extra.{name}", str(value))


def _check_word(key: str, value: str | None) -> None:
    """Raise for a line break, which would end the line of a job script, and for other control characters."""
    if value is not None and (not value or not value.isprintable()):
        raise ConfigError(f"{key}={value!r} cannot be used.", "Write it as one line of printable characters.")


def minutes(launcher: LauncherConfig) -> int | None:
    """Return the time limit in minutes, rounded up; None without one."""
    text = launcher.time
    if text is None:
        return None
    match = _TIME.fullmatch(text)
    if match:
        days, hours, whole, seconds = (int(part or 0) for part in match.groups())
        found = (days * 24 + hours) * 60 + whole + (seconds > 0)
    else:
        found = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_MINUTES)) else 0
    if not 0 < found <= _MOST_MINUTES:
        raise ConfigError(
            f"launcher.time={text} is not a time limit.", "Write minutes (90), HH:MM:SS or D-HH:MM:SS; in YAML, quote it."
        )
    return found


def memory_bytes(launcher: LauncherConfig) -> int | None:
    """Return the memory of a point in bytes; None if it is not set."""
    if launcher.memory is None:
        return None
    match = _MEMORY.fullmatch(launcher.memory)
    if match is None or not int(match[1]):
        raise ConfigError(f"launcher.memory={launcher.memory} is not an amount of memory.", "Write it with its unit: 32G.")
    return int(match[1]) * _UNITS[match[2].upper()]


def gpus_of(config: RunConfig) -> int:
    """Return how many GPUs a point asks the cluster for: by default, those that its ranks or workers use."""
    if config.launcher.gpus is not None:
        return config.launcher.gpus
    return devices_used(config) if config.hardware.device == "cuda" else 0
