"""The options of a fine-tuning run: each one's name, type, default, help and rule in one place.

The command line (`cli_options.py`), the keys of YAML files and `OUT/config.yaml` all derive from `RunOptions`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Self, get_args

import yaml

from wgrad.device.errors import WgradError
from wgrad.device.files import write_text
from wgrad.train.options import choices
from wgrad.train.options.choices import AUTO, REPORTERS
from wgrad.train.options.contradictions import refuse_contradictions
from wgrad.train.options.input_options import SHARE_BELOW_1, InputOptions
from wgrad.train.options.objectives import ObjectiveOptions
from wgrad.train.options.option_text import is_size
from wgrad.train.options.options import ABOVE_0, NOT_NEGATIVE, SEED, option, show
from wgrad.train.options.unused_options import unused_options

CONFIG_FILE = "config.yaml"
CONFIG_FORMAT = 1  # of OUT/config.yaml; a user's file need not name it
# Options that --help and the studio show first.
USUAL = ("model", "data", "out", "resume", "lora_r", "learning_rate", "batch_size", "max_length", "epochs", "vram")
MOST_KEPT = 5  # of --keep-projections
COMPUTE_HELP = "auto: float16 where tensor cores are enabled, bfloat16 on HIP, else float32"
DEVICE_HELP = "where to compute: auto, hip, wgpu or cpu; hip:GPU and wgpu:GPU take a number or part of a name"
MOST = 10**9  # largest count, which no run reaches: a larger number is a mistake
STREAM_HELP = (
    "keep the frozen weights in host memory and copy each layer to the device before its use; auto: only where they do "
    "not fit otherwise"
)
LIMIT_HELP = "use at most this much device memory: 3GiB, 800MiB"
A_LENGTH = (f"must be between 2 (one token predicts the next) and {MOST:,}", lambda v: 2 <= v <= MOST)
A_WARMUP = ("must be a share below 1 or a whole number of steps", lambda v: 0 <= v < 1 or v == int(v) >= 1)
A_SIZE = ("must be a size, as 3GiB or 800MiB", is_size)
A_NUMBER = (f"must be between 0 and {MOST:,}", lambda v: not isinstance(v, str) and 0 <= v <= MOST)
LAYERS = ("must be auto, true, false or a number of layers", lambda v: v == AUTO or A_NUMBER[1](v))
A_COUNT = (f"must be between 1 and {MOST:,}", lambda v: 1 <= v <= MOST)

of_training = partial(option, group="training")
of_machine = partial(option, group="machine")


@dataclass(frozen=True, kw_only=True)
class RunOptions(ObjectiveOptions, InputOptions):
    """Options of a run, without the requirement to name files, which parts of a run can do without (`wgrad warm`).

    Raises WgradError, naming the option, if a value breaks its rule.
    """

    learning_rate: float = of_training(2e-4, "peak learning rate", rule=ABOVE_0, metavar="LR")
    loraplus_lr_ratio: float = of_training(
        1.0,
        "LoRA+: the learning rate of every lora_B is RATIO times that of lora_A, which is --learning-rate (PEFT: "
        "loraplus_lr_ratio)",
        rule=ABOVE_0,
        metavar="RATIO",
    )
    lr_sweep: tuple[float, ...] = of_training(
        (),
        "try these learning rates in short runs (--max-steps, else 50 steps) from the same start, and print a table; "
        "only sweep.json is kept",
        rule=("must be two or more numbers above 0", lambda v: not v or (len(v) > 1 and min(v) > 0)),
        metavar="LR",
    )
    lr_scheduler_type: choices.Schedule = of_training(
        "cosine", "learning rate schedule after the warm-up", choices=get_args(choices.Schedule)
    )
    warmup_steps: float = of_training(
        0.03,
        "warm-up: a fraction of all steps if below 1, else a number of steps; the first step has LR / warm-up steps "
        "(transformers: 0)",
        rule=A_WARMUP,
        metavar="W",
    )
    weight_decay: float = of_training(
        0.0, "decoupled weight decay (AdamW) of matrices and DoRA's magnitudes", rule=NOT_NEGATIVE, metavar="D"
    )
    max_grad_norm: float = of_training(1.0, "clip gradients to this norm; 0: never", rule=NOT_NEGATIVE, metavar="G")
    batch_size: int = of_training(
        1,
        "sequences per micro-batch; pairs where the objective compares pairs; auto: the fastest that fits "
        "(--auto-find-batch-size)",
        rule=A_COUNT,
        metavar="B",
        fixed=True,
    )
    gradient_accumulation_steps: int = of_training(
        8, "micro-batches per optimizer step", rule=A_COUNT, metavar="N", fixed=True
    )
    max_length: int = of_training(
        1024, "tokens per sequence; longer examples are truncated", rule=A_LENGTH, metavar="T", fixed=True
    )
    epochs: int = of_training(1, "passes over the data", rule=A_COUNT, metavar="N")
    max_steps: int | None = of_training(
        None, "stop after this many optimizer steps, regardless of --epochs", rule=A_COUNT, metavar="N"
    )
    router_aux_loss_coef: float | None = of_training(
        None,
        "weight of the load-balancing loss of experts' routers, in sft; 0: without (default: that of config.json where "
        "output_router_logits is true, else 0)",
        rule=NOT_NEGATIVE,
        metavar="C",
    )
    packing: bool = of_training(
        True, "pack several short documents into one sequence; each attends only to itself", fixed=True
    )
    loss_on: choices.LossOn = of_training(
        "completion",
        "tokens in the loss: completions and assistant turns, or all",
        choices=get_args(choices.LossOn),
        fixed=True,
    )
    eval_fraction: float = of_training(
        0.05,
        "fraction of the data held out to measure the loss before and after training",
        rule=SHARE_BELOW_1,
        metavar="F",
        fixed=True,
    )
    eval_tokens: int = of_training(
        16384,
        "held-out tokens to measure the loss on, the same before and after; 0: all",
        rule=A_NUMBER,
        metavar="N",
        fixed=True,
    )
    eval_steps: int = of_training(
        0, "steps between evaluations during training; 0: only before and after", rule=A_NUMBER, metavar="N"
    )
    early_stopping_patience: int = of_training(
        0,
        "stop after this many evaluations in a row without a better loss; 0: never",
        rule=A_NUMBER,
        metavar="PATIENCE",
    )
    keep_best: int = of_training(
        0,
        "keep the checkpoints of the K best evaluations; --out then holds the best result instead of the last "
        "(--early-stopping-patience keeps one)",
        rule=A_NUMBER,
        metavar="K",
    )
    seed: int = of_training(
        0, "seed of data order, split, adapter initialization and dropout", rule=SEED, metavar="N", fixed=True
    )

    compute: choices.ComputeType = of_machine(
        AUTO,
        f"dtype of activations; matmuls always accumulate in float32. {COMPUTE_HELP}",
        choices=get_args(choices.ComputeType),
        fixed=True,
    )
    device: str = of_machine("auto", f"{DEVICE_HELP}; with several ranks a list, separated by commas", metavar="DEVICE")
    ranks: int | None = of_machine(
        None,
        "start this many processes with mpirun, each on its own GPU of this machine; they share the micro-batches of a "
        "step. Not needed under mpirun or srun, which start the processes",
        rule=A_COUNT,
        metavar="N",
    )
    int8_matmul: bool = of_machine(
        False,
        "for GPUs without tensor cores: multiply frozen weights and activations as 8-bit integers; matmuls take half "
        "the time where the GPU has fast integer dot products, with an error of about 0.8 %",
    )
    gradient_checkpointing: bool | int | choices.Auto | None = of_machine(
        AUTO,
        "keep only the input of each layer, or of the first N, and recompute its activations in the backward; auto: of "
        "as few layers as free memory allows, and offload their inputs where that costs no time",
        rule=LAYERS,
        metavar="N",
    )
    offload_activations: bool | int = of_machine(
        False,
        "offload checkpointed activations to host memory, for all layers or the first N; turns "
        "--gradient-checkpointing on",
        rule=A_NUMBER,
        metavar="N",
    )
    keep_attention: bool | None = of_machine(
        None,
        "with --gradient-checkpointing: also keep attention outputs instead of recomputing them (default: for "
        "sequences of 8,192 tokens or more, if they take less than 4 GiB and no option limits memory)",
    )
    keep_projections: int | None = of_machine(
        None,
        f"what recomputed layers keep besides attention outputs, from 0 to {MOST_KEPT}. 1: queries, keys and values; "
        "each more: gate and up of half a chunk of the MLP (default: with --gradient-checkpointing auto as much as is "
        "offloaded without costing time, else 0)",
        rule=(f"must be between 0 and {MOST_KEPT}", lambda v: 0 <= v <= MOST_KEPT),
        metavar="N",
    )
    keep_gate_up: int | None = of_machine(
        None,
        "of the last N recomputed layers, also keep gate and up of one chunk of the MLP on the device (default: with "
        "--gradient-checkpointing auto as many as memory allows, where that saves more than whole layers; else 0)",
        rule=A_NUMBER,
        metavar="N",
    )
    auto_find_batch_size: bool = of_machine(
        False,
        "choose the fastest --batch-size and --gradient-accumulation-steps that fit; the tokens per step stay. "
        "--batch-size auto is the same with --batch-size 1",
    )
    keep_norms: bool | None = of_machine(
        None, "keep the outputs of norms instead of recomputing them from their inputs (default: if memory allows)"
    )
    keep_gated: bool | None = of_machine(
        None,
        "of layers that are not recomputed, keep the products of gate and up instead of computing them again (default: "
        "with --gradient-checkpointing auto if memory is left when all else is kept, else not)",
    )
    keep_dequantized: bool | int | None = of_machine(
        None,
        "keep the frozen weights, or N of them, dequantized on the GPU instead of dequantizing them in each pass, to "
        "the same bits (default: with --gradient-checkpointing auto as many as memory allows, else none)",
        rule=A_NUMBER,
        metavar="N",
    )
    mlp_chunk: str | None = of_machine(
        None, "with --gradient-checkpointing: memory that the MLP of a long sequence takes at a time (default: 768MiB "
        "for more than 4,096 tokens, or less with a --memory-limit)", rule=A_SIZE, metavar="SIZE",
    )  # fmt: skip
    stream_weights: choices.Stream = of_machine(
        "auto", f"{STREAM_HELP}. Training then uses --gradient-checkpointing", choices=get_args(choices.Stream)
    )
    resident_layers: int | None = of_machine(
        None,
        "with --stream-weights: layers whose weights stay on the device (default: as many as fit into a memory limit, "
        "else none)",
        rule=A_NUMBER,
        metavar="N",
    )
    memory_limit: str | None = of_machine(None, LIMIT_HELP, rule=A_SIZE, metavar="SIZE")
    vram: str | None = of_machine(
        None,
        "use at most this much device memory, and choose the fastest options that fit in it: --batch-size, "
        "--gradient-accumulation-steps (the tokens per step stay), --gradient-checkpointing, --offload-activations, "
        "--stream-weights",
        rule=A_SIZE,
        metavar="SIZE",
    )
    save_steps: int = of_machine(
        100, "steps between checkpoints; 0: only after the last step", rule=NOT_NEGATIVE, metavar="N"
    )
    logging_steps: int = of_machine(
        10,
        "steps between printed lines where the output is not a terminal; metrics.jsonl has every step",
        rule=A_COUNT,
        metavar="N",
    )
    report_to: tuple[str, ...] = of_machine(
        (),
        f"also send metrics to other tools: {', '.join(REPORTERS)}; each needs its own package",
        rule=(f"must be among {', '.join(REPORTERS)}", lambda v: set(v) <= {*REPORTERS} or v == ("none",)),
        metavar="TOOL",
    )
    profile: bool = of_machine(
        False, "time each kernel; at the end print a table, the largest costs and what reduces them"
    )
    sample: bool = of_machine(True, "print a sample before and after training, and at each --eval-steps")
    sample_prompt: tuple[str, ...] = of_machine(
        (),
        "prompt of the sample (default: the start of a held-out example); repeat the option for several",
        metavar="TEXT",
        repeat=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.report_to == ("none",):  # as transformers has it
            object.__setattr__(self, "report_to", ())
        refuse_contradictions(self)

    @property
    def rows(self) -> int:
        """Sequences of one forward and backward."""
        return 2 * self.batch_size if self.objective_kind.records == "pairs" else self.batch_size

    @property
    def examples_per_step(self) -> int:
        """Examples of an optimizer step: sequences or pairs of all its micro-batches."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step whose sequences are full."""
        return self.rows * self.max_length * self.gradient_accumulation_steps

    def with_batch(self, batch: int) -> Self:
        """Return the options with another batch size, and as many examples in a step."""
        return replace(self, batch_size=batch, gradient_accumulation_steps=self.examples_per_step // batch)

    @property
    def packs(self) -> bool:
        """Return whether a sequence may hold several documents."""
        return self.packing and self.objective_kind.packs

    @property
    def checkpointing_open(self) -> bool:
        """Return whether wgrad chooses the layers to recompute. None: the value of runs before 2026-11-26."""
        return self.gradient_checkpointing in (AUTO, None)

    @property
    def chooses_batch(self) -> bool:
        """Return whether wgrad chooses the size of a micro-batch."""
        return self.vram is not None or self.auto_find_batch_size

    @property
    def limit_option(self) -> str:
        """Name of the option that limits memory."""
        return "--vram" if self.vram else "--memory-limit"

    @property
    def limit(self) -> str | None:
        """Value of the option that limits memory."""
        return self.vram or self.memory_limit

    @property
    def best_kept(self) -> int:
        """Number of best checkpoints to keep: --keep-best, or one if the run may stop after its best step."""
        return self.keep_best or int(self.early_stopping_patience > 0)

    def to_yaml(self) -> str:
        """Return the text of config.yaml, which `--config` reads back to equal options."""
        unused = unused_options(self.to_dict())
        values = {"format": CONFIG_FORMAT} | {k: v for k, v in self.to_dict().items() if k not in unused}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10**6)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.yaml into `folder`, atomically."""
        write_text(os.path.join(folder, CONFIG_FILE), self.to_yaml())

    def summary(self) -> str:
        """Return one line for people, with the options that are not the defaults."""
        unused = unused_options(self.to_dict())
        values = {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata["required"]}
        defaults = {f.name: f.default for f in fields(self)}
        changed = [f"{k} {show(v)}" for k, v in values.items() if v != defaults[k] and k not in unused]
        others = "" if self.lr_sweep else f"; all are in {os.path.join(self.out, CONFIG_FILE)}"
        return f"options: {', '.join(changed) or 'the defaults'}{others}"


@dataclass(frozen=True)
class FinetuneConfig(RunOptions):
    """Options of `wgrad finetune`. Raises WgradError as `RunOptions` does, and if model, data or out is missing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require()
        if self.objective_kind.mismatched and self.batch_size == 1:
            raise WgradError(
                f"--batch-size: must be at least 2 with --objective {self.objective}, which compares each prompt with "
                "another one's completion of the same batch; got 1"
            )
