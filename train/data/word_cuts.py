"""Pre-tokenizers of known byte-level tokenizers: the regular expressions that split a text into words.

Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, which knows them by name.
"""

from __future__ import annotations

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
# GPT-4o's: words with capitals first, followed by their short form; a slash belongs to the text before it. As in the
# models' own files: llama.cpp only knows the capitals of ASCII, and cuts words at combining marks.
_BEFORE, _SHORT = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = "|".join(
    (
        f"{_BEFORE}{_CAPITALS}*{_SMALL}+{_SHORT}",
        f"{_BEFORE}{_CAPITALS}+{_SMALL}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _BLANKS,
    )
)
# Mistral's of 2024 and later: GPT-4o's with one digit at a time and no short forms.
_TEKKEN = "|".join(
    (
        f"{_BEFORE}{_CAPITALS}*{_SMALL}+",
        f"{_BEFORE}{_CAPITALS}+{_SMALL}*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _BLANKS,
    )
)
# Qwen3.5's: marks belong to the letters before them.
_MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
)
# llama.cpp's names (tokenizer.ggml.pre) by the steps of the pre-tokenizer.
CUTS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (f"{_LETTERS}{{1,3}}{_REST}",): "llama-bpe",
    (f"{_LETTERS}{_REST}",): "qwen2",
    (_O200K,): "gpt-4o",
    (_TEKKEN,): "tekken",
    (_MARKED,): "qwen35",
    _DEEPSEEK: "deepseek-v3",
}
PATTERNS = frozenset(step for steps in CUTS for step in steps if step not in ("bytes", "digits"))
