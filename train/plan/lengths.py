"""Lengths of a run's sequences and samples, and the positions that a model has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.options.finetune_config import RunOptions

PROMPT_TOKENS = 24  # most tokens of a sample's prompt without --sample-prompt
SAMPLE_TOKENS = 64  # tokens of a sample, or fewer if the model has no more positions

_Options = TypeVar("_Options", bound=RunOptions)


def within_positions(config: _Options, model_config: ModelConfig) -> tuple[_Options, str]:
    """Shorten --max-length to the positions that a model has embeddings of.

    Returns:
        The options, and a note on what changed, or "".
    """
    most = model_config.positions
    if not model_config.position_table or config.max_length <= most:
        return config, ""
    note = f"sequences have at most {most} tokens, not --max-length {config.max_length}"
    return replace(config, max_length=most), f"note: {note}: the model has embeddings of {most} positions"


def beyond_positions(seq_len: int, model_config: ModelConfig) -> str:
    """Return a note on sequences that are longer than the model was made for, or ""."""
    limit = model_config.positions
    if seq_len <= limit:
        return ""
    return f"note: --max-length {seq_len} is beyond the {limit} positions that the model was made for"


def prompt_room(model_config: ModelConfig) -> int:
    """Return the most tokens of a prompt that the run chooses itself."""
    most = model_config.positions
    return max(most - SAMPLE_TOKENS, min(PROMPT_TOKENS, most // 2), 1)


def check_prompt(prompt: Sequence[int], model_config: ModelConfig) -> None:
    """Raise WgradError if a prompt leaves no position for a sample."""
    most = model_config.positions
    if len(prompt) >= most:
        raise WgradError(
            f"--sample-prompt: {counted(len(prompt), 'token')} must be fewer than the {most} positions that the model "
            "was made for, so that a sample can follow: shorten the prompt"
        )


def sample_tokens(prompt_tokens: int, model_config: ModelConfig) -> int:
    """Return the most tokens of a sample after a prompt of so many tokens."""
    return min(SAMPLE_TOKENS, model_config.positions - prompt_tokens)


def sample_positions(config: RunOptions, model_config: ModelConfig, prompt_tokens: int) -> int:
    """Return the positions that samples need; 0 if the run makes none."""
    return min(prompt_tokens + SAMPLE_TOKENS, model_config.positions) if config.sample else 0
