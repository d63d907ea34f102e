"""Resources of a run that are opened before its weights: device, model configuration, tokenizer and data."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wgrad.autograd.select_device import list_devices, select_device
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.data.data import Dataset, load_data
from wgrad.train.data.named_templates import use_chat_template
from wgrad.train.data.packing import ROW_STEP, BatchStream, Example, prompt_length
from wgrad.train.data.standard_input import reads_standard_input, standard_input
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.data.tokenizer_files import TEMPLATE_FILE
from wgrad.train.data.tokenizer_source import open_tokenizer
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles, open_files
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.choices import AUTO
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig, RunOptions
from wgrad.train.options.objectives import SFT
from wgrad.train.options.options import fixed_options, flag
from wgrad.train.plan.fit import Fit, Mode
from wgrad.train.plan.lengths import PROMPT_TOKENS, beyond_positions, check_prompt, prompt_room, within_positions
from wgrad.train.plan.plan import Plan, training_needs
from wgrad.train.plan.rates import not_cached
from wgrad.train.plan.settle import settle
from wgrad.train.ranks.devices import device_of_rank
from wgrad.train.ranks.world import World
from wgrad.train.run.caller import PythonCaller
from wgrad.train.run.schedule import few_steps, long_warmup
from wgrad.train.step.checked import fault_notes
from wgrad.train.step.compute import choose_compute, common_compute, round_products
from wgrad.train.step.find_model import find_model, other_base
from wgrad.train.step.memory import hold_to_limit
from wgrad.train.step.room import room_of
from wgrad.train.terminal.progress import Display


@dataclass
class Session:
    """Loaded parts of a run."""

    config: FinetuneConfig
    device: Device
    folder: Path  # of the base model
    model_config: ModelConfig
    tokenizer: Tokenizer
    data: Dataset
    stream: BatchStream
    prompts: list[list[int]]  # tokens of each prompt to sample from
    display: Display
    row_tokens: int  # of a sequence: --max-length, or fewer if all examples are shorter
    mode: dict[str, Any] = field(default_factory=dict)  # memory options that were chosen for the run, by name
    chooses_compute: bool = False  # whether --compute is left to the device
    plan: Plan | None = None  # for `config` and `mode`, if choosing them made one

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    def say(self, text: str) -> None:
        self.display.say(text)


def open_session(
    config: FinetuneConfig,
    world: World | None = None,
    display: Display | None = None,
    caller: PythonCaller | None = None,
    before: Mode | None = None,
) -> Session:
    """Open the device, model configuration, tokenizer and data, so that mistakes show before weights are read.

    Args:
        config: Options of the run. The session's have the dtype of activations settled.
        world: All ranks; None: this process is alone.
        display: Terminal output; None: a new one.
        caller: Arguments of a Python caller.
        before: `Session.mode` of the run to resume.

    Raises:
        WgradError: An option, the model or the data cannot be used.
    """
    world, display = world or World(), display or Display()
    resumed = config.resume and Path(config.out, CONFIG_FILE).exists()
    chooses_compute = config.compute == AUTO
    device, config = _open_device(config, world, display, resumed)
    folder = find_model(config.model)
    model_config = load_model_config(folder)
    tokenizer, note = open_tokenizer(folder, config.adapter, model_config.vocab_size)
    kept = Path(config.out, TEMPLATE_FILE) if resumed else None
    told = use_chat_template(tokenizer, config.chat_template, kept)
    for remark in (other_base(config.model, config.adapter), note, told, *_not_applied(config, model_config)):
        if remark:
            display.say(f"note: {remark}")
    # A missing or damaged shard is reported before the data is tokenized.
    files, model_config, head_note = open_files(folder, model_config)
    refuse_quantized_anew(config, files, model_config)
    config, shortened = within_positions(config, model_config)
    stdin = _standard_input(config, world, display)
    with display.phase("reading and tokenizing", unit="%") as phase:
        data = load_data(config, tokenizer, phase.update, caller.records if caller else None, stdin)
    row_tokens = row_length(config, data)
    prompts = _sample_prompts(config, data, tokenizer, model_config)
    rows, room = replace(config, max_length=row_tokens), room_of(config, device)
    fit = Fit(rows, model_config, folder, device, max(map(len, prompts)), room.limit or 0, world.local_size)
    with display.phase("planning"):
        chosen = settle(config, fit, room, world, pinned=resumed, before=before)
    if chosen.limit is not None:
        device.limit_memory(chosen.limit)
    config = chosen.config
    stream = BatchStream(data.train, replace(config, max_length=row_tokens), tokenizer.pad_id or 0, data.mix)
    opened = (config, device, folder, model_config, tokenizer, data, stream, prompts, display, row_tokens, chosen.mode)
    session = Session(*opened, chooses_compute, chosen.plan)
    for remark in filter(None, (head_note and f"note: {head_note}", shortened)):
        session.say(remark)
    _say_data(session, [*(f"note: {remark}" for remark in not_cached()), *chosen.lines])
    if caller is not None and caller.silent and (data.bad_lines or data.left_out or data.truncated):
        lines = [remark for remark in data.remarks if remark.startswith("skipped ")]
        warnings.warn("; ".join([data.summary(), *lines]), stacklevel=2)
    return session


def _not_applied(config: RunOptions, model: ModelConfig) -> Iterator[str]:
    """Yield what config.json asks for in training, and transformers applies, but this run does not."""
    if asked := " and ".join(f"{key} {p:g}" for key, p in model.dropouts):
        yield f"{asked} of config.json: not applied here, as transformers does in training"
    balance = model.experts.balance if model.experts is not None and config.router_aux_loss_coef is None else 0.0
    if balance and config.objective != SFT:
        loss = f"the experts' load-balancing loss of config.json (weight {balance:g})"
        yield f"{loss} is no part of --objective {config.objective}"


def _open_device(
    config: FinetuneConfig, world: World, display: Display, resumed: bool
) -> tuple[Device, FinetuneConfig]:
    """Open the device of this rank, and settle the dtype of activations for all ranks.

    Returns:
        The device, and the options with that dtype.
    """
    spec = device_of_rank(config.device, world.local_rank, world.local_size, list_devices)
    device = select_device(spec, training_needs(config))
    display.say(f"device: {device.description} ({device.reason})")
    compute = choose_compute(config.compute, device, resumed=resumed)
    if config.compute == AUTO:
        compute = common_compute(compute, world.all_gather(compute.dtype, "the type of activations"))
    for line in [*fault_notes(device), *compute.lines, *round_products(config, device)]:
        display.say(line)
    config = replace(config, compute=compute.dtype)
    for remark in (hold_to_limit(device, config.limit, config.limit_option), offload_remark(config, device)):
        if remark:
            display.say(f"note: {remark}")
    return device, config


def _say_data(session: Session, memory_choices: Sequence[str]) -> None:
    """Print what the run learns from, and how it goes through it."""
    config, data, row_tokens = session.config, session.data, session.row_tokens
    session.say(f"data: {data.summary()}")
    for remark in filter(None, (data.turns, *data.remarks)):
        session.say(f"  {remark}")
    for line in memory_choices:
        session.say(line)
    if row_tokens < config.max_length:
        session.say(
            f"note: sequences have {row_tokens} tokens, in which all the data fits, not --max-length "
            f"{config.max_length}"
        )
    if config.objective_kind.reference:
        not_this = f", not --adapter {config.adapter}: wgrad merge makes that one" if config.adapter else ""
        session.say(f"reference: the base model without an adapter{not_this}")
    steps, positions = session.stream.total_steps, beyond_positions(row_tokens, session.model_config)
    for note in (positions, few_steps(config, steps), long_warmup(config, steps)):
        if note:
            session.say(note)


def _standard_input(config: FinetuneConfig, world: World, display: Display) -> Path | None:
    """Return a copy of standard input if an option reads it (only the first rank has it), else None."""
    option = reads_standard_input(config)
    if not option:
        return None
    copy, line = world.broadcast(lambda: standard_input(config, option, world.alone), "standard input")
    display.say(line)
    if not copy.exists():
        raise WgradError(f"{option}: {copy}, the copy of standard input, is not on this host: give a file that all see")
    return copy


def row_length(config: RunOptions, data: Dataset) -> int:
    """Return the tokens of a sequence: --max-length, or fewer if no sequence would ever be filled."""
    kinds = [_row_lengths(examples, config) for examples in (data.train, data.held_out) if examples]
    longest = max((sum(lengths) if config.packs else max(lengths) for lengths in kinds), default=config.max_length)
    return min(config.max_length, -(-longest // ROW_STEP) * ROW_STEP)


def _row_lengths(examples: Sequence[Example], config: RunOptions) -> list[int]:
    """Return the tokens of each document; if the objective mixes rows, of the longest prompt plus completion."""
    parts = [part for example in examples for part in example.parts]
    if config.objective_kind.mismatched:
        prompts = [prompt_length(part) for part in parts]
        return [max(prompts) + max(len(part) - prompt for part, prompt in zip(parts, prompts))]
    return [len(part) for part in parts]


def refuse_quantized_anew(config: RunOptions, files: ModelFiles, model_config: ModelConfig) -> None:
    """Raise WgradError for quantization options if the model's files are quantized already."""
    default = RunOptions()
    changed = [
        n for n in ("double_quant", "block_size", "init_lora_weights") if getattr(config, n) != getattr(default, n)
    ]
    if config.full or not changed or not any(files.is_frozen(spec) for spec in weight_specs(model_config)):
        return
    if changed[0] != "init_lora_weights":
        raise WgradError(f"{flag(changed[0])}: would be ignored: {files.folder} is quantized already: leave it out")
    raise WgradError(
        f"--init-lora-weights: {config.init_lora_weights} takes its part out of weights "
        f"in full precision, and {files.folder} is quantized: name "
        "the base model in full precision with --model, or use --init-lora-weights lora"
    )


def _sample_prompts(
    config: RunOptions, data: Dataset, tokenizer: Tokenizer, model_config: ModelConfig
) -> list[list[int]]:
    """Return the tokens of each --sample-prompt, else of the first held-out example's prompt or beginning."""
    if config.sample_prompt:
        prompts = [tokenizer.encode(text) for text in config.sample_prompt]
        for prompt in prompts:
            check_prompt(prompt, model_config)
        return prompts
    document = (data.held_out or data.train)[0].parts[0]
    before = next((i for i, learned in enumerate(document.loss_mask) if learned), 0)
    prompt = [int(i) for i in document.ids[: before or min(PROMPT_TOKENS, (len(document) + 1) // 2)]]
    return [prompt[-prompt_room(model_config) :]]


def offload_remark(config: RunOptions, device: Device) -> str:
    """Return a remark on an option that has no effect on this device, or ""."""
    if config.offload_activations and device.shared_memory:
        return "--offload-activations moves nothing: this device's memory is main memory"
    if config.stream_weights == "on" and device.shared_memory:
        return "--stream-weights moves nothing: this device's memory is main memory"
    return ""


def run_info(session: Session, own_loss: bool = False) -> dict[str, Any]:
    """Return the values that must match to resume: options that shape tensors, the base model, and the data."""
    values, held_out = session.config.to_dict(), session.data.held_out
    # Paths are left out: a folder may have moved, and the checkpoint holds what it contained.
    run = {f.name: values[f.name] for f in fixed_options(RunOptions) if not f.metadata["path"]}
    model = hashlib.blake2b(session.model_config.identity().encode(), digest_size=16)
    model.update(ModelFiles(session.folder).digest().encode())
    measured = BatchStream(held_out, session.stream.config).fingerprint() if held_out else ""
    run |= {"the base model": model.hexdigest(), "the held-out data": measured}
    if own_loss:  # so that a run does not continue with a built-in loss
        run["loss"] = "a function"
    return {"run": run, "data": session.stream.fingerprint()}
