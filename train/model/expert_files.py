"""Experts in files: a tensor for each expert's projection, as in most models, or one tensor for all experts of a layer.

Files are written with the names of a model's first release, which transformers 4 and 5 and other tools read. The names
that transformers 5 uses in memory can be read too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.gguf_files import GgufEntry
from wgrad.train.files.input_files import one_line
from wgrad.train.files.mxfp4_files import gather_mxfp4
from wgrad.train.files.safetensors_files import TensorEntry, TensorSource
from wgrad.train.model.experts import DOWN, GATE_UP, Experts
from wgrad.train.model.gguf_activation import NumberEntry
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import WeightSpec

GGUF_PARTS = ("gate_proj", "up_proj", "down_proj")  # of all experts, as gguf_files.py names them


@dataclass(frozen=True)
class Layout:
    """Names within a layer.

    Attributes:
        each: Names of an expert's gate ("": none), up and down, with {} for its number.
        whole: Names of gate and up, and of down, of all experts.
        transposed: Whether `whole` tensors are [experts, in, out].
        correction: Name of the correction, if it is not `Experts.correction`.
    """

    router: str
    each: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    transposed: bool = False
    correction: str = ""


def _numbered(module: str) -> tuple[str, ...]:
    return tuple(f"{module}.experts.{{}}.w{number}.weight" for number in (1, 3, 2))


_EACH = tuple(f"mlp.experts.{{}}.{part}.weight" for part in GGUF_PARTS)
LAYOUTS = {
    "llama": Layout("mlp.gate.weight", _EACH),
    "mixtral": Layout("block_sparse_moe.gate.weight", _numbered("block_sparse_moe")),
    "minimax": Layout(
        "block_sparse_moe.gate.weight",
        _numbered("block_sparse_moe"),
        correction="block_sparse_moe.e_score_correction_bias",
    ),
    "exaone": Layout("mlp.gate.weight", _EACH, correction="mlp.e_score_correction_bias"),
    "hunyuan": Layout("mlp.gate.wg.weight", _EACH),
    "hy3": Layout("mlp.router.gate.weight", _EACH, correction="mlp.expert_bias"),
    "laguna": Layout("mlp.gate.weight", _EACH, correction="mlp.experts.e_score_correction_bias"),
    "kolibri1": Layout("mlp.gate.weight", _EACH, correction="moe.router.expert_bias"),
    "lfm2": Layout("feed_forward.gate.weight", _numbered("feed_forward")),
    "jamba": Layout(
        "feed_forward.router.weight", tuple(f"feed_forward.experts.{{}}.{part}.weight" for part in GGUF_PARTS)
    ),
    "afmoe": Layout("mlp.router.gate.weight", _EACH),
    "granite_swa": Layout(
        "block_sparse_moe.router.weight",
        whole=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
    "granite": Layout(
        "block_sparse_moe.router.layer.weight",
        whole=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    "nemotron": Layout(
        "mixer.gate.weight", ("", "mixer.experts.{}.up_proj.weight", "mixer.experts.{}.down_proj.weight")
    ),
    "ernie": Layout("mlp.gate.weight", _EACH, correction="mlp.moe_statics.e_score_correction_bias"),
    "qwen3_vl": Layout("mlp.gate.weight", whole=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), transposed=True),
    "llama4": Layout(
        "feed_forward.router.weight",
        whole=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        transposed=True,
    ),
    "mistral4": Layout("mlp.gate.weight", whole=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    "gemma4": Layout("router.proj.weight", whole=("experts.gate_up_proj", "experts.down_proj")),
    "gpt_oss": Layout(
        "mlp.router.weight", whole=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), transposed=True
    ),
}


@dataclass(frozen=True)
class StackedEntry(TensorEntry):
    """A tensor of all experts of a layer, [experts, out, in], made of each expert's tensors. parts: tensors of each
    expert, whose rows are stacked."""

    parts: tuple[TensorEntry, ...] = field(repr=False)

    @classmethod
    def of(cls, name: str, parts: list[TensorEntry], shape: tuple[int, ...]) -> StackedEntry:
        """Combine the parts. Raise WgradError if they do not fit each other."""
        first = parts[0]
        for part in parts:
            if part.dtype != first.dtype:
                raise WgradError(
                    f"{first.source}: {one_line(part.name)} in {part.path} is {part.dtype}, and {one_line(first.name)} "
                    f"is {first.dtype}: all experts of a layer must have one type"
                )
        return cls(first.source, first.path, name, first.dtype, shape, None, None, tuple(parts))

    def array(self) -> np.ndarray:
        stacked = np.concatenate([part.array().reshape(-1, self.shape[-1]) for part in self.parts])
        return np.ascontiguousarray(stacked.reshape(self.shape))

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        size, held = rows * math.prod(self.shape[1:]), list[np.ndarray]()
        for part in self.parts:
            held.append(part.array().reshape(-1))
            if (whole := sum(a.size for a in held) // size) or part is self.parts[-1]:
                values = np.concatenate(held)
                held = [values[whole * size :]]
                yield from values[: whole * size].reshape(whole, rows, *self.shape[1:])
        if held[0].size:
            yield held[0].reshape(-1, *self.shape[1:])

    def sample(self, count: int, size: int) -> list[bytes]:
        return [block for part in self.parts for block in part.sample(2, 256)]


@dataclass(frozen=True)
class TransposedEntry(TensorEntry):
    """A matrix [out, in], or those of all experts of a layer, whose last two axes are stored the other way."""

    stored: TensorEntry = field(repr=False)

    @classmethod
    def of(cls, stored: TensorEntry, name: str = "") -> TransposedEntry:
        *outer, columns, rows = stored.shape
        name, shape = name or stored.name, (*outer, rows, columns)
        return cls(stored.source, stored.path, name, stored.dtype, shape, None, None, stored)

    def array(self) -> np.ndarray:
        return np.ascontiguousarray(self.stored.array().swapaxes(-1, -2))

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        if len(self.shape) == 2:
            whole = self.array()
            yield from (whole[begin : begin + rows] for begin in range(0, self.shape[0], rows))
            return
        for block in self.stored.blocks(rows):
            yield np.ascontiguousarray(block.swapaxes(1, 2))

    def sample(self, count: int, size: int) -> list[bytes]:
        return self.stored.sample(count, size)


@dataclass(frozen=True)
class GgufExperts(GgufEntry):
    """Gate and up of all experts, from two tensors of a GGUF file. interleaved: their rows alternate."""

    halves: tuple[GgufEntry, ...] = field(repr=False)
    interleaved: bool = field(repr=False)

    def row_bytes(self) -> np.ndarray:
        experts, rows = self.shape[:2]
        gate, up = (half.row_bytes().reshape(experts, rows // 2, -1) for half in self.halves)
        both = joined(gate, up, self.interleaved)
        return both.reshape(experts * rows, -1) if len(self.shape) == 3 else both.reshape(experts, -1)

    def sample(self, count: int, size: int) -> list[bytes]:
        return [block for half in self.halves for block in half.sample(count, size)]


def joined(gate: np.ndarray, up: np.ndarray, interleaved: bool) -> np.ndarray:
    """Join gate and up [experts, n, ...] to one array [experts, 2 n, ...]."""
    both = np.stack([gate, up], axis=2 if interleaved else 1)
    return np.ascontiguousarray(both).reshape(len(gate), 2 * gate.shape[1], *gate.shape[2:])


def with_experts(entries: Mapping[str, TensorEntry], config: ModelConfig) -> dict[str, TensorEntry]:
    """Return the tensors by their names in the model. Raise WgradError if an expert's is missing or of another type."""
    found = dict(entries)
    if config.experts is None:
        return found
    layout = LAYOUTS[config.experts.files]
    for layer in range(config.num_hidden_layers):
        if config.has_experts(layer):
            _gather_layer(found, config.experts, layout, f"model.layers.{layer}.", config.hidden_size)
    return found


def _gather_layer(found: dict[str, TensorEntry], experts: Experts, layout: Layout, prefix: str, hidden: int) -> None:
    router = f"{prefix}{experts.router}.weight"
    if prefix + layout.router in found:
        found[router] = found.pop(prefix + layout.router)
    if layout.correction and prefix + layout.correction in found:
        found[prefix + experts.correction] = found.pop(prefix + layout.correction)
    if experts.may_be_uncorrected and router in found and (name := prefix + experts.correction) not in found:
        first = found[router]
        found[name] = NumberEntry(first.source, first.path, name, "F32", (experts.count,), None, None, 0.0)
    for module, shape in experts.shapes(hidden).items():
        name, parts = prefix + module, _parts_of(module)
        gather_mxfp4(found, name)
        if isinstance(found.get(f"{name}.weight"), GgufEntry) and len(parts) > 1:  # GGUF has gate and up fused as well
            found[name] = found.pop(f"{name}.weight")
        for ending, wanted in (("weight", shape), ("bias", shape[:2])):
            halves = [found.get(f"{prefix}{experts.module}.{part}.{ending}") for part in parts]
            if isinstance(halves[0], GgufEntry):
                gathered = name if ending == "weight" else f"{name}_bias"
                found[gathered] = _of_gguf(gathered, halves, wanted, experts.interleaved)
                for half in halves:
                    assert half is not None
                    del found[half.name]
        whole = prefix + layout.whole[(GATE_UP, DOWN).index(module.rpartition(".")[2])] if layout.whole else name
        if whole in found and type(found[whole]) is TensorEntry:
            stored = found.pop(whole)
            turned = layout.transposed and (stored.shape != shape or shape[1] == shape[2])
            found[name] = TransposedEntry.of(stored, name) if turned else stored
        if name not in found and layout.each:
            _gather_each(found, name, shape, [prefix + layout.each[GGUF_PARTS.index(part)] for part in parts])


def _gather_each(found: dict[str, TensorEntry], name: str, shape: tuple[int, int, int], forms: list[str]) -> None:
    """Combine the tensors of each expert, if the files have these. Raise WgradError if one is missing."""
    each = [form.format(number) for number in range(shape[0]) for form in forms]
    if each[0] not in found:
        return
    missing = next((part for part in each if part not in found), None)
    if missing is not None:
        raise WgradError(
            f"{found[each[0]].source}: {found[each[0]].path.parent} has no tensor {missing}: config.json and "
            "the weights do not belong together, or a shard is missing: fetch the model again"
        )
    found[name] = StackedEntry.of(name, _of_shape([found.pop(part) for part in each], shape, len(forms)), shape)


def _parts_of(module: str) -> tuple[str, ...]:
    return GGUF_PARTS[:2] if module.endswith(GATE_UP) else (module.rpartition(".")[2],)


def _of_shape(parts: list[TensorEntry], shape: tuple[int, int, int], halves: int) -> list[TensorEntry]:
    """Raise WgradError if a part has a wrong shape."""
    wanted = (shape[1] // halves, shape[2])
    for part in parts:
        if part.shape != wanted:
            raise WgradError(
                f"{part.source}: {one_line(part.name)} in {part.path} has shape {list(part.shape)}: config.json asks "
                f"for {list(wanted)}: fetch the model again"
            )
    return parts


def _of_gguf(name: str, halves: list[Any], shape: tuple[int, ...], interleaved: bool) -> TensorEntry:
    first: GgufEntry = halves[0]
    for half in halves:
        if half is None or half.stored != first.stored or half.shape != (shape[0], shape[1] // len(halves), *shape[2:]):
            what = "is missing" if half is None else f"is {half.stored} {list(half.shape)}"
            raise WgradError(
                f"{first.source}: {first.path}: the experts of {name} must have gate and up of one type and shape; "
                f"{one_line(first.name)} is {first.stored} {list(first.shape)}, and the other {what}: use another file"
            )
    if len(halves) == 1:
        return replace(first, name=name)
    size = sum(half.size for half in halves)
    return GgufExperts(
        first.source, first.path, name, first.dtype, shape, None, None, first.stored, first.offset, size, 0,
        tuple(halves), interleaved,
    )  # fmt: skip


# ---- writing ---------------------------------------------------------------------------------------
def written_tensors(
    specs: list[WeightSpec], config: ModelConfig, dtype: np.dtype, fetch: Callable[[int, WeightSpec], np.ndarray]
) -> Iterator[TensorSource]:
    """Return the tensors of a file with these weights. fetch: returns a weight by its index, once each, in order."""
    for number, spec in enumerate(specs):
        prefix = ".".join(spec.name.split(".")[:3]) + "."
        if config.experts is None or spec.kind not in ("experts", "router"):
            name, own = spec.name, np.dtype(np.float32) if spec.float32 else dtype
            if config.experts is not None and name == prefix + config.experts.correction:
                name = prefix + (LAYOUTS[config.experts.files].correction or config.experts.correction)
            turned = config.transposed and spec.kind == "projection"
            yield _whole(spec, number, name, turned, own, fetch)
            continue
        layout = LAYOUTS[config.experts.files]
        if spec.kind == "router":
            is_router = spec.name == f"{prefix}{config.experts.router}.weight"
            name = prefix + layout.router if is_router else spec.name
            yield TensorSource(name, dtype, spec.shape, partial(fetch, number, spec))
        elif layout.whole:
            name = prefix + layout.whole[(GATE_UP, DOWN).index(spec.name.rpartition(".")[2])]
            yield _whole(spec, number, name, layout.transposed, dtype, fetch)
        else:
            yield from _each(spec, number, prefix, layout, dtype, fetch)


def _whole(
    spec: WeightSpec,
    number: int,
    name: str,
    transposed: bool,
    dtype: np.dtype,
    fetch: Callable[[int, WeightSpec], np.ndarray],
) -> TensorSource:
    """Return a tensor as it is, or with its last two axes the other way."""
    if not transposed:
        return TensorSource(name, dtype, spec.shape, partial(fetch, number, spec))
    *outer, rows, columns = spec.shape
    return TensorSource(
        name, dtype, (*outer, columns, rows), lambda: np.ascontiguousarray(fetch(number, spec).swapaxes(-1, -2))
    )


def _each(
    spec: WeightSpec,
    number: int,
    prefix: str,
    layout: Layout,
    dtype: np.dtype,
    fetch: Callable[[int, WeightSpec], np.ndarray],
) -> Iterator[TensorSource]:
    """Return a tensor for each expert, with gate and up apart."""
    held: list[np.ndarray] = []
    forms = [layout.each[GGUF_PARTS.index(part)] for part in _parts_of(spec.name)]
    experts, rows = spec.shape[0], spec.shape[1] // len(forms)

    def part(expert: int, half: int) -> np.ndarray:
        if not held:
            held.append(fetch(number, spec))
        found = held[0][expert, half * rows : (half + 1) * rows]
        if expert == experts - 1 and half == len(forms) - 1:
            held.clear()
        return found

    for expert in range(experts):
        for half, form in enumerate(forms):
            shape = (rows, spec.shape[2])
            yield TensorSource(prefix + form.format(expert), dtype, shape, partial(part, expert, half))
