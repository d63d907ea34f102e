"""The objectives, one entry each: their data, their needs and their options.

To add an objective, add an entry in OBJECTIVES, its options as fields of `ObjectiveOptions`, and a class in
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
    """Properties of an objective.

    Attributes:
        summary: Text for `--help`.
        records: Data to learn from: texts, pairs of a chosen and a rejected answer, or labeled answers.
        options: Fields of `ObjectiveOptions` that it reads.
        reference: Whether it compares with the base model, the adapter off.
        packs: Whether a sequence may hold several examples; only for texts.
        trains_head: Whether its loss has a gradient of the output layer, as --train-head and --full need.
        framed: Whether bos and eos are added to texts without them.
        mismatched: Whether each prompt is also combined with another example's answer of the micro-batch.
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
    """Return the names of the objectives that learn from these records, such as "dpo or orpo"."""
    *most, last = (name for name, kind in OBJECTIVES.items() if kind.records in records)
    return f"{', '.join(most)} or {last}" if most else last


of_objective = partial(option, group="training", fixed=True)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(Options):
    """Options of a run's objective."""

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
        "dpo: probability that chosen and rejected are swapped by mistake (robust DPO)",
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
        """Entry of --objective."""
        return OBJECTIVES[self.objective]


def options_of_others(objective: str) -> dict[str, str]:
    """Return the options that an objective does not read, each with the reason."""
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
