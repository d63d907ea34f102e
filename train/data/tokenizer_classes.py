"""Tokenizer classes that transformers builds itself instead of reading all of tokenizer.json.

It takes vocabulary, merges and usually the post-processor from the file; normalizer, pre-tokenizer, decoder and default
special tokens come from the class. Source: the classes of transformers 5.23
(tests/train/test_oracle_tokenizer_classes.py compares, and lists every class).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from wgrad.device.errors import WgradError
from wgrad.train.model.families import FORCED_TOKENIZERS, TOKENIZERS

# Further classes of transformers, whose rules are not implemented here, or which do not use tokenizer.json.
_REFUSED = frozenset(
    """Albert Auto Bart Barthez Bartpho Basic Bert BertGeneration BertJapanese Bertweet BigBird BioGpt Blenderbot
    BlenderbotSmall ByT5 CLIP CTRL Camembert Canine Character Clvp ConvBert Cpm CpmAnt DPRContextEncoder
    DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia DistilBert Esm Esmc FNet FSMT FastSpeech2Conformer
    Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert LED Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert M2M100
    MBart MBart50 MLuke MPNet Marian MarkupLM Mecab Mgpstr MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart
    Parakeet Pegasus Perceiver Phobert Pop2Piano ProphetNet Rag Reformer RemBert RoCBert RoFormer Roberta
    SeamlessM4T Siglip Siglip2 Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas Tipsv2 Udop VideoPrism Vits
    Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper Wordpiece XGLM XLM XLMRoberta XLNet""".split()
)

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]
Config = dict[str, Any]


class TokenizerClass(NamedTuple):
    """The rules of a class.

    build: makes the tokenizer from vocabulary, merges and tokenizer_config.json.
    tokens: default special tokens.
    post: the post-processor: "file" (that of tokenizer.json), "bos" (adds bos before a text) or "none".
    plain: special tokens lose the flags of the files, such as rstrip.
    """

    build: Callable[[Vocabulary, Merges, Config], tokenizers.Tokenizer]
    tokens: dict[str, str]
    post: str = "file"
    plain: bool = False


# ---- builders ------------------------------------------------------------------------------------
def _byte_level(
    vocab: Vocabulary,
    merges: Merges,
    config: Config,
    normalizer: normalizers.Normalizer | None = None,
    split: pre_tokenizers.PreTokenizer | None = None,
    use_regex: bool = True,
) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    octets = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=use_regex)
    made.pre_tokenizer = octets if split is None else pre_tokenizers.Sequence([split, octets])
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    return made


def _words(letter: str, other: str) -> Callable[[Vocabulary, Merges, Config], tokenizers.Tokenizer]:
    """Return a builder of byte-level tokenizers with Qwen's words.

    letter: pattern of a letter of a word; other: the characters, besides spaces and digits, that are not punctuation.
    """
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letter}+|\p{{N}}"
        rf"| ?[^\s{other}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return partial(_byte_level, normalizer=normalizers.NFC(), split=split, use_regex=False)


def _from_octets(strip: bool) -> decoders.Decoder:
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if strip else steps)


def _prefixed(config: Config) -> bool:
    value = config.get("add_prefix_space")
    return value is None or bool(value)


def _llama(vocab: Vocabulary, merges: Merges, config: Config) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    first = "always" if config.get("legacy", False) else "first"
    made.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", first if _prefixed(config) else "never", split=False)
    made.decoder = _from_octets(strip=_prefixed(config))
    return made


def _with_unk(vocab: Vocabulary, merges: Merges, config: Config) -> tokenizers.Tokenizer:
    unk = config.get("unk_token")
    unk = str(unk["content"] if isinstance(unk, dict) else unk)  # also the word None, for null
    return tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unk)
    )


def _code_llama(vocab: Vocabulary, merges: Merges, config: Config) -> tokenizers.Tokenizer:
    made = _with_unk(vocab, merges, config)
    scheme = "first" if _prefixed(config) else "never"
    made.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", scheme, split=False)
    made.decoder = _from_octets(strip=True)
    return made


def _gemma(vocab: Vocabulary, merges: Merges, config: Config) -> tokenizers.Tokenizer:
    made = _with_unk(vocab, merges, config)
    made.normalizer = normalizers.Replace(" ", "\u2581")  # so its pre-tokenizer, which splits at spaces, finds none
    made.decoder = _from_octets(strip=False)
    return made


# ---- the table -----------------------------------------------------------------------------------
def _named(unk: str, bos: str | None, eos: str, **more: str) -> dict[str, str]:
    given = {"bos": bos, "eos": eos, "unk": unk, **more}
    return {f"{name}_token": text for name, text in given.items() if text is not None}


_END = "<|endoftext|>"
_COHERE = {"pad": "<PAD>", "cls": "<CLS>", "sep": "<SEP>", "mask": "<MASK_TOKEN>"}
_INFILL = {name: f"\u2581<{name[:3].upper()}>" for name in ("prefix", "middle", "suffix", "eot")}
_INFILL["fill"] = "<FILL_ME>"
_NFC_DIGITS = partial(_byte_level, normalizer=normalizers.NFC(), split=pre_tokenizers.Digits(individual_digits=True))

CLASSES = {
    "CodeGen": TokenizerClass(_byte_level, _named(_END, _END, _END)),
    "CodeLlama": TokenizerClass(_code_llama, _named("<unk>", "<s>", "</s>", **_INFILL), post="bos"),
    "Cohere": TokenizerClass(_NFC_DIGITS, _named("<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", **_COHERE)),
    "GPT2": TokenizerClass(_byte_level, _named(_END, _END, _END)),
    "GPTNeoX": TokenizerClass(
        partial(_byte_level, normalizer=normalizers.NFC()), _named(_END, _END, _END, pad="<|padding|>"), post="none"
    ),
    "Gemma": TokenizerClass(_gemma, _named("<unk>", "<bos>", "<eos>", pad="<pad>", mask="<mask>")),
    "Llama": TokenizerClass(_llama, _named("<unk>", "<s>", "</s>")),
    "Qwen2": TokenizerClass(
        _words(r"\p{L}", r"\p{L}"), _named(_END, None, _END, pad=_END), plain=True
    ),
    "Qwen3_5": TokenizerClass(_words(r"[\p{L}\p{M}]", r"\p{L}\p{M}"), _named(_END, None, _END, pad=_END)),
}  # fmt: skip


def choose_class(config: Config, model: Config, data: bytes, where: str) -> TokenizerClass | None:
    """Return the class that transformers uses for the files; None: tokenizer.json as it is.

    config, model: tokenizer_config.json and config.json; data: tokenizer.json; where: the folder, for errors.

    Raises:
        WgradError: the rules of the class are not implemented here.
    """
    file = "tokenizer_config.json" if config.get("tokenizer_class") else "config.json"
    declared, kind = config.get("tokenizer_class") or model.get("tokenizer_class"), str(model.get("model_type"))
    name = registered = TOKENIZERS.get(kind)
    if isinstance(declared, str):
        plain = declared.removesuffix("Fast")
        name = plain.removesuffix("Tokenizer") if plain.endswith("Tokenizer") else None
        is_held = kind in FORCED_TOKENIZERS or registered == ""
        if is_held and "auto_map" not in config:  # with an auto_map, transformers ignores the model type
            name = registered
    if name == "Llama" and isinstance(declared, str) and "auto_map" not in config and b'"ByteLevel"' in data:
        return None
    if name in _REFUSED:
        raise WgradError(
            f"--model: {where}: tokenizer_class in {file} must be a general one, or one of {', '.join(CLASSES)} "
            f"(followed by Tokenizer), whose rules are known; got {declared!r}, with which transformers builds another "
            'tokenizer than that of tokenizer.json: write "TokenizersBackend" there if tokenizer.json is right'
        )
    return CLASSES.get(name) if name is not None else None


def rebuild(chosen: TokenizerClass, config: Config, data: bytes, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Build a tokenizer of the class, without added tokens. data: tokenizer.json; backend: the tokenizer in it."""
    model = msgspec.json.decode(data)["model"]
    vocab, merges = model["vocab"], model.get("merges", [])
    if isinstance(vocab, list):  # of a Unigram model: its scores are not used
        vocab = {entry[0] if isinstance(entry, list) else entry: number for number, entry in enumerate(vocab)}
    pairs: Any = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    made = chosen.build(vocab, pairs, config)
    if chosen.post == "file" and backend.post_processor is not None:
        made.post_processor = backend.post_processor
    return made


def finish(chosen: TokenizerClass, made: tokenizers.Tokenizer, bos: str | None, special: list[str]) -> None:
    """Apply a class's changes after its tokens are added. bos, special: the tokens that the configuration names."""
    if chosen.plain:
        made.add_tokens([AddedToken(text, special=True) for text in special])
    if chosen.post == "bos" and bos is not None and (id_ := made.token_to_id(bos)) is not None:
        made.post_processor = processors.TemplateProcessing([bos, "$A"], [bos, "$A", "$B"], [(bos, id_)])
