"""Compute the FLOPs, bytes and roofline time of a model."""

from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.completing import complete_hardware, complete_override
from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json


def cost(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="model=NAME, model.architecture.FIELD=VALUE.", autocompletion=complete_override),
    ] = None,
    model_config: Annotated[Path | None, typer.Option(help="A Hugging Face config.json, instead of model=.")] = None,
    batch: Annotated[str, typer.Option(help="Number of sequences; with --hardware, a list: 1,8,64.")] = "1",
    prompt: Annotated[str, typer.Option(help="Prompt tokens in prefill.")] = "2048",
    context: Annotated[str, typer.Option(help="Cached tokens in the decode step; with --hardware, a list.")] = "2048",
    dtype: Annotated[
        str, typer.Option(help="Dtype of the weights: bf16, fp16, fp32, fp8, int8, int4, fp4; with --hardware, a list.")
    ] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Dtype of the KV cache.")] = "bf16",
    mla: Annotated[str | None, typer.Option(help="Implementation of latent attention: expand_once, reexpand, absorb.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Show roofline times on this device: h100_sxm, h200, rtx_4090 …", autocompletion=complete_hardware),
    ] = None,
    decoder_only: Annotated[
        bool, typer.Option("--decoder-only", help="For a model with image or audio input: count its text decoder only.")
    ] = False,
    images: Annotated[
        int | None, typer.Option(help="Images per prompt, in addition to --prompt. Default: 1 if the model takes images.")
    ] = None,
    image_height: Annotated[
        int | None, typer.Option(help="Height of an image in pixels, after preprocessing. Default: the model's own size.")
    ] = None,
    image_width: Annotated[
        int | None, typer.Option(help="Width of an image in pixels, after preprocessing. Default: the model's own size.")
    ] = None,
    image_tiles: Annotated[
        int | None, typer.Option(help="Tiles (crops) of each image, in addition to the whole image, for models that use tiles.")
    ] = None,
    config_dir: Annotated[Path | None, typer.Option(help="A folder with your own options.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute the FLOPs and bytes of a model per component; with --hardware, its roofline time. Needs no GPU and no weights."""
    note_debug(debug)
    from llm_perf_opt.report.cost import cost_document, what_if_document
    from llm_perf_opt.report.terminal import render_text
    from llm_perf_opt.workflows.cost import CostRequest, estimate_cost

    request = CostRequest(
        *(overrides or [], model_config, config_dir, batch, prompt, context, dtype, kv_dtype, mla, hardware, decoder_only),
        *(images, image_height, image_width, image_tiles),
    )
    found = estimate_cost(request)
    if as_json:
        print_json(found.to_json())
        return
    if found.cost:
        print(render_text(cost_document(found.cost)))
    if found.hardware:
        print(render_text(what_if_document(found.rows, found.turning, found.hardware, found.part_of)), end="")
