"""Writing a tokenizer of Hugging Face into a GGUF file: byte-level BPE with a pre-tokenizer that llama.cpp knows, or
BPE of pieces.

Source: github.com/ggml-org/llama.cpp, gguf-py/gguf/vocab.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.gguf_pieces import space_prefix, write_pieces
from wgrad.train.data.tokenizer import TOKENS, Tokenizer, load_tokenizer
from wgrad.train.data.word_cuts import CUTS
from wgrad.train.files.decode import read_json

CONVERT = "use --format safetensors and convert that with llama.cpp's convert_hf_to_gguf.py"


def write_tokenizer(writer: Any, gguf: Any, folder: Path, vocabulary: int) -> None:
    """Write the tokenizer of `folder` into a GGUFWriter. vocabulary: number of tokens of the model.

    Raises:
        WgradError: llama.cpp has no such kind of tokenizer.
    """
    tokenizer = load_tokenizer(folder)
    raw = read_json(folder / "tokenizer.json", dict[str, Any], "--model")
    model = raw.get("model") or {}
    tokenizer.limit(vocabulary)
    prefix = space_prefix(raw)
    begins = tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.added_ids()[0]
    if prefix is not None and write_pieces(writer, gguf, raw, vocabulary, prefix, begins):
        _write_special(writer, tokenizer, vocabulary)
        return
    cut = CUTS.get(_cut(raw.get("pre_tokenizer")))
    if model.get("type") != "BPE" or raw.get("normalizer") not in (None, {"type": "NFC"}) or cut is None:
        raise WgradError(
            f"--format gguf: the tokenizer in {folder} is of a kind that cannot be written into GGUF here: it must be "
            f"byte-level BPE that cuts words as one of {', '.join(CUTS.values())}, or SentencePiece's BPE: {CONVERT}"
        )
    tokens = {id_: text for text, id_ in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in raw.get("added_tokens") or []:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([tokens.get(id_, f"[PAD{id_}]") for id_ in range(vocabulary)])
    writer.add_token_types([kinds.get(id_, gguf.TokenType.UNUSED) for id_ in range(vocabulary)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    _write_special(writer, tokenizer, vocabulary)


def _write_special(writer: Any, tokenizer: Tokenizer, vocabulary: int) -> None:
    ids = {
        writer.add_bos_token_id: tokenizer.bos_id,
        writer.add_eos_token_id: tokenizer.eos_id,
        writer.add_pad_token_id: tokenizer.pad_id,
    }
    for add, id_ in ids.items():
        if id_ is not None and id_ < vocabulary:
            add(id_)
    before, behind = tokenizer.added_ids()
    writer.add_add_bos_token(tokenizer.bos_id is not None and tokenizer.bos_id in before)
    writer.add_add_eos_token(tokenizer.eos_id is not None and tokenizer.eos_id in behind)
    if template := tokenizer.template_text:
        writer.add_chat_template(template)
    if (end := tokenizer.turn_end_id) not in (None, tokenizer.eos_id):
        writer.add_eot_token_id(end)


def changed_keys(tokenizer: Tokenizer, base: Tokenizer) -> dict[str, str | int]:
    """Return the metadata of the base model's GGUF file that differs for another tokenizer, and the end of a turn.

    Raises:
        WgradError: the tokenizers differ in their tokens.
    """
    different = tokenizer.differences(base)
    if TOKENS in different:
        raise WgradError(
            f"--format gguf: the tokenizer of {tokenizer.where} has other tokens than the base model's GGUF file: "
            "merge onto the base model in safetensors"
        )
    keys: dict[str, str | int] = {}
    if tokenizer.templates != base.templates:
        keys["tokenizer.chat_template"] = tokenizer.template_text
    for name, id_ in (("eos", tokenizer.eos_id), ("eot", tokenizer.turn_end_id)):
        if id_ is not None and (name == "eos" or id_ != tokenizer.eos_id):
            keys[f"tokenizer.ggml.{name}_token_id"] = id_
    return keys


def _cut(pre: Any) -> tuple[str, ...]:
    """Return the steps of a tokenizer.json's pre-tokenizer, "bytes" for GPT-2's own pattern; () if one is unknown."""
    steps = pre.get("pretokenizers", [pre]) if isinstance(pre, dict) else []
    found = []
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                found += ["bytes"] if step.get("use_regex", True) else []
            case {"type": "Digits", "individual_digits": True}:
                found.append("digits")
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": behavior, "invert": bool(invert)}:
                if (behavior, invert) not in (("Isolated", False), ("Removed", True)):
                    return ()
                found.append(pattern)  # nothing is between words: the patterns of CUTS match every character
            case _:
                return ()
    return tuple(found)
