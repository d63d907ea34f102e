"""Tokenizers in Hugging Face layout, without transformers: tokenizer.json, tokenizer_config.json, the chat template."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from wgrad.device.errors import WgradError
from wgrad.train.data.chat import ChatTemplate, Message
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.text_stream import Step, TextStream, steps_of
from wgrad.train.data.text_windows import WINDOW, Encoded, encode_windows, pieces
from wgrad.train.data.tokenizer_files import (
    SPECIAL,
    explain,
    read_backend,
    read_options,
    read_templates,
    token_text,
)
from wgrad.train.files.input_files import exists


class Tokenizer:
    """What training and generation need of a tokenizer. Made by `load_tokenizer`.

    Attributes: vocab_size (largest id + 1), bos_id, eos_id, pad_id (None where there is none), stop_ids (ids that end a
    generation: eos and those of generation_config.json).
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any], templates: Mapping[str, str], where: str
    ) -> None:
        self._backend, self.where = backend, where
        # Those of this model alone, such as image_token, are for templates.
        own = [name for name, value in config.items() if name.endswith("_token") and isinstance(value, str)]
        self.special_tokens = {n: text for n in (*SPECIAL, *own) if (text := token_text(config.get(n))) is not None}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id, self.eos_id, self.pad_id = (self._special_id(n) for n in ("bos_token", "eos_token", "pad_token"))
        self.stop_ids: frozenset[int] = frozenset(() if self.eos_id is None else (self.eos_id,))
        self._special = frozenset(t.content for t in backend.get_added_tokens_decoder().values() if t.special)
        self._steps: list[Step] | None = None  # of the decoder; read when first needed
        self._templates = templates
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
        """As the post-processor of tokenizer.json says, with or without bos. WgradError: a text that is not Unicode.

        add_bos_token of tokenizer_config.json is not looked at: transformers 5 ignores it too where there is a
        tokenizer.json (tests/train/test_oracle_tokenizer.py compares).
        """
        for text in texts:
            check_text(text)
        try:
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
            return [Encoded(e.ids, e.offsets) for e in encodings]
        except BaseException as error:
            reason = explain(error)
            if reason is None:
                raise
            raise WgradError(
                f"--model: the tokenizer of {self.where} fails on this text: {reason}: fetch its files again, or "
                f"remove the text; it begins with {texts[0][:40]!r}"
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of one text; see `encode_batch`. A long one is encoded in windows: it would take 500 times its size."""
        if len(text) <= WINDOW:
            return self.encode_batch([text], add_special_tokens)[0].ids
        before, behind = self.added_ids() if add_special_tokens else ([], [])
        return [*before, *(id_ for part in self.encode_stream(pieces(text)) for id_ in part.ids), *behind]

    def encode_stream(self, blocks: Iterable[str]) -> Iterator[Encoded]:
        """A text of any length, given in blocks, in the ids of one go but without bos and eos; offsets count from its
        beginning. Takes memory for a part of it only."""
        return encode_windows(blocks, lambda text: self.encode_batch([text], add_special_tokens=False)[0])

    def added_ids(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before a text and behind it."""
        plain, whole = self.encode("x", add_special_tokens=False), self.encode("x")
        place = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:place], whole[place + len(plain) :]

    # ---- ids -> text -------------------------------------------------------------------------
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def special_text(self, token: int) -> str:
        """The text of a special token; "" for any other."""
        text = self._backend.id_to_token(int(token))
        return text if text in self._special else ""

    def token_text(self, token: int) -> str:
        """The text of a token inside a text, special or not; \ufffd for a part of a character."""
        anchor = self._backend.encode("x", add_special_tokens=False).ids[-1:]
        before = self.decode(anchor, skip_special_tokens=False)
        return self.decode([*anchor, token], skip_special_tokens=False).removeprefix(before)

    def decode_stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """The text of ids that follow `prompt_ids`, as they come."""
        if self._steps is None:
            self._steps = steps_of(self._backend)
        skipped = self._special if skip_special_tokens else frozenset[str]()

        def token(id_: int) -> str | None:
            text = self._backend.id_to_token(int(id_))
            return None if text in skipped else text

        return TextStream(self._steps, token, prompt_ids)

    def decode_after(self, prompt_ids: Sequence[int], ids: Iterable[int]) -> str:
        """The text that `ids` add to a prompt."""
        return "".join(self.decode_stream(prompt_ids).pieces(ids))

    # ---- chat --------------------------------------------------------------------------------
    @property
    def template_text(self) -> str:
        """Of the chat template; "" where there is none."""
        return self._templates.get("default", "")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> ChatTemplate:
        """The compiled template. WgradError where the tokenizer has none."""
        if self._template is None:
            if not self._templates:
                raise WgradError(
                    f"--model: the tokenizer of {self.where} has no chat template (chat_template in "
                    "tokenizer_config.json, or chat_template.jinja), which messages need: take the instruct variant "
                    "of the model, or data with prompt and completion"
                )
            self._template = ChatTemplate(self._templates, self.special_tokens)
        return self._template

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation; the template, not the tokenizer, puts bos where it belongs."""
        try:
            return self.encode(self.chat_template.render(messages, add_generation_prompt), add_special_tokens=False)
        finally:
            shared_process().close()  # there will hardly be another


def check_text(text: str) -> None:
    """WgradError where `text` cannot be written as UTF-8: an escape of JSON, or a byte of the command line, left half
    of a surrogate pair in it."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WgradError(
            f"character {error.start + 1} of the text is U+{ord(text[error.start]):04X}, half of a surrogate pair, "
            "which stands for nothing alone: write the whole character, or remove it"
        ) from None


def _stop_ids(folder: Path) -> set[int]:
    # Where there is no generation_config.json, config.json stands for it, as in transformers.
    name = "generation_config.json" if exists(folder / "generation_config.json", "--model") else "config.json"
    value = read_options(folder, name).get("eos_token_id")
    return {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of a model folder. WgradError: no tokenizer.json, a broken one, broken configuration."""
    folder = Path(folder)
    if not exists(folder / "tokenizer.json", "--model"):
        if exists(folder / "tokenizer.model", "--model"):
            raise WgradError(
                f"--model: {folder} has tokenizer.model but no tokenizer.json: convert it once with transformers "
                "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or take a repository that has it"
            )
        raise WgradError(f"--model: {folder} has no tokenizer.json: copy the tokenizer's files beside the weights")
    backend, config = read_backend(folder)
    tokenizer = Tokenizer(backend, config, read_templates(folder, config), str(folder))
    tokenizer.stop_ids |= _stop_ids(folder)
    return tokenizer
