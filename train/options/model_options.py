"""Options of all commands that open a model for inference: the model, and its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from wgrad.device.errors import WgradError
from wgrad.train.options.choices import AUTO, TEMPLATE_HELP, ComputeType, Stream
from wgrad.train.options.finetune_config import (
    A_SIZE,
    COMPUTE_HELP,
    DEVICE_HELP,
    LIMIT_HELP,
    STREAM_HELP,
)
from wgrad.train.options.options import Options, Rule, option

DEFAULT_CONTEXT = 4096  # tokens, for models that were made for more

_CONTEXT: Rule = ("must be at least 2", lambda v: v >= 2)


@dataclass(frozen=True, kw_only=True)
class OnDevice(Options):
    """Options of a model's device and dtypes."""

    device: str = option("auto", DEVICE_HELP, metavar="DEVICE", group="machine")
    compute: ComputeType = option(
        AUTO, f"dtype of activations. {COMPUTE_HELP}", choices=get_args(ComputeType), group="machine"
    )
    stream_weights: Stream = option("auto", STREAM_HELP, choices=get_args(Stream), group="machine")
    memory_limit: str | None = option(None, LIMIT_HELP, rule=A_SIZE, metavar="SIZE", group="machine")
    quantize: bool = option(True, "hold the weights in NF4, as in fine-tuning", group="machine")


@dataclass(frozen=True, kw_only=True)
class WithTemplate(OnDevice):
    """Options of chat templates."""

    chat_template: str | None = option(None, TEMPLATE_HELP, metavar="FILE_OR_NAME", path=True)


@dataclass(frozen=True)
class OneModel(WithTemplate):
    """Options of a model, with or without an adapter."""

    model: str = option(
        "",
        "model: a folder, a GGUF file, or a Hub id such as org/name; needed unless --adapter names it",
        metavar="DIR_OR_HUB_ID",
        path=True,
    )
    adapter: str | None = option(None, "PEFT adapter to apply to the model", metavar="DIR", path=True)

    def require(self, where: str = "") -> None:
        super().require(where)
        if not self.model and not self.adapter:
            raise WgradError("--model is required: give it, or an --adapter that names it")


@dataclass(frozen=True, kw_only=True)
class WithContext(OnDevice):
    """Options of a model's context, for commands that do not know their texts in advance."""

    context: int | None = option(
        None,
        f"most tokens of a prompt or conversation with its answer (default: what the model was made for, at most "
        f"{DEFAULT_CONTEXT})",
        rule=_CONTEXT,
        metavar="N",
        group="limits",
    )


@dataclass(frozen=True)
class LoadOptions(WithContext, OneModel):
    """Options of commands that keep a model open."""
