"""The plan of a sweep as its folder has it: the configurations of its points, and the launcher that runs them.

The folder may be somebody else's: what can run code is taken from it only if it was typed as well.
"""

import os
import platform
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from llm_perf_opt.config.code_settings import Stored, code_settings, launcher_settings, typed_settings
from llm_perf_opt.config.composition import Composed, check_setting, compose, config_from_mapping, with_overrides, without_plus
from llm_perf_opt.config.launchers import LAUNCHER, gpus_of
from llm_perf_opt.config.schema import LauncherConfig
from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.inside import leads_inside
from llm_perf_opt.workflows.sweep_folder import Sweep, SweepFolder, resume_command


def enter_project(folder: SweepFolder, sweep: Sweep) -> None:
    """Make the project of the sweep the working folder.

    Raise ConfigError if it is another folder than the current one and the sweep is not in it: a file chooses no folder elsewhere.
    """
    if sweep.project is None:
        return
    if not leads_inside(Path(sweep.project), folder.path) and Path(sweep.project).resolve() != Path.cwd():
        raise ConfigError(
            f"{folder.path} was started in {sweep.project}, which neither contains it nor is the current folder.",
            f"If that is your project, change to it: cd {shlex.quote(sweep.project)}",
        )
    try:
        os.chdir(sweep.project)
    except OSError as error:
        raise ConfigError(
            f"The project folder of the sweep, {sweep.project}, cannot be used on {platform.node()}: {error.strerror}.",
            "Mount it there under the same path, or start the sweep in a folder that all nodes share.",
        ) from error


def stored_sweep(folder: SweepFolder, sweep: Sweep, code: Sequence[str] = (), command: str = "") -> Stored:
    """Return the file that has the settings of the points, with those that can run code and were typed."""
    file = folder.sweep_file if sweep.project is None else folder.plan_file
    return Stored(file, command or resume_command(folder), tuple(code))


def composed_points(folder: SweepFolder, sweep: Sweep, numbers: Iterable[int], stored: Stored) -> dict[int, Composed]:
    """Return points by number as they were planned; for a sweep of an older version, composed from their overrides.

    Raise ConfigError if one has a setting that can run code and was not typed.
    """
    if sweep.project is None:
        config_dir = Path(sweep.config_dir) if sweep.config_dir else None
        older = {number: compose(sweep.points[number].overrides, config_dir, stored) for number in numbers}
        return {number: replace(one, run_dir=folder.point_folder(number)) for number, one in older.items()}
    settings = folder.settings()
    if len(settings) != len(sweep.points):
        raise ParseError(f"{folder.path} is damaged: its plan has {len(settings)} of {len(sweep.points)} points.")
    found = {number: config_from_mapping(settings[number]) for number in numbers}
    asked = {number: code_settings(asdict(config)) for number, config in found.items()}
    stored.allowed(one for settings_of_point in asked.values() for one in settings_of_point)
    return {number: Composed(config, folder.point_folder(number), code=asked[number]) for number, config in found.items()}


def check_words(folder: SweepFolder, sweep: Sweep, stored: Stored) -> None:
    """Raise ConfigError for a word that no point of the sweep needs: its settings are used as they were planned."""
    if not stored.words:
        return
    points = [typed_settings(point.overrides) for point in sweep.points]
    if sweep.project is not None:
        points = [code_settings(asdict(config_from_mapping(values))) for values in folder.settings()]
    stored.check_words(one for point in points for one in point)


def launcher_of(folder: SweepFolder) -> LauncherConfig:
    """Return where the points of a sweep run, as planned."""
    sweep = folder.read()
    return LauncherConfig() if sweep.project is None else config_from_mapping(folder.settings()[0]).launcher


def code_words(folder: SweepFolder, overrides: Sequence[str]) -> list[str]:
    """Return the words of `--resume` that are not the launcher's: they repeat settings that can run code, or are an error."""
    words = [text for text in map(without_plus, overrides) if not _is_launchers(text)]
    for text in words:
        check_setting(text)
    sweep = folder.read()
    check_words(folder, sweep, stored_sweep(folder, sweep, words))
    return words


def _is_launchers(text: str) -> bool:
    return text.partition("=")[0].split(".")[0] == LAUNCHER


def with_launcher(folder: SweepFolder, launcher: LauncherConfig, overrides: Sequence[str]) -> LauncherConfig:
    """Return the launcher of a sweep with the settings of it that `--resume` was given.

    Raise ConfigError if one of the result can run code and was not among them.
    """
    code_words(folder, overrides)
    words = [text for text in map(without_plus, overrides) if _is_launchers(text)]
    sweep = folder.read()
    found = _with_overrides(folder, sweep, launcher, words)
    stored_sweep(folder, sweep, words).allowed(launcher_settings(asdict(found)))
    return found


def _with_overrides(folder: SweepFolder, sweep: Sweep, launcher: LauncherConfig, words: Sequence[str]) -> LauncherConfig:
    if any(text.startswith(f"{LAUNCHER}=") for text in words):
        return compose(words, Path(sweep.config_dir) if sweep.config_dir else None).config.launcher
    if not words:
        return launcher
    if sweep.project is None:
        raise ConfigError("This sweep was planned by an older version, for this machine.", "Add launcher=slurm or launcher=ray.")
    return with_overrides(folder.settings()[0], words).launcher


def gpus_of_points(folder: SweepFolder, launcher: LauncherConfig, code: Sequence[str] = ()) -> dict[int, int]:
    """Return how many GPUs each point asks a cluster for. `code`: settings that can run code, as typed."""
    sweep = folder.read()
    composed = composed_points(folder, sweep, range(len(sweep.points)), stored_sweep(folder, sweep, code))
    return {number: gpus_of(replace(one.config, launcher=launcher)) for number, one in composed.items()}
