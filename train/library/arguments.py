"""Arguments of the functions of a loaded model, for type checkers and help(); these classes are never instantiated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wgrad.train.library.signature import Paths
from wgrad.train.options.generate_config import BatchOptions, PromptOptions, TextOptions
from wgrad.train.options.model_options import LoadOptions

Schema = Paths | Mapping[str, Any] | None  # path of a file, JSON text, or the schema itself


@dataclass(frozen=True, kw_only=True)
class TextArguments(TextOptions):
    """Arguments of `LoadedModel.generate` and `stream`."""

    json_schema: Schema = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class BatchArguments(BatchOptions):
    """Arguments of `LoadedModel.generate_many`."""

    json_schema: Schema = None  # type: ignore[assignment]


@dataclass(frozen=True)
class LoadArguments(LoadOptions):
    """Arguments of `load`."""

    model: Paths = ""  # type: ignore[assignment]
    adapter: Paths | None = None  # type: ignore[assignment]
    chat_template: Paths | None = field(default=None, kw_only=True)  # type: ignore[assignment]


@dataclass(frozen=True)
class GenerateArguments(PromptOptions):
    """Arguments of `generate`."""

    model: Paths = ""  # type: ignore[assignment]
    adapter: Paths | None = None  # type: ignore[assignment]
    chat_template: Paths | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    json_schema: Schema = field(default=None, kw_only=True)  # type: ignore[assignment]
    prompt: str = field(default="", kw_only=True, metadata={"help": "prompt to continue"})
