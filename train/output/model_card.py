"""Model card (README.md) of a trained model: base model, data, options, losses, and how to load it.

Since the card may be published, it names folders and files of this machine by their last part only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

import wgrad
from wgrad.train.options.data_sources import STDIN, sources_of
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.options import show
from wgrad.train.options.unused_options import unused_options
from wgrad.train.output.card_use import Contents, use_of

CARD_FILE = "README.md"
_LONGEST_CARD = 1 << 20  # bytes; ours have a few thousand
MARK = "<!-- Written by wgrad. Remove this line to keep your own changes. -->"
KINDS = ("adapter", "model", "gguf")
# Options that a card shows even if they are the defaults.
_ALWAYS = ("objective", "learning_rate", "lora_r", "lora_alpha", "batch_size", "gradient_accumulation_steps",
           "max_length", "epochs")  # fmt: skip
_GROUPS = ("adapter", "training")
_LIBRARIES = {"adapter": "peft", "model": "transformers", "gguf": "gguf"}
_RELATIONS = {"adapter": "adapter", "model": "finetune", "gguf": "quantized"}


@dataclass(frozen=True)
class Card:
    """Contents of a model card.

    Attributes:
        kind: One of KINDS.
        base: Base model of the run.
        on_hub: Whether `base` is an id on the Hub.
        config: Options of the run; {}: not known.
        results: Contents of results.json; {}: not known.
        repo: Id of the model on the Hub; "": it has none yet.
        curve: Whether loss.svg is next to the card.
        contents: Properties of the model's files.
    """

    kind: str
    base: str
    on_hub: bool
    config: Mapping[str, Any]
    results: Mapping[str, Any]
    repo: str = ""
    curve: bool = False
    contents: Contents = Contents()

    @property
    def base_name(self) -> str:
        """Name of the base model for other people."""
        return self.base if self.on_hub else Path(self.base).name

    def text(self) -> str:
        """Return the Markdown text with its metadata."""
        name = self.repo.rpartition("/")[2] or f"A model trained on {self.base_name}"
        parts = [self._metadata(), MARK, f"# {name}", self._summary()]
        if rows := self._losses():
            parts += ["## Training", _table(("", "before", "after"), rows)]
            if self.curve:
                parts.append("![Loss by step](loss.svg)")
        if rows := self._options():
            parts += ["## Options", _table(("option", "value"), rows)]
        base = self.base if self.on_hub else "BASE_MODEL"
        use = use_of(self.kind, self.contents, self.repo or "OWNER/NAME", base, self.on_hub)
        return "\n\n".join([*parts, "## Use it", *use]) + "\n"

    def _metadata(self) -> str:
        values: dict[str, Any] = {"library_name": _LIBRARIES[self.kind], "pipeline_tag": self.contents.task}
        if self.on_hub:
            values |= {"base_model": self.base, "base_model_relation": _RELATIONS[self.kind]}
        values["tags"] = ["wgrad", *(["lora"] if self.kind == "adapter" else [])]
        data = [path.partition(":")[0] for path, on_hub in self._data() if on_hub]
        if data:
            values["datasets"] = data
        return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}---"

    def _summary(self) -> str:
        what = {
            "adapter": f"A {self.contents.method} adapter for",
            "model": "A model fine-tuned from",
            "gguf": "A GGUF model made from",
        }
        base = f"[{self.base}](https://huggingface.co/{self.base})" if self.on_hub else f"`{self.base_name}`"
        data = ", ".join(f"`{path}`" for path, _ in self._data())
        trained = f", trained on {data}" if data else ""
        return f"{what[self.kind]} {base}{trained}, with wgrad {wgrad.__version__}."

    def _data(self) -> list[tuple[str, bool]]:
        """Return the data sources by names for other people, and whether each is on the Hub."""
        found = []
        for source in sources_of(tuple(self.config.get("data") or ())):
            path = source.path
            local = path == STDIN or path.startswith("<") or Path(path).exists() or path.count("/") != 1
            on_hub = not local and not Path(path).suffix
            name = {STDIN: "standard input"}.get(path, path.strip("<>") if path.startswith("<") else Path(path).name)
            found.append((path if on_hub else name, on_hub))
        return found

    def _losses(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for key, value in self.results.items():
            if key.startswith("held_out_") and key.endswith("_after") and isinstance(value, (int, float)):
                name = key.removeprefix("held_out_").removesuffix("_after")
                before = self.results.get(f"held_out_{name}_before")
                shown = f"{before:.4f}" if isinstance(before, (int, float)) else "–"
                rows.append((f"held-out {name.replace('_', ' ')}", shown, f"{value:.4f}"))
        if steps := self.results.get("result_step") or self.results.get("steps"):
            rows.append(("steps", "", str(steps)))
        return rows

    def _options(self) -> list[tuple[str, ...]]:
        if not self.config:
            return []
        unused = unused_options(self.config)
        rows: list[tuple[str, ...]] = []
        for field in fields(RunOptions):
            meta, value = field.metadata, self.config.get(field.name, field.default)
            value = tuple(value) if isinstance(value, list) else value
            shown = field.name in _ALWAYS or value != field.default
            if shown and not meta["path"] and meta["group"] in _GROUPS and field.name not in unused:
                rows.append((f"`{field.name}`", show(value)))
        return rows


def is_own_card(path: Path) -> bool:
    """Return whether a card may be replaced: there is none, or wgrad wrote it. One that cannot be read may not."""
    try:
        if not path.exists():
            return True
        if not path.is_file():  # a pipe or a device may never end
            return False
        with path.open("rb") as file:
            return MARK.encode() in file.read(_LONGEST_CARD)
    except OSError:
        return False


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
