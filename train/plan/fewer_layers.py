"""Forecast the memory of a model from short dry runs of the same model with fewer layers.

Layers repeat with a period, and a layer that is left out needs as much memory as the corresponding one that stays. So
the whole model fits into a limit if the shorter one fits into the limit less the memory of the layers left out.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from wgrad.device.contract import Device
from wgrad.device.errors import DoesNotFit
from wgrad.device.memory import size_class
from wgrad.train.files.gguf_files import GgufEntry
from wgrad.train.model.layer_kinds import listed
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import open_files
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.plan import Plan, run_dry

_LONGEST_PERIOD, _MOST_FIRST = 8, 4  # layers: of a period, and at the beginning that differ from the others
DOUBT = 0.02  # fraction of a limit by which a forecast may be wrong
_WORTH = 2  # a model must have more than _WORTH times the layers of both shorter ones, or it is not shortened


@dataclass(frozen=True)
class Shorter:
    """A model with fewer layers."""

    model: ModelConfig
    longer: ModelConfig  # with one period more
    left_out: int  # periods that `model` lacks

    @classmethod
    def of(cls, model: ModelConfig, folder: str | os.PathLike[str]) -> Shorter | None:
        """Shorten a model; None: its layers do not repeat often enough. WgradError: as `open_files`."""
        layers = model.num_hidden_layers
        if any(model.kv_source(layer) != layer for layer in range(layers)):
            return None
        kinds = _kinds(model, folder)
        for period in range(1, _LONGEST_PERIOD + 1):
            first = next((i for i in range(_MOST_FIRST + 1) if kinds[i:-period] == kinds[i + period :]), None)
            if first is None:
                continue
            least = max(first + period, 2)
            few = least + (layers - least) % period
            if _WORTH * (2 * few + period) > layers:
                return None
            return cls(_cut(model, few), _cut(model, few + period), (layers - few) // period)
        return None


def _kinds(model: ModelConfig, folder: str | os.PathLike[str]) -> list[Any]:
    """Return the kind of each layer: its entries in lists of the configuration, and how files store its tensors."""
    layers = model.num_hidden_layers
    files, _, _ = open_files(folder, model)
    stored: list[list[Any]] = [[] for _ in range(layers)]
    for spec in weight_specs(model):
        prefix, _, rest = spec.name.removeprefix("model.layers.").partition(".")
        if spec.name.startswith("model.layers."):
            entry = files.entries.get(spec.name)
            of_file = entry.stored if isinstance(entry, GgufEntry) else ""
            kind = None if entry is None else (type(entry), entry.dtype, of_file)
            stored[int(prefix)].append((rest, spec.shape, kind))
    lists = listed(model, layers)
    return [(*(values[layer] for values in lists), stored[layer]) for layer in range(layers)]


def _cut(part: Any, layers: int) -> Any:
    """Return the configuration of the first `layers` layers. The tensors of others in files are ignored."""
    whole = part.num_hidden_layers
    changes: dict[str, Any] = {"num_hidden_layers": layers, "extra_layers": part.extra_layers + whole - layers}
    return replace(part, **(_cut_lists(part, whole, layers) | changes))


def _cut_lists(part: Any, whole: int, layers: int) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for each in fields(part):
        value = getattr(part, each.name)
        if isinstance(value, tuple) and len(value) == whole:
            changes[each.name] = value[:layers]
        elif is_dataclass(value) and not isinstance(value, type):
            changes[each.name] = replace(value, **_cut_lists(value, whole, layers))
    return changes


@dataclass(frozen=True)
class Forecast:
    """Predicts the memory of runs that treat all layers alike, from dry runs of few layers."""

    shorter: Shorter
    folder: str | os.PathLike[str]
    device: Device
    prompt_tokens: int
    sums: dict[str, tuple[float, float, float]] = field(default_factory=dict, compare=False)

    def peak(self, config: RunOptions) -> float:
        """Return the peak bytes without a limit; infinite if it is beyond another limit of the device."""
        return self._sums(config)[1]

    def others(self, config: RunOptions) -> float:
        """Return the bytes of `peak` that belong to the layers left out."""
        few, whole, _ = self._sums(config)
        return whole - few if whole < math.inf else math.inf

    def host_weights(self, config: RunOptions) -> float:
        """Return the bytes of weights in main memory; infinite if it is beyond another limit of the device."""
        return self._sums(config)[2]

    def fits(self, config: RunOptions, limit: float) -> Plan | None:
        """Return a plan of the shorter model within a limit; None: it does not fit."""
        try:
            return self._plan(config, self.shorter.model, max(int(limit), 0))
        except DoesNotFit:
            return None

    def _sums(self, config: RunOptions) -> tuple[float, float, float]:
        """Return the peaks of the shorter and the whole model, and the bytes of all weights in main memory."""
        key = repr(config)  # a number of layers may be 1, which equals True
        if key not in self.sums:
            try:
                few, more = (self._plan(config, model, None) for model in (self.shorter.model, self.shorter.longer))
            except DoesNotFit:
                self.sums[key] = math.inf, math.inf, math.inf
            else:
                period = more.host_weight_bytes - few.host_weight_bytes
                host = few.host_weight_bytes + self.shorter.left_out * period
                self.sums[key] = few.peak_bytes, self._of_all(few, more), host
        return self.sums[key]

    def _plan(self, config: RunOptions, model: ModelConfig, limit: int | None) -> Plan:
        return run_dry(config, model, self.folder, self.device, self.prompt_tokens, limit)

    def _of_all(self, few: Plan, more: Plan) -> float:
        periods = self.shorter.left_out
        trained = few.trained + periods * (more.trained - few.trained)
        rest, with_more = (plan.peak_bytes - _flat(plan.trained) for plan in (few, more))
        return rest + periods * (with_more - rest) + _flat(trained)


def _flat(trained: int) -> int:
    """Return the bytes of the trained parameters, their gradients and two moments, each one array."""
    return 4 * size_class(4 * trained)
