"""The options of `wgrad report-gpu`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.errors import WgradError
from wgrad.train.options.bench_config import AUTO_SIZE, SIZE_CHOICES
from wgrad.train.options.finetune_config import DEVICE_HELP
from wgrad.train.options.options import Options, Rule, option

DEVICE, SELF_TEST, RATES, FINE_TUNE, CPU = PARTS = ("device", "self-test", "rates", "fine-tune", "cpu")
_CHOSEN = PARTS[1:]  # the device is always described
_PARTS: Rule = (f"must be of {', '.join(_CHOSEN)}", lambda v: set(v) <= set(_CHOSEN))


@dataclass(frozen=True)
class ReportConfig(Options):
    """Options of `wgrad report-gpu`. Raises WgradError if a value breaks its rule."""

    device: str = option("auto", DEVICE_HELP, metavar="DEVICE")
    out: str = option("gpu-report.json", "the file", metavar="FILE", path=True)
    size: str = option(AUTO_SIZE, "how large the timed work is, as of bench", choices=SIZE_CHOICES)
    only: tuple[str, ...] = option(
        (),
        f"only these parts: {', '.join(_CHOSEN)}; rates then times every operator, for bench --compare",
        rule=_PARTS,
        metavar="PART",
    )
    op: tuple[str, ...] = option((), "with --only rates: only these operators", metavar="NAME")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.op and RATES not in self.only:
            raise WgradError("--op: goes with --only rates: add that, or leave it out")

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that run, in their order."""
        return tuple(name for name in PARTS if name == DEVICE or not self.only or name in self.only)
