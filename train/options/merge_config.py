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
    "with --quantize: weigh errors by an importance matrix, measured on a file with data or on the run's data ('run'), "
    "or read from a file of llama.cpp (.gguf)"
)
A_DATA_FILE = ("must name a file, or be run", lambda v: bool(v.strip()))
_WEIGHTED = tuple(mix for mix in GGUF_MIXES if mix not in ("q8_0", "mxfp4"))
GGUF_TYPES = ("none", *GGUF_MIXES, "f16")  # of merged matrices


@dataclass(frozen=True)
class MergeConfig(Options):
    """Options of `wgrad merge`. Raises WgradError if a value breaks its rule."""

    adapter: str = option("", "adapter to merge: finetune's --out", metavar="DIR", path=True, required=True)
    out: str = option("", "folder to write the model into", metavar="DIR", path=True, required=True)
    model: str | None = option(
        None, "its base model (default: as the adapter names it)", metavar="DIR_OR_HUB_ID", path=True
    )
    onto: str = option(
        "dequantized",
        "dequantized: the weights as the adapter was trained on them, NF4; original: the base model's own",
        choices=("dequantized", "original"),
    )
    format: str = option(
        "safetensors",
        "safetensors: a folder in Hugging Face layout; gguf: one with model.gguf, for llama.cpp (pip install "
        "'wgrad[gguf]')",
        choices=("safetensors", "gguf"),
    )
    dtype: str = option(
        "auto",
        "dtype of the merged weights; auto: that of the base model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantize: str = option(
        "none",
        "with --format gguf: type of the merged matrices, or llama.cpp's mix of that name; none: that of --dtype",
        choices=GGUF_TYPES,
    )
    imatrix: str | None = option(None, IMATRIX_HELP, metavar="FILE|run", path=True, rule=A_DATA_FILE)
    block_size: BlockSize | None = option(
        None,
        "weights in one block of the NF4 that the adapter was trained on (default: as in its run, else 64)",
        choices=get_args(BlockSize),
        metavar="N",
    )
    double_quant: bool | None = option(
        None, "whether that NF4 had its scales quantized as well (default: as in its run, else yes)"
    )
    compare: bool = option(True, "print how merging changed the logits (loads both models once more)")
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
