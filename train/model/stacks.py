"""Stacks: projections of the same input computed by one GEMM, with their weights and adapters concatenated by rows.

A step then launches one GEMM for q, k and v, and one for gate and up, in the forward, the backward and LoRA. Each
projection keeps its own name, also on disk: its arrays are views of the stack's (NF4Array.stack), and its adapter's
matrices are views of the flat parameters.
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
    """Return the paths of a stack's projections. stack: its path, such as `model.layers.3.mlp.gate_up_proj`."""
    for name, parts in _PARTS.items():
        if stack.endswith(name):
            return [stack.removesuffix(name) + part for part in parts]
    raise ValueError(f"{stack} is no stack")


def stack_of(module: str) -> str | None:
    """Return the path of the stack whose last part a module is, or None.

    Parts are loaded in order, so the other parts are there when the last one is.
    """
    for name, parts in _PARTS.items():
        if module.endswith(parts[-1]):
            return module.removesuffix(parts[-1]) + name
    return None


def stack_weights(weights: dict[str, Any], stack: str, device: Device, one_code: bool = False) -> None:
    """Add a stack to the weights and make its parts views of it, if the parts can be stacked.

    one_code: as for `NF4Array.stack`.
    """
    whole = _stacked(weights, stack, device, one_code)
    if whole is None:
        return
    weights[stack + ".weight"] = whole
    for part, weight in zip(parts_of(stack), whole.split(device.view)):
        weights[part + ".weight"] = weight


def _stacked(weights: Mapping[str, Any], stack: str, device: Device, one_code: bool = False) -> NF4Array | None:
    """Return a stack's weight, or None if a part is missing or the parts' formats or sizes do not fit.

    one_code: as for `NF4Array.stack`.
    """
    names = [part + ".weight" for part in parts_of(stack)]
    if not all(isinstance(weights.get(name), NF4Array) for name in names):
        return None
    return NF4Array.stack([weights[name] for name in names], device, one_code)


def stack_layer(weights: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Return stacks of a layer's projections as copies, which leave the parts unchanged."""
    made = {}
    for name in weights:
        stack = stack_of(name.removesuffix(".weight"))
        whole = _stacked(weights, stack, device, one_code=True) if stack else None
        if whole is not None:
            made[f"{stack}.weight"] = whole
    return made


def stack_parts(weights: dict[str, Any], device: Device) -> None:
    """Stack the weights of a layer, which have one nested_code, and whose parts become views."""
    for name in list(weights):
        if stack := stack_of(name.removesuffix(".weight")):
            stack_weights(weights, stack, device, one_code=True)


def stack_biases(weights: dict[str, Any], device: Device) -> None:
    """Stack the biases of all stacks whose parts all have biases."""
    for name in list(weights):
        module, _, kind = name.rpartition(".")
        stack = stack_of(module) if kind == "bias" else None
        biases = [weights.get(part + ".bias") for part in parts_of(stack)] if stack else []
        if stack and all(bias is not None and bias.size % PART_ROWS == 0 for bias in biases):
            _stack_biases(weights, stack, biases, device)


def stack_if_last(weights: dict[str, Any], name: str, device: Device) -> None:
    """Stack weights if the weight `name` is the last part of a stack, or biases if the bias `name` is.

    In models with biases, the last bias comes after the last weight and completes the stack.
    """
    module, _, kind = name.rpartition(".")
    stack = stack_of(module)
    if stack is not None and kind == "weight":
        stack_weights(weights, stack, device)
    elif stack is not None and stack + ".weight" in weights:
        _stack_biases(weights, stack, [weights[part + ".bias"] for part in parts_of(stack)], device)


def _stack_biases(weights: dict[str, Any], stack: str, biases: Sequence[Array], device: Device) -> None:
    """Add a stack's bias to the weights and make the biases of its parts views of it."""
    whole, at = device.empty((sum(bias.size for bias in biases),)), 0
    for part, bias in zip(parts_of(stack), biases):
        view = device.view(whole, bias.shape, at)
        device.copy(bias, view)
        weights[part + ".bias"] = view
        at += bias.size
    weights[stack + ".bias"] = whole


def adapter_groups(names: Iterable[str]) -> list[list[str]]:
    """Return groups of adapter matrices to place next to each other in the flat parameters.

    A group has the names of the A, or of the B, of all parts of a stack.
    """
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
    """Return whether adapters cannot be stacked, because each draws its own dropout mask or has more than A and B."""
    return bool(config.dropout or config.dora or config.variant)


def stack_adapter(adapter: Adapter, joined: Mapping[tuple[str, ...], Tensor]) -> Adapter:
    """Return the adapter with modules added for stacks whose parts have the same rank and scale.

    joined: concatenated matrices as one Tensor, by the names in a group of `adapter_groups`.
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
