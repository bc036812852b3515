"""Compute the FLOPs, bytes and roofline time of a model."""

from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.completing import complete_hardware, complete_override
from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json

# The options about several devices.
Tp = Annotated[int | None, typer.Option(help="Tensor parallelism: split every layer over this many GPUs.")]
Pp = Annotated[int | None, typer.Option(help="Pipeline parallelism: split the layers into this many stages.")]
Ep = Annotated[int | None, typer.Option(help="Expert parallelism: split the experts over this many GPUs, a multiple of --tp.")]
Link = Annotated[
    str | None, typer.Option(help="Link within a node: nvlink, pcie, or GB/s per GPU and direction. Default: the fastest.")
]
Network = Annotated[
    str | None, typer.Option(help="Link between nodes: ndr, hdr, edr, xdr, or GB/s per GPU and direction. Default: ndr.")
]
NodeGpus = Annotated[int | None, typer.Option(help="GPUs per node. Default: 8, or as many as NVLink connects.")]
ExpertExchange = Annotated[
    str | None, typer.Option(help="How tokens reach experts if --ep is above --tp: all_gather (default) or all_to_all.")
]
CollectiveUs = Annotated[float | None, typer.Option(help="Latency of each collective in microseconds, as measured. Default: 0.")]
Peaks = Annotated[
    Path | None,
    typer.Option(
        help="A file of measured peaks instead of datasheet peaks: the one that `llm-perf ceilings` names, or of a run."
    ),
]
MemoryShare = Annotated[float | None, typer.Option(help="Share of a GPU's memory for weights and cache. Default: 0.9.")]


def cost(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="model=NAME, model.architecture.FIELD=VALUE.", autocompletion=complete_override),
    ] = None,
    model_config: Annotated[Path | None, typer.Option(help="A Hugging Face config.json, instead of model=.")] = None,
    batch: Annotated[str, typer.Option(help="Number of sequences; with --hardware, a list: 1,8,64.")] = "1",
    prompt: Annotated[str, typer.Option(help="Prompt tokens in prefill.")] = "2048",
    context: Annotated[
        str | None,
        typer.Option(help="Cached tokens in the decode step; with --hardware, a list. Default: the prompt with its images."),
    ] = None,
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
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    link: Link = None,
    network: Network = None,
    node_gpus: NodeGpus = None,
    expert_exchange: ExpertExchange = None,
    collective_us: CollectiveUs = None,
    memory_share: MemoryShare = None,
    peaks: Peaks = None,
    config_dir: Annotated[Path | None, typer.Option(help="A folder with your own options.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute the FLOPs and bytes of a model per component; with --hardware, its roofline time. Needs no GPU and no weights."""
    note_debug(debug)
    from llm_perf_opt.report.cost import cost_document, what_if_document
    from llm_perf_opt.report.cost_parallel import parallel_document
    from llm_perf_opt.report.terminal import render_text
    from llm_perf_opt.workflows.cost import CostRequest, estimate_cost
    from llm_perf_opt.workflows.cost_parallel import ParallelRequest

    parallel = ParallelRequest(tp, pp, ep, link, network, node_gpus, expert_exchange, collective_us, memory_share)
    request = CostRequest(
        *(overrides or [], model_config, config_dir, batch, prompt, context, dtype, kv_dtype, mla, hardware, decoder_only),
        *(images, image_height, image_width, image_tiles, parallel, peaks),
    )
    found = estimate_cost(request)
    if as_json:
        print_json(found.to_json())
        return
    if found.cost:
        print(render_text(cost_document(found.cost)))
    if found.hardware:
        if parallel.plan.devices == 1:
            print(render_text(what_if_document(found.rows, found.turning, found.hardware, found.part_of)), end="")
        if found.parallel:
            print(
                ("\n" if parallel.plan.devices == 1 else "") + render_text(parallel_document(found.parallel, found.model)), end=""
            )
