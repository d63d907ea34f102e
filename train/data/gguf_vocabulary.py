"""The tokenizer of a GGUF file as files of Hugging Face: byte-level BPE ("gpt2"), SentencePiece's BPE ("llama"), and
BPE of pieces ("gemma4").

SentencePiece joins the neighbors whose joint piece has the highest score. Here every way to form a piece is a merge,
in the order of falling scores.
Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from wgrad.device.errors import WgradError
from wgrad.train.data.tokenizer_files import explain
from wgrad.train.data.word_cuts import CUTS
from wgrad.train.files.decode import show
from wgrad.train.files.gguf_fields import GgufFields

_KEY = "tokenizer.ggml."
# llama.cpp's further names of pre-tokenizers, which separate words.
_SAME_CUT = {
    "default": "llama-bpe", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe",
    "falcon-h1": "llama-bpe", "pixtral": "llama-bpe", "lfm2": "llama-bpe", "olmo": "gpt-2", "mpt": "gpt-2",
    "phi-2": "gpt-2", "dbrx": "llama-bpe", "refact": "smollm", "starcoder": "smollm",
    "command-r": "smollm", "deepseek-r1-qwen": "qwen2", "llama4": "gpt-4o", "kanana2": "gpt-4o",
    "stablelm2": "qwen2", "smaug-bpe": "llama-bpe", "midm-2.0": "llama-bpe", "chatglm-bpe": "llama-bpe",
    "glm4": "llama-bpe", "hunyuan": "qwen2", "bailingmoe": "qwen2", "bailingmoe2": "qwen2", "megrez": "qwen2",
    "grok-2": "qwen2", "solar-open": "qwen2", "hunyuan-dense": "deepseek-v3", "joyai-llm": "deepseek-v3",
    "exaone": "smollm", "mellum2": "smollm", "codeshell": "smollm", "minerva-7b": "smollm", "exaone4": "gpt-2",
    "mellum": "gpt-2", "gigachat": "gpt-2", "a.x-4.0": "gpt-2", "trillion": "gpt-2", "granite-docling": "gpt-2",
    "jais": "gpt-2",
}  # fmt: skip
# These separate words as Llama 3, but use merges alone, and put no bos before a text.
_NOT_LLAMA = ("default", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4")
_AS_LLAMA = ("llama-bpe", "tekken")  # words that are tokens are not joined by merges
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")  # normalize texts
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_LONGEST = 256  # characters of a piece: every way to cut one is tried
_SPACE = "\u2581"
_GEMMA4 = "gemma4"
_PLAIN_DECODERS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_BESIDE = "put the model's config.json, tokenizer.json and tokenizer_config.json next to the file"


def tokenizer_of_gguf(fields: GgufFields) -> dict[str, dict[str, Any]]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json as objects, by file name.

    Raises:
        WgradError: the file has no tokenizer, one of an unknown kind, or a damaged one.
    """
    kind = fields.get(_KEY + "model", str, "")
    build = {"gpt2": _byte_level, "llama": _sentence_piece, _GEMMA4: _merged_pieces}.get(kind)
    if build is None:
        raise WgradError(
            f"{fields.source}: {fields.path}: {_KEY}model {show(kind)} is not supported: gpt2, llama and gemma4 are; "
            f"{_BESIDE}"
        )
    tokens = _distinct(fields.texts(_KEY + "tokens"))
    types = fields.numbers(_KEY + "token_type") or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise fields.error(
            _KEY + "token_type", f"must have an entry for each of {len(tokens)} tokens, got {len(types)}"
        )
    ids = {name: _id(fields, name, len(tokens)) for name in (*_SPECIAL, "eot")}
    raw = {
        "version": "1.0",
        "added_tokens": [
            _added(id_, tokens[id_], type_ != _USER, _takes_blanks(fields, tokens[id_]))
            for id_, type_ in enumerate(types)
            if type_ in (_CONTROL, _USER)
        ],
        **build(fields, tokens, types, ids),
        "post_processor": _around(fields, kind, tokens, ids),
    }
    try:
        tokenizers.Tokenizer.from_str(json.dumps(raw))
    except BaseException as error:
        reason = explain(error)
        if reason is None:
            raise
        raise fields.error(_KEY + "tokens", f"make no tokenizer ({reason})") from error
    config: dict[str, Any] = {"tokenizer_class": "TokenizersBackend"}  # as it is, whatever the family's class is
    config |= {name: tokens[id_] for part, name in _SPECIAL.items() if (id_ := ids[part]) is not None}
    if template := fields.get("tokenizer.chat_template", str):
        config["chat_template"] = template
    stops = [id_ for id_ in (ids["eos"], ids["eot"]) if id_ is not None]
    return {
        "tokenizer.json": raw,
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": list(dict.fromkeys(stops))} if stops else {},
    }


def _distinct(tokens: list[str]) -> list[str]:
    """Rename repeated tokens, which never occur in a text: only the first of them does."""
    first: dict[str, int] = {}
    for id_, token in enumerate(tokens):
        first.setdefault(token, id_)
    return [token if first[token] == id_ else f"[PAD{id_}]" for id_, token in enumerate(tokens)]


def _id(fields: GgufFields, name: str, count: int) -> int | None:
    key = f"{_KEY}{name}_token_id"
    value = fields.get(key, int)
    if value is not None and not 0 <= value < count:
        raise fields.error(key, f"must be below {count}, the number of tokens, got {value}")
    return value


def _takes_blanks(fields: GgufFields, token: str) -> bool:
    """Return whether a special token includes the blanks after it. GGUF cannot express this; llama.cpp goes by the name
    of Phi-3's models."""
    name = fields.get("general.name", str, "").lower()
    return ("phi-3" in name or "phi3" in name) and token not in ("<unk>", "<s>", "<|endoftext|>")


def _added(id_: int, text: str, special: bool, takes_blanks: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return {"id": id_, "content": text, **flags, "rstrip": takes_blanks, "special": special}


def _around(fields: GgufFields, kind: str, tokens: list[str], ids: dict[str, int | None]) -> dict[str, Any] | None:
    """Return the post-processor that puts tokens around a text; by default bos for SentencePiece and Llama 3."""
    begins = (
        kind in ("llama", _GEMMA4) or _SAME_CUT.get(pre := _cut(fields), pre) in _AS_LLAMA and pre not in _NOT_LLAMA
    )
    places = {"bos": fields.get(_KEY + "add_bos_token", bool, begins)}
    places["eos"] = fields.get(_KEY + "add_eos_token", bool, False)
    added = {name: tokens[id_] for name, wanted in places.items() if wanted and (id_ := ids[name]) is not None}
    if not added:
        return None
    pieces = [{"SpecialToken": {"id": text, "type_id": 0}} for text in added.values()]
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    split = 1 if "bos" in added else 0
    special = {text: {"id": text, "ids": [ids[name]], "tokens": [text]} for name, text in added.items()}
    pair: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    single = [*pieces[:split], *text, *pieces[split:]]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


# ---- byte level --------------------------------------------------------------------------------
def _cut(fields: GgufFields) -> str:
    return fields.get(_KEY + "pre", str, "default")


def _byte_level(fields: GgufFields, tokens: list[str], types: list[int], ids: dict[str, int | None]) -> dict[str, Any]:
    name = _SAME_CUT.get(_cut(fields), _cut(fields))
    steps = next((steps for steps, cut in CUTS.items() if cut == name), None)
    if steps is None:
        raise WgradError(
            f"{fields.source}: {fields.path}: {_KEY}pre {show(name)} is not supported: {', '.join(CUTS.values())} are, "
            f"and {len(_SAME_CUT)} other names of these; {_BESIDE}"
        )
    made = [_step(step) for step in steps]
    if "bytes" not in steps:
        made.append(_bytes(use_regex=False))
    return {
        "normalizer": {"type": "NFC"} if _cut(fields) in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": made},
        "decoder": _bytes(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": name in _AS_LLAMA and _cut(fields) not in _NOT_LLAMA,
            "vocab": {token: id_ for id_, token in enumerate(tokens)},
            "merges": fields.texts(_KEY + "merges"),
        },
    }


def _step(step: str) -> dict[str, Any]:
    if step == "bytes":
        return _bytes(use_regex=True)
    if step == "digits":
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


# ---- SentencePiece -----------------------------------------------------------------------------
def _sentence_piece(
    fields: GgufFields, tokens: list[str], types: list[int], ids: dict[str, int | None]
) -> dict[str, Any]:
    scores = fields.numbers(_KEY + "scores")
    if len(scores) != len(tokens):
        raise fields.error(_KEY + "scores", f"must have an entry for each of {len(tokens)} tokens, got {len(scores)}")
    prefix = fields.get(_KEY + "add_space_prefix", bool, True)
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [*_PLAIN_DECODERS, strip] if prefix else _PLAIN_DECODERS
    pieces = [id_ for id_, type_ in enumerate(types) if type_ in (_NORMAL, _USER, _UNUSED)]
    return _of_pieces(tokens, ids, _merges(fields, tokens, pieces, scores), normalizers, decoders, None)


def _of_pieces(
    tokens: list[str],
    ids: dict[str, int | None],
    merges: list[list[str]],
    before: list[dict[str, Any]],
    decoders: list[dict[str, Any]],
    cuts: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the parts of a tokenizer.json. before: steps of the normalizer before spaces are replaced."""
    unknown = ids["unknown"]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": cuts,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: id_ for id_, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _merged_pieces(
    fields: GgufFields, tokens: list[str], types: list[int], ids: dict[str, int | None]
) -> dict[str, Any]:
    """Return Gemma 4's tokenizer: pieces are joined by merges, within lines and within runs of line ends."""
    merges = []
    for text in fields.texts(_KEY + "merges"):
        left, _, right = text[1:].partition(" ")
        merges.append([text[:1] + left, right])
    return _of_pieces(tokens, ids, merges, [], _PLAIN_DECODERS, _step("[^\n]+|[\n]+"))


def _merges(fields: GgufFields, tokens: list[str], pieces: list[int], scores: list[float]) -> list[list[str]]:
    """Return every two pieces that form a third, in the order of falling scores."""
    if (longest := max((len(tokens[id_]) for id_ in pieces), default=0)) > _LONGEST:
        raise fields.error(_KEY + "tokens", f"must be of at most {_LONGEST} characters, got one of {longest}")
    there = {tokens[id_] for id_ in pieces}
    found = []
    for id_ in sorted(pieces, key=lambda id_: (-scores[id_], id_)):
        token = tokens[id_]
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        found += [[left, right] for left, right in cuts if left in there and right in there]
    return found
