"""Ways in which byte-level tokenizers cut a text into words: regular expressions of known tokenizers.

Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, which knows them by name.
"""

from __future__ import annotations

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# GPT-4o's: words in which capitals come first, their short form behind them; a slash belongs to what it follows.
_BEFORE, _SHORT = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = "|".join(
    (
        f"{_BEFORE}{_CAPITALS}*{_SMALL}+{_SHORT}",
        f"{_BEFORE}{_CAPITALS}+{_SMALL}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
# How a text is cut into words -> llama.cpp's name of it (tokenizer.ggml.pre).
CUTS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (f"{_LETTERS}{{1,3}}{_REST}",): "llama-bpe",
    (f"{_LETTERS}{_REST}",): "qwen2",
    (_O200K,): "gpt-4o",
}
PATTERNS = frozenset(step for steps in CUTS for step in steps if step not in ("bytes", "digits"))
