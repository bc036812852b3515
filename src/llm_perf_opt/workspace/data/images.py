"""Images for a vision-language model: one of random pixels per sequence, whose tokens are part of the prompt length."""

from dataclasses import dataclass, replace

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.workspace.data.prompts import Prompts


@dataclass(frozen=True)
class Picture:
    """An image as the model sees it."""

    tokens: int
    """Number of tokens it takes in the prompt."""
    token_id: int
    """The id of such a token."""
    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of its pixel values."""
        return self.channels, self.height, self.width


def with_pictures(prompts: Prompts, picture: Picture, longest: int, seed: int) -> Prompts:
    """Return every prompt with one image after its first token, at most `longest` tokens; its text is shortened."""
    least = picture.tokens + 2
    if longest < least:
        raise ConfigError(
            f"An image takes {picture.tokens} tokens of this model's prompt, but runtime.prompt_tokens={longest}.",
            f"Set runtime.prompt_tokens={least} or more: one token before the image and one after it.",
        )
    placeholder = 0 if picture.token_id else 1
    room = longest - picture.tokens
    texts = prompts.texts
    if texts is not None:
        texts = replace(texts, cut=sum(len(ids) > room for ids in prompts.ids[: texts.used]), limit=room)
    found = []
    for ids in prompts.ids:
        text = [placeholder if token == picture.token_id else token for token in ids[:room]]
        text += [placeholder] * (2 - len(text))
        found.append((text[0], *[picture.token_id] * picture.tokens, *text[1:]))
    source = f"{prompts.source}; one picture of random pixels each, seed {seed} ({picture.tokens} of the prompt's tokens)"
    pixels = (len(found), *picture.shape)
    return replace(prompts, ids=tuple(found), source=source, pixels=pixels, pixel_seed=seed, texts=texts)
