"""What `${NAME:…}` may call in options, and which variables of the environment a file may read."""

import inspect
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from omegaconf import Node, OmegaConf
from omegaconf.base import Container
from omegaconf.basecontainer import BaseContainer

from llm_perf_opt.core.errors import ConfigError

READABLE = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "HOSTNAME", "PWD", "TMPDIR", "SCRATCH"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME"),
        *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
        *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_TMPDIR"),
    )
)
"""The variables that a file may read: none holds a secret. The command line may read any."""
_READ = "oc.env"
_NAMES = re.compile(r"oc\.env\s*:\s*['\"]?(\w+)")
_MOST_REFERENCES, _MOST_CHARACTERS = 2_000, 1_000_000
"""That are resolved in a configuration, with those inside others, and of the results: each line may double the one before it."""
_NO_DEFAULT = inspect.Parameter.empty


class _File(Protocol):
    @property
    def path(self) -> Any: ...
    @property
    def keys(self) -> Sequence[str]: ...


class Environment:
    """Reads the environment for `${oc.env:NAME}`: a name in READABLE, or one that was typed in the value of the same key.

    The key is that of the value in which the call is written. So neither a name that is put together, nor text that is decoded,
    nor a typed value that refers to one in a file reads anything else.
    """

    def __init__(self, typed: Sequence[str]) -> None:
        self._typed = {key.lstrip("+~"): set(_NAMES.findall(value)) for key, _, value in (text.partition("=") for text in typed)}
        self._refused: list[tuple[str, str]] = []

    def read(self, name: str, default: Any = _NO_DEFAULT, *, _node_: Any) -> str | None:
        """Return the value of a variable, as OmegaConf's own resolver does. Raise ValueError if it must not be read."""
        key = _node_._get_full_key(None)
        if name not in READABLE and not any(name in names for typed, names in self._typed.items() if _is_within(key, typed)):
            self._refused.append((key, name))
            raise ValueError(f"a file cannot read the variable {name}")
        if name in os.environ:
            return os.environ[name]
        if default is _NO_DEFAULT:
            raise KeyError(f"Environment variable '{name}' not found")
        return None if default is None else str(default)

    def check(self, files: Sequence[_File]) -> None:
        """Raise a ConfigError that names the file, the key and the variable if one was refused."""
        if not self._refused:
            return
        key, name = self._refused[0]
        plain = key.partition("[")[0]
        where = next((file.path for file in files if any(_is_within(plain, one) for one in file.keys)), None)
        listed = next((file.path for file in files), "The configuration")
        known = plain in self._typed or where is not None
        fact = f"{where or listed}: {plain if known else 'the defaults list'} reads the environment variable {name}."
        remedy = f"A file may read {', '.join(sorted(READABLE))}."
        if known:
            remedy = f"Give it on the command line: {plain}='${{oc.env:{name}}}'. {remedy}"
        raise ConfigError(fact, remedy)


def _is_within(key: str, outer: str) -> bool:
    return key == outer or key.startswith((f"{outer}.", f"{outer}["))


@contextmanager
def resolvers(environment: Environment) -> Iterator[None]:
    """Make only the resolvers of OmegaConf, of Hydra and of llm-perf known: those of the calling program are not for files."""
    from hydra.core.utils import setup_globals

    known: dict[str, Any] = BaseContainer._resolvers
    before, resolve = dict(known), Container.resolve_parse_tree
    left = [_MOST_REFERENCES, _MOST_CHARACTERS]

    def counted(self: Any, *words: Any, **named: Any) -> Any:
        left[0] -= 1
        value = resolve(self, *words, **named) if left[0] >= 0 else None
        left[1] -= len(str(value._value() if isinstance(value, Node) else value)) if not OmegaConf.is_config(value) else 0
        if min(left) < 0:
            raise ConfigError("The values of the configuration refer to each other too often: ${…} in ${…}.", "Write them out.")
        return value

    Container.resolve_parse_tree = counted  # type: ignore[method-assign]
    try:
        for name in before:
            if not name.startswith("oc."):
                del known[name]
        setup_globals()  # now, python_version
        OmegaConf.register_new_resolver(_READ, environment.read, replace=True)
        OmegaConf.register_new_resolver("folder_name", lambda path: Path(str(path)).name or "model")
        OmegaConf.register_new_resolver("at_most", _at_most)
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]
        known.clear()
        known.update(before)


def _at_most(usual: int, limit: Any) -> int:
    """Return the smaller of a default and another setting, which is checked elsewhere."""
    return min(usual, limit) if isinstance(limit, int) else usual
