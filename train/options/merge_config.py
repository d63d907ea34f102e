"""The options of `wgrad merge`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.formats.nf4 import BLOCK_SIZES
from wgrad.train.options.finetune_config import DEVICE_HELP
from wgrad.train.options.options import Options, option


@dataclass(frozen=True)
class MergeConfig(Options):
    """Which adapter goes into which weights. WgradError where a value breaks its rule."""

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
    dtype: str = option(
        "auto",
        "type of the merged weights; auto: as the base model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    block_size: int = option(64, "of the NF4 that it was trained on", choices=BLOCK_SIZES, metavar="N")
    double_quant: bool = option(True, "whether that NF4 had its scales quantised as well")
    compare: bool = option(True, "tell at the end what merging changed in the logits (both models are loaded for it)")
    device: str = option("auto", DEVICE_HELP, metavar="DEVICE")
