"""An answer in the batch, and its sequence there."""

from __future__ import annotations

from dataclasses import dataclass, field

from wgrad.train.inference.growing import Growing
from wgrad.train.serve.jobs import Answer


@dataclass(eq=False)
class Member:
    """An answer in the batch. ids: its tokens so far; began: how many there were as its sequence began. scored: its
    prompt has been, where that was asked for."""

    answer: Answer
    sequence: Growing
    ids: list[int] = field(default_factory=list)
    began: int = 0
    scored: bool = False

    def begin_again(self) -> None:
        """Its sequence joins once more, with all tokens so far."""
        self.sequence = self.sequence.go_on(self.ids[self.began :])
        self.began = len(self.ids)
