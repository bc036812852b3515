"""Look up hardware counters and metric sets."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json, verb_group
from llm_perf_opt.core.missing import Missing

app = verb_group(
    "metrics", "Look up hardware counters: the named sets, the counters of a set on a chip, and whether a name exists."
)

Chip = Annotated[str | None, typer.Option(help="ga100, ad102, gh100, gb100 or gb202; by default that of this machine's GPU.")]
Installed = Annotated[
    bool, typer.Option("--installed", help="Also check with the installed ncu; older versions do not have all names.")
]


ConfigDir = Annotated[Path | None, typer.Option(help="A folder with your own sets, metrics/NAME.yaml, in addition to ./conf.")]


@app.command("list")
def list_sets(config_dir: ConfigDir = None, as_json: Json = False, debug: Debug = False) -> None:
    """List the named sets, your own included, and the chips whose counters are known."""
    note_debug(debug)
    from llm_perf_opt.config.choices import own_sets
    from llm_perf_opt.counters.catalog import LISTED_BY, base_names, chips
    from llm_perf_opt.counters.set_file import known_sets

    sets = known_sets(own_sets(config_dir=config_dir))
    if as_json:
        known = [{"chip": chip, "products": where, "counters": len(base_names(chip))} for chip, where in chips().items()]
        print_json({"sets": list(sets.values()), "chips": known, "listed_by": LISTED_BY})
        return
    width = max(map(len, sets))
    for name, metric_set in sets.items():
        print(f"{name:<{width}}  {metric_set.description}")
    print(f"\nChips, as {LISTED_BY} lists their counters:")
    for chip, products in chips().items():
        print(f"{chip:<{width}}  {len(base_names(chip)):>5,} counters   {products}")


@app.command()
def show(
    sets: Annotated[list[str], typer.Argument(metavar="SET", help="Sets, merged in this order after base.")],
    chip: Chip = None,
    add: Annotated[list[str] | None, typer.Option(help="Add a counter. May be repeated.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Remove a counter. May be repeated.")] = None,
    section: Annotated[list[str] | None, typer.Option(help="Add a section of Nsight Compute. May be repeated.")] = None,
    installed: Installed = False,
    config_dir: ConfigDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what sets collect on a chip: every counter with its set, sections, trace modules, and what the chip does not have."""
    note_debug(debug)
    from llm_perf_opt.config.choices import own_sets
    from llm_perf_opt.counters.manifest import resolve
    from llm_perf_opt.report.manifest import resolved_text

    where = _chip(chip)
    known = _known(where) if installed else None
    found = resolve(
        sets,
        add=add or (),
        remove=remove or (),
        sections=section or (),
        chip=where,
        known=known,
        known_sections=_sections(installed),
        defined=own_sets(sets, config_dir),
    )
    if as_json:
        print_json(found)
        return
    print(resolved_text(found))


@app.command()
def check(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Counters with their suffix.")],
    chip: Chip = None,
    installed: Installed = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check whether a chip has these counters; old names are translated. Exits with 2 if one is unknown."""
    note_debug(debug)
    where = _chip(chip)
    known = _known(where) if installed else None
    found = [_verdict(where, name, known) for name in names]
    if as_json:
        print_json({"chip": where, "names": found})
    else:
        for verdict in found:
            _print_verdict(verdict)
    if any(verdict["status"] == "unknown" for verdict in found):
        raise typer.Exit(2)


def _verdict(chip: str, name: str, known: frozenset[str] | None) -> dict[str, Any]:
    from dataclasses import asdict

    from llm_perf_opt.counters.catalog import problem
    from llm_perf_opt.counters.manifest import close_names, translate

    translation = translate(chip, name)
    faults = [problem(chip, part.name, known) for part in translation.parts] if translation else [problem(chip, name, known)]
    why = next((fault for fault in faults if fault), "")
    if why:
        return {"name": name, "status": "unknown", "why": why, "near": close_names(chip, name)}
    if translation:
        return {"name": name, "status": "old", "use": [asdict(part) for part in translation.parts], "note": translation.note}
    return {"name": name, "status": "ok"}


def _print_verdict(verdict: dict[str, Any]) -> None:
    print(f"{verdict['status']:<8} {verdict['name']}{': ' + verdict['why'] if 'why' in verdict else ''}")
    for close in verdict.get("near", ()):
        print(f"{'':<8} → near: {close}")
    for part in verdict.get("use", ()):
        print(f"{'':<8} → {str(part['factor']) + ' × ' if part['factor'] != 1 else ''}{part['name']}")
    if verdict.get("note"):
        print(f"{'':<8}   {verdict['note']}")


def _chip(chosen: str | None) -> str:
    from llm_perf_opt.counters.catalog import DEFAULT_CHIP, base_names, chip_of_device
    from llm_perf_opt.runners.measure.gpu import gpu_name

    if chosen is not None:
        base_names(chosen)  # rejects an unknown chip and lists the known ones
        return chosen
    device = gpu_name()
    chip = device if isinstance(device, Missing) else chip_of_device(device)
    if isinstance(chip, Missing):
        why = f"no GPU found ({chip.why})" if isinstance(device, Missing) else f"{device}: {chip.why}"
        print(f"chip {DEFAULT_CHIP}: {why}; --chip selects another", file=sys.stderr)
        return DEFAULT_CHIP
    print(f"chip {chip}: {device}", file=sys.stderr)
    return chip


def _known(chip: str) -> frozenset[str]:
    from llm_perf_opt.core.errors import ResourceError
    from llm_perf_opt.profiling.requested_metrics import names_known_to
    from llm_perf_opt.profiling.vendor.probe import find_tool

    ncu = find_tool("ncu")
    if ncu is None:
        raise ResourceError(
            "--installed needs Nsight Compute, and no ncu was found.", "See `llm-perf doctor`, or omit --installed."
        )
    names = names_known_to(ncu, chip)
    if isinstance(names, Missing):
        raise ResourceError(f"{names.why}.", "Update Nsight Compute, or omit --installed.")
    return names


def _sections(installed: bool) -> tuple[str, ...] | None:
    """Return the sections of the installed ncu, if `installed`."""
    from llm_perf_opt.profiling.requested_metrics import sections_of
    from llm_perf_opt.profiling.vendor.probe import find_tool

    ncu = find_tool("ncu") if installed else None
    return sections_of(ncu) if ncu else None
