"""The options of `wgrad merge`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from wgrad.device.errors import WgradError
from wgrad.train.options.choices import GGUF_MIXES, BlockSize
from wgrad.train.options.finetune_config import DEVICE_HELP
from wgrad.train.options.options import Options, option

OF_THE_RUN = "run"
IMATRIX_HELP = (
    "with --quantize: weigh errors by an importance matrix: made from a file with data, from that of the run ('run'), "
    "or llama.cpp's own (.gguf)"
)
A_DATA_FILE = ("must name a file, or be run", lambda v: bool(v.strip()))
_WEIGHTED = tuple(mix for mix in GGUF_MIXES if mix not in ("q8_0", "mxfp4"))
GGUF_TYPES = ("none", *GGUF_MIXES, "f16")  # of merged matrices


@dataclass(frozen=True)
class MergeConfig(Options):
    """Options of `wgrad merge`. Raises WgradError where a value breaks its rule."""

    adapter: str = option("", "adapter to merge: finetune's --out", metavar="DIR", path=True, required=True)
    out: str = option("", "folder to write the model into", metavar="DIR", path=True, required=True)
    model: str | None = option(
        None, "its base model (default: as the adapter names it)", metavar="DIR_OR_HUB_ID", path=True
    )
    onto: str = option(
        "dequantised",
        "dequantised: the weights as the adapter was trained on them, NF4; original: the base model's own",
        choices=("dequantised", "original"),
    )
    format: str = option(
        "safetensors",
        "safetensors: a folder in Hugging Face layout; gguf: one with model.gguf, for llama.cpp (pip install "
        "'wgrad[gguf]')",
        choices=("safetensors", "gguf"),
    )
    dtype: str = option(
        "auto",
        "type of the merged weights; auto: as the base model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantize: str = option(
        "none",
        "with --format gguf: the merged matrices in this type, or llama.cpp's mix of that name; none: as --dtype says",
        choices=GGUF_TYPES,
    )
    imatrix: str | None = option(None, IMATRIX_HELP, metavar="FILE|run", path=True, rule=A_DATA_FILE)
    block_size: BlockSize | None = option(
        None,
        "of the NF4 that it was trained on (default: as its run had it, else 64)",
        choices=get_args(BlockSize),
        metavar="N",
    )
    double_quant: bool | None = option(
        None, "whether that NF4 had its scales quantised as well (default: as its run had it, else they had)"
    )
    compare: bool = option(True, "tell at the end what merging changed in the logits (both models are loaded for it)")
    device: str = option("auto", DEVICE_HELP, metavar="DEVICE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imatrix is not None and self.quantize not in _WEIGHTED:
            raise WgradError(
                f"--imatrix: would be ignored: --quantize {self.quantize} weighs no errors: leave it out, or choose "
                f"one of {', '.join(_WEIGHTED)}"
            )
        if self.quantize == "none":
            return
        if self.dtype != "auto":
            raise WgradError("--quantize: says the type of the weights, as --dtype does: give only one of the two")
        if self.format != "gguf":
            raise WgradError(f"--quantize: needs --format gguf, got --format {self.format}: add it")
