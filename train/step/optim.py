"""AdamW over flat buffers: all trainable parameters, their gradients and moments lie in four float32 arrays.

One launch updates everything, and nothing is read back: the device works out clipping, the loss scale, and whether to
skip a step with a non-finite gradient (`Device.clip`).
Sources: AdamW (arXiv 1711.05101); dynamic loss scaling (arXiv 1710.03740).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from wgrad.autograd.ops.optimizer import (
    HYPER_GROWTH_INTERVAL,
    HYPER_LR,
    HYPER_MAX_NORM,
    HYPER_SIZE,
    STATE_APPLIED,
    STATE_SIZE,
    STATE_SKIPPED,
)
from wgrad.autograd.tensor import Tensor, parameter
from wgrad.device.contract import Device, Readback
from wgrad.device.memory import Array

ALIGN = 64  # elements; a view's offset must be a multiple of it
START_LOSS_SCALE = 16384.0  # float16; doubles up to 65536, halves when a gradient overflows
GROWTH_INTERVAL = 500  # steps without an overflow before the loss scale doubles
FLAT_STATE = ("parameters", "exp_avg", "exp_avg_sq")  # names of the state's arrays that cover all parameters


@dataclass(frozen=True)
class ParameterSpec:
    """A tensor to train."""

    name: str
    shape: tuple[int, ...]
    decay: bool = True  # whether weight decay applies (matrices; not norms and biases)
    rate: float = 1.0  # factor of the step's learning rate


@dataclass(frozen=True)
class Segment:
    """Elements begin ... end of the flat buffers, which share a factor of the learning rate."""

    begin: int
    end: int
    rate: float


def _offsets(specs: Sequence[ParameterSpec]) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor, at multiples of ALIGN, and the end of the last."""
    offsets, at = {}, 0
    for spec in specs:
        offsets[spec.name] = at
        at += -(-math.prod(spec.shape) // ALIGN) * ALIGN
    return offsets, at


def _segments(placed: Iterable[ParameterSpec], offsets: dict[str, int], size: int) -> list[Segment]:
    begun = [(offsets[first.name], rate) for rate, (first, *_) in groupby(placed, key=lambda s: s.rate)] or [(0, 1.0)]
    ends = [begin for begin, _ in begun[1:]] + [size]
    return [Segment(begin, end, rate) for (begin, rate), end in zip(begun, ends)]


class FlatParameters:
    """Trainable tensors as views into one float32 buffer, those with weight decay first, and gradients likewise.

    Checkpoints hold the tensors in another order, which does not depend on groups and learning rates.

    Args:
        specs: The tensors.
        device: Device that holds the buffers.
        groups: Names of matrices that are placed side by side, so that one Tensor can hold the rows of all (`joined`).

    Attributes:
        data, grad: float32 [size].
        tensors: Tensor of each name, in the order of `specs`.
        joined: Tensor of each group, by its names.
        decay_elements: Elements with weight decay, from the first on.
        segments: Parts of the buffer with one learning rate each; they cover it.
        changed: Called after the values have changed; may only do device work.
    """

    def __init__(self, specs: Sequence[ParameterSpec], device: Device, groups: Sequence[Sequence[str]] = ()) -> None:
        self.device = device
        ordered = [s for s in specs if s.decay] + [s for s in specs if not s.decay]
        self._file_offsets, _ = _offsets(ordered)
        together = {name: group for group in groups for name in group}
        by_name = {s.name: s for s in specs}
        placed: dict[str, ParameterSpec] = {}
        for spec in sorted(ordered, key=lambda s: (not s.decay, s.rate)):
            for name in together.get(spec.name, [spec.name]):
                placed[name] = by_name[name]
        self._offsets, end = _offsets(list(placed.values()))
        offsets = self._offsets
        self.size = max(end, ALIGN)
        self.decay_elements = min((offsets[s.name] for s in specs if not s.decay), default=self.size)
        self.segments = _segments(placed.values(), offsets, self.size)
        self.changed: Callable[[], None] = lambda: None
        self.data = device.zeros((self.size,))
        self.grad = device.zeros((self.size,))
        self.tensors: dict[str, Tensor] = {}
        for spec in specs:
            data, grad = (device.view(a, spec.shape, offsets[spec.name]) for a in (self.data, self.grad))
            self.tensors[spec.name] = parameter(data, device, grad=grad)
        self.joined: dict[tuple[str, ...], Tensor] = {}
        for group in groups:
            parts = [by_name[name].shape for name in group]
            if all(shape[1:] == parts[0][1:] and math.prod(shape) % ALIGN == 0 for shape in parts):
                whole = (sum(shape[0] for shape in parts), *parts[0][1:])
                data, grad = (device.view(a, whole, offsets[group[0]]) for a in (self.data, self.grad))
                self.joined[tuple(group)] = parameter(data, device, grad=grad)

    @property
    def count(self) -> int:
        """Number of trainable parameters, without the padding between tensors."""
        return sum(math.prod(t.shape) for t in self.tensors.values())

    def places(self) -> dict[str, tuple[int, int]]:
        """Return where each tensor begins and ends in the flat buffers."""
        return {name: (at, at + math.prod(self.tensors[name].shape)) for name, at in self._offsets.items()}

    def set(self, name: str, value: np.ndarray) -> None:
        self.device.write(self.tensors[name].data, np.ascontiguousarray(value, np.float32))

    def get(self, name: str) -> np.ndarray:
        return self.device.download(self.tensors[name].data)

    def to_file(self, flat: np.ndarray) -> np.ndarray:
        """Reorder a flat array of the device to the order of checkpoints."""
        return self._moved(flat, self._offsets, self._file_offsets)

    def from_file(self, flat: np.ndarray) -> np.ndarray:
        """Invert `to_file`. ValueError: the array is not one of these parameters."""
        if flat.shape != (self.size,) or flat.dtype != np.float32:
            raise ValueError(f"expected float32 ({self.size},), got {flat.dtype} {flat.shape}")
        return self._moved(flat, self._file_offsets, self._offsets)

    def named(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return the tensors of a flat array in the order of checkpoints, by name."""
        at = self._file_offsets
        return {n: flat[at[n] : at[n] + math.prod(t.shape)].reshape(t.shape) for n, t in self.tensors.items()}

    def _moved(self, flat: np.ndarray, before: dict[str, int], after: dict[str, int]) -> np.ndarray:
        moved = np.zeros_like(flat)
        for name, tensor in self.tensors.items():
            size = math.prod(tensor.shape)
            moved[after[name] : after[name] + size] = flat[before[name] : before[name] + size]
        return moved


class AdamW:
    """AdamW with global-norm clipping and a dynamic loss scale (float16). Its state lives on the device.

    Attributes:
        loss_scale: float32 [1], a factor that the seed gradient must contain.
        state: float32 [8], see autograd/ops/optimizer.py.
        hyper: float32 [4] for each factor of the learning rate, see there.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        *,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        scale_loss: bool = False,
    ) -> None:
        self.parameters, self.device = parameters, parameters.device
        self.weight_decay, self.betas, self.eps = weight_decay, betas, eps
        self._hyper_host = np.zeros(HYPER_SIZE, np.float32)
        largest = float(np.finfo(np.float32).max)  # a larger norm is not finite: its step is skipped anyway
        self._hyper_host[HYPER_MAX_NORM] = min(max_grad_norm, largest)
        self._hyper_host[HYPER_GROWTH_INTERVAL] = GROWTH_INTERVAL if scale_loss else 0
        device = self.device
        self.exp_avg, self.exp_avg_sq = device.zeros((parameters.size,)), device.zeros((parameters.size,))
        self.hyper = {s.rate: device.upload(self._hyper_host) for s in parameters.segments}
        self.state = device.zeros((STATE_SIZE,))
        self.loss_scale = device.upload(np.array([START_LOSS_SCALE if scale_loss else 1.0], np.float32))

    def set_lr(self, lr: float) -> None:
        """Write the step's learning rate to the device (before `step`, outside a capture)."""
        for rate, hyper in self.hyper.items():
            with np.errstate(over="ignore"):  # a rate beyond float32 becomes infinite, which the run then reports
                self._hyper_host[HYPER_LR] = lr * rate
            self.device.write(hyper, self._hyper_host)

    def step(self) -> None:
        """Update the parameters from the gradients, then clear those. Only device work, so that it can be recorded."""
        p, device, (beta1, beta2) = self.parameters, self.device, self.betas
        norm = device.grad_norm(p.grad)
        device.clip(norm, next(iter(self.hyper.values())), self.state, self.loss_scale, beta1=beta1, beta2=beta2)
        for segment in p.segments:
            begin, size = segment.begin, segment.end - segment.begin
            device.adamw(
                *(device.view(array, (size,), begin) for array in (p.data, p.grad, self.exp_avg, self.exp_avg_sq)),
                self.hyper[segment.rate],
                self.state,
                beta1=beta1,
                beta2=beta2,
                eps=self.eps,
                weight_decay=self.weight_decay,
                decay_elements=min(max(p.decay_elements - begin, 0), size),
            )
        device.fill(p.grad, 0.0)
        p.changed()

    def applied(self) -> int:
        """Return the number of steps that changed the parameters. Waits for the device."""
        return int(self.device.download(self.state)[STATE_APPLIED])

    def skipped(self) -> int:
        """Return the number of steps skipped because a gradient was not finite. Waits for the device."""
        return int(self.device.download(self.state)[STATE_SKIPPED])

    def finite(self) -> bool:
        """Return whether all parameters are finite. Waits for the device."""
        return bool(np.isfinite(self.device.download(self.parameters.data)).all())

    def _arrays(self) -> dict[str, Array]:
        return {
            "parameters": self.parameters.data,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "state": self.state,
            "loss_scale": self.loss_scale,
        }

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return everything that a resumed run needs, parameters included (float32)."""
        arrays = {name: self.device.download(array) for name, array in self._arrays().items()}
        return _in_file_order(arrays, self.parameters)

    @property
    def state_bytes(self) -> int:
        return 4 * (3 * self.parameters.size + STATE_SIZE + 1)

    def state_readback(self) -> StateReadback:
        """Start `state_arrays` without waiting: further steps may be recorded meanwhile."""
        readbacks = {name: self.device.readback(array) for name, array in self._arrays().items()}
        return StateReadback(readbacks, self.parameters)

    def load_state_arrays(self, values: dict[str, np.ndarray]) -> None:
        """Invert `state_arrays`. KeyError or ValueError: the arrays belong to another run."""
        arrays = self._arrays()
        for name, array in arrays.items():
            if values[name].shape != tuple(array.shape) or values[name].dtype != np.float32:
                got = values[name]
                raise ValueError(f"{name}: expected float32 {array.shape}, got {got.dtype} {got.shape}")
        for name in ("state", "loss_scale"):  # always finite in a run
            if not np.isfinite(values[name]).all():
                raise ValueError(f"{name}: a number is not finite")
        for name, array in arrays.items():
            value = self.parameters.from_file(values[name]) if name in FLAT_STATE else values[name]
            self.device.write(array, value)
        self.device.fill(self.parameters.grad, 0.0)
        self.parameters.changed()


def _in_file_order(arrays: dict[str, np.ndarray], parameters: FlatParameters) -> dict[str, np.ndarray]:
    return arrays | {name: parameters.to_file(arrays[name]) for name in FLAT_STATE}


class StateReadback:
    """The arrays of `AdamW.state_arrays` while they are copied to the host."""

    def __init__(self, readbacks: dict[str, Readback], parameters: FlatParameters) -> None:
        self._readbacks, self._parameters = readbacks, parameters

    def ready(self) -> bool:
        return all(readback.ready() for readback in self._readbacks.values())

    def result(self) -> dict[str, np.ndarray]:
        return _in_file_order({name: r.result() for name, r in self._readbacks.items()}, self._parameters)
