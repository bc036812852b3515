"""Add datasets, derive variants from them, and check both."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.shared import Debug, Json, Quiet, note_debug, print_json, verb_group
from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.core.units import counted
from llm_perf_opt.core.user_files import PROJECT_CONF
from llm_perf_opt.workspace.data.layout import DATASETS_ROOT, MODELS_ROOT, SOURCE, DatasetTree, given_root

if TYPE_CHECKING:
    from llm_perf_opt.workspace.data.inventory import Skipped, VariantMetadata

app = verb_group("dataset", "Add datasets, derive variants from them, and check whether they changed.")

Root = Annotated[Path, typer.Option(help="The folder with the datasets.")]
Conf = Annotated[Path, typer.Option(help="The folder with the project's options, where dataset=NAME is looked up.")]


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Select it later with dataset=NAME.")],
    source: Annotated[Path, typer.Option(help="The data: a folder or a file. It is linked and never modified.")],
    version: Annotated[str | None, typer.Option(help="Version of the data.")] = None,
    origin: Annotated[str | None, typer.Option(help="URL the data came from.")] = None,
    license_name: Annotated[str | None, typer.Option("--license", help="License of the data.")] = None,
    notes: Annotated[str | None, typer.Option(help="Free text for the metadata.")] = None,
    text_field: Annotated[str, typer.Option(help="The field or column with the text.")] = "text",
    data_format: Annotated[
        str | None, typer.Option("--format", help="Which files hold the records, if the folder contains several formats.")
    ] = None,
    root: Root = DATASETS_ROOT,
    conf: Conf = PROJECT_CONF,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Add a dataset: a link to the data, metadata with hashes, a README, and the option dataset=NAME."""
    note_debug(debug)
    from llm_perf_opt.cli.progress import watched
    from llm_perf_opt.core.units import byte_count
    from llm_perf_opt.report.workspace import dataset_readme
    from llm_perf_opt.workspace.data.preparing import Description, add_dataset

    description = Description(version, origin, license_name, notes, text_field, data_format)
    with watched("add", name, quiet) as phases:
        folder, metadata = add_dataset(DatasetTree(root), conf, name, source, description, dataset_readme, phases)
    if as_json:
        print_json({"path": str(folder.path), "metadata": metadata})
        return
    print(f"{folder.path}: {metadata.size.records} records, {byte_count(metadata.size.bytes)}, {metadata.format}")
    print(f"run it: llm-perf run dataset={name}")


@app.command(name="list")
def list_datasets(root: Root = DATASETS_ROOT, as_json: Json = False, debug: Debug = False) -> None:
    """List the datasets and their variants."""
    note_debug(debug)
    from llm_perf_opt.core.units import byte_count
    from llm_perf_opt.workspace.data.checking import listed

    found = [listed(folder) for folder in DatasetTree(given_root(root, DATASETS_ROOT)).datasets()]
    if as_json:
        print_json([asdict(entry) for entry in found])
        return
    if not found:
        print(f"{root} has no dataset. Add one with `llm-perf dataset add NAME --source PATH`.")
    for entry in found:
        records = "records not counted" if entry.records is None else f"{entry.records} records"
        size = "" if entry.bytes is None else f"  {records}, {byte_count(entry.bytes)}, {entry.format}"
        print(f"{entry.name}{size}  → {entry.source}{'' if entry.state == 'ok' else f'  ({entry.state})'}")
        if entry.filled:
            print(f"  found in the data, not stated in its metadata: {', '.join(entry.filled)}")
        for name, what in entry.variants.items():
            print(f"  {name}  {what}")


@app.command()
def check(
    name: Annotated[str | None, typer.Argument(help="A dataset; all by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compare names and sizes only; do not read the data.")] = False,
    root: Root = DATASETS_ROOT,
    conf: Conf = PROJECT_CONF,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check for changes: a source or a variant that differs from its metadata, a dangling link. Exits with 1 if it finds any."""
    note_debug(debug)
    from llm_perf_opt.cli.progress import watched
    from llm_perf_opt.workspace.data.checking import check_dataset, unfinished, unrecorded

    tree = DatasetTree(given_root(root, DATASETS_ROOT))
    folders = (tree.dataset(name),) if name else tree.datasets()
    differences = [] if name else unfinished(tree)
    with watched("check", name or str(root), quiet) as phases:
        for folder in folders:
            differences += check_dataset(folder, conf, quick, phases)
    if as_json:
        print_json({"checked": [folder.name for folder in folders], "quick": quick, "differences": differences})
    else:
        for found in differences:
            print(f"{found.dataset}: {found.part}: {found.what}")
        for folder in folders:
            for part in unrecorded(folder):
                print(f"{folder.name}: {part}: not compared: no hashes are recorded (`llm-perf dataset refresh {folder.name}`)")
        how = "by name and size" if quick else "by content"
        print(f"{len(folders)} checked {how}, {len(differences)} differences")
    if differences:
        raise typer.Exit(1)


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="A dataset; `llm-perf dataset list` shows them.")],
    variant: Annotated[
        str,
        typer.Option(
            help="Name of the variant, for dataset.variant=NAME. If no transform is given, the name selects one: subset-1k is a "
            "subset of 1,000 records."
        ),
    ],
    parent: Annotated[str, typer.Option("--from", help="Start from another variant.")] = SOURCE,
    split: Annotated[str | None, typer.Option(help="Use only this split: train, validation, test.")] = None,
    within: Annotated[str | None, typer.Option(help="Use only the files in this folder of the source.")] = None,
    num_samples: Annotated[int | None, typer.Option(help="Create a subset with this many records.")] = None,
    seed: Annotated[int | None, typer.Option(help="With --num-samples: seed of the sample; 0 by default.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Create token ids with `bytes`, or with a folder that has a tokenizer.json.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="Convert to jsonl, parquet or txt.")] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Normalize the texts, and leave out empty ones and exact duplicates.")
    ] = False,
    text_field: Annotated[str | None, typer.Option(help="The field with the text; the dataset's by default.")] = None,
    join_lines: Annotated[
        bool, typer.Option("--join-lines", help="With --to txt: join the lines of a text with a space.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip unreadable records and count them.")] = False,
    root: Root = DATASETS_ROOT,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Derive a variant: a subset, a split, cleaned texts, token ids, another format. The same arguments give the same bytes."""
    note_debug(debug)
    from llm_perf_opt.cli.progress import watched
    from llm_perf_opt.core.units import byte_count
    from llm_perf_opt.report.workspace import dataset_block
    from llm_perf_opt.workspace.data.named_transforms import Preparation
    from llm_perf_opt.workspace.data.preparing import prepare as make
    from llm_perf_opt.workspace.data.refreshing import update_readme

    preparation = Preparation(
        variant=variant,
        parent=parent,
        split=split,
        within=within,
        num_samples=num_samples,
        seed=seed,
        tokenizer=tokenizer,
        to=to,
        clean=clean,
        text_field=text_field,
        join_lines=join_lines,
        skip_bad=skip_bad,
    )
    tree = DatasetTree(given_root(root, DATASETS_ROOT))
    folder = tree.dataset(name)
    with watched("prepare", f"{name} → {variant}", quiet) as phases:
        metadata = make(folder, preparation, phases, tree.root.parent / MODELS_ROOT)
    try:
        update_readme(tree, folder, dataset_block)
    except LlmPerfError as error:  # the variant is there all the same
        print(f"warning: the README was not updated: {error.fact} {error.remedy}", file=sys.stderr)
    if as_json:
        print_json({"path": str(folder.variant(variant).path), "metadata": metadata})
        return
    size = metadata.size
    print(f"{folder.path / variant}: {size.records} records, {byte_count(size.bytes)}, {metadata.format}")
    if not preparation.transforms:
        print(f"created with: {_options(metadata)}")
    if metadata.left_out:
        print(f"left out: {', '.join(f'{count} {reason}' for reason, count in metadata.left_out.items())}")
    _print_skipped(metadata.skipped)
    print(f"run it: llm-perf run dataset={name} dataset.variant={variant}")


_OPTIONS = {"split": "--split", "within": "--within", "num_samples": "--num-samples", "tokenizer": "--tokenizer", "to": "--to"}


def _options(metadata: "VariantMetadata") -> str:
    """Return the options that the name of the variant stands for."""
    given = [(option, metadata.arguments.get(key)) for key, option in _OPTIONS.items()]
    words = [f"{option} {value}" for option, value in given if value is not None]
    return " ".join([*words, *(["--clean"] if metadata.left_out else [])])


@app.command()
def refresh(
    name: Annotated[str | None, typer.Argument(help="A dataset; all by default.")] = None,
    root: Root = DATASETS_ROOT,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Update the README, and record sizes, counts and hashes that are missing from handmade metadata. Your own text stays."""
    note_debug(debug)
    from llm_perf_opt.cli.progress import watched
    from llm_perf_opt.report.workspace import dataset_block
    from llm_perf_opt.workspace.data.refreshing import refresh as renew

    tree = DatasetTree(given_root(root, DATASETS_ROOT))
    folders = (tree.dataset(name),) if name else tree.datasets()
    with watched("refresh", name or str(root), quiet) as phases:
        done = [renew(tree, folder, dataset_block, phases) for folder in folders]
    changed = [str(path) for each in done for path in each.changed]
    skipped = [why for each in done for why in each.skipped]
    if as_json:
        print_json({"refreshed": [folder.name for folder in folders], "changed": changed, "skipped": skipped})
        return
    for why in skipped:
        print(f"warning: left as it is: {why}", file=sys.stderr)
    for path in changed:
        print(f"updated {path}")
    print(f"{len(folders)} refreshed, {counted(len(changed), 'file')} changed")


def _print_skipped(skipped: "Skipped") -> None:
    if skipped.count:
        print(f"warning: {skipped.count} records left out" + (", the first of them:" if skipped.first else ""))
        for line in skipped.first:
            print(f"  {line}")
