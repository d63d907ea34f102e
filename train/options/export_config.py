"""The options of `wgrad export`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import show
from wgrad.train.options.options import Options, option


@dataclass(frozen=True)
class ExportConfig(Options):
    """Options of `wgrad export`. Raises WgradError where a value breaks its rule."""

    adapter: str = option("", "adapter to export: finetune's --out", metavar="DIR", path=True, required=True)
    gguf_lora: str = option("", "file to write, for llama.cpp's --lora", metavar="FILE.gguf", path=True, required=True)
    model: str | None = option(
        None,
        "its base model; only config.json is read (default: as the adapter names it)",
        metavar="DIR_OR_HUB_ID",
        path=True,
    )
    type: str = option("float32", "type of its numbers", choices=("float32", "float16"))
    modelfile: str | None = option(
        None,
        "also write a Modelfile for `ollama create`, with this base: a model of Ollama's, or a GGUF file",
        metavar="BASE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modelfile is not None and (not self.modelfile.strip() or "\n" in self.modelfile):
            raise WgradError(f"--modelfile: must name a base model on one line, got {show(self.modelfile)}: name it")
