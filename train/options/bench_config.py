"""The options of `wgrad bench`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.whole_numbers import whole_number
from wgrad.train.options.finetune_config import DEVICE_HELP
from wgrad.train.options.options import NOT_NEGATIVE, Options, Rule, option

AUTO_SIZE = "auto"
SIZE_CHOICES = (AUTO_SIZE, "large", "small", "tiny")
_SIZES: Rule = (
    "must be three sizes from 1 to 4294967295, as in 2048x8192x2048",
    lambda v: v.count("x") == 2 and all(0 < (whole_number(n) or 0) < 2**32 for n in v.split("x")),
)


@dataclass(frozen=True)
class BenchConfig(Options):
    """Options of `wgrad bench`. Raises WgradError if a value breaks its rule."""

    op: tuple[str, ...] = option((), "only these operators", metavar="NAME")
    device: str = option("auto", DEVICE_HELP, metavar="DEVICE")
    size: str = option(
        AUTO_SIZE,
        "how large the work is (auto: large if the device copies 30 GB/s, and with --compare as in the file)",
        choices=SIZE_CHOICES,
    )
    warm_up: float = option(
        0.5,
        "seconds of work before each is timed: an idle GPU runs at a sixth of its clock",
        rule=NOT_NEGATIVE,
        metavar="S",
    )
    compare: str | None = option(
        None,
        "file of report-gpu to compare with: time its operators, and end with status 1 if one is more than 5 % slower, "
        "relative to the peak rates of each run and beyond their spread",
        metavar="FILE",
        path=True,
    )
    explain: str | None = option(
        None,
        "print the kernels that a linear layer of these sizes gets, and time nothing: TOKENSxOUTPUTSxINPUTS",
        rule=_SIZES,
        metavar="MxNxK",
    )
    against_cpu: bool = option(
        False,
        "time a QLoRA step of SmolLM2-135M's and TinyLlama-1.1B's shapes on the device and on this machine's CPU, and "
        "print their ratio; --size small: the first shape only",
    )
    out: str | None = option(None, "draw the roofline into this file", metavar="FILE.svg", path=True)
