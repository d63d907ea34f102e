"""An answer in the batch, and its sequence there."""

from __future__ import annotations

from dataclasses import dataclass, field

from wgrad.train.inference.growing import Growing
from wgrad.train.serve.jobs import Answer


@dataclass(eq=False)
class Member:
    """An answer in the batch. ids: its tokens so far; began: their number when its sequence began. scored: whether its
    prompt has been scored."""

    answer: Answer
    sequence: Growing
    ids: list[int] = field(default_factory=list)
    began: int = 0
    scored: bool = False

    def begin_again(self) -> None:
        """Replace its sequence by one with all tokens so far, which must join again."""
        self.sequence = self.sequence.go_on(self.ids[self.began :])
        self.began = len(self.ids)
