"""The tensors of a model's folder in Hugging Face layout, checked against config.json without reading them.

Quantized weights of three kinds are used as they are: those of bitsandbytes (nf4_files.py), experts in MXFP4
(mxfp4_files.py), and tensors of a GGUF file in the folder (gguf_files.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath, PureWindowsPath

import ml_dtypes
import numpy as np
from msgspec import Struct

from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight, gguf_formats
from wgrad.device.shown import counted
from wgrad.train.files.decode import read_json, show
from wgrad.train.files.fp8_files import with_fp8
from wgrad.train.files.gguf_files import GgufEntry, is_frozen_gguf, read_gguf_entries
from wgrad.train.files.gguf_splits import linked_file, one_of_each
from wgrad.train.files.imatrix_file import IMATRIX_FILE
from wgrad.train.files.input_files import exists, one_line, reading
from wgrad.train.files.mxfp4_files import Mxfp4Entry
from wgrad.train.files.nf4_files import NF4_PARTS, check_packed, is_nf4, read_nf4
from wgrad.train.files.packed_files import PackedEntry, with_packed
from wgrad.train.files.safetensors_files import TensorEntry, read_entries
from wgrad.train.model.expert_files import with_experts
from wgrad.train.model.gguf_activation import add_from_keys
from wgrad.train.model.gguf_latent import with_kv_b
from wgrad.train.model.gguf_linear import from_gguf
from wgrad.train.model.gguf_mamba import check_multipliers
from wgrad.train.model.gguf_shared_keys import table_of_model
from wgrad.train.model.linear_files import by_own_names, with_linear, with_transposed
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.multimodal_names import is_beside_text, text_name
from wgrad.train.model.weights import EMBEDDING, HEAD, WeightSpec, weight_specs

INDEX_FILE, SINGLE_FILE, GGUF = "model.safetensors.index.json", "model.safetensors", ".gguf"
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
FLOATS = tuple(_DTYPES)
_MOST_LISTED = 8  # names in a message
# Tensors that do not affect the output: tables and masks that old files contain although the model computes them,
# constants of an activation, and multi-token prediction layers.
_LEFT_OVER = re.compile(
    r"^mtp\.|(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids|(attention\.|attn\.|masked_)bias"
    r"|act_fn\.(beta|eps))$"
)
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,9})\.")
# Published files contain these even for layers that use another layer's keys and values.
_KEYS = re.compile(r"model\.layers\.(\d{1,4})\.self_attn\.[kv]_(?:proj|norm)\.(?:weight|bias)")
# In GGUF: factors of rotary embeddings, which gguf_config.py reads, and frequencies in old files.
_LEFT_OVER_GGUF = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight")


def dtype_of(entry: TensorEntry) -> np.dtype:
    """Return the dtype of a tensor whose stored type is one of FLOATS."""
    result: np.dtype = _DTYPES[entry.dtype]
    return result


Progress = Callable[[int, int], None]  # tensors done, tensors in all


class _Index(Struct):
    """The file model.safetensors.index.json. weight_map: name of the shard of each tensor."""

    weight_map: dict[str, str]


class ModelFiles:
    """The tensors of a model's folder, in one file or in shards. Opening it reads only the headers.

    Tensors of a multimodal model's text part get the names of the text model alone.

    Raises:
        WgradError: There is no file, or a shard is missing, damaged or outside of the folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        files = self._files()
        self.place = files[0] if files[0].suffix == GGUF and files[0].parent != self.folder else self.folder
        for file in files:
            found = (read_gguf_entries if file.suffix == GGUF else read_entries)(file, "--model")
            for name, entry in found.items():
                self._add(text_name(name), entry)

    def _add(self, name: str, entry: TensorEntry) -> None:
        other = self.entries.setdefault(name, entry)
        if other is not entry:
            places = [f"{one_line(e.name)} in {e.path.name}" for e in (other, entry)]
            raise WgradError(
                f"--model: {self.folder} has {one_line(name)} twice, as {places[0]} and as {places[1]}: remove the "
                "file that does not belong to this model"
            )

    def _files(self) -> list[Path]:
        if exists(self.folder / SINGLE_FILE, "--model"):
            return [self.folder / SINGLE_FILE]
        index = self.folder / INDEX_FILE
        if exists(index, "--model"):
            names = sorted(set(read_json(index, _Index, "--model").weight_map.values()))
            for name in names:
                if _leaves_folder(name):
                    raise WgradError(
                        f"--model: {index}: weight_map must name files within its folder; got {show(name)}: do not "
                        "trust this model: fetch it from its owner"
                    )
            missing = [name for name in names if not exists(self.folder / name, "--model")]
            if missing:
                first = one_line(missing[0])
                raise WgradError(
                    f"--model: {self.folder} lacks {len(missing)} of {len(names)} shards ({first}): fetch them"
                )
            return [self.folder / name for name in names]
        with reading(self.folder, "--model"):
            names = sorted(os.listdir(self.folder))
        whole = one_of_each(self.folder / n for n in names if n.endswith(GGUF) and n != IMATRIX_FILE)
        if len(whole) > 1:
            raise one_gguf_file(self.folder, whole, "--model")
        if whole:
            return [linked_file(whole[0])]
        others = [name for name in names if name.endswith(".bin")]
        convert = "convert it to safetensors with transformers (from_pretrained(DIR), save_pretrained(DIR))"
        hint = f"; {others[0]} is of another format: {convert}" if others else ""
        raise WgradError(
            f"--model: {self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE} nor a {GGUF} file{hint or ': fetch it'}"
        )

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor.

        Raises:
            WgradError: The files do not have it.
        """
        if name not in self.entries:
            raise WgradError(
                f"--model: {self.place} has no tensor {name}: config.json and the weights do not belong together, "
                "or a shard is missing: fetch the model again"
            )
        return self.entries[name]

    def check(self, config: ModelConfig) -> None:
        """Convert the entries to the model's tensors, and check that all are there and fit config.json.

        No tensor is read, so that a wrong model is found before memory is allocated for it.

        Raises:
            WgradError: A tensor is missing, has a wrong shape or type, or is not used by the model.
        """
        self.entries = with_fp8(with_packed(self.entries, config.packing), config.fp8_block)
        if config.packing is not None:
            self._drop_empty_biases(config)
        if config.tie_word_embeddings and EMBEDDING not in self.entries and HEAD in self.entries:
            self.entries[EMBEDDING] = self.entries[HEAD]  # tied matrices may have either name, as in transformers
        add_from_keys(self.entries, config)
        if any(isinstance(entry, GgufEntry) for entry in self.entries.values()):
            check_multipliers(config, self.folder)
        from_gguf(self.entries, config)
        with_kv_b(self.entries, config)
        table_of_model(self.entries, config)
        self.entries = with_transposed(with_experts(with_linear(self.entries, config), config), config)
        for spec in weight_specs(config):
            if not spec.is_linear or not self.is_frozen(spec):
                self.float_entry(spec)
            elif is_nf4(self.entries, spec.name):
                check_packed(self.entries, spec.name, spec.shape)
            else:
                self._check_shape(spec, self.entries[spec.name])
        self._check_unused(config)

    def _drop_empty_biases(self, config: ModelConfig) -> None:
        """Remove zero biases that the model does not have: early GPTQ tools wrote them for every projection."""
        known = {spec.name for spec in weight_specs(config)}
        for name, entry in list(self.entries.items()):
            packed = isinstance(self.entries.get(f"{name.removesuffix('.bias')}.weight"), PackedEntry)
            if packed and name.endswith(".bias") and name not in known and not entry.array().any():
                del self.entries[name]

    def _check_unused(self, config: ModelConfig) -> None:
        """Raise WgradError if the files have tensors that the model does not use, since it is another model then."""
        used = {EMBEDDING, HEAD, *(spec.name for spec in weight_specs(config))}
        used |= {name + suffix for name in used if is_nf4(self.entries, name) for suffix in NF4_PARTS}
        filled = (n for n, entry in self.entries.items() if 0 not in entry.shape)  # no shared expert has a width of 0
        unused = [one_line(n) for n in filled if n not in used and not is_left_over(n, config)]
        if unused:
            listed = ", ".join(unused[:_MOST_LISTED])
            listed += f" and {len(unused) - _MOST_LISTED} more" if len(unused) > _MOST_LISTED else ""
            raise WgradError(
                f"--model: {self.place} has {counted(len(unused), 'tensor')} that {config.architecture}, "
                f"as it is configured, does not use: {listed}: correct config.json, or take all files from one model"
            )

    def is_frozen(self, spec: WeightSpec) -> bool:
        """Return whether the files have this tensor in a quantized format that is used as it is."""
        entry = self.entries.get(spec.name)
        return is_nf4(self.entries, spec.name) or is_frozen_gguf(entry) or isinstance(entry, Mxfp4Entry)

    def beside_text(self) -> list[TensorEntry]:
        """Return the tensors of a multimodal model that do not belong to the text model.

        Raises:
            WgradError: There are none, or some are quantized.
        """
        own = {name: entry for name, entry in self.entries.items() if not isinstance(entry, GgufEntry)}
        found = [entry for name, entry in own.items() if is_beside_text(name)]
        if not found or any(entry.dtype not in FLOATS for entry in found):
            what = "only the text part of a multimodal model" if not found else f"{one_line(found[0].name)} quantized"
            raise WgradError(
                f"--model: {self.folder} has {what}: use --format gguf, or name the whole model in 16 bits with --model"
            )
        return found

    def stay_as_they_are(self, specs: Iterable[WeightSpec]) -> bool:
        """Return whether no projection should be quantized, because the files are quantized or GGUF.

        Float tensors of such files were left in float on purpose (llm_int8_skip_modules, a GGUF author's choice).
        """
        return any(self.is_frozen(spec) or isinstance(self.entries.get(spec.name), GgufEntry) for spec in specs)

    def read_frozen(self, spec: WeightSpec, device: Device, contents: bool) -> FrozenWeight:
        """Upload a projection for which `is_frozen` is true.

        Args:
            contents: False for a dry run, which allocates memory but reads almost nothing.

        Raises:
            WgradError: The tensor cannot be read.
        """
        entry = self.entries.get(spec.name)
        if isinstance(entry, (GgufEntry, Mxfp4Entry)):
            return entry.upload_frozen(device, contents)
        return read_nf4(self.entries, spec.name, spec.shape, device, contents)

    def read(self, spec: WeightSpec) -> np.ndarray:
        """Read a tensor in the file's dtype.

        Raises:
            WgradError: It is missing, has another shape or no float dtype, or is not finite.
        """
        return self.float_entry(spec).finite_array()

    def readable_ahead(self, spec: WeightSpec, dtype: np.dtype) -> TensorEntry | None:
        """Return the entry of a tensor whose bytes in the file can be uploaded as they are in this dtype, or None."""
        entry = self.entries.get(spec.name)
        if entry is None or entry.begin is None or entry.dtype not in FLOATS:
            return None
        return None if dtype_of(entry) != dtype or spec.offset else entry

    def offset_within(self, spec: WeightSpec) -> float:
        """Return the number by which the files' values exceed Hugging Face's: GGUF includes the offset of norms."""
        return spec.offset if isinstance(self.entries.get(spec.name), GgufEntry) else 0.0

    def dtype(self, spec: WeightSpec) -> np.dtype:
        """Return the file's dtype of a tensor.

        Raises:
            WgradError: It is missing, or has another shape or no float dtype.
        """
        return dtype_of(self.float_entry(spec))

    def float_entry(self, spec: WeightSpec) -> TensorEntry:
        """Return the entry of a float tensor.

        Raises:
            WgradError: It is missing, or has another shape or no float dtype.
        """
        entry = self.entry(spec.name)
        if entry.dtype not in FLOATS:
            known = [*FLOATS, *(gguf_formats() if isinstance(entry, GgufEntry) else ["bitsandbytes' NF4"])]
            raise WgradError(
                f"--model: {spec.name} in {entry.path} is {entry.dtype}: expected {', '.join(known)}: use the "
                "unquantized model"
            )
        self._check_shape(spec, entry)
        return entry

    def _check_shape(self, spec: WeightSpec, entry: TensorEntry) -> None:
        if entry.shape != spec.shape:
            raise WgradError(
                f"--model: {spec.name} in {entry.path} has shape {list(entry.shape)}: config.json asks for "
                f"{list(spec.shape)}: fetch the model again"
            )

    def digest(self) -> str:
        """Return a hash of the tensors' names, dtypes, shapes and samples of their bytes, whatever file they are in.

        At most 16 KiB of a tensor are read, 5 MB for an 8B model. This tells models of the same shapes apart, but
        usually misses a single changed number in a large tensor.
        """
        total = hashlib.blake2b(digest_size=16)
        for name, entry in sorted(self.entries.items()):
            total.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
            for block in entry.sample(4, 4096):
                total.update(block)
        return total.hexdigest()


def is_left_over(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor may be in the files although the text model does not use it."""
    if config.text_of and is_beside_text(name):
        return True
    layer = _LAYER.match(name)
    of_dense = "" if config.norms_dense_out else f"{config.mlp_out_norm}.weight"
    if layer and (0 <= int(layer[1]) - config.num_hidden_layers < config.extra_layers or name == layer[0] + of_dense):
        return True
    if (keys := _KEYS.fullmatch(name)) and (number := int(keys[1])) < config.num_hidden_layers:
        return config.kv_source(number) != number
    return bool(_LEFT_OVER.search(name) or _LEFT_OVER_GGUF.fullmatch(name))


def one_gguf_file(folder: Path, files: list[Path], option: str) -> WgradError:
    """Return the error for a folder with several GGUF models."""
    first = ", ".join(one_line(path.name) for path in files[:3])
    return WgradError(
        f"{option}: {folder} must have one {GGUF} model, got {len(files)} ({first}): keep one, or give its file"
    )


def _leaves_folder(name: str) -> bool:
    """Return whether a path of an index is absolute or leaves the folder, on any system. Symbolic links are allowed."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return any(p.is_absolute() or p.drive or p.root or ".." in p.parts for p in paths)


def use_own_head(config: ModelConfig, files: ModelFiles) -> tuple[ModelConfig, str]:
    """Untie a head that config.json ties to the embedding although the files have other values for it.

    transformers 5 uses the files' head too.

    Returns:
        The configuration, and a note for the user or "".
    """
    head, embedding = files.entries.get(HEAD), files.entries.get(EMBEDDING)
    if not config.tie_word_embeddings or head is None or embedding is None or _same(head, embedding):
        return config, ""
    note = f"config.json ties the head to the embedding, but {HEAD} has other values: it is used, and not tied"
    return dataclasses.replace(config, tie_word_embeddings=False), note


def _same(a: TensorEntry, b: TensorEntry) -> bool:
    if a.shape != b.shape or len(a.shape) != 2 or not {a.dtype, b.dtype} <= set(FLOATS):
        return False
    return all(
        np.array_equal(x.astype(np.float32), y.astype(np.float32)) for x, y in zip(a.blocks(1024), b.blocks(1024))
    )


_Opened = tuple[ModelFiles, ModelConfig, str]
_opened: ContextVar[dict[tuple[str, ModelConfig], _Opened] | None] = ContextVar("opened", default=None)


@contextmanager
def opened_once() -> Iterator[None]:
    """Make `open_files` open files only once for each configuration inside of this context.

    A search plans many runs of the same files, and reading the headers of thousands of experts takes longer than a dry
    run.
    """
    outer = _opened.get()
    token = _opened.set({} if outer is None else outer)
    try:
        yield
    finally:
        _opened.reset(token)


def open_files(folder: str | os.PathLike[str], config: ModelConfig) -> tuple[ModelFiles, ModelConfig, str]:
    """Open a model's files and check them without reading a tensor.

    Returns:
        The files, and the configuration and note of `use_own_head`.

    Raises:
        WgradError: Files are missing or damaged, or do not fit config.json.
    """
    kept, key = _opened.get(), (os.fspath(folder), config)
    if kept is None:
        return _open_files(folder, config)
    if key not in kept:
        kept[key] = _open_files(folder, config)
    return kept[key]


def _open_files(folder: str | os.PathLike[str], config: ModelConfig) -> _Opened:
    files = ModelFiles(folder)
    files.entries = by_own_names(files.entries, config)  # so that the next line finds embedding and head
    config, note = use_own_head(config, files)
    files.check(config)
    return files, config, note
