"""The vision-language model that a Hugging Face configuration describes, and the cost of a prefill with images."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.blocks import Fields
from llm_perf_opt.analysis.cost_model.cost import (
    BF16,
    Formats,
    ModelCost,
    StageCost,
    combined,
    stage_of,
    step_cost,
)
from llm_perf_opt.analysis.cost_model.vision import ModuleWork
from llm_perf_opt.analysis.cost_model.vision_families import FAMILIES, Family
from llm_perf_opt.analysis.cost_model.vision_inputs import ImageRequest
from llm_perf_opt.analysis.cost_model.work import ComponentName, Step, Work
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.vision_records import VisionInput

LANGUAGE_MODULE = "model.language_model"
_OUTSIDE_LANGUAGE: frozenset[ComponentName] = frozenset({"embedding", "lm_head"})
_BODY_MODULE = "model"
_HEAD_MODULE = "lm_head"
_MOST_IMAGES = 1_000_000
"""More than any batch has; a typo beyond it would fill the memory."""


@dataclass(frozen=True)
class Vision:
    """The image encoders and the projector of a vision-language model."""

    model_type: str
    width: int
    """Of the text decoder."""
    family: Family = field(repr=False)
    _config: Fields = field(repr=False)

    def work(self, images: VisionInput) -> tuple[ModuleWork, ...]:
        """Return the work of every module on these images."""
        return tuple(self.family.work(self._config, self.width, images))

    @property
    def params(self) -> int:
        """All parameters, also those that some images do not use."""
        return sum(entry.params for entry in self.work(self.input(ImageRequest(1), 1)))

    def input(self, request: ImageRequest, sequences: int) -> VisionInput:
        """Return the tensors and tokens of these images in every sequence."""
        if request.tiles and not self.family.has_tiles:
            raise ConfigError(f"{self.model_type} does not cut images into tiles.", "Omit the tiles.")
        number = request.images * sequences
        if number > _MOST_IMAGES:
            raise ConfigError(f"{number:,} images are more than {_MOST_IMAGES:,}.", "Use fewer images or a smaller batch.")
        found = self.family.tensors(self._config, replace(request, images=number))
        tokens = (request.images * found.tokens,) * sequences
        return VisionInput(number, found.shapes, found.grids, tokens, "computed", (request.tiles,) * number)

    def step(self, images: VisionInput, step: Step) -> Step:
        """Return a step whose new tokens include those of the images."""
        tokens = sum(images.image_tokens)
        pairs = 0
        if self.family.attends_in_blocks and images.images:
            block = tokens // images.images
            pairs = images.images * block * (block - 1) // 2
        return replace(step, image_tokens=tokens, block_pairs=pairs)


def vision_of(config: object) -> Vision | None:
    """Return the image encoders and the projector that a config describes; None for a model_type that is not in FAMILIES."""
    if not isinstance(config, Mapping):
        return None
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(model_type, str):
        return None
    text = Fields(text_fields(config, family), family.text_type, "text_config.")
    return Vision(model_type, text.size("hidden_size"), family, Fields(config, model_type))


def text_fields(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the config of the text decoder, with the setting of its head that applies to the whole model."""
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(f"text_config must be a mapping of fields, not {type(inner).__name__}.")
    # Published Qwen2.5-VL configs have the fields of the text decoder at the top level.
    fields: dict[str, object] = {**config, "model_type": None} if inner is None else dict(inner)
    if fields.get("model_type") is None:
        fields["model_type"] = family.text_type
    tied = config.get("tie_word_embeddings")
    inside = fields.get("tie_word_embeddings") if family.tied_by_text else False
    fields["tie_word_embeddings"] = inside or (family.tied if tied is None else tied)
    return fields


def modules_cost(modules: Iterable[ModuleWork], formats: Formats = BF16) -> StageCost:
    """Return the cost of these modules together, per component."""
    totals: dict[ComponentName, Work] = {}
    for entry in modules:
        totals[entry.component] = totals.get(entry.component, Work()) + entry.work
    return stage_of(totals, formats)


def prefill_cost(
    architecture: Architecture, step: Step, formats: Formats, vision: Vision | None = None, images: VisionInput | None = None
) -> StageCost:
    """Return the cost of a prefill, with its images if it has any. The new tokens of `step` include those of the images."""
    if vision is None or images is None:
        return step_cost(architecture, step, formats)
    return combined([modules_cost(vision.work(images), formats), step_cost(architecture, vision.step(images, step), formats)])


def submodule_cost(path: str, modules: Sequence[ModuleWork], prefill: StageCost, formats: Formats) -> Maybe[StageCost]:
    """Return the cost of a submodule in a prefill with images; `prefill` is that of the whole model.

    Missing for a submodule that the cost model does not count separately.
    """
    own = path.removesuffix(".*")
    if own == _BODY_MODULE:
        return StageCost(tuple(part for part in prefill.components if part.name != _HEAD_MODULE))
    inside = [entry for entry in modules if f"{entry.module}.".startswith(f"{own}.")]
    if inside:
        return modules_cost(inside, formats)
    images = {entry.component for entry in modules}
    if own == LANGUAGE_MODULE:
        left_out = images | _OUTSIDE_LANGUAGE
        return StageCost(tuple(part for part in prefill.components if part.name not in left_out))
    if own == _HEAD_MODULE:
        return StageCost(tuple(part for part in prefill.components if part.name == _HEAD_MODULE))
    return Missing("the cost model does not count this submodule separately")


@dataclass(frozen=True)
class ImagePrompt:
    """Images in every prompt of a batch."""

    vision: Vision
    request: ImageRequest
    """Of one sequence."""

    @property
    def tokens(self) -> int:
        """Image tokens of one sequence."""
        return self.vision.input(self.request, 1).image_tokens[0]

    def input(self, batch: int) -> VisionInput:
        """Return the images of the batch."""
        return self.vision.input(self.request, batch)


def with_images(text: ModelCost, prompt: ImagePrompt) -> ModelCost:
    """Return the cost of the same request with images in every prompt, in addition to its text."""
    images = prompt.input(text.batch)
    modules = prompt.vision.work(images)
    tokens = text.prompt + prompt.tokens
    paths = dict.fromkeys(entry.module for entry in modules)
    return replace(
        text,
        prompt=tokens,
        prefill=prefill_cost(text.architecture, Step(text.batch, tokens), text.formats, prompt.vision, images),
        images=images,
        modules=tuple((path, modules_cost([entry for entry in modules if entry.module == path], text.formats)) for path in paths),
    )
