"""Reading and writing adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Names in the file: `base_model.model.<module>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r], with DoRA
`.lora_magnitude_vector` [out]; `base_model.model.<module>.weight` and `.bias` of a module that was trained whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.files import make_folder, write_json
from wgrad.train.files.decode import FETCH
from wgrad.train.files.input_files import exists, one_line
from wgrad.train.files.safetensors_files import TensorEntry, read_entries, save_arrays
from wgrad.train.model.adapter_config import CONFIG_FILE, in_config_file, load_config
from wgrad.train.model.adapter_targets import MERGE, resolve_targets
from wgrad.train.model.experts import DOWN, EXPERTS
from wgrad.train.model.lora import (
    MAGNITUDE,
    ExpertModules,
    LoraConfig,
    check_all_patterns,
    ends_with,
    is_whole,
    lora_shapes,
    whole_shapes,
)
from wgrad.train.model.multimodal_names import is_beside_text, name_in_peft, namer_of, whole_of
from wgrad.train.model.weights import EMBEDDING, HEAD, WholeModules, whole_in_peft

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save_adapter(
    folder: str | os.PathLike[str],
    lora: LoraConfig,
    arrays: Mapping[str, np.ndarray],
    base_model: str,
    in_peft: str = "model.",
    whole: WholeModules | None = None,
    text_of: str = "",
) -> None:
    """Write an adapter that PEFT loads.

    Args:
        folder: Folder to write to.
        lora: Configuration of the adapter.
        arrays: Matrices and whole weights by name, as `load_adapter` returns them.
        base_model: Name of the base model in the file.
        in_peft: Prefix of the modules in PEFT (`ModelConfig.in_peft`).
        whole: Modules that may be trained whole, as for `load_adapter`.
        text_of: `ModelConfig.text_of`.

    Raises:
        WgradError: The folder cannot be made or written.
    """
    target = make_folder(folder)
    names = whole_in_peft(whole or {})
    arrays = {names.get(name, name): array for name, array in arrays.items()}
    if in_peft != "model.":  # modules by their full names: those of the image part may have the same endings
        modules = [name.removesuffix(".lora_A") for name in arrays if name.endswith(".lora_A")]
        lora = lora.renamed({module: name_in_peft(module, in_peft) for module in modules})
        arrays = {name_in_peft(name, in_peft): array for name, array in arrays.items()}
    adapted = {name.rpartition(".")[0] for name in arrays}
    tensors = {
        _key(name, adapted): np.ascontiguousarray(_as_in_peft(name, a), np.float32)
        for name, a in sorted(arrays.items())
    }
    # Write the weights last: a folder that has them is complete.
    # The keys are sorted, as in PEFT's files, but not those of the patterns, of which the first that matches counts.
    outer = text_of if whole_of(text_of) else ""
    write_json(Path(target) / CONFIG_FILE, dict(sorted(in_config_file(lora, base_model, outer).items())))
    save_arrays(Path(target) / WEIGHTS_FILE, tensors)


def _key(name: str, adapted: Collection[str]) -> str:
    """Return a tensor's name in the file. adapted: all modules with LoRA.

    PEFT nests the wrappers of experts' two weights in each other, and names them by the module that holds the weights.
    """
    if is_whole(name) or name.endswith(MAGNITUDE):
        return _PREFIX + name
    module, _, side = name.rpartition(".")
    owner, _, part = module.rpartition(".")
    if owner.endswith(EXPERTS):
        inner = part != DOWN and f"{owner}.{DOWN}" in adapted
        return f"{_PREFIX}{owner}{'.base_layer' if inner else ''}.{side}.weight"
    return f"{_PREFIX}{name}.weight"


def _as_in_peft(name: str, array: np.ndarray) -> np.ndarray:
    """Reshape the matrices of experts [E, r, in] and [E, out, r] to PEFT's [E r, in] and [out, r E]."""
    if array.ndim < 3 or is_whole(name):
        return array
    if name.endswith(".lora_A"):
        return array.reshape(-1, array.shape[2])
    return array.transpose(1, 2, 0).reshape(array.shape[1], -1)


def _from_peft(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Undo `_as_in_peft`."""
    if len(shape) < 3 or name.endswith(".lora_A"):
        return array.reshape(shape)
    return np.ascontiguousarray(array.reshape(shape[1], shape[2], shape[0]).transpose(2, 0, 1))


def load_adapter(
    folder: str | os.PathLike[str],
    modules: Mapping[str, tuple[int, int]],
    whole: WholeModules | None = None,
    experts: ExpertModules = MappingProxyType({}),
) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """Read an adapter of a model, or of the text part of a multimodal model.

    Args:
        folder: Folder of the adapter.
        modules: Shapes [out, in] of the model's projections by path (`lora.linear_modules`).
        whole: Modules that may be in the adapter whole (`weights.whole_modules`).
        experts: Modules of experts (`lora.expert_modules`).

    Returns:
        The configuration, and float32 arrays: `<module>.lora_A` and `.lora_B` in the model's order, then the weights of
        whole modules by their names in the model.

    Raises:
        WgradError: It is missing, no LoRA, of an unsupported variant, or damaged: a matrix is missing, has a wrong
            shape, is not finite, or belongs to no such module.
    """
    folder = Path(folder)
    lora, limits = load_config(folder)
    _check_whole(lora, whole or {}, folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    if not exists(path, "--adapter"):
        if exists(folder / "adapter_model.bin", "--adapter"):
            raise WgradError(f"--adapter: {folder} has only adapter_model.bin: save it as safetensors with PEFT")
        raise WgradError(f"--adapter: {path} is missing: {FETCH}")
    entries = dict(read_entries(path, "--adapter"))
    named = namer_of(name.removeprefix(_PREFIX) for name in entries)
    names = {named(module): module for module in modules}
    others = [named(name) for name in whole or (name.removesuffix(".weight") for name in (EMBEDDING, HEAD))]
    check_all_patterns(lora, [*names, *others], f"--adapter: {folder / CONFIG_FILE}")
    lora = resolve_targets(lora, limits, list(names), others, folder / CONFIG_FILE)
    parameters = tuple(t for t in lora.target_parameters if any(ends_with(module, t) for module in experts))
    if parameters or lora.target_modules:  # as in PEFT, names that no parameter has are ignored
        lora = replace(lora, target_parameters=parameters)
    if not lora.dora and any(name.endswith(MAGNITUDE) for name in entries):
        raise WgradError(
            f"--adapter: {path} is a DoRA adapter, and use_dora in {CONFIG_FILE} is not true: fetch it again"
        )
    shapes: dict[str, tuple[int, ...]] = dict(
        lora_shapes(lora, {name: modules[module] for name, module in names.items()}, "--adapter", experts)
    )
    names |= {module: module for module in experts}
    in_peft = whole_in_peft(whole or {})
    for name, shape in whole_shapes(lora, whole or {}).items():
        shapes[named(in_peft[name])], names[named(in_peft[name])] = shape, name
    adapted = {name.rpartition(".")[0] for name in shapes}
    arrays = {_own(names, theirs): _read(entries, theirs, shape, path, adapted) for theirs, shape in shapes.items()}
    if entries:
        raise _beyond(entries, named, whole or {}, path)
    if names != {module: module for module in names}:
        matrices = [name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) == 2]
        lora = lora.renamed({name: names[name] for name in dict.fromkeys(matrices) if name in names})
    return lora, arrays


def _beyond(
    entries: Mapping[str, TensorEntry], named: Callable[[str], str], whole: WholeModules, path: Path
) -> WgradError:
    """Return the error about tensors that belong to no adapted projection."""
    in_peft = whole_in_peft(whole)
    tables = {named(in_peft[name]): shape for tensors in whole.values() for name, shape in tensors.items()}
    for key, entry in entries.items():
        name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if name in tables:
            return _whole_table(name, entry, tables[name], path)
    name = one_line(next(iter(entries)).removeprefix(_PREFIX))
    where = f"--adapter: {path} adapts {name}, which"
    if is_beside_text(name):
        return WgradError(f"{where} is of the part for images, and only the text part is read here: {MERGE}")
    return WgradError(f"{where} is no projection of this model's layers, and only those are read here: {MERGE}")


def _whole_table(name: str, entry: TensorEntry, shape: tuple[int, ...], path: Path) -> WgradError:
    """Return the error about a whole embedding or head that has a wrong shape or is not named in the configuration."""
    if entry.shape[:1] != shape[:1]:
        return WgradError(
            f"--adapter: {path} holds the whole {name} because tokens were added to it ({entry.shape[0]} rows for the "
            f"model's {shape[0]}): resize the base model to {entry.shape[0]} tokens with transformers, or {MERGE}"
        )
    return WgradError(
        f"--adapter: {path} holds the whole {name}, which modules_to_save in {CONFIG_FILE} does not name: save the "
        f"adapter with save_embedding_layers=False where the base has the same, or {MERGE}"
    )


def _own(names: Mapping[str, str], theirs: str) -> str:
    """Return a tensor's name in the model. names: the model's names of modules and whole weights by the file's."""
    module, _, side = theirs.rpartition(".")
    return names[theirs] if is_whole(theirs) else f"{names[module]}.{side}"


def _check_whole(lora: LoraConfig, whole: WholeModules, path: Path) -> None:
    """Raise WgradError if an adapter has a whole module that is not one of these."""
    for name in lora.modules_to_save:
        if not whole:
            raise WgradError(
                f"--adapter: {path}: modules_to_save has {one_line(name)}: whole modules next to the adapter cannot be "
                "read here: wgrad merge writes a model with them in it"
            )
        if not any(module.endswith(name) for module in whole):
            raise WgradError(
                f"--adapter: {path}: modules_to_save has {one_line(name)}: of whole modules only "
                f"{' and '.join(whole)} can be read: {MERGE}"
            )


def _read(
    entries: dict[str, TensorEntry], name: str, wanted: tuple[int, ...], path: Path, adapted: Collection[str]
) -> np.ndarray:
    """Read a tensor and remove it from `entries`. adapted: as for `_key`. Raise WgradError if it does not fit."""
    shape = _as_in_peft(name, np.broadcast_to(np.float32(0), wanted)).shape
    entry = entries.pop(_key(name, adapted), None)
    if entry is None:
        raise WgradError(f"--adapter: {path} lacks {name}, which {CONFIG_FILE} asks for: fetch it again")
    if entry.shape != shape and is_whole(name) and entry.shape[1:] == shape[1:]:
        raise _whole_table(name, entry, shape, path)
    if entry.shape != shape:
        raise WgradError(
            f"--adapter: {name} in {path} has shape {list(entry.shape)}, the model asks for {list(shape)}: the adapter "
            "belongs to another model"
        )
    if entry.dtype not in ("F32", "F16", "BF16"):
        raise WgradError(f"--adapter: {name} in {path} is {entry.dtype}: expected F32, F16 or BF16")
    return _from_peft(name, np.array(entry.finite_array(), np.float32), wanted)
