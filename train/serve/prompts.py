"""Prompts that are read outside of the batch: scores and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.inference.embedding import embed
from wgrad.train.inference.generation import settings_of, uniform_numbers
from wgrad.train.inference.scoring import LogProbs, log_probs, score
from wgrad.train.model.model import Model
from wgrad.train.serve.jobs import LENGTH, STOP, Answer, Job, Piece, TokenInfo, token_info


def embed_prompts(model: Model, answers: Sequence[Answer]) -> None:
    """Emit the embedding of each prompt. All have the same pooling."""
    jobs = [answer.job for answer in answers]
    pooling = jobs[0].pooling
    assert pooling is not None
    for answer, vector in zip(answers, embed(model, [job.prompt for job in jobs], pooling)):
        answer.job.emit(Piece("", finish=STOP, vector=vector))
        answer.ended = True


def score_prompt(model: Model, answer: Answer) -> tuple[int, LogProbs] | None:
    """Emit the prompt's tokens with their scores. If one new token is wanted, as in evaluations, draw it without a
    second pass, and return it with its log-probabilities; else return None."""
    job, top = answer.job, answer.job.top or 0
    scored, last = score(model, job.prompt, top), None
    if job.max_new_tokens == 1:
        upload = model.device.upload
        number, settings = upload(uniform_numbers(job.sampling.seed, 1)), upload(settings_of(job.sampling)[None])
        logits = model.device.download(scored.next_logits)
        bias = job.bias(logits.shape[1], []) if job.is_edited else None
        logits = logits if bias is None else logits + bias
        token = int(model.device.download(model.device.sample(upload(logits), number, settings))[0])
        last = token, log_probs(logits, [token], top)
    job.emit(
        Piece("", prompt_tokens(answer.tokenizer, job, scored.given, top))
    )  # only now, when nothing can fail any more
    if job.max_new_tokens == 0:
        answer.end(LENGTH)
    return last


def prompt_tokens(tokenizer: Tokenizer, job: Job, given: LogProbs, top: int) -> list[TokenInfo]:
    """Return the entries of a prompt's tokens."""
    stream, ids = tokenizer.decode_stream(skip_special_tokens=False), job.prompt
    texts = [stream.add(token) for token in ids]
    texts[-1] += stream.rest()
    first = TokenInfo(ids[0], texts[0], None)
    infos = [first, *(token_info(ids[n], texts[n], given, n - 1, top) for n in range(1, len(ids)))]
    before, behind = job.around
    return [replace(info, shown=before <= n < len(ids) - behind) for n, info in enumerate(infos)]
