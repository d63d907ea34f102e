"""Common start of `generate`, `chat`, `serve` and `eval`: device, configuration, tokenizer; no weights yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from wgrad.autograd.select_device import Needs, select_device
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.data.named_templates import use_chat_template
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.data.tokenizer_source import open_tokenizer
from wgrad.train.inference.scoring import most_work
from wgrad.train.model.adapter_config import base_of_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles, open_files
from wgrad.train.options.chat_config import ChatConfig
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.options.model_options import DEFAULT_CONTEXT, LoadOptions
from wgrad.train.options.serve_config import ServeConfig
from wgrad.train.step.build import build_frozen
from wgrad.train.step.compute import choose_compute, compute_type
from wgrad.train.step.find_model import find_base, other_base
from wgrad.train.step.memory import hold_to_limit
from wgrad.train.terminal.output import make_console
from wgrad.train.terminal.progress import Display

Args = TypeVar("Args", GenerateConfig, ChatConfig, LoadOptions, ServeConfig, RunOptions)


@dataclass(frozen=True)
class Opened(Generic[Args]):
    """Everything but the weights. args: the command's, with --compute and --model settled. head_note: a note about the
    output layer that has not been shown yet, or ""."""

    args: Args
    device: Device
    folder: Path
    files: ModelFiles
    config: ModelConfig
    tokenizer: Tokenizer
    head_note: str
    display: Display


def open_model(args: Args, silent: bool = False, needs: Needs | None = None) -> Opened[Args]:
    """Select the device, and read configuration and tokenizer, showing the choices on stderr.

    silent: show nothing, now or later. needs: as in `select_device`; by default those of writing text.

    Raises:
        WgradError: an option or a file is wrong.
    """
    display = Display(make_console("stderr", silent=silent))
    device = select_device(args.device, needs or _text_needs(args))
    display.say(f"device: {device.description} ({device.reason})")
    compute = choose_compute(args.compute, device)
    for line in compute.lines:
        display.say(line)
    if remark := hold_to_limit(device, args.memory_limit):
        display.say(f"note: {remark}")
    adapter = _first_adapter(args)
    folder = find_base(args.model, adapter or "")
    args = replace(args, compute=compute.dtype, model=args.model or base_of_adapter(adapter or ""))
    config = load_model_config(folder)
    own = None if isinstance(args, ServeConfig) else args.adapter  # each model of a server has its own
    tokenizer, note = open_tokenizer(folder, own, config.vocab_size)
    for remark in (other_base(args.model, own), note, use_chat_template(tokenizer, args.chat_template)):
        if remark:
            display.say(f"note: {remark}")
    files, config, head_note = open_files(folder, config)
    return Opened(args, device, folder, files, config, tokenizer, head_note, display)


def _first_adapter(args: Args) -> str | None:
    """Return the adapter that names the base model; for a server the first."""
    return next(iter(args.adapters.values()), None) if isinstance(args, ServeConfig) else args.adapter


def _text_needs(args: Args) -> Needs:
    def check(device: Device) -> None:
        dry, adapter = device.dry_run(), _first_adapter(args)
        if dry is None:
            return
        folder = find_base(args.model, adapter or "")
        _, config, _ = open_files(folder, load_model_config(folder))
        options: dict[str, Any] = {"compute": compute_type(args.compute, device), "quantize": args.quantize}
        model = build_frozen(config, folder, dry, positions=64, adapter=adapter, contents=False, **options)
        most_work(model, 32, 1, 16)

    return check


def context_of(opened: Opened[ChatConfig] | Opened[LoadOptions] | Opened[ServeConfig]) -> int:
    """Return --context, or its default. Raises WgradError if it is more than the model's positions."""
    most = opened.config.positions
    if (opened.args.context or 0) > most:
        rule = f"must be at most the {most} positions that the model was made for"
        raise WgradError(f"--context: {rule}; got {opened.args.context}")
    return opened.args.context or min(most, DEFAULT_CONTEXT)
