"""`wgrad export --gguf-lora`: an adapter in GGUF, for llama.cpp and Ollama."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.files import check_writable, write_text
from wgrad.train.data.tokenizer_source import find_source
from wgrad.train.model.adapter_config import adapter_note
from wgrad.train.model.adapter_files import load_adapter
from wgrad.train.model.gguf_adapter import is_gguf_adapter, save_gguf_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import expert_modules, linear_modules
from wgrad.train.options.export_config import ExportConfig
from wgrad.train.step.find_model import base_name, find_base, other_base
from wgrad.train.terminal.output import say


def run_export(args: ExportConfig) -> int:
    """Write the adapter and return the exit status. WgradError: adapter, model or path cannot be used."""
    check_writable(args.gguf_lora, "--gguf-lora")
    out = Path(args.gguf_lora)
    if out.exists() and not is_gguf_adapter(out):
        raise WgradError(f"--gguf-lora: {out} is there and is no adapter in GGUF: give another name, or remove it")
    modelfile = out.parent / "Modelfile"
    text = f"FROM {_base(args.modelfile, out.parent)}\nADAPTER ./{out.name}\n" if args.modelfile else ""
    if text and modelfile.exists() and modelfile.read_bytes() != text.encode():
        raise WgradError(f"--modelfile: {modelfile} is there and says something else: move it away")
    folder = find_base(args.model, args.adapter, weights=False)
    config = load_model_config(folder)
    lora, arrays = load_adapter(args.adapter, linear_modules(config), experts=expert_modules(config))
    for note in filter(None, (other_base(args.model, args.adapter), adapter_note(lora))):
        say(f"note: {note}", "stderr")
    if note := _tokenizer_note(folder, args.adapter):
        say(f"note: {note}; a GGUF adapter carries no tokenizer: wgrad merge --format gguf writes it", "stderr")
    save_gguf_adapter(args.gguf_lora, config, lora, arrays, np.dtype(args.type), "--gguf-lora")
    if text:
        write_text(modelfile, text, "--gguf-lora")
    size, base = out.stat().st_size / 2**20, base_name(args.model, args.adapter)
    say(f"wrote {args.gguf_lora} ({size:.1f} MiB): use it with llama.cpp's --lora and a GGUF of {base}")
    return 0


def _tokenizer_note(folder: Path, adapter: str) -> str:
    """Return how the adapter's tokenizer differs from the base model's, if that has one here; "": it does not."""
    source = find_source(folder, adapter)
    if source.adapter is None or not (folder / "tokenizer.json").exists():
        return ""
    return source.load()[1]


def _base(given: str, folder: Path) -> str:
    """Return the FROM of a Modelfile in this folder. WgradError: there is no such GGUF file."""
    if not given.endswith(".gguf"):
        return given
    if not Path(given).is_file():
        raise WgradError(f"--modelfile: no such file: {given}: give a GGUF file, or the name of a model of Ollama's")
    return given if os.path.isabs(given) else os.path.join(".", os.path.relpath(given, folder))
