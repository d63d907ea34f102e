"""Tokenizers in Hugging Face layout, without transformers: tokenizer.json, tokenizer_config.json, the chat template."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from wgrad.device.errors import WgradError
from wgrad.train.data.chat import ChatTemplate, Message, MessagesRefused
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.text_stream import Step, TextStream, octets_of, steps_of
from wgrad.train.data.text_windows import WINDOW, Encoded, encode_windows, pieces
from wgrad.train.data.tokenizer_files import (
    SPECIAL,
    explain,
    read_backend,
    read_options,
    read_templates,
    token_text,
)
from wgrad.train.data.tokenizer_trial import BATCH_SECONDS, in_time
from wgrad.train.files.decode import FETCH
from wgrad.train.files.input_files import exists
from wgrad.train.model.config_file import MOST_IDS

GENERATION_FILE = "generation_config.json"
TOKENS, TEMPLATE = "tokens", "chat template"  # parts in which tokenizers may differ
_PROBE = " A wise son, na\u00efve in 1867;\n\tx  (\u77e5)"
_MARK = "wgradAnswer"  # an assistant's turn, to find the text after it


class Tokenizer:
    """A tokenizer for training and generation, made by `load_tokenizer`.

    Attributes: vocab_size (largest id + 1), bos_id, eos_id, pad_id (None if missing), ends (ids that end a text: eos
    and those of generation_config.json).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        templates: Mapping[str, str],
        where: str,
        has_known_cost: bool = True,
    ) -> None:
        self._backend, self.where, self._has_known_cost = backend, where, has_known_cost
        # Templates may use the model's own tokens, such as image_token.
        own = [name for name, value in config.items() if name.endswith("_token") and isinstance(value, str)]
        self.special_tokens = {n: text for n in (*SPECIAL, *own) if (text := token_text(config.get(n))) is not None}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id, self.eos_id, self.pad_id = (self._special_id(n) for n in ("bos_token", "eos_token", "pad_token"))
        self.ends: frozenset[int] = frozenset(() if self.eos_id is None else (self.eos_id,))
        self._rows = self.vocab_size  # token ids of the model
        self._special = frozenset(t.content for t in backend.get_added_tokens_decoder().values() if t.special)
        self._steps: list[Step] | None = None  # of the decoder; read when first needed
        self._added: tuple[list[int], list[int]] | None = None
        self.templates = dict(templates)  # by name, "default" for the one without
        self._template: ChatTemplate | None = None
        self._turn_end: tuple[int | None] | None = None  # None: not looked for yet

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def limit(self, rows: int) -> None:
        """Let `check_ids` refuse ids beyond the `rows` token ids of a model.

        Raises:
            WgradError: the token at the end of every text is beyond them.
        """
        self._rows = rows
        if self.eos_id is not None and self.eos_id >= rows:
            raise WgradError(
                f"--model: the tokenizer of {self.where} ends texts with {self.special_tokens['eos_token']!r} (id "
                f"{self.eos_id}), but the model has {rows} token ids: use the model's own tokenizer"
            )
        if self.pad_id is not None and self.pad_id >= rows:  # any other id can be used as padding
            self.pad_id = None

    def check_ids(self, ids: Sequence[int] | np.ndarray) -> None:
        """Raise WgradError if an id of a text is beyond the model's."""
        if self.vocab_size <= self._rows:
            return
        found = np.asarray(ids, np.int64)
        if (beyond := found[found >= self._rows]).size:
            raise WgradError(
                f"the text has the token {self._backend.id_to_token(int(beyond[0]))!r} (id {beyond[0]}), but the model "
                f"has rows for {self._rows} tokens only (vocab_size): remove the token from the text"
            )

    # ---- text -> ids -------------------------------------------------------------------------
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoded]:
        """Encode texts, with the special tokens of tokenizer.json's post-processor that a text does not have itself.

        add_bos_token of tokenizer_config.json is ignored, as transformers 5 does with a tokenizer.json
        (tests/train/test_oracle_tokenizer.py compares).

        Raises:
            WgradError: a text is not Unicode, or the tokenizer fails.
        """
        for text in texts:
            check_text(text)
        try:
            encode = partial(self._backend.encode_batch, list(texts), add_special_tokens=add_special_tokens)
            encodings = encode() if self._has_known_cost else in_time(encode, BATCH_SECONDS)
            encoded = [Encoded(e.ids, e.offsets) for e in encodings]
            return [self._once(one) for one in encoded] if add_special_tokens else encoded
        except BaseException as error:
            reason = explain(error)
            if reason is None:
                raise
            if isinstance(error, TimeoutError):
                reason = f"it does not end within {BATCH_SECONDS:g} s"
            raise WgradError(
                f"--model: the tokenizer of {self.where} fails on this text: {reason}: fetch its files again, or "
                f"remove the text; it begins with {texts[0][:40]!r}"
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of one text; see `encode_batch` and `check_ids`.

        A long text is encoded in windows, since it would take 500 times its size in memory.
        """
        if len(text) <= WINDOW:
            ids = self.encode_batch([text], add_special_tokens)[0].ids
        else:
            parts = self.encode_stream(pieces(text))
            ids = [id_ for part in (self.framed(parts) if add_special_tokens else parts) for id_ in part.ids]
        self.check_ids(ids)
        return ids

    def encode_up_to(self, most: int, text: str, add_special_tokens: bool = True) -> list[int] | None:
        """Encode as `encode` does; return None for a text of more than `most` tokens, without encoding all of it."""
        if len(text) > most * self._longest:
            return None
        if len(text) <= WINDOW:
            ids = self.encode(text, add_special_tokens)
            return ids if len(ids) <= most else None
        parts, ids = self.encode_stream(pieces(text)), list[int]()
        for part in self.framed(parts) if add_special_tokens else parts:
            ids += part.ids
            if len(ids) > most:
                return None
        self.check_ids(ids)
        return ids

    def encode_first(self, most: int, text: str) -> list[int]:
        """Return the first tokens of a text of more than `most`, which is not read to its end, framed as `encode`
        frames it."""
        before, behind = self.added_ids()
        ids, room = list(before), most - len(behind)
        for part in self.encode_stream(pieces(text)):
            ids += part.ids
            if len(ids) >= room:
                break
        self.check_ids(ids)
        return ids[:room] + behind

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token, so that n characters are at least n / this tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode_stream(self, blocks: Iterable[str]) -> Iterator[Encoded]:
        """Yield the tokens of a text of any length, given in blocks, with bounded memory.

        The ids are those of encoding it whole, without bos and eos; offsets count from its beginning.
        """
        return encode_windows(blocks, lambda text: self.encode_batch([text], add_special_tokens=False)[0])

    def added_ids(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the post-processor puts before and after a text."""
        if self._added is None:
            plain, whole = (self._backend.encode("x", add_special_tokens=added).ids for added in (False, True))
            place = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
            self._added = whole[:place], whole[place + len(plain) :]
        return self._added

    def _once(self, encoded: Encoded) -> Encoded:
        """Remove the special tokens that the post-processor added if the text already has them."""
        ids = encoded.ids
        if not ids or not (ids[0] in ids[1:9] or ids[-1] in ids[-9:-1]):
            return encoded
        before, behind = self.added_ids()
        first, last = len(before), len(ids) - len(behind)
        start = first if before and ids[first : min(2 * first, last)] == before else 0
        end = last if behind and ids[max(last - len(behind), first) : last] == behind else len(ids)
        return Encoded(ids[start:end], encoded.offsets[start:end])

    def framed(self, parts: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the parts of a text, with the special tokens of the post-processor around them; see `encode_batch`."""
        before, behind = self.added_ids()
        last: Encoded | None = None
        for part in parts:
            if part.ids:
                if last is None:
                    yield _added([] if part.ids[: len(before)] == before else before)
                else:
                    yield last
                last = part
        if last is None:
            yield _added(before + behind)
        else:
            yield last
            yield _added([] if last.ids[len(last.ids) - len(behind) :] == behind else behind)

    # ---- ids -> text -------------------------------------------------------------------------
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def special_text(self, token: int) -> str:
        """Return the text of a special token; "" for any other."""
        text = self._backend.id_to_token(int(token))
        return text if text in self._special else ""

    def token_text(self, token: int) -> str:
        """Return the text of a token inside a text, special or not; \ufffd for a part of a character."""
        anchor = self._backend.encode("x", add_special_tokens=False).ids[-1:]
        before = self.decode(anchor, skip_special_tokens=False)
        return self.decode([*anchor, token], skip_special_tokens=False).removeprefix(before)

    def partial_octets(self, token: int) -> bytes | None:
        """Return the octets of a token with a part of a character. None: it has whole ones, or unknown octets."""
        return octets_of(self._backend.id_to_token(token) or "") if "\ufffd" in self.token_text(token) else None

    def decode_stream(
        self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True, shown: Collection[str] = ()
    ) -> TextStream:
        """Return a stream of the text of ids that follow `prompt_ids`. shown: special tokens that are not skipped."""
        if self._steps is None:
            self._steps = steps_of(self._backend)
        skipped = self._special.difference(shown) if skip_special_tokens else frozenset[str]()

        def token(id_: int) -> str | None:
            text = self._backend.id_to_token(int(id_))
            return None if text in skipped else text

        return TextStream(self._steps, token, prompt_ids)

    def decode_after(self, prompt_ids: Sequence[int], ids: Iterable[int]) -> str:
        """Return the text that `ids` add to a prompt."""
        return "".join(self.decode_stream(prompt_ids).pieces(ids))

    def for_grammars(self, kind: Callable[..., Any], rows: int) -> Any:
        """Return the tokenizer for llguidance. kind: its class; rows: number of token ids of the model."""
        rows = max(rows, self.vocab_size)
        return kind(self._backend.to_str(), n_vocab=rows, eos_token=sorted(self.stop_ids) or None)

    def special_id(self, text: str) -> int | None:
        """Return the id of a special token; None if the text is not one."""
        return self._backend.token_to_id(text) if text in self._special else None

    # ---- ends --------------------------------------------------------------------------------
    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generation: `ends`, and the end of a turn."""
        return self.ends if self.turn_end_id is None else self.ends | {self.turn_end_id}

    @property
    def turn_end_id(self) -> int | None:
        """The special token that the chat template writes after the assistant's text; None if it writes none."""
        if self._turn_end is None:
            self._turn_end = (self._find_turn_end(),)
        return self._turn_end[0]

    def _find_turn_end(self) -> int | None:
        if not self.templates:
            return None
        question, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": _MARK}
        for messages in ([question, answer], [question, answer, question]):  # some end a turn with the next one
            try:
                _, found, behind = self.chat_template.render(messages).rpartition(_MARK)
                ids = self.encode(behind, add_special_tokens=False) if found else []
            except MessagesRefused:
                continue
            except WgradError:  # it does not compile, or does not end
                return None
            for id_ in ids:
                if self.special_text(id_):
                    return id_
                if self.token_text(id_).strip():
                    break
        return None

    # ---- chat --------------------------------------------------------------------------------
    def use_templates(self, templates: Mapping[str, str]) -> None:
        """Replace the chat templates. templates: by name, "default" for the one without a name."""
        self.templates, self._template, self._turn_end = dict(templates), None, None

    def differences(self, other: Tokenizer) -> list[str]:
        """List the parts in which the tokenizers differ, without comparing templates."""
        mine, theirs = (one._backend.get_vocab(with_added_tokens=True) for one in (self, other))
        parts = {
            TOKENS: mine == theirs and self.encode(_PROBE) == other.encode(_PROBE),
            "special tokens": (self.special_tokens, self._special) == (other.special_tokens, other._special),
        }
        return [name for name, same in parts.items() if not same]

    @property
    def template_text(self) -> str:
        """The text of the default chat template; "" without one."""
        return self.templates.get("default", "")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.templates)

    @property
    def chat_template(self) -> ChatTemplate:
        """The compiled template. Raises WgradError if the tokenizer has none."""
        if self._template is None:
            if not self.templates:
                raise WgradError(
                    f"--model: the tokenizer of {self.where} has no chat template (chat_template in "
                    "tokenizer_config.json, or chat_template.jinja), which messages need: add --chat-template chatml, "
                    "or take the instruct variant of the model"
                )
            self._template = ChatTemplate(self.templates, self.special_tokens, strict=True)
        return self._template

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation. The template, not the tokenizer, writes bos."""
        try:
            return self.encode(self.chat_template.render(messages, add_generation_prompt), add_special_tokens=False)
        finally:
            shared_process().close()  # another conversation is unlikely


def _added(ids: list[int]) -> Encoded:
    """Return tokens that cover no character."""
    return Encoded(ids, [(0, 0)] * len(ids))


def check_text(text: str) -> None:
    """Raise WgradError if `text` cannot be written as UTF-8, because an escape of JSON or a byte of the command line
    left half a surrogate pair in it."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WgradError(
            f"character {error.start + 1} of the text is U+{ord(text[error.start]):04X}, half of a surrogate pair, "
            "which stands for nothing alone: write the whole character, or remove it"
        ) from None


def generation_options(folder: Path) -> dict[str, Any]:
    """Return generation_config.json, or without one the special token ids of config.json, as transformers does."""
    if exists(folder / GENERATION_FILE, "--model"):
        return read_options(folder, GENERATION_FILE)
    config = read_options(folder, "config.json")
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}


def ends_of(folder: Path) -> set[int]:
    """Return the ids that end a text, by generation_config.json."""
    value = generation_options(folder).get("eos_token_id")
    return {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of a model folder.

    Raises:
        WgradError: tokenizer.json is missing or broken, or a configuration file is broken.
    """
    folder = Path(folder)
    if not exists(folder / "tokenizer.json", "--model"):
        for other in ("tokenizer.model", "vocab.json"):
            if exists(folder / other, "--model"):
                raise WgradError(
                    f"--model: {folder} has {other} but no tokenizer.json: convert it once with transformers "
                    "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or take a repository that has it"
                )
        raise WgradError(f"--model: {folder} has no tokenizer.json: copy the tokenizer's files next to the weights")
    backend, config, has_known_cost = read_backend(folder)
    tokenizer = Tokenizer(backend, config, read_templates(folder, config), str(folder), has_known_cost)
    if tokenizer.vocab_size > MOST_IDS:
        raise WgradError(
            f"--model: {folder / 'tokenizer.json'}: the vocabulary has a token with the id {tokenizer.vocab_size - 1}, "
            f"and ids end at {MOST_IDS - 1}: {FETCH}"
        )
    tokenizer.ends |= ends_of(folder)
    return tokenizer
