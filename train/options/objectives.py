"""The objectives, one entry each: what they learn from, what they need, and which options are theirs.

Another objective is an entry in OBJECTIVES, its options as fields of `ObjectiveOptions`, and a class in
train/step/objectives.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from wgrad.train.options.options import ABOVE_0, NOT_NEGATIVE, Options, option

ObjectiveName = Literal["sft", "dpo", "orpo", "kto", "simpo"]
SFT, *_ = get_args(ObjectiveName)


@dataclass(frozen=True)
class Objective:
    """How an objective differs from others.

    Attributes:
        summary: For `--help`.
        records: What it learns from: texts, pairs of a chosen and a rejected answer, or answers with a label.
        options: Fields of `ObjectiveOptions` that it reads.
        reference: Whether it measures against the base model with the adapter off.
        packs: Whether a row may hold several examples; of texts only.
        trains_head: Whether its loss has a gradient of the output layer, so that this and --full can be trained.
        framed: Whether bos and eos are added where a text has none.
        mismatched: Whether each prompt is also put in front of another example's answer of the micro-batch.
    """

    summary: str
    records: Literal["texts", "pairs", "labels"]
    options: tuple[str, ...] = ()
    reference: bool = False
    packs: bool = False
    trains_head: bool = False
    framed: bool = False
    mismatched: bool = False


OBJECTIVES = {
    SFT: Objective("learns what the data says", "texts", packs=True, trains_head=True),
    "dpo": Objective(
        "prefers 'chosen' to 'rejected', measured against the base model",
        "pairs",
        ("beta", "label_smoothing"),
        reference=True,
    ),
    "orpo": Objective(
        "learns 'chosen' and prefers it to 'rejected', without a reference", "pairs", ("beta",), framed=True
    ),
    "kto": Objective(
        "goes by 'label', measured against the base model",
        "labels",
        ("beta", "desirable_weight", "undesirable_weight"),
        reference=True,
        mismatched=True,
    ),
    "simpo": Objective(
        "prefers 'chosen' to 'rejected' by the mean of a token, without a reference",
        "pairs",
        ("beta", "simpo_gamma"),
        framed=True,
    ),
}


def objectives_with(*records: str) -> str:
    """Names of the objectives that learn from these records, in words."""
    *most, last = (name for name, kind in OBJECTIVES.items() if kind.records in records)
    return f"{', '.join(most)} or {last}" if most else last


of_objective = partial(option, group="training", fixed=True)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(Options):
    """The objective of a run and what it is weighed by."""

    objective: ObjectiveName = of_objective(
        SFT, "; ".join(f"{name} {kind.summary}" for name, kind in OBJECTIVES.items()), choices=OBJECTIVES
    )
    beta: float = of_objective(
        0.1,
        "dpo, kto: larger stays closer to the base model; orpo: weight of the odds ratio (its lambda); simpo: scale of "
        "the reward, 2 to 10 in its paper",
        rule=ABOVE_0,
        metavar="B",
    )
    label_smoothing: float = of_objective(
        0.0,
        "dpo: probability that chosen and rejected are the wrong way round (robust DPO)",
        rule=("must be at least 0 and below 0.5", lambda v: 0 <= v < 0.5),
        metavar="P",
    )
    simpo_gamma: float = of_objective(
        0.5,
        "simpo: margin by which the reward of chosen is to exceed that of rejected",
        rule=NOT_NEGATIVE,
        metavar="G",
    )
    desirable_weight: float = of_objective(
        1.0, "kto: weight of examples whose label is true", rule=NOT_NEGATIVE, metavar="W"
    )
    undesirable_weight: float = of_objective(
        1.0, "kto: weight of examples whose label is false", rule=NOT_NEGATIVE, metavar="W"
    )

    @property
    def objective_kind(self) -> Objective:
        """The entry of --objective."""
        return OBJECTIVES[self.objective]


def options_of_others(objective: str) -> dict[str, str]:
    """Options that an objective does not read, each with the reason."""
    own = OBJECTIVES[objective].options
    none = f"--objective {objective} has none" if not own else ""
    users: dict[str, list[str]] = {}
    for name, kind in OBJECTIVES.items():
        for field in kind.options:
            users.setdefault(field, []).append(name)
    return {
        field: none or f"it is of --objective {' and '.join(names)}"
        for field, names in users.items()
        if field not in own
    }
