"""Projections of one input as one product: their weights under one another (NF4Array.stack), their adapters likewise.

A step then launches one product for q, k and v, and one for gate and up; forward, backward, and LoRA's. On disk and
by name every projection stays one of its own: its arrays are views of the stack's, its adapter's matrices views of the
flat parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device
from wgrad.device.formats.nf4 import PART_ROWS, NF4Array
from wgrad.train.model.lora import Adapter, LoraConfig, LoraModule

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
_PARTS = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
}


def parts_of(stack: str) -> list[str]:
    """Paths of the projections of a stack, by its own path: `model.layers.3.mlp.gate_up_proj`."""
    for name, parts in _PARTS.items():
        if stack.endswith(name):
            return [stack.removesuffix(name) + part for part in parts]
    raise ValueError(f"{stack} is no stack")


def stack_of(module: str) -> str | None:
    """The stack whose last part a module is, so that the others are there when it comes."""
    for name, parts in _PARTS.items():
        if module.endswith(parts[-1]):
            return module.removesuffix(parts[-1]) + name
    return None


def stack_weights(weights: dict[str, Any], stack: str, device: Device) -> None:
    """Put a stack beside its parts, which become views of it; nothing where they do not fit."""
    whole = _stacked(weights, stack, device)
    if whole is None:
        return
    weights[stack + ".weight"] = whole
    for part, weight in zip(parts_of(stack), whole.split(device.view)):
        weights[part + ".weight"] = weight


def _stacked(weights: Mapping[str, Any], stack: str, device: Device, one_code: bool = False) -> NF4Array | None:
    """A stack's weight; None where a part is missing, of another format, or does not fit. one_code: as of
    `NF4Array.stack`."""
    names = [part + ".weight" for part in parts_of(stack)]
    if not all(isinstance(weights.get(name), NF4Array) for name in names):
        return None
    return NF4Array.stack([weights[name] for name in names], device, one_code)


def stack_layer(weights: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """The stacks of a layer's projections, which devices quantised: copies, beside which the parts stay."""
    made = {}
    for name in weights:
        stack = stack_of(name.removesuffix(".weight"))
        whole = _stacked(weights, stack, device, one_code=True) if stack else None
        if whole is not None:
            made[f"{stack}.weight"] = whole
    return made


def stack_biases(weights: dict[str, Any], device: Device) -> None:
    """The biases of every stack whose parts have them all, as `stack_if_last` makes them."""
    for name in list(weights):
        module, _, kind = name.rpartition(".")
        stack = stack_of(module) if kind == "bias" else None
        biases = [weights.get(part + ".bias") for part in parts_of(stack)] if stack else []
        if stack and all(bias is not None and bias.size % PART_ROWS == 0 for bias in biases):
            _stack_biases(weights, stack, biases, device)


def stack_if_last(weights: dict[str, Any], name: str, device: Device) -> None:
    """`stack_weights`, where a weight of this name completes a stack. Its bias is made one with the others' too: where
    a model has biases it is their last that completes it."""
    module, _, kind = name.rpartition(".")
    stack = stack_of(module)
    if stack is not None and kind == "weight":
        stack_weights(weights, stack, device)
    elif stack is not None and stack + ".weight" in weights:
        _stack_biases(weights, stack, [weights[part + ".bias"] for part in parts_of(stack)], device)


def _stack_biases(weights: dict[str, Any], stack: str, biases: Sequence[Array], device: Device) -> None:
    whole, at = device.empty((sum(bias.size for bias in biases),)), 0
    for part, bias in zip(parts_of(stack), biases):
        view = device.view(whole, bias.shape, at)
        device.copy(bias, view)
        weights[part + ".bias"] = view
        at += bias.size
    weights[stack + ".bias"] = whole


def adapter_groups(names: Iterable[str]) -> list[list[str]]:
    """Return the adapter matrices, by name, that lie side by side in the flat parameters where a stack's are all
    there: the A of its parts, and the B."""
    ordered, groups = list(names), []
    there = set(ordered)
    for name in ordered:
        module, _, side = name.rpartition(".")
        stack = stack_of(module)
        group = [f"{part}.{side}" for part in parts_of(stack)] if stack else []
        if group and there.issuperset(group):
            groups.append(group)
    return groups


def _apart(config: LoraConfig) -> bool:
    """Return whether parts do not stand side by side: each would draw a mask of its own, or has more than A and B."""
    return bool(config.dropout or config.dora or config.variant)


def stack_adapter(adapter: Adapter, joined: Mapping[tuple[str, ...], Tensor]) -> Adapter:
    """The adapter with those of stacks beside those of their parts. joined: of names of matrices, one Tensor of all.

    Parts of one rank and scale.
    """
    modules = dict(adapter.modules)
    for names, a in joined.items():
        parts = [name.removesuffix(".lora_A") for name in names]
        b = joined.get(tuple(f"{part}.lora_B" for part in parts))
        own = [adapter.modules[part] for part in parts if part in adapter.modules]
        if not names[0].endswith(".lora_A") or b is None or _apart(adapter.config):
            continue
        if len({(module.scaling, module.a.shape[0]) for module in own}) == 1:
            stack = stack_of(parts[-1])
            assert stack is not None
            modules[stack] = LoraModule(a, b, own[0].scaling, own[0].stream)
    return replace(adapter, modules=modules)
