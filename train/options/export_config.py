"""The options of `wgrad export`: each one's name, type, default, help and rule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import show
from wgrad.train.options.finetune_config import DEVICE_HELP
from wgrad.train.options.merge_config import A_DATA_FILE, GGUF_TYPES, IMATRIX_HELP, MergeConfig
from wgrad.train.options.options import Options, flag, option

EXPORT_TOOLS = ("ollama", "lmstudio", "llama.cpp")
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_A_NAME = re.compile(rf"(?:{_PART}/)?{_PART}(?::{_PART})?")
A_NAME = ("must be NAME or OWNER/NAME, of letters, digits, '.', '_' and '-'", lambda v: bool(_A_NAME.fullmatch(v)))


@dataclass(frozen=True)
class ExportConfig(Options):
    """Options of `wgrad export` without a tool. Raises WgradError if a value breaks its rule."""

    adapter: str = option("", "adapter to export: finetune's --out", metavar="DIR", path=True, required=True)
    gguf_lora: str = option(
        "",
        "without TOOL: the adapter alone, as a file for llama.cpp's --lora",
        metavar="FILE.gguf",
        path=True,
        required=True,
    )
    model: str | None = option(
        None,
        "its base model; only config.json is read (default: as the adapter names it)",
        metavar="DIR_OR_HUB_ID",
        path=True,
    )
    type: str = option("float32", "with --gguf-lora: type of its numbers", choices=("float32", "float16"))
    modelfile: str | None = option(
        None,
        "with --gguf-lora: also write a Modelfile, with this base: a model of Ollama's, or a GGUF file",
        metavar="BASE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modelfile is not None and (not self.modelfile.strip() or "\n" in self.modelfile):
            raise WgradError(f"--modelfile: must name a base model on one line, got {show(self.modelfile)}: name it")


@dataclass(frozen=True)
class ModelExportConfig(Options):
    """Options of `wgrad export TOOL`. Raises WgradError if a value breaks its rule."""

    adapter: str = option("", "adapter to export: finetune's --out", metavar="DIR", path=True, required=True)
    model: str | None = option(
        None, "its base model (default: as the adapter names it)", metavar="DIR_OR_HUB_ID", path=True
    )
    name: str | None = option(
        None, "with TOOL: the model's name there (default: that of the adapter's folder)", rule=A_NAME, metavar="NAME"
    )
    out: str | None = option(
        None,
        "with TOOL: folder to write (default: DIR/TOOL); with lmstudio: its models folder (default: LM Studio's own, "
        "if it is installed)",
        metavar="DIR",
        path=True,
    )
    quantize: str = option("q8_0", "with TOOL: type of the merged matrices", choices=GGUF_TYPES)
    imatrix: str | None = option(
        None, IMATRIX_HELP.replace("with --quantize", "with TOOL"), metavar="FILE|run", path=True, rule=A_DATA_FILE
    )
    onto: str = option("dequantized", "with TOOL: as --onto of wgrad merge", choices=("dequantized", "original"))
    template: str | None = option(
        None,
        "with ollama: a file with your own TEMPLATE (default: made from the chat template)",
        metavar="FILE",
        path=True,
    )
    create: bool = option(True, "with ollama: run `ollama create` where it is installed")
    device: str = option("auto", f"with TOOL: {DEVICE_HELP}", metavar="DEVICE")

    def merge_config(self, out: str) -> MergeConfig:
        """Return the options of the merge."""
        same = {name: getattr(self, name) for name in ("adapter", "model", "quantize", "imatrix", "onto", "device")}
        return MergeConfig(out=out, format="gguf", compare=False, **same)


def refuse_options_of_others(tool: str | None, given: Collection[str]) -> None:
    """Raise WgradError for a given option that has no effect with this tool, or without one."""
    kinds = (ExportConfig, ModelExportConfig)
    alone, together = ({field.name for field in dataclasses.fields(kind)} for kind in kinds)
    for name in given:
        if tool is None and name not in alone:
            raise WgradError(f"{flag(name)}: is for wgrad export {'|'.join(EXPORT_TOOLS)}: name one, or leave it out")
        if tool is not None and name not in together:
            raise WgradError(f"{flag(name)}: writes the adapter alone, and export {tool} the model: leave one out")
        if name in ("template", "create") and tool != "ollama":
            raise WgradError(f"{flag(name)}: is for export ollama, not {tool}: leave it out")
