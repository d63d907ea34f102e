"""Before and after a run: the loss on a part of the held-out data, and a text that the model continues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.device.errors import UnusableResult
from wgrad.train.data.packing import Batch, Document, eval_batches
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.run.build import TrainableModel
from wgrad.train.run.generation import generate_ids
from wgrad.train.run.plan import SAMPLE_TOKENS
from wgrad.train.run.session import Session
from wgrad.train.run.trainer import Trainer


def eval_subset(documents: Sequence[Document], config: RunOptions) -> list[Document]:
    """Documents of about --eval-tokens tokens (one more than fit), drawn by the seed; all where they have no more or it
    is 0. Always the same ones, in the order of `documents`."""
    if not config.eval_tokens or sum(map(len, documents)) <= config.eval_tokens:
        return list(documents)
    # The last word tells this generator from those that split the data and order the epochs.
    order = np.random.Generator(np.random.PCG64([config.seed, 0, 2])).permutation(len(documents))
    chosen, tokens = [], 0
    for index in order.tolist():
        if tokens >= config.eval_tokens:
            break
        chosen.append(index)
        tokens += len(documents[index])
    return [documents[index] for index in sorted(chosen)]


class Evaluation:
    """Measures the same things before and after. `measure` says them and returns them as results."""

    def __init__(self, session: Session, trainer: Trainer, built: TrainableModel) -> None:
        self.session, self.trainer, self.built = session, trainer, built
        documents, config = session.data.held_out, session.config
        chosen = eval_subset(documents, config)
        self.batches: list[Batch] = eval_batches(chosen, trainer.config, session.tokenizer.pad_id or 0)
        self._note = ""
        if len(chosen) < len(documents):
            self._note = f"; on {len(chosen)} of {len(documents)} held-out examples: --eval-tokens {config.eval_tokens}"

    def measure(self, when: str) -> dict[str, Any]:
        """when: "before" or "after"."""
        return {**self._loss(when), **self._sample(when)}

    def _loss(self, when: str) -> dict[str, Any]:
        if not self.batches:
            return {}
        with self.session.display.phase("held-out loss", len(self.batches), "batches") as phase:
            loss = self.trainer.evaluate(self.batches, phase.update)
        self.session.say(f"held-out loss {when}: {loss:.4f} (perplexity {math.exp(min(loss, 700)):.2f}{self._note})")
        return {f"held_out_loss_{when}": loss if math.isfinite(loss) else None}

    def _sample(self, when: str) -> dict[str, Any]:
        if not self.session.config.sample:
            return {}
        return self.trainer.world.by_first(lambda: self._sample_here(when), "a sample of the model")

    def _sample_here(self, when: str) -> dict[str, Any]:
        session = self.session
        stop, decode = session.tokenizer.stop_ids, session.tokenizer.decode_stream(session.prompt)
        text = ""
        with session.display.phase("sample", SAMPLE_TOKENS, "tokens") as phase:
            ids = generate_ids(self.built.model, session.prompt, SAMPLE_TOKENS, GREEDY, stop)
            try:
                for number, token in enumerate(ids, start=1):
                    text += decode(token)
                    phase.update(number)
            except UnusableResult as error:  # what is trained is judged elsewhere
                session.say(f"note: no sample {when}: {error}")
                return {f"sample_{when}": None}
        session.say(f"sample {when}: {session.tokenizer.decode(session.prompt)!r} -> {text!r}")
        return {f"sample_{when}": text}
