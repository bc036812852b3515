"""Rules on a compiled decode on a GPU: which of its kernels are far from their roofline time, why, and what to change.

The kernels of a compiled decode run back to back, so faster kernels shorten the step. Two figures of the run itself say what is
possible: the share of the bandwidth that its best component reaches, and the time that a generated kernel takes however little
it reads (`Reach`).
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from llm_perf_opt.analysis.cost_model.architecture import GroupedAttention, Mlp
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.compiled_reach import (
    EXPERTS,
    LINEAR,
    PRODUCT_KERNELS,
    compiled_decode,
    reach_of,
    seconds_of,
)
from llm_perf_opt.analysis.findings.decode_cost import Decode, rooflines
from llm_perf_opt.analysis.findings.finding import (
    ATTENTION,
    PRODUCTS,
    Bounds,
    Claim,
    Grounds,
    ToTry,
    finding,
    place_of,
    saving_of,
    unit_time,
    wall_clock_saving,
)
from llm_perf_opt.analysis.findings.host import launches_one_by_one
from llm_perf_opt.analysis.kernels.classes import KernelClass
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_launches import KernelTotal
from llm_perf_opt.core.units import duration, percentage

WORTHWHILE = 0.02
"""The least share of a decode step that a change must save to be a finding; twice what a comparison can confirm."""
SEARCHED = 0.25
"""Share of the time above what is possible that a search over library kernels is assumed to save."""
FUSED = 0.25
"""Share of the small kernels' time that fusing them by hand is assumed to save."""
MOST_ROWS = 8
"""Up to this many sequences, a compiled step reads 8-bit weights directly."""
MANY = 100
"""From this many small kernels per step on, they are a finding."""
_PREPARES = re.compile(r"^triton_(poi|for)_\w{0,1000}(scaled_dot_product|flex_attention)")
_BACKENDS = (
    ("cudnn", re.compile("cudnn", re.I)),
    ("efficient", re.compile("fmha|efficient", re.I)),
    ("flash", re.compile("flash")),
)
"""Backends by the names of their kernels; cuDNN's also say `flash`."""


def slow_products(evidence: Evidence) -> Finding | None:
    """The matrix products of a compiled decode read their weights at a fraction of the bandwidth."""
    decode = compiled_decode(evidence)
    reach = reach_of(decode) if decode else None
    if decode is None or reach is None or decode.formats.quantized or not reach.products:
        return None  # those of quantized weights are our own, or have no names that tell them from other reductions
    stage, parts = decode.stage, reach.products
    possible = decode.work.batch_size == 1 and decode.architecture.model_type not in _CONV1D
    tried = possible and bool(evidence.facts.setting("runtime.row_kernel"))
    own = possible and not tried and not launches_one_by_one(stage)
    above = [max(part.spent_ns - reach.possible_ns(part), 0.0) for part in parts]
    most = sum(max(part.spent_ns - reach.least_ns(part), 0.0) for part in parts)
    bounds = (0.0, (1.0 if own else SEARCHED) * sum(above), most)
    spent, roofline = (sum(values) for values in zip(*((part.spent_ns, part.roofline_ns) for part in parts), strict=True))
    if bounds[1] < WORTHWHILE * stage.budget.wall_ns:
        return None
    claim: Claim = (
        f"The matrix products of decode take {unit_time(stage, spent)} per {stage.unit}, {spent / roofline:.1f} × roofline "
        f"({unit_time(stage, roofline)}): they read their weights at {percentage(roofline / spent)} of the {reach.peaks} "
        "bandwidth.",
        f"Short products do not reach the bandwidth: a kernel takes time however little it reads ({duration(reach.fixed_ns, 3)} "
        "for generated kernels of this run).",
    )
    because = _WHY_OWN if own else _WHY_SEARCHED
    rows = (*(reach.row(part, stage) for part in parts), reach.source)
    to_try = _OWN if own else _search_kernels(evidence, tried=tried)
    return _device_finding(decode, "slow_products", claim, (rows, because), bounds, to_try)


_OWN = ToTry(
    ("runtime.row_kernel=true",),
    "Multiply one row with a kernel that is made for it, and not with the library's kernels for many rows.",
    "Use a kernel for products of one row",
    PRODUCTS,
)
_CONV1D = ("gpt2",)
"""Models whose layers are Conv1D instead of Linear, except the LM head: `row_kernel` leaves them as they are."""
_WHY_OWN = "such a product is expected to take the time of a generated kernel plus its bytes at the best rate of this run"
_WHY_SEARCHED = (
    f"how fast the other kernels are is unknown; {percentage(SEARCHED)} of the time above what this run shows to be possible is "
    "assumed"
)


def _search_kernels(evidence: Evidence, *, tried: bool) -> ToTry:
    """Return what to try for products that `row_kernel` cannot improve. `tried`: it is used for them already."""
    title = "Search for faster product kernels"
    if tried or evidence.facts.setting("runtime.compile") == "max-autotune":
        return ToTry(change="Use an engine with its own kernels, or serve larger batches.", title=title)
    return ToTry(
        ("runtime.compile=max-autotune",),
        'Compile with torch.compile(mode="max-autotune"), which times several kernels.',
        title,
        PRODUCTS,
    )


def separate_projections(evidence: Evidence) -> Finding | None:
    """A compiled decode multiplies the same input by the query, key and value matrices one after the other."""
    decode = compiled_decode(evidence)
    reach = reach_of(decode) if decode else None
    if decode is None or reach is None or evidence.facts.setting("runtime.fuse_projections"):
        return None
    stage, layers = decode.stage, decode.architecture.layers
    grouped = [layer.attention for layer in layers if isinstance(layer.attention, GroupedAttention)]
    part = next((part for part in reach.products if part.name == "attention_projections"), None)
    if len(grouped) < len(layers) or part is None or part.kernels < _SEPARATE * len(layers) * stage.units:
        return None
    mean, read = (spent / part.kernels for spent in (part.spent_ns, part.roofline_ns / reach.share))
    fixed = max(mean - read, reach.fixed_ns)
    gated = [layer for layer in layers if isinstance(layer.feed_forward, Mlp) and layer.feed_forward.gated]
    expected, most = (count * fixed * stage.units for count in (2 * len(layers), 2 * len(layers) + len(gated)))
    if expected < WORTHWHILE * stage.budget.wall_ns:
        return None
    claim: Claim = (
        f"Each of {len(layers)} layers multiplies the same input by the query, key and value matrices in three kernels"
        f"{', and by the two matrices of its gated MLP in two' if gated else ''}.",
        f"A product of attention takes {duration(mean, 3)} on average; reading its matrix takes {duration(read, 3)} of that.",
    )
    because = (
        "each product of attention that is merged into another is expected to save what such a product takes on average beyond "
        "reading its matrix; longer products of an MLP may save nothing"
    )
    to_try = ToTry(
        ("runtime.fuse_projections=true",),
        "Store matrices that multiply the same input as one (query, key and value; gate and up) and multiply once.",
        "Fuse the projections",
        PRODUCTS,
    )
    rows = (reach.row(part, stage), reach.source)
    return _device_finding(decode, "separate_projections", claim, (rows, because), (0.0, expected, most), to_try)


_SEPARATE = 3.5
"""Kernels of a layer's attention projections, from which on query, key, value and output are products of their own."""


def slow_decode_attention(evidence: Evidence) -> Finding | None:
    """The attention of a compiled decode, with the kernels that prepare its inputs, is far from its roofline time."""
    decode = compiled_decode(evidence)
    reach = reach_of(decode) if decode else None
    if decode is None or reach is None:
        return None
    stage = decode.stage
    kernels = [row for row in stage.kernels if row.kind is KernelClass.ATTENTION]
    prepare = [row for row in stage.kernels if _PREPARES.search(row.name) and row.kind is not KernelClass.ATTENTION]
    core, before = (sum(row.total_ns for row in rows) for rows in (kernels, prepare))
    layers = len(decode.architecture.layers) * stage.units
    roofline = reach.roofline_ns("attention_core")
    spent = core + before
    backend = next((name for name, pattern in _BACKENDS if any(pattern.search(row.name) for row in kernels)), "")
    to_try = _other_attention(evidence, backend, copies=before > core / 3)
    above = spent - roofline - layers * reach.fixed_ns
    if not kernels or not roofline or above / 2 < WORTHWHILE * stage.budget.wall_ns:
        return None
    because = "how fast the other kernels are is unknown; the expected saving is half of the time above what is possible"
    bounds = (0.0, above / 2, spent - roofline)
    claim: Claim = (
        f"Attention of decode takes {unit_time(stage, spent)} per {stage.unit}, {spent / roofline:.1f} × roofline "
        f"({unit_time(stage, roofline)}), for a batch of {decode.work.batch_size}.",
        f"{unit_time(stage, before)} of it are kernels that copy or mask its inputs." if before else "",
        "At a small batch, few blocks share the work: kernels that split the keys, and read grouped heads without copies, are "
        "faster.",
    )
    rows = (
        f"attention kernels: {unit_time(stage, core)} per {stage.unit}, {stage.per_unit(sum(row.calls for row in kernels)):,.0f} "
        f"kernels{f' ({backend})' if backend else ''}",
        *_kernel_rows([*kernels, *prepare], stage),
    )
    return _device_finding(decode, "slow_decode_attention", claim, (rows, because), bounds, to_try)


def _other_attention(evidence: Evidence, backend: str, *, copies: bool) -> ToTry:
    """Return the attention to try: another backend of SDPA. For copies of grouped heads, no setting is known to be faster."""
    words = "Use an attention that splits the keys over blocks and reads grouped key and value heads without copying them."
    title = "Try another attention implementation"
    chosen = evidence.facts.setting("runtime.attention_backend") not in (None, "auto")
    if copies or chosen or evidence.facts.attention not in ("", "auto", "sdpa"):
        return ToTry(change=words, title=title)
    other = "efficient" if backend == "cudnn" else "cudnn"
    return ToTry((f"runtime.attention_backend={other}",), words, title, ATTENTION)


def many_small_kernels(evidence: Evidence) -> Finding | None:
    """A decode step in CUDA graphs consists of many kernels that take little more than the shortest possible time."""
    decode = compiled_decode(evidence)
    reach = reach_of(decode) if decode else None
    if decode is None or reach is None or launches_one_by_one(decode.stage):
        return None
    stage = decode.stage
    short = 2 * reach.fixed_ns
    small = [row for row in stage.kernels if row.mean_ns <= short and row.kind not in (*PRODUCT_KERNELS, KernelClass.ATTENTION)]
    count, spent = (
        (sum(values) for values in zip(*((row.calls, row.total_ns) for row in small), strict=True)) if small else (0, 0)
    )
    gaps = max(stage.budget.idle_ns, 0) * count / max(stage.time.kernels, 1)
    if count < MANY * stage.units or FUSED * (spent + gaps) < WORTHWHILE * stage.budget.wall_ns:
        return None
    claim: Claim = (
        f"{stage.per_unit(count):,.0f} of {stage.per_unit(stage.time.kernels):,.0f} kernels per {stage.unit} take at most "
        f"{duration(short, 2)} each: {unit_time(stage, spent)}, and {unit_time(stage, gaps)} between them.",
        "Most are norms, positions, activations and cache writes, which the compiler cannot fuse with products and attention "
        "of a library.",
    )
    because = f"how many of them can be fused is unknown; the expected saving is {percentage(FUSED)} of their time and gaps"
    change = (
        "Fuse them with their neighbors, or run the model in an engine with fused kernels for norms, positions and cache writes."
    )
    bounds = (0.0, FUSED * (spent + gaps), spent + gaps)
    to_try = ToTry(change=change, title="Fuse the small kernels of decode")
    return _device_finding(decode, "many_small_kernels", claim, (_kernel_rows(small, stage), because), bounds, to_try)


def eight_bit_weights(evidence: Evidence) -> Finding | None:
    """A compiled decode reads its weights in 16 or 32 bits; 8 bits are fewer bytes. Lossy."""
    decode = compiled_decode(evidence)
    if decode is None or decode.work.batch_size > MOST_ROWS:
        return None  # more rows are multiplied with converted weights, which moves more bytes
    setting = evidence.facts.setting  # one row has a kernel of its own, several are generated, which max-autotune tunes
    tuned = decode.work.batch_size == 1 or setting(_DESCENT) or setting("runtime.compile") == "max-autotune"
    tuning = () if tuned else (f"{_DESCENT}=true",)
    return _narrow_weights(decode, "eight_bit_weights", 8, ("runtime.quantization=int8", *tuning))


def four_bit_weights(evidence: Evidence) -> Finding | None:
    """A compiled decode reads its weights in 16 or 32 bits; 4 bits are a fraction of the bytes. Lossy."""
    decode = compiled_decode(evidence)
    if decode is None or decode.formats.weights != "bf16":
        return None
    return _narrow_weights(decode, "four_bit_weights", 4, ("runtime.quantization=int4",), _INT4_SCALES, _INT4_EXPECTED)


_DESCENT = "runtime.coordinate_descent_tuning"
_INT4_SCALES = 0.25
"""Bits per weight for scale and offset: 2 × 16 per group of 128. One scale per output channel hardly counts."""
_INT4_EXPECTED = 0.5
"""Share of the saved bytes' time that is expected. On an H200, torch's int4 kernels read the weights of qwen2_5_1_5b at 29 % of
the bandwidth, the kernels for 8 bits at 47 and 50 %."""


def _narrow_weights(
    decode: Decode, id: str, bits: int, overrides: tuple[str, ...], scales: float = 0.0, share_expected: float = 1.0
) -> Finding | None:
    """Return the finding that fewer bytes of weights take less time: at the bandwidth, and at most in proportion."""
    if decode.formats.quantized:
        return None
    stage = decode.stage
    now = decode.roofline(decode.steps, decode.formats)
    then = decode.roofline(decode.steps, replace(decode.formats, quantized=LINEAR, quantized_bits=bits + scales))
    if now is None or then is None:
        return None
    saved = (now.seconds - then.seconds) * 1e9
    share = 1 - sum(seconds_of(then, LINEAR)) / max(sum(seconds_of(now, LINEAR)), 1e-12)
    products = sum(row.total_ns for row in stage.kernels if row.kind in PRODUCT_KERNELS and not EXPERTS.search(row.name))
    if share_expected * saved < WORTHWHILE * stage.budget.wall_ns:
        return None
    weights = sum(seconds_of(now, (*LINEAR, "router", "experts"))) / now.seconds
    claim: Claim = (
        f"Reading the weights takes {percentage(weights)} of the roofline time of a decode step; with {bits} bits per weight, "
        f"the roofline time is {percentage(1 - then.seconds / now.seconds)} shorter.",
        "Quantized weights change the output (lossy).",
    )
    because = (
        f"the saving is {'' if share_expected == 1 else f'{percentage(share_expected)} of '}the time that the saved bytes take "
        "at the device's bandwidth; conversions take time, and other kernels run, which may be slower or faster"
    )
    to_try = ToTry(
        overrides,
        f"Quantize the weights of the linear layers to {bits} bits. The output changes: compare its quality, not only its time.",
        f"Quantize the weights to {bits} bits (lossy)",
        PRODUCTS,
    )
    rows = (rooflines(stage, now, then, f"{_bits(decode)} and {bits} bits"), _MEANT)
    bounds = (0.0, share_expected * saved, max(products * share, saved))
    return _device_finding(decode, id, claim, (rows, because), bounds, to_try)


_MEANT = "quantized: linear layers of attention, MLP and LM head; embedding, norms and experts stay"


def _bits(decode: Decode) -> int:
    return 32 if decode.formats.weights == "fp32" else 16


def _kernel_rows(rows: Sequence[KernelTotal], stage: StageEvidence) -> tuple[str, ...]:
    longest = sorted(rows, key=lambda row: -row.total_ns)[:3]
    return tuple(
        f"{short_name(row.name, 90)}: {stage.per_unit(row.calls):,.0f} per {stage.unit}, {duration(row.mean_ns, 3)} each, "
        f"{unit_time(stage, row.total_ns)}"
        for row in longest
    )


def _device_finding(
    decode: Decode, id: str, claim: Claim, grounds: tuple[tuple[str, ...], str], bounds: Bounds, to_try: ToTry
) -> Finding:
    """Return a finding on kernels; its saving counts as far as the stage waits for the device."""
    on_wall = wall_clock_saving(decode.stage, bounds)
    rows, because = grounds
    why = f"{because}; {on_wall.because}" if on_wall.because else because
    saving = saving_of(decode.stage, *on_wall.bounds)
    return finding(
        id, place_of(decode.evidence, decode.stage), (*claim, on_wall.claim), Grounds(rows, "low", why), saving, to_try
    )
