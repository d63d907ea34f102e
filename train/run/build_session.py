"""From an opened session to its model on the device: the plan, the check of operators, loading."""

from __future__ import annotations

import time
from dataclasses import replace

from wgrad.device.errors import WgradError
from wgrad.device.main_memory import main_memory
from wgrad.train.model.adapter_config import adapter_note
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.options.choices import AUTO
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.options.option_text import size
from wgrad.train.plan.lengths import sample_positions
from wgrad.train.plan.plan import Plan, plan_run
from wgrad.train.ranks.world import World
from wgrad.train.run.session import Session
from wgrad.train.step.activations import estimate_activations, recomputes_all
from wgrad.train.step.build import TrainableModel, build_trainable
from wgrad.train.step.checked import check_operators
from wgrad.train.step.compute import choose_compute, common_compute
from wgrad.train.step.memory import for_steps
from wgrad.train.terminal.progress import duration

_KINDS = {
    "nf4_nested": "NF4, double-quantized",
    **{name: name for name in ("float32", "float16", "bfloat16")},
}  # other formats are shown in capitals


def prepare_session(session: Session, config: FinetuneConfig) -> Plan | None:
    """Plan the memory of the run, and compile its shaders.

    Args:
        session: Session of the run.
        config: Its options, with the adapter to start from and `Session.row_tokens` as the sequence length.

    Returns:
        The plan; None in NumPy, which has none.

    Raises:
        WgradError: The run cannot fit into memory.
    """
    with session.display.phase("compiling", unit="shaders") as phase:
        plan = session.plan
        if plan is None or plan.config != config:
            plan = plan_run(config, session.model_config, session.folder, session.device, session.prompt_tokens)
        if plan is None:
            _refuse_beyond_memory(config, session.model_config)
            return None
        begun = time.monotonic()
        count = session.device.prepare(plan.dry, phase.update)
    if config.keep_dequantized and not plan.dequantized.nbytes:
        session.say("note: --keep-dequantized keeps nothing: this device dequantizes weights inside its matmuls")
    if count:
        session.say(f"shaders: {count} compiled in {duration(time.monotonic() - begun)}")
    return plan


def check_session(session: Session, plan: Plan | None, world: World) -> bool:
    """Check the operators of a planned run on its device.

    Returns:
        Whether a rank's device stopped using some kernels, so that the run has to be planned again.
    """
    changed = plan is not None and check_operators(session.device, plan.dry, session.display)
    if not any(world.all_gather(changed, "the check of operators")):
        return False
    session.plan = None  # it was made for the former kernels
    if session.chooses_compute:
        compute = choose_compute(AUTO, session.device)
        compute = common_compute(compute, world.all_gather(compute.dtype, "the type of activations"))
        session.config = replace(session.config, compute=compute.dtype)
        for line in compute.lines:
            session.say(line)
    return True


def _refuse_beyond_memory(config: FinetuneConfig, model_config: ModelConfig) -> None:
    """Raise WgradError if the activations of a step in NumPy exceed all main memory and would be swapped."""
    needed, there = estimate_activations(config, model_config), main_memory()
    if there is not None and needed > there:
        advice = for_steps(config, recomputes_all(config, model_config))
        raise WgradError(
            f"--max-length: activations of {config.rows} x {config.max_length} tokens take roughly {size(needed)}, and "
            f"there are {size(there)} of main memory, which about {config.max_length * there // needed} tokens per "
            f"sequence fit in: {advice}"
        )


def build_session(session: Session, config: FinetuneConfig) -> TrainableModel:
    """Load the model onto the device. config: as for `prepare_session`."""
    begun, remarks = time.monotonic(), list[str]()
    what = "loading weights" if config.full else "loading and quantizing weights"
    with session.display.phase(what, unit="tensors") as phase:
        built = build_trainable(
            config,
            session.model_config,
            session.folder,
            session.device,
            positions=sample_positions(config, session.model_config, session.prompt_tokens),
            progress=phase.update,
            remarks=remarks,
        )
    for remark in remarks:
        session.say(f"note: {remark}")
    if whole := session.model_config.text_of:
        session.say(f"note: of {whole} only the text part is read and trained: the part for images stays as it is")
    if note := adapter_note(built.lora):
        session.say(f"note: {note}")
    trained = built.parameters.count
    kind = ", ".join(_KINDS.get(name, name.upper()) for name in sorted(built.model.variants))
    session.say(
        f"model: {session.model_config.architecture}, {built.total:,} parameters ({kind}), {trained:,} trained "
        f"({100 * trained / built.total:.2f} %), loaded in {time.monotonic() - begun:.1f} s"
    )
    return built


def memory_line(session: Session, plan: Plan | None, built: TrainableModel) -> str:
    """Return a line about the run's device memory, and what that does not count."""
    optimizer = plan.optimizer_bytes if plan is not None else 8 * built.parameters.size
    held = plan.held_bytes if plan is not None else session.device.memory().in_use_bytes + optimizer
    kept = plan.dequantized.nbytes if plan is not None else 0
    parts = f"{size(held - optimizer - kept)} for weights and gradients, {size(optimizer)} for the optimizer"
    parts += f", {size(kept)} for dequantized weights" * (kept > 0)
    recomputed, layers = built.model.recomputed, session.model_config.num_hidden_layers
    part = f"of {recomputed} of {layers} layers" if recomputed else "off"
    how = f"checkpointing {'on' if recomputed == layers else part}"
    how += ", attention kept" * built.model.keep_attention
    if plan is None:  # NumPy: everything is in main memory
        activations = estimate_activations(replace(session.config, max_length=session.row_tokens), session.model_config)
        more = f"roughly {size(activations)} more for activations ({how})"
        rest = "dequantized weights (while memory is free), Python, NumPy and the data"
        return f"memory: {parts}, {more}; not counted: {rest}"
    resident = plan.config.resident_layers if plan.config.stream_weights == "on" else None
    weights = f"weights of {layers - resident} of {layers} layers" if resident else "weights"
    there = [weights if plan.config.stream_weights == "on" else "the embedding"] if plan.host_weight_bytes else []
    there += ["checkpoints"] if plan.host_bytes > plan.host_weight_bytes else []
    beside = f"; {size(plan.host_bytes)} in main memory ({' and '.join(there)})" if there else ""
    return (
        f"memory: {parts}, about {size(plan.activation_bytes)} more for activations ({how}): {size(plan.peak_bytes)} "
        f"on the device{beside}; not counted: compiled shaders, what the driver keeps for itself, and main memory"
        f"{' for anything else' if beside else ''}"
    )
