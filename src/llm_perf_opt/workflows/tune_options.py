"""Whether the options of a search are valid, before anything is measured."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from llm_perf_opt.analysis.tuning.goals import objective_named, parse_constraints
from llm_perf_opt.analysis.tuning.tokens import RULES as TOKEN_RULES
from llm_perf_opt.config.code_settings import CodeSetting, Stored, code_settings, typed_settings
from llm_perf_opt.config.composition import check_setting, expand_sweep, with_overrides, without_plus
from llm_perf_opt.config.runtimes import Lever, Machine, traits_of
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.profiling.requested_metrics import on_gpu
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.tune_folder import STATE, SUFFIX, TuneOptions


def check_options(options: TuneOptions) -> None:
    """Raise ConfigError for an option that is invalid, before anything is measured."""
    objective_named(options.objective)
    parse_constraints(options.constraints)
    user_levers(options.levers)
    if options.tokens not in TOKEN_RULES:
        raise ConfigError(f"--tokens {options.tokens} is not known.", f"Known: {', '.join(TOKEN_RULES)}.")
    most = options.max_logit_diff
    if most is not None and not 0 <= most < math.inf:
        raise ConfigError(f"--max-logit-diff {most} is not a limit.", "Give a number that is not negative, such as 0.5.")


def user_levers(texts: Sequence[str]) -> list[Lever]:
    """Return the levers that the user gave as KEY=VALUE,VALUE."""
    found = []
    for given in texts:
        text = without_plus(given)
        key, _, values = text.partition("=")
        if not key.strip() or not values.strip():
            raise ConfigError(f"--lever needs KEY=VALUE,VALUE, not '{given}'.", "Write --lever runtime.batch_size=1,2.")
        choices = tuple(tuple(point) for point in expand_sweep([text]))
        found.append(Lever(key, choices))
    return found


def allowed_code(
    run: RunReader, options: TuneOptions, code: Sequence[str], command: str, *, typed_levers: bool
) -> tuple[CodeSetting, ...]:
    """Return the settings of the base and of the user's levers that can run code; raise ConfigError for one that was not typed.

    `code`: settings typed after `command`. `typed_levers`: the levers were typed, too, and not read from the folder of a search.
    """
    own = code_settings(asdict(with_overrides(run.settings, ())))
    levers = [one for lever in user_levers(options.levers) for choice in lever.choices for one in _asked(run.settings, choice)]
    words = (*code, *(map(str, levers) if typed_levers else ()))
    stored = Stored(run.folder.config_file, command, words)
    stored.check_words((*own, *levers))
    if typed_levers or not levers:
        return stored.allowed((*own, *levers))
    search = replace(stored, file=run.folder.path.with_name(f"{run.folder.path.name}{SUFFIX}") / STATE)
    return (*stored.allowed(own), *search.allowed(levers))


def _asked(values: Mapping[str, Any], choice: Sequence[str]) -> tuple[CodeSetting, ...]:
    """Return what a choice of a lever sets that can run code, alone or with the settings of the base."""
    try:
        return code_settings(asdict(with_overrides(values, choice)))
    except ConfigError:  # it may need another lever first
        return typed_settings(choice)


def check_for_base(options: TuneOptions, values: Mapping[str, Any], device: str = "", *, is_run: bool = False) -> None:
    """Raise ConfigError for an option that does not fit the configuration of the base.

    `device`: where the base ran. `is_run`: the base was given as a run, not as settings.
    """
    _check_energy(options, values, device or str(values["hardware"]["device"]), is_run)
    levers = user_levers(options.levers)
    for lever in levers:
        for choice in lever.choices:
            _check_choice(choice, values, levers)


def _check_energy(options: TuneOptions, values: Mapping[str, Any], device: str, is_run: bool) -> None:
    wanted = ["--objective energy"] if options.objective == "energy" else []
    wanted += [f"--constraint '{one.text}'" for one in parse_constraints(options.constraints) if one.goal == "energy"]
    if wanted and (device.startswith("cpu") or (device == "auto" and not on_gpu())):
        raise ConfigError(
            f"{wanted[0]} cannot be measured on a CPU: energy comes from the GPU's counter.", "Choose another figure, or a GPU."
        )
    if wanted and not values["profiling"]["nvml"]["enable"]:
        raise ConfigError(
            f"{wanted[0]} cannot be measured: profiling.nvml.enable=false, so the GPU's energy is not sampled.",
            f"{'Make the run again with' if is_run else 'Add'} profiling.nvml.enable=true.",
        )


def _check_choice(choice: Sequence[str], values: Mapping[str, Any], levers: Sequence[Lever]) -> None:
    """Raise ConfigError for a choice that neither the base accepts nor the base with another lever, which may be kept first."""
    known = False
    try:
        for text in choice:
            check_setting(text)
        known = True
        with_overrides(values, choice)
    except ConfigError as error:
        if not known or not any(_accepts(values, (*other, *choice)) for other in _other_choices(values, levers)):
            raise ConfigError(f"--lever {' '.join(choice)}: {error.fact}", error.remedy) from None


def _other_choices(values: Mapping[str, Any], levers: Sequence[Lever]) -> Iterator[tuple[str, ...]]:
    known = traits_of(str(values["runtime"]["type"])).levers
    for lever in (*levers, *known(Machine("cpu", 1)), *known(Machine("cuda", 1))):
        yield from lever.choices


def _accepts(values: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    try:
        with_overrides(values, overrides)
    except ConfigError:
        return False
    return True
