"""The options of `wgrad generate`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.errors import WgradError
from wgrad.train.options.model_options import OneModel
from wgrad.train.options.options import AT_LEAST_1, NOT_NEGATIVE, SEED, Options, option


@dataclass(frozen=True, kw_only=True)
class Sampling(Options):
    """Options for choosing the next token."""

    temperature: float = option(0.8, "0 takes the likeliest token", rule=NOT_NEGATIVE, metavar="T", group="sampling")
    top_k: int = option(0, "choose among the K likeliest; 0: off", rule=NOT_NEGATIVE, metavar="K", group="sampling")
    top_p: float = option(
        0.95,
        "choose among the likeliest of total P; 1: off",
        rule=("must be above 0 and at most 1 (1: off)", lambda v: 0 < v <= 1),
        metavar="P",
        group="sampling",
    )
    min_p: float = option(
        0.0,
        "choose among tokens at least P times as likely as the likeliest; 0: off",
        rule=("must be between 0 and 1 (0: off)", lambda v: 0 <= v <= 1),
        metavar="P",
        group="sampling",
    )
    repetition_penalty: float = option(
        1.0,
        "make tokens less likely that already occur in prompt or answer: 1.1 a little, 1: off",
        rule=("must be between 0.01 and 100 (1: off)", lambda v: 0.01 <= v <= 100),
        metavar="F",
        group="sampling",
    )
    seed: int = option(0, "the same seed gives the same text", rule=SEED, metavar="N", group="sampling")


GREEDY = Sampling(temperature=0.0, top_p=1.0)  # always take the likeliest token


@dataclass(frozen=True, kw_only=True)
class TextOptions(Sampling):
    """Options for reading a prompt and limiting its answer."""

    chat: bool = option(False, "the prompt is a user's message: apply the model's chat template")
    max_new_tokens: int = option(128, "stop after this many tokens", rule=AT_LEAST_1, metavar="N")
    json_schema: str | None = option(
        None,
        "write JSON that follows this schema, or the schema in this file; needs the extra guided",
        metavar="FILE_OR_JSON",
        path=True,
        json=True,
    )
    regex: str | None = option(
        None, "write text that this regular expression matches as a whole; needs the extra guided", metavar="PATTERN"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.json_schema is not None and self.regex is not None:
            raise WgradError("--regex: --json-schema is given already: leave one of the two out")

    @property
    def is_guided(self) -> bool:
        """Return whether the answer has to follow a grammar."""
        return self.json_schema is not None or self.regex is not None

    @property
    def is_watched(self) -> bool:
        """Return whether the host must see each token before it requests the next."""
        return self.is_guided or self.repetition_penalty != 1


@dataclass(frozen=True, kw_only=True)
class BatchOptions(TextOptions):
    """Options for many prompts."""

    batch_size: int = option(8, "with many prompts: how many are answered at once", rule=AT_LEAST_1, metavar="B")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(TextOptions, OneModel):
    """Options for one prompt and the model that continues it."""

    prompt: str = option("", "prompt to continue; - reads it from standard input", metavar="TEXT")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(BatchOptions, PromptOptions):
    """Options of `wgrad generate`. Raises WgradError if a value breaks its rule."""

    prompts: str | None = option(
        None,
        "many prompts: JSON lines with 'prompt' or 'messages', which are written again with a key 'generated'. - reads "
        "them from standard input",
        metavar="FILE",
        path=True,
    )
    out: str | None = option(None, "with --prompts: new file for these lines", metavar="FILE", path=True)

    def require(self, where: str = "") -> None:
        super().require(where)
        if not self.prompt and not self.prompts:
            raise WgradError("--prompt is required: give it, or --prompts FILE")
        if self.prompt and self.prompts:
            raise WgradError("--prompts: --prompt is given already: leave one of the two out")
        if self.out is not None and not self.prompts:
            raise WgradError("--out: goes with --prompts: add that, or redirect standard output")
