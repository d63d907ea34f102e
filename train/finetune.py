"""`wgrad finetune`: from a configuration to an adapter (or with --full a whole checkpoint) in the output folder."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from wgrad.autograd.device import Device
from wgrad.autograd.dispatch import select_device
from wgrad.autograd.errors import WgradError
from wgrad.train.adapter import WEIGHTS_FILE, save_adapter
from wgrad.train.build import TrainableModel, build_trainable
from wgrad.train.checkpoint_files import TrainingState, check_info, drop_later, has_checkpoints, load_state, save_state
from wgrad.train.cli_options import FIXED_BY_RESUME
from wgrad.train.config import FinetuneConfig
from wgrad.train.data import Dataset, load_data
from wgrad.train.files import make_folder, remove_leftovers, write_json
from wgrad.train.full_checkpoint import save_full
from wgrad.train.generate import Sampling, generate_text
from wgrad.train.hub import resolve_model
from wgrad.train.loop import Run, Trainer
from wgrad.train.loss_curve import LOSS_CURVE_FILE, save_loss_curve
from wgrad.train.metrics import MetricsFile
from wgrad.train.model_config import ModelConfig, load_model_config
from wgrad.train.optim import AdamW
from wgrad.train.packing import BatchStream, eval_batches
from wgrad.train.progress import TrainingProgress, duration
from wgrad.train.tokenizer import Tokenizer, load_tokenizer
from wgrad.train.weights import SINGLE_FILE, Checkpoint

RESULTS_FILE = "results.json"
SAMPLE_TOKENS = 64
_PROMPT_TOKENS = 24  # of a held-out text, where no --sample-prompt is given


@dataclass
class Session:
    """What a run has loaded."""

    config: FinetuneConfig
    device: Device
    folder: Path  # of the base model
    model_config: ModelConfig
    tokenizer: Tokenizer
    data: Dataset
    stream: BatchStream
    prompt: list[int]  # for the sample before and after
    console: Console

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def run_finetune(config: FinetuneConfig) -> int:
    """Train as `config` says. -> 0. Raises WgradError (or a device's error) with a message for the user."""
    if _already_done(config):
        return 0
    session = _open(config)
    state = load_state(config.out) if config.resume else None
    if config.resume and state is None:
        session.say(f"note: {config.out} has no checkpoint to resume from: the run begins anew")
    return _run(session, state)


def _already_done(config: FinetuneConfig) -> bool:
    """True where a finished run is asked to resume. WgradError where an old run would be overwritten."""
    out = Path(config.out)
    finished = [name for name in (RESULTS_FILE, WEIGHTS_FILE, SINGLE_FILE) if (out / name).exists()]
    if config.resume:
        if RESULTS_FILE in finished:
            print(f"{out}: this run is finished: nothing to resume")
            return True
        return False
    if finished:
        raise WgradError(f"--out: {out} already holds a finished run ({finished[0]}): choose another folder")
    if has_checkpoints(out):
        raise WgradError(f"--out: {out} holds an unfinished run: go on with --resume, or choose another folder")
    return False


# ---- before ------------------------------------------------------------------------------------
def _open(config: FinetuneConfig) -> Session:
    """Device, model configuration, tokenizer and data: everything that can be wrong before weights are read."""
    console = Console(highlight=False)
    device = select_device(config.device)
    console.print(f"device: {device.description} ({device.reason})", markup=False, soft_wrap=True)  # type: ignore[attr-defined]
    folder = resolve_model(config.model)
    model_config, tokenizer = load_model_config(folder), load_tokenizer(folder)
    tokenizer.check_fits(model_config.vocab_size)
    Checkpoint(folder)  # a missing or damaged shard is told before the data is tokenised
    data = load_data(config, tokenizer)
    stream = BatchStream(data.train, config, tokenizer.pad_id or 0)
    session = Session(config, device, folder, model_config, tokenizer, data, stream, [], console)
    session.prompt = _sample_prompt(session)
    session.say(f"data: {data.summary()}")
    if config.seq_len > model_config.max_position_embeddings:
        limit = model_config.max_position_embeddings
        session.say(f"note: --seq-len {config.seq_len} is beyond the {limit} positions that the model was made for")
    return session


def _sample_prompt(session: Session) -> list[int]:
    """--sample-prompt, else what comes before the completion in the first held-out text (or its beginning)."""
    if session.config.sample_prompt:
        return session.tokenizer.encode(session.config.sample_prompt)
    document = (session.data.held_out or session.data.train)[0]
    before = next((i for i, counts in enumerate(document.counts) if counts), 0)
    return [int(i) for i in document.ids[: before or min(_PROMPT_TOKENS, (len(document) + 1) // 2)]]


def _build(session: Session) -> TrainableModel:
    config, begun = session.config, time.monotonic()
    positions = len(session.prompt) + SAMPLE_TOKENS
    with session.console.status("loading weights") as status:  # shown on a terminal only
        built = build_trainable(
            config,
            session.model_config,
            session.folder,
            session.device,
            positions=positions,
            progress=lambda done, total: status.update(f"loading weights: {done} of {total} tensors"),
        )
    trained = built.parameters.count
    kind = "float32" if config.full else "NF4, double-quantised" if config.double_quant else "NF4"
    session.say(
        f"model: {session.model_config.architecture}, {built.total:,} parameters ({kind}), {trained:,} trained "
        f"({100 * trained / built.total:.2f} %), loaded in {time.monotonic() - begun:.1f} s"
    )
    in_use, optimizer = _mib(session.device.memory().in_use_bytes), _mib(8 * built.parameters.size)
    session.say(
        f"memory: {in_use} on the device for weights and gradients, {optimizer} more for the optimiser; "
        f"activation checkpointing {'on' if built.model.checkpointing else 'off'}"
    )
    return built


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _run_info(session: Session) -> dict[str, Any]:
    """What a checkpoint must agree with: the options that shape its tensors, the base model, the data."""
    values = session.config.to_dict()
    run = {name: values[name] for name in FIXED_BY_RESUME}
    digest = hashlib.blake2b((session.folder / "config.json").read_bytes(), digest_size=16)
    for name, entry in sorted(Checkpoint(session.folder).entries.items()):
        digest.update(f"{name} {entry.dtype} {entry.shape} {entry.begin}".encode())
    return {"run": {**run, "model": digest.hexdigest()}, "data": session.stream.fingerprint()}


# ---- the run -----------------------------------------------------------------------------------
def _run(session: Session, state: TrainingState | None) -> int:
    config, stream = session.config, session.stream
    built = _build(session)
    optimizer = AdamW(
        built.parameters,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        scale_loss=config.compute == "float16",
    )
    trainer = Trainer(built.model, optimizer, config)
    info = _run_info(session)
    if state is not None:
        _restore(session, optimizer, state, info)
    make_folder(config.out)
    remove_leftovers(config.out)
    config.save(config.out)
    held_out = eval_batches(session.data.held_out, config, session.tokenizer.pad_id or 0)
    results = state.info["results"] if state is not None else {}
    if state is None:
        results |= _measure(session, trainer, built, held_out, "before")

    def save(done: int) -> None:
        extra = {"results": results, "stream": stream.state(), **info}
        adapter = None if config.full else (lambda folder: _save_adapter(session, built, folder))
        save_state(config.out, done, optimizer.state_arrays(), extra, adapter)

    _start_profile(session)
    done = stream.step
    session.say(f"training: {stream.total_steps - done} steps, {len(stream.documents)} documents")
    begun = time.monotonic()
    with MetricsFile(config.out, done) as metrics:
        with TrainingProgress(stream.total_steps, done, config.log_every, session.console) as progress:
            run = Run(trainer, stream, metrics, progress, save)
            run.train()
        results["seconds"] = results.get("seconds", 0.0) + time.monotonic() - begun
        results |= _measure(session, trainer, built, held_out, "after")
        _finish(session, built, metrics, results, run.skipped)
    return 0


def _start_profile(session: Session) -> None:
    """--profile: from here on each kernel is timed (which costs some speed)."""
    if session.config.profile:
        profile = getattr(session.device, "profile", None)
        if profile is None:
            session.say(f"note: --profile has no effect: {session.device.description} has no kernels to time")
        else:
            profile(True)


def _restore(session: Session, optimizer: AdamW, state: TrainingState, info: dict[str, Any]) -> None:
    check_info(state, info)
    session.stream.restore(state.step, state.info["data"])
    try:
        optimizer.load_state_arrays(state.arrays)
    except (KeyError, ValueError) as error:
        raise WgradError(f"--resume: {state.path} is of another run ({error}): choose another --out") from error
    drop_later(session.config.out, state.step)
    session.say(f"resuming from {state.path}")


def _measure(
    session: Session, trainer: Trainer, built: TrainableModel, held_out: list[Any], when: str
) -> dict[str, Any]:
    """Held-out loss and a sample, printed and returned as results."""
    results: dict[str, Any] = {}
    if held_out:
        loss = trainer.evaluate(held_out)
        results[f"held_out_loss_{when}"] = loss if math.isfinite(loss) else None
        session.say(f"held-out loss {when}: {loss:.4f} (perplexity {math.exp(min(loss, 700)):.2f})")
    text = generate_text(built.model, session.tokenizer, session.prompt, SAMPLE_TOKENS, Sampling())
    results[f"sample_{when}"] = text
    session.say(f"sample {when}: {session.tokenizer.decode(session.prompt)!r} -> {text!r}")
    return results


def _finish(
    session: Session, built: TrainableModel, metrics: MetricsFile, results: dict[str, Any], skipped: int
) -> None:
    """Write what the run was for. results.json comes last: a folder that has it is complete."""
    out, config, stream = session.out, session.config, session.stream
    if config.full:
        save_full(out, session.folder, built.parameters, session.device)
    else:
        _save_adapter(session, built, out)
    points = [(0, results.get("held_out_loss_before")), (stream.total_steps, results.get("held_out_loss_after"))]
    curve = [(step, loss) for step, loss in points if loss is not None]
    title = f"{Path(config.model).name} on {Path(config.data).name}"
    save_loss_curve(out / LOSS_CURVE_FILE, metrics.records, curve, title)
    memory = session.device.memory()
    write_json(
        out / RESULTS_FILE,
        {**results, "steps": stream.total_steps, "skipped_steps": skipped, "peak_bytes": memory.peak_bytes},
    )
    if skipped:
        session.say(f"note: {skipped} steps were skipped because a gradient was not finite")
    what = "checkpoint" if config.full else "adapter"
    session.say(f"done in {duration(results['seconds'])}, peak memory {_mib(memory.peak_bytes)}: {what} in {out}")
    table = getattr(session.device, "profile_table", None)
    if config.profile and table is not None:
        session.say(table())


def _save_adapter(session: Session, built: TrainableModel, folder: Path) -> None:
    assert built.lora is not None
    arrays = {name: built.parameters.get(name) for name in built.parameters.tensors}
    save_adapter(folder, built.lora, arrays, session.config.model)
