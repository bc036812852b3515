"""Link to models outside the project."""

from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json, verb_group
from llm_perf_opt.workspace.data.layout import MODELS_ROOT, given_root

app = verb_group("model", "Link and check model folders.")

Root = Annotated[Path, typer.Option(help="The folder with the links.")]


@app.command()
def link(
    name: Annotated[str, typer.Argument(help="Select it later with model=NAME.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A local Hugging Face folder.")],
    root: Root = MODELS_ROOT,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Link a folder of weights as models/NAME."""
    note_debug(debug)
    from llm_perf_opt.report.workspace import model_lines
    from llm_perf_opt.workspace.data.model_tree import check_model, link_model

    place = link_model(root, name, target)
    found = check_model(place)
    if as_json:
        print_json({"path": str(place), **_fields(found)})
        return
    print(f"{place} → {found.target}")
    for line in model_lines(found)[1:]:
        print(line)
    for difference in _differences(name, place):
        print(f"warning: this folder differs from the packaged model {name}: {difference}")
    print(f"run it: llm-perf run model={name}" if root == MODELS_ROOT else f"run it: llm-perf run model=hf model.path={place}")


@app.command(name="list")
def list_models(root: Root = MODELS_ROOT, as_json: Json = False, debug: Debug = False) -> None:
    """List the linked models."""
    note_debug(debug)
    from llm_perf_opt.workspace.data.model_tree import linked_models

    places = linked_models(given_root(root, MODELS_ROOT))
    links = [{"name": place.name, "target": _target(place), "dangling": not place.exists()} for place in places]
    if as_json:
        print_json(links)
        return
    if not links:
        print(f"{root} has no model. Link one with `llm-perf model link NAME DIR`.")
    for entry in links:
        print(f"{entry['name']}  → {entry['target']}{'  (dangling: the target does not exist)' if entry['dangling'] else ''}")


@app.command()
def check(
    name: Annotated[str | None, typer.Argument(help="A model; all by default.")] = None,
    root: Root = MODELS_ROOT,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check configuration, shards, dtypes, sizes and tokenizer without reading weights. Exits with 1 if something is wrong."""
    note_debug(debug)
    from llm_perf_opt.report.workspace import model_lines
    from llm_perf_opt.workspace.data.model_tree import check_model, linked_models, model_named

    given_root(root, MODELS_ROOT)
    places = [model_named(root, name)] if name else linked_models(root)
    found = [check_model(place) for place in places]
    if as_json:
        print_json([_fields(entry) for entry in found])
    else:
        for entry in found:
            print("\n".join(model_lines(entry)))
        print(f"{len(found)} checked, {sum(not entry.ok for entry in found)} with problems")
    if not all(entry.ok for entry in found):
        raise typer.Exit(1)


def _differences(name: str, place: Path) -> list[str]:
    """Return how the linked folder differs from the packaged option of this name."""
    from llm_perf_opt.config.choices import packaged_options
    from llm_perf_opt.config.project_files import packaged_option
    from llm_perf_opt.config.weights import shape_differences

    shape = packaged_option("model", name).get("architecture") if name in packaged_options("model") else None
    return shape_differences(shape or {}, place)


def _fields(found: object) -> dict[str, object]:
    from dataclasses import asdict, is_dataclass

    assert is_dataclass(found) and not isinstance(found, type)  # noqa: S101, PT018 - for the type checker
    return asdict(found)


def _target(place: Path) -> str:
    return str(place.readlink()) if place.is_symlink() else str(place)
