"""Build a model on a device from its folder: with adapters, with all parameters trainable, or for inference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.model.adapter_files import load_adapter
from wgrad.train.model.balance import Balance
from wgrad.train.model.dora import start_magnitudes, with_inverses
from wgrad.train.model.load_streamed import load_streamed
from wgrad.train.model.load_weights import load_frozen, load_trainable, load_untrained
from wgrad.train.model.lora import (
    MAGNITUDE,
    Adapter,
    LoraConfig,
    adaptable,
    expert_modules,
    init_lora,
    linear_modules,
    lora_shapes,
    unwritten,
    variant_starts,
    whole_shapes,
)
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import Progress
from wgrad.train.model.pissa import PissaStart, start_within
from wgrad.train.model.qat import Rounding, round_adapted
from wgrad.train.model.stacks import adapter_groups, stack_adapter
from wgrad.train.model.weights import EMBEDDING, HEAD, weight_specs, whole_modules
from wgrad.train.options.choices import LORA, ComputeType
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.objectives import SFT
from wgrad.train.step.activations import activation_options, scratch_bytes
from wgrad.train.step.compute import compute_type
from wgrad.train.step.lora_options import lora_config
from wgrad.train.step.memory import advising, for_parameters
from wgrad.train.step.optim import AdamW, FlatParameters, ParameterSpec
from wgrad.train.step.resident import keeps_head, resident_layers


@dataclass(frozen=True)
class TrainableModel:
    """A model with its trainable parameters."""

    model: Model
    parameters: FlatParameters
    lora: LoraConfig | None  # None: all parameters are trained
    total: int  # parameters of the whole model, adapters included
    start: PissaStart | None = None  # start values that were subtracted from the frozen weights

    def adapter(self, flat: np.ndarray | None = None) -> tuple[LoraConfig, dict[str, np.ndarray]]:
        """Return the adapter for the original base model, like `load_adapter`.

        flat: parameters in a checkpoint's order; None: the current ones.
        """
        assert self.lora is not None
        names = self.parameters.tensors
        arrays = {name: self.parameters.get(name) for name in names} if flat is None else self.parameters.named(flat)
        return (self.lora, arrays) if self.start is None else self.start.as_lora(arrays)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the base model (tied weights count once)."""
    return sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in weight_specs(config))


def balance(config: RunOptions, model: ModelConfig, device: Device) -> Balance | None:
    """Return the load-balancing loss of a run; None: it has none.

    Raises:
        WgradError: --router-aux-loss-coef is set for a model without experts, or another objective than sft.
    """
    coefficient, experts = config.router_aux_loss_coef, model.experts
    if coefficient and experts is None:
        raise WgradError(
            f"--router-aux-loss-coef: {model.architecture} has no experts, got {coefficient:g}: leave it out"
        )
    if coefficient and config.objective != SFT:
        raise WgradError(
            f"--router-aux-loss-coef: --objective {config.objective} has no load-balancing loss, got {coefficient:g}: "
            "leave it out"
        )
    if experts is None or config.objective != SFT:
        return None
    weight = experts.balance if coefficient is None else coefficient
    return Balance(weight, experts, config.rows * config.max_length, device) if weight else None


def build_trainable(
    config: RunOptions,
    model_config: ModelConfig,
    folder: str | os.PathLike[str],
    device: Device,
    *,
    positions: int,
    progress: Progress | None = None,
    contents: bool = True,
    remarks: list[str] | None = None,
) -> TrainableModel:
    """Build the model that `config` trains, with its weights and the start values of its parameters.

    Args:
        config: Options of the run.
        model_config: Configuration of the base model.
        folder: Folder of the base model.
        device: Device of the run.
        positions: Positions that the model needs at least, as for samples.
        progress: Called with the number of tensors loaded, and of all.
        contents: Whether to read the weights; False, for a dry run: only allocate them.
        remarks: Receives remarks for the user.

    Raises:
        WgradError: Options and model do not fit together, or memory is too small.
    """
    config = replace(config, compute=compute_type(config.compute, device))
    options, device.scratch_bytes = _model_options(config, model_config, device, positions), scratch_bytes(config)
    base = count_parameters(model_config)
    if config.full:
        parameters = _all_parameters(config, model_config, folder, device, progress, contents)
        whole = {**parameters.tensors, **load_untrained(folder, model_config, device, contents)}
        return TrainableModel(Model(model_config, whole, device, **options), parameters, None, base)
    with advising(for_parameters(config)):
        lora, values, start = _start(config, model_config, contents)
    rounding = _rounding(config, lora, folder, model_config)
    weights = load_base(
        folder,
        model_config,
        device,
        streams(config.stream_weights, device),
        remarks,
        quantize=config.quantize,
        double_quant=config.double_quant,
        block_size=config.block_size,
        stacked=device.stacks_weights and rounding is None,
        progress=progress,
        contents=contents,
        start=start,
        staying={"resident": resident_layers(config, model_config)},
    )
    parameters = _adapter_parameters(config, model_config, folder, device, lora, values, contents)
    adapter = stack_adapter(Adapter.from_tensors(lora, parameters.tensors), parameters.joined)
    if lora.dora and not config.adapter and contents:
        start_magnitudes(adapter, weights, device)
    if rounding is not None:
        weights, adapter = _rounded(rounding, weights, adapter, parameters, model_config)
    model = Model(model_config, weights, device, adapter=adapter, **options)
    return TrainableModel(model, parameters, lora, base + parameters.count, start)


def _model_options(config: RunOptions, model_config: ModelConfig, device: Device, positions: int) -> dict[str, Any]:
    """Return the model's options: its dtype, what is kept for the backward and where, and the balance of experts."""
    options = activation_options(config, model_config)
    if device.shared_memory:
        options["offload"] = 0
    return options | {
        "positions": max(positions, config.max_length),
        "dtype": np.dtype(config.compute),
        "balance": balance(config, model_config, device),
    }


def _rounding(
    config: RunOptions, lora: LoraConfig, folder: str | os.PathLike[str], model_config: ModelConfig
) -> Rounding | None:
    """Return the rounding of --qat, if it is set. Raises WgradError if it does not round all that the adapter has."""
    rounding = Rounding.of(config.qat, folder, model_config) if config.qat else None
    if rounding is not None and (lora.dora or lora.modules_to_save):
        what = "is a DoRA adapter" if lora.dora else f"has {lora.modules_to_save[0]} whole"
        raise WgradError(f"--qat: {config.adapter} {what}, which is not rounded in training: leave one of the two out")
    return rounding


def _rounded(
    rounding: Rounding,
    weights: Mapping[str, Any],
    adapter: Adapter,
    parameters: FlatParameters,
    model_config: ModelConfig,
) -> tuple[Mapping[str, Any], Adapter]:
    """Return weights and adapter with rounded weights of the adapted modules, rounded anew when parameters change."""
    weights = rounding.fixed(weights, adapter, model_config, parameters.device)
    adapter = rounding.with_places(adapter, model_config, parameters.device)
    parameters.changed = partial(round_adapted, adapter, weights, parameters.device)
    parameters.changed()
    return weights, adapter


def _all_parameters(
    config: RunOptions,
    model_config: ModelConfig,
    folder: str | os.PathLike[str],
    device: Device,
    progress: Progress | None,
    contents: bool,
) -> FlatParameters:
    """Return all parameters of the model, for --full."""
    specs = [ParameterSpec(s.name, s.shape, s.decays) for s in weight_specs(model_config) if s.trained]
    with advising(for_parameters(config)):
        parameters = FlatParameters(specs, device)
    arrays = {name: tensor.data for name, tensor in parameters.tensors.items()}
    load_trainable(folder, model_config, arrays, device, progress, contents)
    return parameters


def _adapter_parameters(
    config: RunOptions,
    model_config: ModelConfig,
    folder: str | os.PathLike[str],
    device: Device,
    lora: LoraConfig,
    values: Mapping[str, np.ndarray],
    contents: bool,
) -> FlatParameters:
    """Return the parameters of an adapter. Whole modules that `values` lacks start as in the model's files."""
    with advising(for_parameters(config)):
        shapes = whole_shapes(lora, whole_modules(model_config))
        parameters = lora_parameters(values, device, config.loraplus_lr_ratio, shapes)
    for name in shapes.keys() - values.keys():
        # A head that is tied to the embedding starts as a copy of it.
        source = EMBEDDING if name == HEAD and model_config.tie_word_embeddings else name
        load_trainable(folder, model_config, {source: parameters.tensors[name].data}, device, contents=contents)
    return parameters


def streams(choice: str, device: Device) -> bool:
    """Return whether weights stay in main memory: --stream-weights on, unless the device shares that memory."""
    return choice == "on" and not device.shared_memory


def load_base(
    folder: str | os.PathLike[str],
    model_config: ModelConfig,
    device: Device,
    streamed: bool,
    remarks: list[str] | None,
    *,
    stacked: bool = False,
    staying: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Mapping[str, Any]:
    """Load the frozen weights: onto the device, or into main memory to be streamed.

    Args:
        staying: Arguments of `load_streamed` alone: which weights stay on the device.
        options: Arguments of `load_frozen` and `load_streamed`.
    """
    if streamed:
        return load_streamed(folder, model_config, device, remarks=remarks, **staying, **options)
    return load_frozen(folder, model_config, device, stacked=stacked, **options)


def lora_parameters(
    values: Mapping[str, np.ndarray],
    device: Device,
    rate_of_b: float = 1.0,
    whole: dict[str, tuple[int, ...]] | None = None,
) -> FlatParameters:
    """Return an adapter's matrices and whole trained weights as parameters; those of a stack lie side by side.

    Args:
        values: Start value of each matrix (`init_lora`).
        device: Device of the run.
        rate_of_b: Factor of the learning rate of every B and vector (LoRA+, arXiv 2402.12354, as PEFT groups them).
        whole: Shapes of weights that are trained whole; they start as zeros.
    """
    shapes = {name: value.shape for name, value in values.items()} | (whole or {})
    fast = {name for name, shape in shapes.items() if name.endswith(".lora_B") or len(shape) == 1}
    specs = [
        ParameterSpec(name, shape, len(shape) > 1 or name.endswith(MAGNITUDE), rate_of_b if name in fast else 1.0)
        for name, shape in shapes.items()
    ]
    parameters = FlatParameters(specs, device, adapter_groups(values) if device.stacks_weights else ())
    for name, value in values.items():
        parameters.set(name, value)
    return parameters


def build_optimizer(config: RunOptions, parameters: FlatParameters) -> AdamW:
    """Return the optimizer of a run."""
    return AdamW(
        parameters,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        scale_loss=compute_type(config.compute, parameters.device) == "float16",
    )


def _start(
    config: RunOptions, model: ModelConfig, contents: bool
) -> tuple[LoraConfig, dict[str, np.ndarray], PissaStart | None]:
    """Return the adapter to train and its start values: those of --adapter, or new ones (zeros without `contents`).

    The dropout is always --lora-dropout. The third value is set for --init-lora-weights other than lora."""
    modules = linear_modules(model)
    if config.adapter and config.init_lora_weights == LORA:
        lora, values = load_adapter(config.adapter, *adaptable(model))
        if not config.objective_kind.trains_head and lora.saves("lm_head"):
            raise WgradError(
                f"--adapter: {config.adapter} has lm_head whole, and the loss of --objective {config.objective} has no "
                "gradient of it: use --objective sft"
            )
        if lora.dora and config.lora_dropout:
            raise WgradError(
                f"--lora-dropout: {config.adapter} is a DoRA adapter, which is trained without: leave it out"
            )
        return replace(lora, dropout=config.lora_dropout), values, None
    lora = lora_config(config, model)
    shapes = lora_shapes(lora, modules, experts=expert_modules(model))
    _check_ranks(config, lora, shapes)
    if config.init_lora_weights == LORA:
        new = init_lora(shapes, config.seed) | variant_starts(lora, modules) if contents else unwritten(shapes)
        return lora, new, None
    # With such a start, --adapter is the adapter of the checkpoint that the run resumes from.
    known = start_within(load_adapter(config.adapter, *adaptable(model))[1]) if config.adapter else None
    start = PissaStart(lora, shapes, config.init_lora_weights, config.seed, known)
    return lora, start.values, start


def _check_ranks(config: RunOptions, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WgradError for a rank above the size of all projections, or above the singular values that PiSSA needs."""
    adapted = {a[:-7]: (shapes[a[:-1] + "B"][-2], shape[-1]) for a, shape in shapes.items() if a.endswith(".lora_A")}
    widest = max(side for shape in adapted.values() for side in shape)
    for module, shape in adapted.items():
        rank = lora.rank_of(module)
        option = "--lora-r:" if rank == config.lora_r else "--target-modules: a rank"
        if rank > widest:  # and its matrices may fit into no memory
            raise WgradError(
                f"{option} must be at most {widest}, the longest side of the projections that it adapts; got {rank}: "
                "a larger one can do no more"
            )
        if rank > min(shape) and config.init_lora_weights != LORA:
            raise WgradError(
                f"{option} must be at most {min(shape)}, the singular values of {module}, "
                f"with --init-lora-weights {config.init_lora_weights}; "
                f"got {rank}: give it a lower one, or use --init-lora-weights lora"
            )


def frozen_adapter(lora: LoraConfig, values: Mapping[str, np.ndarray], device: Device) -> Adapter:
    """Return an adapter for inference. lora, values: result of `load_adapter`."""
    return Adapter.from_tensors(lora, {name: Tensor(device.upload(v), device) for name, v in values.items()})


def build_frozen(
    model_config: ModelConfig,
    folder: str | os.PathLike[str],
    device: Device,
    *,
    positions: int,
    adapter: str | None = None,
    quantize: bool = True,
    compute: ComputeType = "float32",
    stream_weights: str = "off",
    resident: int = 0,
    slots: int = 0,
    progress: Progress | None = None,
    contents: bool = True,
    remarks: list[str] | None = None,
) -> Model:
    """Build a model for inference, with an adapter or without.

    Args:
        model_config: Configuration of the base model.
        folder: Folder of the base model.
        device: Device.
        positions: Positions that the model needs.
        adapter: Folder of an adapter; None: the base model alone.
        quantize: Whether 16-bit weights are quantized to NF4.
        compute: Dtype of activations.
        stream_weights: "on": keep weights in main memory.
        resident: Layers whose weights stay on the device if weights are streamed.
        slots: Slots of each layer for the experts used last, as for `load_streamed`.
        progress, contents, remarks: As for `build_trainable`.

    Raises:
        WgradError: Options and model do not fit together.
    """
    dtype = np.dtype(compute_type(compute, device))
    loaded = load_adapter(adapter, *adaptable(model_config)) if adapter else None
    options: dict[str, Any] = {"quantize": quantize, "progress": progress, "contents": contents}
    options["staying"] = {
        "resident": resident,
        "keep_head": keeps_head(resident or slots, model_config),
        "slots": slots,
    }
    weights = load_base(folder, model_config, device, streams(stream_weights, device), remarks, **options)
    placed = with_inverses(frozen_adapter(*loaded, device), weights, device) if loaded else None
    return Model(model_config, weights, device, adapter=placed, positions=positions, dtype=dtype)
