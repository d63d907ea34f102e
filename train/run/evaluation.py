"""Evaluations before, during and after a run: the loss on held-out data, and sample texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from wgrad.device.errors import UnusableResult
from wgrad.train.data.packing import Batch, Example, eval_batches
from wgrad.train.inference.generation import generate_ids
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.output.callbacks import Callbacks, EvaluationReport
from wgrad.train.output.metrics import SamplesFile
from wgrad.train.plan.lengths import sample_tokens
from wgrad.train.run.session import Session
from wgrad.train.step.build import TrainableModel
from wgrad.train.step.hooks import Hooks, measure_metrics
from wgrad.train.step.trainer import Trainer

T = TypeVar("T", bound=Example)
_SHOWN = ("rewards/accuracies", "rewards/margins")  # of an objective's metrics


def eval_subset(documents: Sequence[T], config: RunOptions) -> list[T]:
    """Return the documents to evaluate on: a sample of just over --eval-tokens tokens, or all if that is 0 or enough.

    The sample depends only on the seed and keeps the order of `documents`.
    """
    if not config.eval_tokens or sum(map(len, documents)) <= config.eval_tokens:
        return list(documents)
    # The last number separates this generator from those that split the data and order the epochs.
    order = np.random.Generator(np.random.PCG64([config.seed, 0, 2])).permutation(len(documents))
    chosen, tokens = [], 0
    for index in order.tolist():
        if tokens >= config.eval_tokens:
            break
        chosen.append(index)
        tokens += len(documents[index])
    return [documents[index] for index in sorted(chosen)]


class GivenUp(Exception):
    """An evaluation was abandoned because the run was asked to end."""


@dataclass(frozen=True)
class Measured:
    """Result of an evaluation.

    Attributes:
        loss: Mean held-out loss (sft: nats per token); None without held-out data.
        texts: Continuation of each prompt; None if the model's logits are not finite.
        lines: Summary for people.
        metrics: The objective's and the caller's metrics.
    """

    loss: float | None
    texts: Sequence[str | None]
    lines: list[str] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def results(self, when: str) -> dict[str, Any]:
        """Return the entries for results.json. when: "before" or "after". The sample is that of the first prompt."""
        found: dict[str, Any] = {}
        if self.loss is not None:
            named = {"loss": self.loss, **self.metrics}
            found = {f"held_out_{name}_{when}": v if math.isfinite(v) else None for name, v in named.items()}
        return found | ({f"sample_{when}": self.texts[0]} if self.texts else {})


class Evaluation:
    """Evaluates the model of a run, each time on the same data and prompts.

    Args:
        session: Session of the run.
        trainer: Its trainer.
        built: Its model.
        samples: File that keeps the samples; None: generate none.
        callbacks: Called with each evaluation.
        hooks: Custom loss and metrics.
    """

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        built: TrainableModel,
        samples: SamplesFile | None = None,
        callbacks: Callbacks | None = None,
        hooks: Hooks = Hooks(),  # noqa: B008  frozen
    ) -> None:
        self.session, self.trainer, self.built, self.samples = session, trainer, built, samples
        self.callbacks = Callbacks() if callbacks is None else callbacks
        self.hooks = hooks
        documents, config = session.data.held_out, session.config
        chosen = eval_subset(documents, config)
        self.batches: list[Batch] = eval_batches(chosen, trainer.config, session.tokenizer.pad_id or 0)
        self._note = ""
        if len(chosen) < len(documents):
            self._note = f"; on {len(chosen)} of {len(documents)} held-out examples: --eval-tokens {config.eval_tokens}"

    def measure(
        self, step: int, when: str, loss: float | None = None, asked: Callable[[], bool] = lambda: False
    ) -> Measured:
        """Evaluate the model after `step` steps.

        Args:
            step: Steps done.
            when: Word for the printed lines, such as "before".
            loss: Held-out loss if it is known already.
            asked: Returns whether the run was asked to end.

        Raises:
            GivenUp: `asked` returned True.
        """
        lines, metrics, own = [], dict[str, float](), self.hooks.metrics or {}
        if self.batches and (loss is None or self.trainer.objective.score_size):  # its metrics are not kept anywhere
            with self.session.display.phase("held-out loss", len(self.batches), "batches") as phase:
                loss, metrics = self.trainer.measure(self.batches, _until(asked, phase.update))
        if self.batches and self.hooks.metrics:
            found = measure_metrics(self.hooks.metrics, self.built.model, self.trainer.written, self.batches)
            metrics = {**metrics, **found}
        if loss is not None:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name in (*_SHOWN, *own))
            if self.hooks.loss is None and not self.trainer.objective.score_size:
                shown = ", ".join(filter(None, (f"perplexity {math.exp(min(loss, 700)):.2f}", shown)))
            told = f"{shown}{self._note}".removeprefix("; ")
            lines.append(f"held-out loss {when}: {loss:.4f}" + (f" ({told})" if told else ""))
        texts = list(self._texts(step, asked, lines, when)) if self.samples is not None else []
        self.callbacks.evaluation(EvaluationReport(step, loss, tuple(texts), metrics))
        return Measured(loss, texts, lines, metrics)

    def _texts(self, step: int, asked: Callable[[], bool], lines: list[str], when: str) -> Iterator[str | None]:
        """Yield the sample of each prompt, generated unless the file has it already."""
        assert self.samples is not None
        for prompt in self.session.prompts:
            words = self.session.tokenizer.decode(prompt, skip_special_tokens=False)
            known = self.samples.of(step)
            if words not in known:
                text, why_none = self.trainer.world.broadcast(
                    partial(self._sample, prompt, asked), "a sample of the model"
                )
                self.samples.write({"step": step, "prompt": words, "text": text})
                known = {words: text}
                if text is None:
                    lines.append(f"note: no sample {when}: {why_none}")
            if (text := known[words]) is not None:
                lines.append(f"sample {when}: {words!r} -> {text!r}")
            yield text
        self.samples.sync()

    def _sample(self, prompt: list[int], asked: Callable[[], bool]) -> tuple[str | None, str]:
        """Return the continuation of a prompt, or None and the reason."""
        session, device = self.session, self.built.model.device
        stream, text = session.tokenizer.decode_stream(prompt, skip_special_tokens=False), ""
        most = sample_tokens(len(prompt), session.model_config)
        with session.display.phase("sample", most, "tokens") as phase, device.borrowing():
            update = _until(asked, phase.update)
            ids = generate_ids(self.built.model, prompt, most, GREEDY, session.tokenizer.stop_ids)
            try:
                for number, token in enumerate(ids, start=1):
                    text += stream.add(token)
                    update(number)
            except UnusableResult as error:  # the training loop judges the parameters
                return None, str(error)
        return text + stream.rest(), ""


def _until(asked: Callable[[], bool], update: Callable[[int], None]) -> Callable[[int], None]:
    """Return `update`, wrapped to raise GivenUp once the run is asked to end."""

    def told(done: int) -> None:
        if asked():
            raise GivenUp
        update(done)

    return told
