"""Writing SentencePiece's BPE (pieces, not bytes) from a tokenizer.json into a GGUF file, as model `llama` or `gemma4`.

With scores, llama.cpp joins the neighbors whose joint piece has the highest score, whatever the two are. Merges of a
tokenizer.json mean the same only if every way to form a piece is a merge, and the merges of one piece are consecutive.
Other tokenizers are written with their merges.
Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPACE = "\u2581"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_NEVER = -1e9  # the score of pieces that no merge forms
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
# Gemma's pre-tokenizer has no effect: the spaces that it would cut at are already replaced.
_NO_CUTS = (None, {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False})


def space_prefix(raw: Mapping[str, Any]) -> bool | None:
    """Return whether a tokenizer.json puts a space before a text; None: it is not a tokenizer of pieces."""
    model, normalizer, cuts = raw.get("model") or {}, raw.get("normalizer"), raw.get("pre_tokenizer")
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    if model.get("type") != "BPE" or model.get("ignore_merges") or not model.get("byte_fallback"):
        return None
    if any(byte not in model["vocab"] for byte in _BYTES):
        return None
    if isinstance(cuts, dict) and cuts.get("type") == "Metaspace":
        usual = (cuts.get("replacement"), cuts.get("split"), steps) == (_SPACE, False, [])
        prefix = {"always": True, "never": False}.get(cuts.get("prepend_scheme", "")) if usual else None
    elif cuts in _NO_CUTS and steps[-1:] == [_REPLACE]:
        prefix = {"[]": False, str([_PREPEND]): True}.get(str(steps[:-1]))
    else:
        prefix = None
    # llama.cpp also puts a space before the text that follows such a token.
    return None if prefix and any(token["normalized"] for token in raw.get("added_tokens") or []) else prefix


def scores_of(raw: Mapping[str, Any]) -> dict[str, float] | None:
    """Return each piece's score; None: no scores join pieces as the merges do."""
    vocabulary, order, seen = raw["model"]["vocab"], dict[str, int](), set[tuple[str, str]]()
    added = {token["content"] for token in raw.get("added_tokens") or []}
    last = ""
    for left, right in _pairs(raw):
        if (piece := left + right) in added:  # found in a text before any pieces are joined
            continue
        if piece != last and piece in order:
            return None
        last = piece
        order.setdefault(piece, len(order))
        seen.add((left, right))
    pieces = vocabulary.keys() - added - {*_BYTES}
    for piece in pieces:
        for at in range(1, len(piece)):
            if piece[:at] in pieces and piece[at:] in pieces and (piece[:at], piece[at:]) not in seen:
                return None
    return {piece: -float(order[piece]) if piece in order else _NEVER for piece in vocabulary}


def _pairs(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in raw["model"]["merges"]]


def by_lines(raw: Mapping[str, Any]) -> bool:
    """Return whether no merge crosses the end of a line, as `gemma4` requires."""
    return all(set(left + right) == {"\n"} or "\n" not in left + right for left, right in _pairs(raw))


def write_pieces(writer: Any, gguf: Any, raw: Mapping[str, Any], vocabulary: int, prefix: bool, begins: bool) -> bool:
    """Write the pieces of a tokenizer.json with scores, or else with merges; return False if neither is possible.

    vocabulary: number of tokens of the model; prefix: see `space_prefix`; begins: texts begin with a special token.
    """
    scores = scores_of(raw)
    if scores is None and (prefix or not begins or not by_lines(raw)):  # `gemma4` would differ
        return False
    tokens = {id_: text for text, id_ in raw["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    kinds |= {raw["model"]["vocab"][byte]: gguf.TokenType.BYTE for byte in _BYTES}
    for added in raw.get("added_tokens") or []:
        special = added["special"]
        # llama.cpp finds these before spaces become pieces.
        tokens[added["id"]] = added["content"] if special else added["content"].replace(_SPACE, " ")
        kinds[added["id"]] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    unknown = raw["model"]["vocab"].get(raw["model"].get("unk_token"))
    if unknown is not None:
        kinds[unknown] = gguf.TokenType.UNKNOWN
        writer.add_unk_token_id(unknown)
    every = range(vocabulary)
    writer.add_tokenizer_model("gemma4" if scores is None else "llama")
    writer.add_token_list([tokens.get(id_, f"[PAD{id_}]") for id_ in every])
    if scores is None:
        writer.add_token_merges([" ".join(pair) for pair in _pairs(raw)])
    else:
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([scores.get(tokens.get(id_, ""), _NEVER) for id_ in every])
    writer.add_token_types([kinds.get(id_, gguf.TokenType.UNUSED) for id_ in every])
    writer.add_add_space_prefix(prefix)
    return True
