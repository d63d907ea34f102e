"""The options of a run's files and adapter: a part of `RunOptions` (`finetune_config.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import get_args

from wgrad.train.options import choices
from wgrad.train.options.choices import LORA, MODULES
from wgrad.train.options.options import ABOVE_0, AT_LEAST_1, Options, option
from wgrad.train.options.record_names import A_COLUMN, COLUMNS_HELP

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARE_BELOW_1 = ("must be at least 0 and below 1", lambda v: 0 <= v < 1)

in_files = partial(option, group="files")
a_path = partial(in_files, path=True)
of_adapter = partial(option, group="adapter", fixed=True)


@dataclass(frozen=True, kw_only=True)
class InputOptions(Options):
    """Options of the files and the adapter of a run."""

    model: str = a_path(
        "",
        "base model: a folder in Hugging Face layout, a GGUF file, or a Hub id such as org/name",
        metavar="DIR_OR_HUB_ID",
        required=True,
    )
    data: tuple[str, ...] = a_path(
        (),
        "training data: JSONL, a JSON array, CSV, Parquet with text, prompt + completion, messages, chosen + rejected "
        "or completion + label; or plain text. Several times for several sources, with weights as FILE=3: the share of "
        "each in an epoch. - is standard input; OWNER/NAME or OWNER/NAME:SPLIT a data set of the Hugging Face Hub",
        metavar="FILE",
        required=True,
        repeat=True,
    )
    columns: tuple[str, ...] = in_files((), COLUMNS_HELP, rule=A_COLUMN, metavar="OURS=THEIRS", pairs=True)
    out: str = a_path(
        "", "output folder: adapter, metrics.jsonl, loss.svg, config.yaml, checkpoints", metavar="DIR", required=True
    )
    eval_data: tuple[str, ...] = a_path(
        (),
        "held-out data, as --data; --eval-fraction is then not used. Several times for several files",
        metavar="FILE",
        repeat=True,
    )
    on_bad_line: choices.OnBadLine = in_files(
        "skip",
        "invalid lines of the data: report and skip them (an error if most are invalid), or stop at the first",
        choices=get_args(choices.OnBadLine),
    )
    chat_template: str | None = a_path(
        None,
        f"{choices.TEMPLATE_HELP}; it is saved with the result",
        metavar="FILE_OR_NAME",
        fixed=True,
    )
    adapter: str | None = a_path(
        None,
        "continue training this PEFT adapter (with its own r, alpha and target modules)",
        metavar="DIR",
        fixed=True,
    )
    resume: bool = in_files(
        False, "continue from the newest checkpoint in --out; other options default to those of the run"
    )

    lora_r: int = of_adapter(16, "rank of the adapters", rule=AT_LEAST_1, metavar="R")
    lora_alpha: float = of_adapter(32.0, "the adapter is scaled by alpha / r", rule=ABOVE_0, metavar="A")
    lora_dropout: float = of_adapter(0.0, "dropout on the adapter's input", rule=SHARE_BELOW_1, metavar="P")
    target_modules: tuple[str, ...] = of_adapter(
        PROJECTIONS,
        "projections that get an adapter, each optionally with its own rank; all-linear: every linear layer except "
        "the output layer",
        rule=MODULES,
        metavar="NAME[=R]",
    )
    use_rslora: bool = of_adapter(False, "scale by alpha / sqrt(r) instead of alpha / r")
    init_lora_weights: choices.Start = of_adapter(
        LORA,
        "how an adapter starts. lora: without effect; pissa: as the largest singular values of each weight, which are "
        "subtracted from it, computed exactly or (niter: faster) in 4 or 16 random rounds; PiSSA adapters are saved as "
        "plain LoRA of twice the rank",
        choices=get_args(choices.Start),
    )
    use_dora: bool = of_adapter(False, "use DoRA: also train the magnitude of each weight row; slower")
    lora_variant: str = of_adapter(
        "", "train a variant of LoRA that a program registers (wgrad.register_lora_variant)", metavar="NAME"
    )
    qat: choices.Qat | None = of_adapter(
        None,
        "quantization-aware training: train against weights rounded as wgrad merge --format gguf --quantize q4_0 (or "
        "q4_k_m) rounds them",
        choices=get_args(choices.Qat),
    )
    train_embeddings: bool = of_adapter(
        False, "also train the whole embedding (PEFT: modules_to_save); a tied output layer stays frozen"
    )
    train_head: bool = of_adapter(False, "also train the whole output layer; a tied embedding stays frozen")
    full: bool = of_adapter(False, "train all parameters instead of adapters, and save a whole model")
    quantize: bool = of_adapter(
        True,
        "quantize the projections of a 16-bit base model to NF4; quantized and GGUF models stay as they are",
    )
    double_quant: bool = of_adapter(
        True, "also quantize the scales of the NF4 blocks (4.127 bits per weight instead of 4.5)"
    )
    block_size: choices.BlockSize = of_adapter(
        64, "weights in one NF4 block", choices=get_args(choices.BlockSize), metavar="N"
    )
