"""`wgrad push`: upload an adapter, a merged model or a GGUF model to the Hugging Face Hub, with a model card."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.device.shown import as_text, counted
from wgrad.train.data.tokenizer_source import tokenizer_files
from wgrad.train.files.decode import read_json
from wgrad.train.files.hub import is_hub_id
from wgrad.train.files.hub_upload import upload
from wgrad.train.files.input_files import open_input, reading
from wgrad.train.model.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from wgrad.train.model.adapter_config import base_of_adapter
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import CONFIG_FILE
from wgrad.train.options.option_text import size
from wgrad.train.options.push_config import PushConfig
from wgrad.train.output.card_use import Contents
from wgrad.train.output.loss_curve import LOSS_CURVE_FILE
from wgrad.train.output.model_card import CARD_FILE, Card, is_own_card
from wgrad.train.output.previous_run import RESULTS_FILE
from wgrad.train.terminal.output import say

_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "*processor_config.json")


def run_push(args: PushConfig) -> int:
    """Upload the files and return the exit status. WgradError: nothing to upload, or the Hub refuses it."""
    run, folder = Path(args.adapter), Path(args.folder or args.adapter)
    option = "--folder" if args.folder else "--adapter"
    kind, paths = _find(folder, option)
    config: dict[str, Any] = read_config_file(run / CONFIG_FILE) if (run / CONFIG_FILE).is_file() else {}
    results: dict[str, Any] = {}
    if (run / RESULTS_FILE).is_file():
        results = read_json(run / RESULTS_FILE, dict[str, Any], "--adapter")
    base = as_text(args.base or config.get("model") or base_of_adapter(args.adapter))
    on_hub = bool(args.base) or is_hub_id(base, "--adapter")
    if not on_hub:
        say(f"note: the base model is a folder here, {base}: give its id on the Hub as --base, for others", "stderr")
    files: dict[str, Path | bytes] = {path.name: path for path in paths}
    curve = run / LOSS_CURVE_FILE
    if curve.is_file():
        files[curve.name] = curve
    card = Card(kind, base, on_hub, config, results, args.repo, curve.is_file(), Contents.of(folder))
    if is_own_card(folder / CARD_FILE):
        files[CARD_FILE] = card.text().encode()
    else:
        files[CARD_FILE] = folder / CARD_FILE
    if kind == "adapter":  # name the base model so that others can find it
        raw = read_json(folder / ADAPTER_CONFIG, dict[str, Any], "--adapter", from_python=True)
        raw["base_model_name_or_path"] = card.base_name
        files[ADAPTER_CONFIG] = (json.dumps(raw, indent=2, ensure_ascii=False) + "\n").encode()
    total = 0
    for content in files.values():
        if isinstance(content, bytes):
            total += len(content)
        else:
            with open_input(content, option) as file:  # before anything is sent
                total += os.fstat(file.fileno()).st_size
    access = "public" if args.public else "private"
    say(f"uploading {counted(len(files), 'file')} ({size(total)}) to {args.repo}, {access}")
    say(f"uploaded: {upload(args.repo, files, args.public)}")
    return 0


def _find(folder: Path, option: str) -> tuple[str, list[Path]]:
    """Return the kind of model in a folder, and its files. WgradError: there is none."""
    with reading(folder, option):
        beside = tokenizer_files(folder)
        if (folder / WEIGHTS_FILE).is_file():
            return "adapter", [folder / WEIGHTS_FILE, folder / ADAPTER_CONFIG, *beside]
        ggufs = sorted(folder.glob("*.gguf"))
        if ggufs:
            more = [path for path in (folder / "Modelfile", folder / "config.json") if path.is_file()]
            return "gguf", [*ggufs, *more, *beside]
        found = sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)})
    if any(path.suffix == ".safetensors" for path in found) and folder / "config.json" in found:
        return "model", [*found, *beside]
    raise WgradError(f"{option}: {folder} has no adapter, no model and no GGUF file: give the folder of one")
