"""Tokenizers in Hugging Face layout, without transformers: tokenizer.json, tokenizer_config.json, the chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from wgrad.autograd.errors import WgradError
from wgrad.train.chat import ChatTemplate, Message

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Encoded:
    """ids[i] stands for characters [start, end) = offsets[i] of the text; (0, 0) for added tokens such as bos."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """What training and generation need of a tokenizer. Made by `load_tokenizer`.

    Attributes: vocab_size (largest id + 1), bos_id, eos_id, pad_id (None where there is none), stop_ids (ids that end a
    generation: eos and those of generation_config.json).
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], template: str | None, where: str) -> None:
        self._backend, self.where = backend, where
        self._backend.no_padding()
        self._backend.no_truncation()
        self.special_tokens = {name: text for name in _SPECIAL if (text := _token_text(config.get(name))) is not None}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id, self.eos_id, self.pad_id = (self._special_id(n) for n in ("bos_token", "eos_token", "pad_token"))
        self.stop_ids: frozenset[int] = frozenset(() if self.eos_id is None else (self.eos_id,))
        self._template_source = template
        self._template: ChatTemplate | None = None

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def check_fits(self, vocab_size: int) -> None:
        """WgradError where the tokenizer makes ids that a model of `vocab_size` does not have."""
        if self.vocab_size > vocab_size:
            raise WgradError(
                f"--model: the tokenizer of {self.where} has ids up to {self.vocab_size - 1}, but the model's "
                f"vocab_size is {vocab_size}: the tokenizer belongs to another model; use the files of this one"
            )

    # ---- text -> ids -------------------------------------------------------------------------
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoded]:
        """As the post-processor of tokenizer.json says, with or without bos.

        add_bos_token of tokenizer_config.json is not looked at: transformers 5 ignores it too where there is a
        tokenizer.json (tests/train/test_oracle_tokenizer.py compares).
        """
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [Encoded(e.ids, e.offsets) for e in encodings]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of one text; see `encode_batch`."""
        return self.encode_batch([text], add_special_tokens)[0].ids

    # ---- ids -> text -------------------------------------------------------------------------
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def decode_stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Callable[[int], str]:
        """-> a function from the next id to the text that it completes ('' in the middle of a character).

        prompt_ids: what stands before, so that the first word keeps the space in front of it.
        """
        stream = DecodeStream(ids=[int(i) for i in prompt_ids], skip_special_tokens=skip_special_tokens)
        return lambda token: stream.step(self._backend, int(token)) or ""

    # ---- chat --------------------------------------------------------------------------------
    @property
    def chat_template(self) -> ChatTemplate:
        """The compiled template. WgradError where the tokenizer has none."""
        if self._template is None:
            if self._template_source is None:
                raise WgradError(
                    f"--model: the tokenizer of {self.where} has no chat template (chat_template in "
                    "tokenizer_config.json, or chat_template.jinja), which messages need: take the instruct variant "
                    "of the model, or data with prompt and completion"
                )
            self._template = ChatTemplate(self._template_source, self.special_tokens)
        return self._template

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation; the template, not the tokenizer, puts bos where it belongs."""
        return self.encode(self.chat_template.render(messages, add_generation_prompt), add_special_tokens=False)


def _token_text(value: Any) -> str | None:
    """A special token is written as text or as {"content": text, ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WgradError(f"--model: cannot read {path}: {error}: fetch the file again") from error
    if not isinstance(value, dict):
        raise WgradError(f"--model: {path}: expected a JSON object, got a {type(value).__name__}: fetch the file again")
    return value


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Source of the default template: chat_template.jinja, else the configuration's text or named list."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) else None


def _stop_ids(folder: Path) -> set[int]:
    # Where there is no generation_config.json, config.json stands for it, as in transformers.
    name = "generation_config.json" if (folder / "generation_config.json").exists() else "config.json"
    value = _read_json(folder / name).get("eos_token_id")
    return {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder. WgradError: no tokenizer.json, a broken one, broken configuration."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tokenizer.model").exists():
            raise WgradError(
                f"--model: {folder} has tokenizer.model but no tokenizer.json: convert it once with transformers "
                "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or take a repository that has it"
            )
        raise WgradError(f"--model: {folder} has no tokenizer.json: copy the tokenizer's files beside the weights")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise WgradError(
            f"--model: {path} is not a tokenizer that can be read: {error}: fetch the file again"
        ) from error
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    tokenizer = Tokenizer(backend, config, _chat_template(folder, config), str(folder))
    tokenizer.stop_ids |= _stop_ids(folder)
    return tokenizer
