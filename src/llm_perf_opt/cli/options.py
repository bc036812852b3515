"""List the configuration groups."""

from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json


def options(
    config_dir: Annotated[Path | None, typer.Option(help="A folder with your own options.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the configuration groups and their options."""
    note_debug(debug)
    from llm_perf_opt.config.choices import group_options

    found = group_options(config_dir)
    if as_json:
        print_json(found)
        return
    for group, names in found.items():
        print(f"{group:<10} {', '.join(names)}")
