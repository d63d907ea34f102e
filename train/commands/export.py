"""`wgrad export`: an adapter in the format of another tool."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wgrad.device.files import check_writable, write_text
from wgrad.train.model.adapter_files import adapter_note, base_of_adapter, load_adapter
from wgrad.train.model.gguf_adapter import save_gguf_adapter
from wgrad.train.model.lora import linear_modules
from wgrad.train.model.model_config import load_model_config
from wgrad.train.options.export_config import ExportConfig
from wgrad.train.run.find_model import find_model
from wgrad.train.terminal.output import say


def run_export(args: ExportConfig) -> int:
    """`wgrad export`. -> exit status. WgradError: one line for what is wrong with adapter, model or place."""
    check_writable(args.gguf_lora, "--gguf-lora")
    folder = find_model(args.model or base_of_adapter(args.adapter), "--model", weights=False)
    config = load_model_config(folder)
    lora, arrays = load_adapter(args.adapter, linear_modules(config))
    if note := adapter_note(lora):
        say(f"note: {note}", "stderr")
    save_gguf_adapter(args.gguf_lora, config, lora, arrays, np.dtype(args.type), "--gguf-lora")
    if args.modelfile:
        out = Path(args.gguf_lora)
        write_text(out.parent / "Modelfile", f"FROM {args.modelfile}\nADAPTER ./{out.name}\n", "--gguf-lora")
    size = Path(args.gguf_lora).stat().st_size / 2**20
    say(f"wrote {args.gguf_lora} ({size:.1f} MiB): use it with llama.cpp's --lora and a GGUF of {folder}")
    return 0
