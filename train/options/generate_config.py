"""The options of `wgrad generate`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.errors import WgradError
from wgrad.train.options.finetune_config import (
    A_SIZE,
    AUTO,
    COMPUTE_HELP,
    COMPUTE_TYPES,
    DEVICE_HELP,
    LIMIT_HELP,
    STREAM,
    STREAM_HELP,
)
from wgrad.train.options.options import AT_LEAST_1, NOT_NEGATIVE, SEED, Options, option


@dataclass(frozen=True)
class Sampling(Options):
    """How the next token is chosen."""

    temperature: float = option(0.8, "0 takes the likeliest token", rule=NOT_NEGATIVE, metavar="T", group="sampling")
    top_k: int = option(0, "choose among the K likeliest; 0: off", rule=NOT_NEGATIVE, metavar="K", group="sampling")
    top_p: float = option(
        0.95,
        "choose among the likeliest of total P; 1: off",
        rule=("must be above 0 and at most 1 (1: off)", lambda v: 0 < v <= 1),
        metavar="P",
        group="sampling",
    )
    seed: int = option(0, "the same seed gives the same text", rule=SEED, metavar="N", group="sampling")


GREEDY = Sampling(temperature=0.0, top_p=1.0)  # always the likeliest token


@dataclass(frozen=True)
class GenerateConfig(Sampling):
    """What to continue, with what, and how the next token is chosen. WgradError where a value breaks its rule."""

    model: str = option(
        "",
        "model: a folder, or a hub id such as org/name; needed unless --adapter names it",
        metavar="DIR_OR_HUB_ID",
        path=True,
    )
    adapter: str | None = option(None, "PEFT adapter to put on it", metavar="DIR", path=True)
    prompt: str = option("", "text to go on from; - reads it from standard input", metavar="TEXT")
    prompts: str | None = option(
        None,
        "many prompts: JSON lines with 'prompt' or 'messages'; each comes back with 'generated' beside its other keys. "
        "- reads them from standard input",
        metavar="FILE",
        path=True,
    )
    out: str | None = option(None, "with --prompts: new file for these lines", metavar="FILE", path=True)
    batch_size: int = option(8, "with --prompts: how many are answered at once", rule=AT_LEAST_1, metavar="B")
    chat: bool = option(False, "the prompt is a user's message: apply the model's chat template")
    max_new_tokens: int = option(128, "stop after this many tokens", rule=AT_LEAST_1, metavar="N")
    device: str = option("auto", DEVICE_HELP, metavar="DEVICE")
    compute: str = option(AUTO, f"type of activations. {COMPUTE_HELP}", choices=COMPUTE_TYPES)
    stream_weights: str = option("auto", STREAM_HELP, choices=STREAM)
    memory_limit: str | None = option(None, LIMIT_HELP, rule=A_SIZE, metavar="SIZE")
    quantize: bool = option(True, "hold the weights in NF4, as in fine-tuning")

    def require(self, where: str = "") -> None:
        super().require(where)
        if not self.model and not self.adapter:
            raise WgradError("--model is required: give it, or an --adapter that names it")
        if not self.prompt and not self.prompts:
            raise WgradError("--prompt is required: give it, or --prompts FILE")
        if self.prompt and self.prompts:
            raise WgradError("--prompts: --prompt is given already: leave one of the two out")
        if self.out is not None and not self.prompts:
            raise WgradError("--out: goes with --prompts: add that, or redirect standard output")
