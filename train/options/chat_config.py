"""The options of `wgrad chat`: each one's name, type, default, help and rule."""

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
from wgrad.train.options.generate_config import Sampling
from wgrad.train.options.options import AT_LEAST_1, option
from wgrad.train.options.serve_config import CONTEXT, CONTEXT_HELP


@dataclass(frozen=True)
class ChatConfig(Sampling):
    """Whom to talk to, and how the next token is chosen. WgradError where a value breaks its rule."""

    model: str = option(
        "",
        "model: a folder, or a hub id such as org/name; needed unless --adapter names it",
        metavar="DIR_OR_HUB_ID",
        path=True,
    )
    adapter: str | None = option(None, "PEFT adapter to put on it", metavar="DIR", path=True)
    compare: bool = option(False, "with --adapter: answers of the model without it beside those with it")
    system: str = option("", "what the conversation begins with, as its system message", metavar="TEXT")
    max_new_tokens: int = option(512, "stop an answer after this many tokens", rule=AT_LEAST_1, metavar="N")
    context: int | None = option(None, f"most tokens of a conversation {CONTEXT_HELP}", rule=CONTEXT, metavar="N")
    device: str = option("auto", DEVICE_HELP, metavar="DEVICE")
    compute: str = option(AUTO, f"type of activations. {COMPUTE_HELP}", choices=COMPUTE_TYPES)
    stream_weights: str = option("auto", STREAM_HELP, choices=STREAM)
    memory_limit: str | None = option(None, LIMIT_HELP, rule=A_SIZE, metavar="SIZE")
    quantize: bool = option(True, "hold the weights in NF4, as in fine-tuning")

    def require(self, where: str = "") -> None:
        super().require(where)
        if not self.model and not self.adapter:
            raise WgradError("--model is required: give it, or an --adapter that names it")
        if self.compare and not self.adapter:
            raise WgradError("--compare: goes with --adapter: add that, or leave it out")
