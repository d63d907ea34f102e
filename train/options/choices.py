"""Values of options with a few choices, as types for Python callers too."""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

REPORTERS = ("tensorboard", "wandb", "trackio", "mlflow")
Start = Literal["lora", "pissa", "pissa_niter_4", "pissa_niter_16"]
LORA, *_ = get_args(Start)
AUTO: Final = "auto"
Auto = Literal["auto"]
ComputeType = Literal["auto", "float32", "float16", "bfloat16"]
BlockSize = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]  # BLOCK_SIZES of device.formats.nf4
Schedule = Literal["cosine", "linear", "constant"]
LossOn = Literal["completion", "all"]
OnBadLine = Literal["skip", "stop"]
Stream = Literal["auto", "on", "off"]
Qat = Literal["q4_0", "q4_k"]
Pooling = Literal["mean", "last"]
# Well-known chat templates that --chat-template takes by name; other names are looked up in the model.
TEMPLATES = (
    "chatml", "llama2", "llama3", "mistral", "gemma", "phi3", "zephyr", "vicuna", "alpaca", "deepseek-r1",
)  # fmt: skip
TEMPLATE_HELP = (
    "chat template in place of the model's: a file in Jinja, the name of another one of the model's, or one of "
    + ", ".join(TEMPLATES)
)
GGUF_MIXES = ("q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_1", "q4_0", "iq4_xs", "mxfp4")  # mixes of GGUF types
ShotsOrder = Literal["random", "first"]

# The rule of --target-modules.
MODULES = (
    "must name at least one module, each as NAME or NAME=RANK, a rank from 1 on, none twice; all-linear stands alone",
    lambda v: (
        len(v) > 0
        and all(re.fullmatch(r"all-linear|(?!all-linear=)[^=]+(=0*[1-9]\d{0,8})?", n) for n in v)
        and len({n.partition("=")[0] for n in v}) == len(v)
        and (len(v) == 1 or "all-linear" not in v)
    ),
)
