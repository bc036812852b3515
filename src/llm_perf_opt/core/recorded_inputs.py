"""The inputs.yaml of a run: the token ids that were used, so that another run can repeat them."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ConfigError, ResourceError, words_of
from llm_perf_opt.core.user_files import open_ordinary
from llm_perf_opt.core.yaml_text import invalid_yaml, load_yaml

_MOST_BYTES = 64 * 1024 * 1024
_REMEDY = "Give the inputs.yaml of a run. For texts of your own use dataset=sample_prompts dataset.path=FILE."


@dataclass(frozen=True)
class RecordedInputs:
    """What inputs.yaml records of the prompts of a run."""

    ids: tuple[tuple[int, ...], ...]
    new_tokens: int
    sha256: str
    """Hash of the input as recorded; see `Prompts.sha256`."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))


def read_inputs(path: Path) -> RecordedInputs:
    """Return the recorded inputs, or raise an error that says what the file is instead."""
    try:
        with open_ordinary(path) as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.", _REMEDY) from None
    except (OSError, ValueError) as error:
        raise ResourceError(f"{path} cannot be read: {words_of(error)}.", _REMEDY) from error
    if len(content) > _MOST_BYTES:
        raise ResourceError(f"{path} is larger than {_MOST_BYTES >> 20} MiB.", _REMEDY)
    try:
        found = msgspec.convert(load_yaml(content, len(content)), RecordedInputs)  # only aliases make more values than bytes
    except invalid_yaml() as error:  # those of msgspec are ValueErrors
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} does not record the prompts of a run: {reason}.", _REMEDY) from error
    if not found.ids or not all(found.ids) or min(map(min, found.ids)) < 0 or found.new_tokens < 1:
        raise ConfigError(f"{path} has a prompt without tokens, a negative id or no new tokens.", _REMEDY)
    return found
