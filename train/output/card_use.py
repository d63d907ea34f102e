"""The part of a model card that shows how to load the model with PEFT, transformers, wgrad and others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgrad.train.files.decode import read_json
from wgrad.train.model.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from wgrad.train.model.adapter_config import variant_in
from wgrad.train.model.multimodal import Multimodal
from wgrad.train.model.multimodal_names import whole_by_name, whole_of

_CONFIG = "config.json"


@dataclass(frozen=True)
class Contents:
    """Properties of a saved adapter or model that determine how it is loaded.

    Attributes:
        whole: The base model's architecture, if it is multimodal and the adapter has the names of its text part.
        dora: Whether the adapter is DoRA.
        experts: Whether the adapter has matrices of experts.
        variant: Custom variant of LoRA that a program registers; "": none.
    """

    whole: Multimodal | None = None
    dora: bool = False
    experts: bool = False
    variant: str = ""

    @classmethod
    def of(cls, folder: Path) -> Contents:
        """Read the properties from the files of a folder. WgradError: a file is damaged."""
        adapter = folder / ADAPTER_CONFIG
        if adapter.is_file():
            raw = read_json(adapter, dict[str, Any], "--adapter", from_python=True)
            names = raw.get("target_modules")
            names = [names] if isinstance(names, str) else names or ()
            named = raw.get("auto_mapping")
            outer = named.get("base_model_class") if isinstance(named, dict) else None
            whole = next(filter(None, (whole_of(str(outer)), *(whole_by_name(str(name)) for name in names))), None)
            return cls(whole, bool(raw.get("use_dora")), bool(raw.get("target_parameters")), variant_in(raw))
        if (folder / _CONFIG).is_file():
            raw = read_json(folder / _CONFIG, dict[str, Any], "--folder", from_python=True)
            return cls(next(filter(None, (whole_of(str(name)) for name in raw.get("architectures") or ())), None))
        return cls()

    @property
    def auto_class(self) -> str:
        """Class of transformers that loads the (base) model."""
        return "AutoModelForCausalLM" if self.whole is None else self.whole.auto

    @property
    def task(self) -> str:
        """The Hub's name of the model's task."""
        return "text-generation" if self.whole is None else self.whole.task

    @property
    def method(self) -> str:
        """The adapter's method for people."""
        return "DoRA" if self.dora else "LoRA"


def use_of(kind: str, contents: Contents, repo: str, base: str, on_hub: bool) -> list[str]:
    """Return the paragraphs for a model.

    Args:
        kind: One of `model_card.KINDS`.
        contents: Properties of the model.
        repo: Its repository on the Hub.
        base: Id of the base model on the Hub, or a placeholder.
        on_hub: Whether the base model is on the Hub.
    """
    fetch = f"hf download {repo} --local-dir model"
    auto = contents.auto_class
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{repo}")'
    if contents.variant:
        load = (
            f"import wgrad\n\n# The program that registers {contents.variant!r}, as for its training:\n"
            f'wgrad.register_lora_variant("{contents.variant}", ...)\nmodel = wgrad.load("{base}", adapter="model")'
        )
        about = f"`{contents.variant}` is a variant of LoRA that PEFT does not have; wgrad loads it in Python:"
        return [*_block("Fetch it:", "bash", fetch), *_block(about, "python", load)]
    if kind == "adapter":
        peft = (
            f"from peft import PeftModel\nfrom transformers import {auto}, AutoTokenizer\n\n"
            f'model = {auto}.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(model, "{repo}")\n{tokenizer}'
        )
        more = "" if on_hub else f" --model {base}"
        needs = " (0.17 or newer, with transformers 5: it adapts experts)" if contents.experts else ""
        return [
            *_block(f"With PEFT{needs}:", "python", peft),
            *_block("With wgrad:", "bash", f"{fetch}\nwgrad chat --adapter model{more}"),
            *_block("With Ollama:", "bash", f"{fetch}\nwgrad export ollama --adapter model{more}"),
        ]
    if kind == "model":
        transformers = (
            f'from transformers import {auto}, AutoTokenizer\n\nmodel = {auto}.from_pretrained("{repo}")\n{tokenizer}'
        )
        return [
            *_block("With transformers:", "python", transformers),
            *_block("With wgrad:", "bash", f"wgrad chat --model {repo}"),
        ]
    create = f"{fetch}\nollama create mine -f model/Modelfile && ollama run mine"
    return [
        *_block("With Ollama:", "bash", create),
        *_block("With llama.cpp:", "bash", f"{fetch}\nllama-cli -m model/model.gguf"),
        *_block("With wgrad:", "bash", f"{fetch}\nwgrad chat --model model/model.gguf"),
    ]


def _block(title: str, language: str, text: str) -> list[str]:
    return [title, f"```{language}\n{text}\n```"]
