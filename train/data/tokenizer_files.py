"""Reading and checking the files of a tokenizer: tokenizer.json, tokenizer_config.json and related ones.

The behavior follows transformers 5 (AutoTokenizer.from_pretrained; tests/train/test_oracle_tokenizer.py compares).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from wgrad.device.errors import WgradError
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer_classes import choose_class, finish, rebuild
from wgrad.train.data.tokenizer_growth import MOST_ADDED_BYTES, has_known_cost, too_long
from wgrad.train.data.tokenizer_trial import SECONDS_PER_BYTE
from wgrad.train.files.decode import FETCH, read_json
from wgrad.train.files.input_files import exists, read_input, reading

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_LARGEST = 1 << 28  # bytes of a tokenizer.json; the largest of 2026 have about 40 MiB
_sound = set[bytes]()  # digests of files that were tried out
_LONGEST_TEMPLATE = 4 << 20  # bytes of a chat template in a file of its own


class _Parts(msgspec.Struct):
    """The checked part of a tokenizer.json; the tokenizers library checks the rest."""

    post_processor: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


def read_options(folder: Path, name: str) -> dict[str, Any]:
    """Return a JSON file of the folder as an object; {} if it does not exist."""
    path = folder / name
    if not exists(path, "--model"):
        return {}
    return read_json(path, dict, "--model", from_python=name == "config.json")


def read_special_tokens(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with the extra tokens that have names, and with special_tokens_map.json.

    The latter takes precedence, but is not read if the former lists added tokens.
    """
    config = read_options(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_options(folder, "special_tokens_map.json")
    more = config.get("extra_special_tokens")
    if isinstance(more, dict):
        return config | more
    own = (key for key, value in config.items() if key.endswith("_token") and isinstance(value, str))
    more = config.get("model_specific_special_tokens")  # replaced by the tokens that have keys of their own
    return config if set(own) - set(SPECIAL) or not isinstance(more, dict) else config | more


def read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any], bool]:
    """Return the tokenizer of tokenizer.json, rebuilt if transformers does so; the result of `read_special_tokens`,
    with the special tokens of the tokenizer's class; and `has_known_cost`.

    Raises:
        WgradError: the file is missing or unreadable, names unknown ids, or is of a class that cannot be rebuilt.
    """
    path, config = folder / "tokenizer.json", read_special_tokens(folder)
    data = read_input(path, "--model", _LARGEST)
    chosen = choose_class(config, read_options(folder, "config.json"), data, str(folder))
    try:
        if growth := too_long(data):
            raise WgradError(f"--model: {path}: {growth}: {FETCH}")
        has_known = has_known_cost(data)
        if not has_known and (fault := _tried(path, data)):
            raise WgradError(f"--model: {path} is not a tokenizer that can be read: {fault}: {FETCH}")
        backend = tokenizers.Tokenizer.from_buffer(data)
        parts = msgspec.json.decode(data, type=_Parts)
        _check_ids(backend, parts, path)
        if chosen is not None:
            config = chosen.tokens | config
            backend = rebuild(chosen, config, data, backend)
        special = _add_tokens(backend, _added_tokens(folder, config, parts), config)
        if chosen is not None:
            finish(chosen, backend, token_text(config.get("bos_token")), special)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        backend.no_padding()
        backend.no_truncation()
        return backend, config, has_known
    except WgradError:
        raise
    except BaseException as error:
        reason = explain(error)
        if reason is None:
            raise
        raise WgradError(f"--model: {path} is not a tokenizer that can be read: {reason}: {FETCH}") from error


def _tried(path: Path, data: bytes) -> str:
    """Try out a tokenizer.json in the limited process, and describe its fault, or return ""."""
    digest = hashlib.sha256(data).digest()
    if digest in _sound:
        return ""
    fault = shared_process().try_tokenizer(os.fspath(path), len(data) * SECONDS_PER_BYTE)
    if not fault:
        _sound.add(digest)
    return fault


def explain(error: BaseException) -> str | None:
    """Return the message of an error of the tokenizers library in one line; None for another error, such as Ctrl-C.

    The library raises Exception, and PanicException, which is not an Exception, where its Rust code panics.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return " ".join(str(error).split())[:300] or type(error).__name__
    return None


# ---- checks --------------------------------------------------------------------------------------
def _check_ids(backend: tokenizers.Tokenizer, parts: _Parts, path: Path) -> None:
    """Raise WgradError if the post-processor or an added token has an id without a token, which would reach the model,
    or if the post-processor names an undefined token, at which the library panics and prints lines of its own."""
    for what in _undefined(parts.post_processor):
        raise WgradError(f"--model: {path}: post_processor names {what}: {FETCH}")
    places = [(id_, "post_processor") for id_ in _ids_of(parts.post_processor)]
    places += [(token.get("id"), "added_tokens") for token in parts.added_tokens]
    for id_, key in places:
        known = isinstance(id_, int) and 0 <= id_ < 2**32 and backend.id_to_token(id_) is not None
        if not known:
            size = backend.get_vocab_size(with_added_tokens=True)
            raise WgradError(
                f"--model: {path}: {key} names the id {id_!r}, which none of the {size} tokens of the vocabulary has: "
                f"{FETCH}, or take all files from the same model"
            )


def _undefined(processor: Any) -> Iterator[str]:
    """Yield the faults of TemplateProcessing: tokens not in special_tokens, a second text in the template for one."""
    if not isinstance(processor, dict):
        return
    for inner in processor.get("processors") or ():
        yield from _undefined(inner)
    for piece in [*(processor.get("single") or ()), *(processor.get("pair") or ())]:
        name = piece["SpecialToken"]["id"] if "SpecialToken" in piece else None
        if name is not None and name not in processor["special_tokens"]:
            yield f"the token {name!r}, which its special_tokens do not define"
    if any("Sequence" in piece and piece["Sequence"]["id"] != "A" for piece in processor.get("single") or ()):
        yield "a second text in its template for a single one"


def _ids_of(processor: Any) -> Iterator[Any]:
    """Yield the ids that a post-processor adds (TemplateProcessing, BertProcessing, RobertaProcessing, Sequence)."""
    if not isinstance(processor, dict):
        return
    for inner in processor.get("processors") or ():
        yield from _ids_of(inner)
    special = processor.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else ():
        yield from token.get("ids") or ()
    for key in ("sep", "cls"):
        if isinstance(pair := processor.get(key), list) and len(pair) == 2:
            yield pair[1]


# ---- added tokens --------------------------------------------------------------------------------
def token_text(value: Any) -> str | None:
    """Return the text of a special token, which is given as text or as {"content": text, ...}; None for others."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added_tokens(folder: Path, config: dict[str, Any], parts: _Parts) -> dict[int, AddedToken]:
    """Return the added tokens by id, from the place where transformers finds them first."""
    if "added_tokens_decoder" in config:
        return {int(id_): _added_token(token) for id_, token in config["added_tokens_decoder"].items()}
    found: dict[int, AddedToken] = {}
    special = {token_text(config.get(name)) for name in SPECIAL}
    for text, id_ in read_options(folder, "added_tokens.json").items():
        found[id_] = AddedToken(text, normalized=text not in special, special=text in special)
    for token in parts.added_tokens:
        found[token["id"]] = _added_token(token)
    return found


def _added_token(value: dict[str, Any], **flags: bool) -> AddedToken:
    kept = {key: value[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in value}
    return AddedToken(value["content"], **(kept | flags))


def _add_tokens(backend: tokenizers.Tokenizer, added: dict[int, AddedToken], config: dict[str, Any]) -> list[str]:
    """Add the tokens that are found in a text before all others: those of the files, and the special tokens that the
    configuration names. Return the special tokens.

    A name without a token is ignored; transformers would append it with an id that the model lacks.
    """
    there = list(backend.get_added_tokens_decoder().values())
    same = {repr(token) for token in there}
    new = [token for _, token in sorted(added.items()) if repr(token) not in same]
    held = {token.content for token in there + new}
    own = [key for key, value in config.items() if key.endswith("_token") and isinstance(value, str)]
    named = _tokens([config.get(name) for name in dict.fromkeys((*SPECIAL, *own))])
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = named + _tokens(more)
    special = [token for token in special if token.content in held or backend.token_to_id(token.content) is not None]
    new += [token for token in special if token.content not in held]
    for token in new:
        token.special = token.special or token.content in {name.content for name in named}
    if (size := sum(len(token.content.encode()) for token in there + new)) > MOST_ADDED_BYTES:
        raise WgradError(f"--model: the added tokens of the tokenizer have {size:,} bytes of text: {FETCH}")
    backend.add_tokens(new)
    return [token.content for token in special]


def _tokens(values: Any) -> list[AddedToken]:
    return [
        _added_token(value) if isinstance(value, dict) else AddedToken(text, special=True, normalized=False)
        for value in (values if isinstance(values, list) else ())
        if (text := token_text(value))
    ]


# ---- chat templates --------------------------------------------------------------------------------
TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


def more_templates(folder: Path) -> list[Path]:
    """Return the files of the chat templates that have a name."""
    with reading(folder / MORE_TEMPLATES, "--model"):
        return sorted((folder / MORE_TEMPLATES).glob("*.jinja"))


def read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, "default" for the one without a name; {} if there is none."""
    files = {"default": folder / TEMPLATE_FILE}
    files |= {path.stem: path for path in more_templates(folder)}
    found = {name: read_template(path, "--model") for name, path in files.items() if exists(path, "--model")}
    if found:
        return found
    value = config.get("chat_template") or read_options(folder, "chat_template.json").get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    named = {str(entry.get("name")): entry.get("template") for entry in entries}
    return {name: template for name, template in named.items() if isinstance(template, str)}


def read_template(path: Path, option: str) -> str:
    """Return the text of a file with a chat template. Raises WgradError."""
    data = read_input(path, option, _LONGEST_TEMPLATE)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise WgradError(
            f"{option}: {path} must be UTF-8 text; got byte {data[error.start]:#04x} in line {line}: convert the file "
            "to UTF-8"
        ) from error
