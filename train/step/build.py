"""A model on a device from a model folder: adapters on NF4, all parameters trainable, or for inference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from wgrad.autograd.ops.loss import LOGIT_ELEMENTS
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
    variant_starts,
    whole_shapes,
)
from wgrad.train.model.model import MLP_CHUNK_BYTES, Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import Progress
from wgrad.train.model.pissa import PissaStart, start_within
from wgrad.train.model.qat import Rounding, round_adapted
from wgrad.train.model.stacks import adapter_groups, stack_adapter
from wgrad.train.model.weights import EMBEDDING, HEAD, activation_bytes, attention_bytes, weight_specs, whole_modules
from wgrad.train.options.choices import AUTO, LORA, ComputeType
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.objectives import SFT
from wgrad.train.options.options import flag
from wgrad.train.step.compute import compute_type
from wgrad.train.step.lora_options import lora_config
from wgrad.train.step.memory import advising, for_parameters, limit_bytes
from wgrad.train.step.optim import AdamW, FlatParameters, ParameterSpec
from wgrad.train.step.resident import keeps_head, resident_layers

# Bytes of saved activations from which layers are recomputed where nothing is known of the memory.
RECOMPUTE_ABOVE = 2 << 30
# By default what attention gives is kept from rows of so many tokens on: computing it again is a tenth of a step of the
# 1B there and grows with the row (bench/notes/tensor-cores.md), what it takes does not. Bytes below which that is so.
KEEP_ATTENTION_FROM, KEEP_ATTENTION_BELOW = 8192, 4 << 30
# A limit of the memory, divided by this, is what the chunks of a long row's MLP may take; and the least that they get,
# with which the 8B with streamed weights fits 3 GiB.
MLP_CHUNK_SHARE, LEAST_MLP_CHUNK_BYTES = 32, 192 << 20


@dataclass(frozen=True)
class TrainableModel:
    """A model with its trainable parameters. lora is None where all parameters are trained."""

    model: Model
    parameters: FlatParameters
    lora: LoraConfig | None
    total: int  # parameters of the whole model, adapters included
    start: PissaStart | None = None  # what the adapter began as, where the frozen weights are the rest

    def adapter(self, flat: np.ndarray | None = None) -> tuple[LoraConfig, dict[str, np.ndarray]]:
        """The adapter as it is now, or with parameters as a checkpoint has them, for the base model as its files have
        it: as of `load_adapter`."""
        assert self.lora is not None
        names = self.parameters.tensors
        arrays = {name: self.parameters.get(name) for name in names} if flat is None else self.parameters.named(flat)
        return (self.lora, arrays) if self.start is None else self.start.as_lora(arrays)


def count_parameters(config: ModelConfig) -> int:
    """Numbers in the base model (tied weights once)."""
    return sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in weight_specs(config))


def estimate_activations(config: RunOptions, model: ModelConfig) -> int:
    """Rough bytes that a step takes in NumPy beside what is held all the time: activations, and the loss's logits."""
    tokens, layers, itemsize = config.rows * config.max_length, model.num_hidden_layers, itemsize_of(config)
    kept, logits = activation_bytes(model, tokens, itemsize), min(tokens * model.vocab_size, LOGIT_ELEMENTS) * 4
    recomputed = recomputed_layers(config, model)
    if not recomputed:
        return kept + logits
    # Every layer's input, and then either the logits or a layer that is made again, with its largest gradients.
    layer = kept // layers + 2 * tokens * model.mlp_width * itemsize
    attention = attention_bytes(model, tokens, itemsize) * recomputed // layers if keeps_attention(config, model) else 0
    whole = kept // layers * (layers - recomputed)
    return recomputed * tokens * model.hidden_size * 4 + whole + attention + max(layer, logits)


def recomputed_layers(config: RunOptions, model: ModelConfig) -> int:
    """Return how many layers, from the first on, are recomputed in the backward. WgradError: the model has fewer.

    Where --gradient-checkpointing is still auto, and in runs from before there was auto: all, if the activations are
    estimated above RECOMPUTE_ABOVE, or none.
    """
    asked, layers = config.gradient_checkpointing, model.num_hidden_layers
    if config.stream_weights == "on":
        return layers
    if not config.checkpointing_open:
        return _layers("gradient_checkpointing", asked, layers)
    estimate = activation_bytes(model, config.rows * config.max_length, itemsize_of(config))
    return layers if config.offload_activations or estimate > RECOMPUTE_ABOVE else 0


def recomputes_all(config: RunOptions, model: ModelConfig) -> bool:
    """Return whether no activation could be recomputed that is not."""
    return recomputed_layers(config, model) == model.num_hidden_layers


def offloaded_layers(config: RunOptions, model: ModelConfig) -> int:
    """Return how many layers, from the first on, have their inputs offloaded. WgradError: the model has fewer."""
    asked = _layers("offload_activations", config.offload_activations, model.num_hidden_layers)
    return min(asked, recomputed_layers(config, model))


def _layers(name: str, asked: Any, layers: int) -> int:
    """The value of an option that takes true (all layers), false, or a number of them."""
    if asked is True:
        return layers
    if asked > layers:
        raise WgradError(
            f"{flag(name)}: must be at most {layers}, the layers of the model; got {asked}: leave the number out for "
            "all of them"
        )
    return int(asked)


def keeps_attention(config: RunOptions, model: ModelConfig) -> bool:
    """--keep-attention, where layers are made again; by default in long rows, unless it is much or a limit is set."""
    if not recomputed_layers(config, model):
        return False
    if config.keep_attention is not None:
        return config.keep_attention
    if config.limit or config.offload_activations or config.stream_weights == "on":
        return False
    held = attention_bytes(model, config.rows * config.max_length, itemsize_of(config))
    return config.max_length >= KEEP_ATTENTION_FROM and held < KEEP_ATTENTION_BELOW


def mlp_chunk_bytes(config: RunOptions) -> int | None:
    """Return the bytes that the MLP of long sequences may take at a time (`Model`); None: as usual."""
    if config.mlp_chunk is not None:
        return limit_bytes(config.mlp_chunk)
    limit = limit_bytes(config.limit)
    return limit and min(MLP_CHUNK_BYTES, max(LEAST_MLP_CHUNK_BYTES, limit // MLP_CHUNK_SHARE))


def balance(config: RunOptions, model: ModelConfig, device: Device) -> Balance | None:
    """Return the load-balancing loss of a run's model; None: it has none. WgradError: there are no experts."""
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


def itemsize_of(config: RunOptions) -> int:
    """Bytes of an activation; of --compute auto, which no device has decided yet, the most that it can take."""
    return np.dtype("float32" if config.compute == AUTO else config.compute).itemsize


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
    """The model that `config` asks to train, with its weights and the start values of what is trained. WgradError.

    remarks: gets what is worth a word to the user. contents False, for the dry run of a device: as large and as typed,
    without reading the weights.
    """
    config = replace(config, compute=compute_type(config.compute, device))
    offloaded = offloaded_layers(config, model_config)
    options: dict[str, Any] = {
        "positions": max(positions, config.max_length),
        "dtype": np.dtype(config.compute),
        "recompute": recomputed_layers(config, model_config),
        "offload": 0 if device.shared_memory else offloaded,
        "keep_attention": keeps_attention(config, model_config),
        "keep_norms": config.keep_norms is not False,
        "mlp_chunk_bytes": mlp_chunk_bytes(config),
        "mlp_chunks_above": None if config.mlp_chunk is None else 0,
        "balance": balance(config, model_config, device),
    }
    base = count_parameters(model_config)
    if config.full:
        parameters = _all_parameters(config, model_config, folder, device, progress, contents)
        whole = {**parameters.tensors, **load_untrained(folder, model_config, device, contents)}
        return TrainableModel(Model(model_config, whole, device, **options), parameters, None, base)
    with advising(for_parameters(config)):
        lora, values, start = _start(config, model_config)
    rounding = Rounding.of(config.qat, folder, model_config) if config.qat else None
    if rounding is not None and (lora.dora or lora.modules_to_save):
        what = "is a DoRA adapter" if lora.dora else f"has {lora.modules_to_save[0]} whole"
        raise WgradError(f"--qat: {config.adapter} {what}, which is not rounded in training: leave one of the two out")
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
    with advising(for_parameters(config)):
        shapes = whole_shapes(lora, whole_modules(model_config))
        parameters = lora_parameters(start.values if start else values, device, config.loraplus_lr_ratio, shapes)
    for name in shapes.keys() - values.keys():
        # A head that is tied to the embedding begins as that.
        source = EMBEDDING if name == HEAD and model_config.tie_word_embeddings else name
        load_trainable(folder, model_config, {source: parameters.tensors[name].data}, device, contents=contents)
    adapter = stack_adapter(Adapter.from_tensors(lora, parameters.tensors), parameters.joined)
    if lora.dora and not config.adapter and contents:
        start_magnitudes(adapter, weights, device)
    if rounding is not None:
        weights = rounding.fixed(weights, adapter, model_config, device)
        adapter = rounding.with_places(adapter, model_config, device)
        parameters.changed = partial(round_adapted, adapter, weights, device)
        parameters.changed()
    model = Model(model_config, weights, device, adapter=adapter, **options)
    return TrainableModel(model, parameters, lora, base + parameters.count, start)


def _all_parameters(
    config: RunOptions,
    model_config: ModelConfig,
    folder: str | os.PathLike[str],
    device: Device,
    progress: Progress | None,
    contents: bool,
) -> FlatParameters:
    """Those of --full."""
    specs = [ParameterSpec(s.name, s.shape, s.decays) for s in weight_specs(model_config) if s.trained]
    with advising(for_parameters(config)):
        parameters = FlatParameters(specs, device)
    arrays = {name: tensor.data for name, tensor in parameters.tensors.items()}
    load_trainable(folder, model_config, arrays, device, progress, contents)
    return parameters


def streams(choice: str, device: Device) -> bool:
    """Return whether weights live in main memory: --stream-weights on (auto is settled by a plan), where that is not
    the device's own."""
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
    """The frozen weights, on the device or streamed to it. staying, options: of `load_streamed` and `load_frozen`."""
    if streamed:
        return load_streamed(folder, model_config, device, remarks=remarks, **staying, **options)
    return load_frozen(folder, model_config, device, stacked=stacked, **options)


def lora_parameters(
    values: Mapping[str, np.ndarray],
    device: Device,
    rate_of_b: float = 1.0,
    whole: dict[str, tuple[int, ...]] | None = None,
) -> FlatParameters:
    """An adapter's matrices (`init_lora`) as parameters, those of a stack side by side, and whole weights of these
    shapes, zeros where they have no value. rate_of_b: of every B and vector, in the learning rate (LoRA+, arXiv
    2402.12354, as PEFT groups them)."""
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
    """The optimiser of a run."""
    return AdamW(
        parameters,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        scale_loss=compute_type(config.compute, parameters.device) == "float16",
    )


def _start(config: RunOptions, model: ModelConfig) -> tuple[LoraConfig, dict[str, np.ndarray], PissaStart | None]:
    """--adapter's matrices (dropout is still --lora-dropout), or new ones from the seed; of --init-lora-weights pissa
    what finds them."""
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
        return lora, init_lora(shapes, config.seed) | variant_starts(lora, modules), None
    # With such a start an adapter is the one of the checkpoint that the run goes on from.
    known = start_within(load_adapter(config.adapter, *adaptable(model))[1]) if config.adapter else None
    start = PissaStart(lora, shapes, config.init_lora_weights, config.seed, known)
    return lora, start.values, start


def _check_ranks(config: RunOptions, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """WgradError for a rank that can do no more than a lower one, or that --init-lora-weights cannot start."""
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
    """An adapter for inference, from `load_adapter`'s result."""
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
    progress: Progress | None = None,
    contents: bool = True,
    remarks: list[str] | None = None,
) -> Model:
    """A model for inference, with an adapter or without. contents, remarks: see `build_trainable`. WgradError."""
    dtype = np.dtype(compute_type(compute, device))
    loaded = load_adapter(adapter, *adaptable(model_config)) if adapter else None
    options: dict[str, Any] = {"quantize": quantize, "progress": progress, "contents": contents}
    options["staying"] = {"resident": resident, "keep_head": keeps_head(resident, model_config)}
    weights = load_base(folder, model_config, device, streams(stream_weights, device), remarks, **options)
    placed = with_inverses(frozen_adapter(*loaded, device), weights, device) if loaded else None
    return Model(model_config, weights, device, adapter=placed, positions=positions, dtype=dtype)
