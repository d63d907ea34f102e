"""Reasoning of a model before its answer: the markers around it, and whether a prompt opens it."""

from __future__ import annotations

from collections.abc import Sequence

from wgrad.train.data.tokenizer import Tokenizer

_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_LAST = 16  # last tokens of a prompt, which may open a thought


def thought_of(template: str) -> tuple[str, str] | None:
    """Return the markers at the beginning and end of reasoning in a chat template; None if it has none."""
    return next((pair for pair in _THOUGHTS if pair[1] in template), None)


def thought_of_model(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the markers at the beginning and end of reasoning in the chat templates of a model; None without any."""
    return thought_of("\n".join(tokenizer.templates.values()))


def begins(thought: tuple[str, str] | None, prompt: str) -> bool:
    """Return whether the text of a prompt ends with the beginning of a thought."""
    return thought is not None and prompt.rstrip().endswith(thought[0])


def end_of_thought(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Return the text that ends the thought that a prompt opens; "" if it opens none."""
    thought = thought_of_model(tokenizer)
    if thought is None:
        return ""
    stream = tokenizer.decode_stream(skip_special_tokens=False)
    text = "".join(map(stream.add, prompt[-_LAST:])) + stream.rest()
    return thought[1] if begins(thought, text) else ""
