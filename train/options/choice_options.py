"""The options of `wgrad eval --choices`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

from wgrad.device.errors import WgradError
from wgrad.train.options.choices import ShotsOrder
from wgrad.train.options.options import NOT_NEGATIVE, Options, flag, option

SHOTS_SEED = 1234  # of lm-eval, where --seed is not given
_FORM = "JSON lines with 'question', 'choices' and 'answer' (a number from 0, or the text of a choice)"


@dataclass(frozen=True)
class ChoiceOptions(Options):
    """Options of multiple choice: questions, and the text before each. Raises WgradError if a value breaks its rule."""

    choices: str = option("", f"instead of --data: multiple choice, {_FORM}", metavar="FILE", path=True)
    shots: int = option(
        0, "with --choices: number of solved example questions before each question", rule=NOT_NEGATIVE, metavar="N"
    )
    shots_from: str = option(
        "", "file with the questions for --shots (default: the other questions of --choices)", metavar="FILE", path=True
    )
    shots_order: ShotsOrder = option(
        "random",
        "how --shots are chosen. random: drawn for each question by --seed; first: the first ones of the file",
        choices=get_args(ShotsOrder),
    )
    chat: bool = option(False, "with --choices: apply the model's chat template; each shot is two turns")
    system: str = option("", "with --chat: text of the system message", metavar="TEXT")

    def check(self, given: Collection[str]) -> None:
        """Raise WgradError for options without effect. given: names of the options that the user gave."""
        needs = {name: ("choices", bool(self.choices)) for name in ("shots", "shots_from", "shots_order", "chat")}
        needs |= {name: ("shots", self.shots > 0) for name in ("shots_from", "shots_order") if self.choices}
        needs["system"] = ("chat", self.chat)
        for name, (wanted, there) in needs.items():
            if name in given and not there:
                raise WgradError(f"{flag(name)}: needs {flag(wanted)}: add it, or leave this out")
        if self.choices and self.shots_from == "-" == self.choices:
            raise WgradError("--shots-from: --choices reads standard input already: give a file")
