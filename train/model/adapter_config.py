"""Reading and writing adapter_config.json, PEFT's configuration of an adapter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH, convert, read_json, show
from wgrad.train.files.input_files import exists, one_line
from wgrad.train.model.adapter_targets import MERGE, LimitsFile
from wgrad.train.model.lora import LoraConfig
from wgrad.train.model.lora_variants import variant_of

CONFIG_FILE = "adapter_config.json"
_VARIANT = "WGRAD:"  # before the name of a variant in peft_type, so that PEFT refuses what it would compute wrongly

Rank = Annotated[int, Meta(ge=1, le=1 << 20)]
Alpha = Annotated[float, Meta(ge=-1e6, le=1e6)]

# Fields of adapter_config.json that change the arithmetic in unsupported ways, with their harmless values.
_UNSUPPORTED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("bias", "trained biases", (None, "none")),
    ("lora_bias", "biases of lora_B", (None, False)),
    ("trainable_token_indices", "trained token embeddings", (None, [], {})),
    ("layer_replication", "replicated layers", (None, [])),
    ("use_qalora", "QALoRA", (None, False)),
    ("alora_invocation_tokens", "activated LoRA", (None, [])),
    ("arrow_config", "Arrow routing", (None,)),
    ("use_bdlora", "BD-LoRA", (None, False)),
    ("velora_config", "VeLoRA", (None,)),
    ("lora_ga_config", "LoRA-GA", (None,)),
    ("monteclora_config", "Monte Carlo LoRA", (None,)),
    ("kasa_config", "KaSA", (None,)),
)
# Further fields of PEFT's that change nothing here, or are read: a field that is not among these is a newer PEFT's.
_KNOWN = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules "
    "exclude_modules lora_alpha lora_dropout fan_in_fan_out use_rslora modules_to_save init_lora_weights use_dora "
    "layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config megatron_core loftq_config "
    "eva_config corda_config qalora_group_size runtime_config target_parameters ensure_weight_tying".split()
)
# Initializations that leave the base weights unchanged; the others (PiSSA, OLoRA, CorDA, LoftQ) change them.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


def in_config_file(lora: LoraConfig, base_model: str, text_of: str = "") -> dict[str, Any]:
    """Return the contents of the file.

    Args:
        lora: Configuration of the adapter.
        base_model: Name of the base model.
        text_of: Its multimodal architecture, or "".
    """
    targets = lora.target_modules if isinstance(lora.target_modules, str) else sorted(lora.target_modules)
    return {
        "peft_type": f"{_VARIANT}{lora.variant}" if lora.variant else "LORA",
        "task_type": "CAUSAL_LM",
        "auto_mapping": {"base_model_class": text_of, "parent_library": "transformers"} if text_of else None,
        "base_model_name_or_path": base_model,
        "r": lora.r,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "target_parameters": list(lora.target_parameters) or None,
        "use_rslora": lora.rslora,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": {k: _number(v) for k, v in lora.alpha_pattern.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": lora.dora,
        "modules_to_save": list(lora.modules_to_save) or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _number(value: float) -> float:
    """Return a whole alpha as an integer, as PEFT writes it."""
    return int(value) if value == int(value) else value


def refuse_variant(lora: LoraConfig, option: str) -> None:
    """Raise WgradError if the adapter is of a variant, whose matrices are not its change to the weights."""
    if lora.variant:
        raise WgradError(
            f"{option}: the adapter is of the LoRA variant {lora.variant!r}, which can be loaded but not merged or "
            "converted: train plain LoRA or DoRA for that"
        )


def base_of_adapter(folder: str | os.PathLike[str]) -> str:
    """Return the base model that an adapter names. Raise WgradError if there is no adapter or it names none."""
    raw = _read_config(Path(folder))
    base = raw.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise WgradError(f"--adapter: {Path(folder) / CONFIG_FILE} names no base model: give it with --model")
    return base


class AdapterFile(Struct):
    """Keys of adapter_config.json that determine the arithmetic, with PEFT's defaults."""

    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    r: Rank = 8
    lora_alpha: Alpha = 8.0
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    modules_to_save: list[str] | None = None
    use_dora: bool | None = None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not exists(path, "--adapter"):
        with suppress(OSError):
            for found in sorted(folder.glob(f"*/{CONFIG_FILE}")):  # of a run's checkpoints, or of several adapters
                advice = f"give a folder in it, such as {found.parent}"
                raise WgradError(f"--adapter: {folder} has no {CONFIG_FILE}: {advice}")
        raise WgradError(f"--adapter: {folder} has no {CONFIG_FILE}: give the folder of a PEFT adapter")
    return read_json(path, dict[str, Any], "--adapter", from_python=True)


def variant_in(raw: Mapping[str, Any]) -> str:
    """Return the LoRA variant that an adapter_config.json names; "": none."""
    kind = raw.get("peft_type")
    return kind.removeprefix(_VARIANT) if isinstance(kind, str) and kind.startswith(_VARIANT) else ""


def load_config(folder: Path) -> tuple[LoraConfig, LimitsFile]:
    """Read the file in a folder: the adapter's configuration, and which layers and modules it leaves out."""
    path = folder / CONFIG_FILE
    raw = _read_config(folder)
    kind = raw.get("peft_type")
    variant = variant_in(raw)
    if variant:
        variant_of(variant, f"--adapter: {path}")
    if kind != "LORA" and not variant:
        if kind is None and "lora_parameters" in raw:
            advice = "fuse it there (mlx_lm.fuse), and give the model as --model"
            raise WgradError(f"--adapter: {path} is of mlx-lm: {advice}")
        raise WgradError(f"--adapter: {path}: peft_type is {show(raw.get('peft_type'))}: only LORA can be read")
    for key, what, harmless in _UNSUPPORTED:
        if raw.get(key) not in harmless:
            raise WgradError(f"--adapter: {path}: {key} is {show(raw[key])}: {what} cannot be read: {MERGE}")
    if raw.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise WgradError(
            f"--adapter: {path}: init_lora_weights {show(raw['init_lora_weights'])} changes the base weights: "
            "convert it with PEFT (path_initial_model_for_weight_conversion)"
        )
    file = convert(raw, AdapterFile, f"--adapter: {path}")
    if file.modules_to_save and raw.get("ensure_weight_tying"):
        raise WgradError(f"--adapter: {path}: ensure_weight_tying is true: tied whole modules cannot be read: {MERGE}")
    if not file.target_modules and not file.target_parameters:
        raise WgradError(f"--adapter: {path}: target_modules must name at least one module; got none: {FETCH}")
    targets = file.target_modules
    lora = LoraConfig(
        r=file.r,
        alpha=file.lora_alpha,
        dropout=file.lora_dropout,
        rslora=file.use_rslora,
        target_modules=targets if isinstance(targets, str) else tuple(targets or ()),
        target_parameters=tuple(file.target_parameters or ()),
        rank_pattern=file.rank_pattern or {},
        alpha_pattern=file.alpha_pattern or {},
        modules_to_save=tuple(file.modules_to_save or ()),
        dora=bool(file.use_dora),
        variant=variant,
        unread=_unread(raw),
    )
    return lora, convert(raw, LimitsFile, f"--adapter: {path}")


def _unread(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that are filled and that no version of PEFT known here has."""
    known = _KNOWN | {key for key, _, _ in _UNSUPPORTED}
    return tuple(one_line(repr(key)) for key, value in raw.items() if key not in known and value)


def adapter_note(lora: LoraConfig | None) -> str:
    """Return a note about an adapter that was read, or ""."""
    if lora is None:
        return ""
    notes = [f"keys of {CONFIG_FILE} that are not known, and not read: {', '.join(lora.unread)}"] if lora.unread else []
    if lora.alpha == 0:
        notes.append("lora_alpha of the adapter is 0: its scale is 0, so it changes nothing")
    return "; ".join(notes)
