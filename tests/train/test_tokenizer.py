"""Tokenizers and chat templates of Hugging Face checkpoints."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from wgrad.device.errors import WgradError
from wgrad.train.data import template_process, tokenizer_growth, tokenizer_trial
from wgrad.train.data.chat import ChatTemplate, Conversation
from wgrad.train.data.data import load_data
from wgrad.train.data.template_process import TemplateProcess
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.data.tokenizer_growth import too_long
from wgrad.train.data.tokenizer_trial import try_out
from wgrad.train.data.word_cuts import CUTS
from wgrad.train.options.finetune_config import RunOptions

TURNS = [
    {"role": "user", "content": "Who is wise?"},
    {"role": "assistant", "content": "He that héareth."},
    {"role": "user", "content": "And who else?"},
    {"role": "assistant", "content": "None."},
]


# ---- files -------------------------------------------------------------------------------------
def test_special_tokens_are_text_or_objects(make_tokenizer) -> None:
    folder = make_tokenizer(eos_token={"content": "<|im_end|>", "lstrip": False}, pad_token=None)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 4, None)
    assert tokenizer.vocab_size == 400
    assert tokenizer.stop_ids == {4}


def test_stop_ids_include_those_of_the_generation_config(make_tokenizer) -> None:
    folder = make_tokenizer()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    assert load_tokenizer(folder).stop_ids == {1, 4}


def test_special_tokens_map_where_the_configuration_says_nothing(make_tokenizer) -> None:
    folder = make_tokenizer()
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)


def test_missing_and_broken_files_are_explained(tmp_path: Path, make_tokenizer) -> None:
    with pytest.raises(WgradError, match="has no tokenizer.json: copy"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")  # as OPT is published
    with pytest.raises(WgradError, match=r"vocab.json but no tokenizer.json: convert it once .*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(WgradError, match="tokenizer.model but no tokenizer.json: convert"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WgradError, match="is not a tokenizer that can be read"):
        load_tokenizer(tmp_path)
    folder = make_tokenizer()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(WgradError, match="tokenizer_config.json line 1 is not valid JSON"):
        load_tokenizer(folder)


def test_ids_beyond_the_model_are_refused_in_texts_alone(make_tokenizer) -> None:
    """Only texts with an id beyond the model's are refused."""
    tokenizer = load_tokenizer(make_tokenizer())
    last = tokenizer.token_text(399)
    for rows in (400, 512, 399):  # models are padded to round sizes
        tokenizer.limit(rows)
        assert tokenizer.encode("A wise man")
        if rows == 399:
            with pytest.raises(WgradError, match=r"^the text has the token '.*' \(id 399\), but .* 399 tokens only"):
                tokenizer.encode(f"A wise man{last}")
        else:
            assert 399 in tokenizer.encode(f"A wise man{last}")
    tokenizer.limit(2)
    assert tokenizer.pad_id is None  # it only fills rows
    with pytest.raises(WgradError, match=r"ends texts with '</s>' \(id 1\), but the model has 1 token"):
        tokenizer.limit(1)


def with_a_token_beyond(folder: Path) -> Path:
    """Add a special token beyond the model's embedding, like Gemma 3 1B's for images, or [PAD] in tunes of Llama 2."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    raw["added_tokens"].append({"id": 400, "content": "<image>", **kind})
    path.write_text(json.dumps(raw))
    return folder


def test_only_a_text_with_a_token_that_the_model_lacks_is_refused(make_tokenizer) -> None:
    tokenizer = load_tokenizer(with_a_token_beyond(make_tokenizer(pad_token="<image>")))
    assert tokenizer.encode("A wise <image>")[-1] == tokenizer.pad_id == 400
    tokenizer.limit(400)
    assert tokenizer.encode("A wise man") and tokenizer.pad_id is None  # it would be read, where it fills rows
    for text in ("A wise <image>", "A wise man " * 2000 + "<image>"):
        with pytest.raises(WgradError, match=r"^the text has the token '<image>' \(id 400\), but .* 400 tokens only"):
            tokenizer.encode(text)


# ---- ids ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("bos", [False, True])
def test_bos_is_where_the_tokenizer_puts_it(make_tokenizer, bos: bool) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=bos))
    plain = tokenizer.encode("A wise man", add_special_tokens=False)
    assert tokenizer.encode("A wise man") == [0] * bos + plain
    assert 0 not in plain


def test_offsets_are_characters_of_the_text(make_tokenizer) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    text = "A wisé man →"
    (encoded,) = tokenizer.encode_batch([text])
    assert encoded.offsets[0] == (0, 0)
    covered = {c for start, end in encoded.offsets for c in range(start, end)}
    assert covered == set(range(len(text)))


def test_decoding_piece_by_piece_is_decoding_at_once(make_tokenizer) -> None:
    tokenizer = load_tokenizer(make_tokenizer())
    text = "The fear of the LORD → naïve 知恵."
    ids = tokenizer.encode(text)
    assert tokenizer.decode_after([], ids) == tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[:5]) + tokenizer.decode_after(ids[:5], ids[5:]) == text
    assert tokenizer.decode([*ids, 1]) == text
    assert tokenizer.decode([*ids, 1], skip_special_tokens=False) == text + "</s>"


# ---- templates ---------------------------------------------------------------------------------
def test_templates_are_found_in_every_place(make_tokenizer) -> None:
    source = "{{ messages[0]['content'] }}"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
    assert load_tokenizer(make_tokenizer("a", chat_template=named)).chat_template.render(TURNS[:1]) == "Who is wise?"
    folder = make_tokenizer("b", chat_template="no")
    (folder / "chat_template.jinja").write_text(source)
    assert load_tokenizer(folder).chat_template.render(TURNS[:1]) == "Who is wise?"
    with pytest.raises(WgradError, match="has no chat template.*--chat-template chatml.*instruct variant"):
        load_tokenizer(make_tokenizer("c", chat_template=None)).chat_template  # noqa: B018


def test_templates_get_special_tokens_json_and_the_date() -> None:
    source = (
        "{%- for m in messages %}\n"
        "    {%- if loop.index0 == 1 %}\n        {%- break %}\n    {%- endif %}\n"
        "    {{- bos_token + (m | tojson) }}\n"
        "{%- endfor %}\n"
        "{{- strftime_now('%Y') }}{% if tools %}tools{% endif %}"
        "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "<é>"}] * 2)
    assert text == '<s>{"role": "user", "content": "<é>"}' + str(datetime.now().year) + "2"


def test_chat_ids_hold_no_second_bos(make_tokenizer) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True, chat_template=source))
    assert tokenizer.encode_chat(TURNS).count(0) == 1


FRAMED = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    + [{"SpecialToken": {"id": "</s>", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in (("<s>", 0), ("</s>", 1))},
}


@pytest.mark.parametrize("long", [False, True])
def test_a_text_with_its_own_bos_and_eos_gets_no_other(make_tokenizer, long: bool, write_lines, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(change(make_tokenizer(), post_processor=FRAMED))
    text = "A wise man is strong." * (6000 if long else 1)
    ids = tokenizer.encode(text)
    assert ids[0] == 0 and ids[-1] == 1 and not {0, 1} & set(ids[1:-1])
    for begin in ("", "<s>"):
        for end in ("", "</s>"):
            assert tokenizer.encode(begin + text + end) == ids
            config = RunOptions(data=write_lines({"text": begin + text + end}), eval_fraction=0, max_length=1 << 20)
            (document,) = load_data(config, tokenizer).train
            assert document.ids.tolist() == ids and document.loss_mask[1:].all()
            line = {"prompt": begin + text[:7], "completion": text[7:] + end}
            (document,) = load_data(dataclasses.replace(config, data=write_lines(line)), tokenizer).train
            assert document.ids.tolist() == ids and not document.loss_mask[0] and document.loss_mask[-1]
            plain = tmp_path / "plain.txt"
            plain.write_text(begin + text + end)
            stream = load_data(dataclasses.replace(config, data=(str(plain),)), tokenizer).train
            assert stream[0].ids.tolist() == ids[:-1]
    # What a person wrote twice stays.
    assert tokenizer.encode("<s><s>A")[:3] == [0, 0, tokenizer.encode("A")[1]]
    assert (tokenizer.encode(""), tokenizer.encode("<s>"), tokenizer.encode("</s>")) == ([0, 1], [0, 1], [0, 1])


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_ids_of_one_go(make_tokenizer, special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    text = "the words of the wise, and their dark sayings. " * 4000
    ids = tokenizer.encode_batch([text], special)[0].ids
    lengths: list[int] = []
    whole = tokenizer.encode_batch

    def watched(texts: list[str], add_special_tokens: bool = True) -> Any:
        lengths.extend(map(len, texts))
        return whole(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", watched)
    assert tokenizer.encode(text, special) == ids and (ids[0] == 0) == special
    assert max(lengths) < len(text)


def test_a_text_of_too_many_tokens_is_not_read_to_its_end(make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    for text in ("the words of the wise. " * 3, "the words of the wise, and their dark sayings. " * 4000):
        for special in (True, False):
            ids = tokenizer.encode(text, special)
            assert tokenizer.encode_up_to(len(ids), text, special) == ids
            assert tokenizer.encode_up_to(len(ids) - 1, text, special) is None
    encoded, whole = [0], tokenizer.encode_batch

    def counted(texts: list[str], add_special_tokens: bool = True) -> Any:
        encoded[0] += sum(map(len, texts))
        return whole(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    most = len(tokenizer.encode(text)) // 3
    whole_cost, encoded[0] = encoded[0], 0
    assert tokenizer.encode_up_to(most, text) is None and 0 < encoded[0] < whole_cost / 2
    encoded[0] = 0
    assert tokenizer.encode_up_to(500, text * 20) is None and encoded[0] == 0


# ---- files of other people ---------------------------------------------------------------------
def change(folder: Path, **keys) -> Path:
    value = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(value | keys))
    return folder


TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}


def template(*ids: int) -> dict:
    return TEMPLATE | {"special_tokens": {"<s>": {"id": "<s>", "ids": list(ids), "tokens": ["<s>"] * len(ids)}}}


@pytest.mark.parametrize(
    "processor",
    [
        template(400),
        template(0, 70_000),
        template(2**32 - 1),
        {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 4000]},
        {"type": "RobertaProcessing", "sep": ["</s>", 999], "cls": ["<s>", 0], "trim_offsets": True}
        | {"add_prefix_space": False},
        {"type": "Sequence", "processors": [template(0), template(401)]},
    ],
)
def test_a_post_processor_with_ids_of_no_token_is_refused(make_tokenizer, processor: dict) -> None:
    folder = change(make_tokenizer(), post_processor=processor)
    with pytest.raises(WgradError, match=r"^--model: .*tokenizer.json: post_processor names the id \d+, which none of"):
        load_tokenizer(folder)


@pytest.mark.parametrize("id_", [1 << 24, 2**32 - 1])
def test_a_vocabulary_with_an_id_beyond_all_models_is_refused(make_tokenizer, id_: int) -> None:
    folder = make_tokenizer()
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    change(folder, model=model | {"vocab": model["vocab"] | {"zz": (1 << 24) - 1}})
    assert load_tokenizer(folder).vocab_size == 1 << 24
    change(folder, model=model | {"vocab": model["vocab"] | {"zz": id_}})
    with pytest.raises(WgradError, match=f"the vocabulary has a token with the id {id_}, and ids end at 16777215"):
        load_tokenizer(folder)


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {"type": "Sequence", "processors": [p]}])
def test_a_post_processor_with_an_undefined_token_is_refused(make_tokenizer, wrap: Any, capfd: Any) -> None:
    """The library panics there and prints lines of its own."""
    folder = change(make_tokenizer(), post_processor=wrap(TEMPLATE | {"special_tokens": {}}))
    with pytest.raises(
        WgradError, match="post_processor names the token '<s>', which its special_tokens do not define"
    ):
        load_tokenizer(folder)
    assert capfd.readouterr().err == ""


def test_a_post_processor_that_names_a_second_text_is_refused(make_tokenizer, capfd: Any) -> None:
    """The library panics there, too."""
    second = template(0) | {"single": [{"Sequence": {"id": "B", "type_id": 0}}]}
    with pytest.raises(WgradError, match="post_processor names a second text in its template for a single one"):
        load_tokenizer(change(make_tokenizer(), post_processor=second))
    assert capfd.readouterr().err == ""


def test_a_post_processor_with_known_ids_is_taken(make_tokenizer) -> None:
    folder = change(make_tokenizer(), post_processor={"type": "Sequence", "processors": [template(0), template(1)]})
    assert load_tokenizer(folder).encode("")[0] in (0, 1)


def test_an_added_token_with_an_id_that_is_not_its_own_is_refused(make_tokenizer) -> None:
    token = {"id": 90_000, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False}
    folder = change(make_tokenizer(), added_tokens=[token | {"normalized": False, "special": True}])
    with pytest.raises(WgradError, match="added_tokens names the id 90000, which none of|can be read"):
        load_tokenizer(folder)


def replace(content: str, **pattern: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(text: bytes) -> dict:
    """Return SentencePiece's table with an empty trie and this replacement text."""
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + text + b"\0").decode()}


NOTHING = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")) | {
    "added_tokens": []
}
NFKC, LEVEL = {"type": "NFKC"}, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
A, X = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}


@pytest.mark.parametrize(
    ("part", "steps", "words"),
    [
        ("normalizer", [replace("aa", String="a")] * 32, "32 times as long"),
        ("normalizer", [replace("aaaa", Regex="a")] * 4, "64 times as long"),
        ("normalizer", [replace("a" * 20, Regex="b*")], "21 times as long"),  # it matches between all characters
        ("normalizer", [replace("b" * 20, String="")], "21 times as long"),
        ("normalizer", [replace("a" * 80, Regex="[[a]bbbbbbbbbbb]")], "81 times as long"),  # of one character
        ("normalizer", [replace("\ufdfa", String="a"), NFKC], "18 times as long"),
        ("normalizer", [LEVEL] * 9, "32 times as long"),
        ("normalizer", [{"type": "Prepend", "prepend": "a" * 999}], "add 999 characters"),
        ("normalizer", [{"type": "Prepend", "prepend": "a" * 20}, replace("a" * 15, String="a")], "add 300 characters"),
        ("normalizer", [charsmap(b"a" * 999)], "999 times as long"),
        ("pre_tokenizer", [LEVEL] * 9, "32 times as long"),
        ("decoder", [replace("aa", String="a")] * 32, "32 times as long"),
        ("post_processor", [{"type": "TemplateProcessing", "single": [A] * 20, "special_tokens": {}}], "20 times"),
        ("post_processor", [{"single": [A, X], "special_tokens": {"x": {"ids": [0] * 999}}}], "add 999 characters"),
    ],
    ids=range(14),
)
@pytest.mark.parametrize("nested", [False, True])
def test_rules_that_lengthen_a_text_beyond_measure_are_refused(
    make_tokenizer, part: str, steps: list[dict], words: str, nested: bool
) -> None:
    """A few hundred bytes of rules would fill any memory."""
    key = {"pre_tokenizer": "pretokenizers", "post_processor": "processors"}.get(part, f"{part}s")
    value: dict = {"type": "Sequence", key: steps}
    folder = change(make_tokenizer(), **{part: {"type": "Sequence", key: [value]} if nested else value})
    with pytest.raises(WgradError, match=rf"--model: .*tokenizer.json: {part} can .*{words}"):
        load_tokenizer(folder)


def test_a_long_prefix_of_every_token_is_refused(make_tokenizer) -> None:
    folder = make_tokenizer()
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["continuing_subword_prefix"] = "a" * 999
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(WgradError, match="continuing_subword_prefix has more than 256 characters"):
        load_tokenizer(folder)


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LEVEL] * 65}}, "pre_tokenizer has 65 steps"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 65}}, "decoder has 65 steps"),
        ({"pre_tokenizer": split("a" * 8193)}, "regular expressions have 8,193 characters"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAA"}}, "charsmap of normalizer is cut"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, "max_input_chars_per_word is 1,000,000"),
        ({"added_tokens": [{"content": "a" * (1 << 20)}] * 4}, "added_tokens have 4,194,304 bytes"),
        ({"added_tokens": [{"content": "a" * (1 << 20)}], "normalizer": replace("a" * 8, String="a")}, "1,048,576"),
    ],
    ids=range(7),
)
def test_rules_that_take_too_much_time_or_memory_are_refused(parts: dict, words: str) -> None:
    """A few kB of rules took 19 s for 4,000 characters, or 8 GiB of memory and the process."""
    assert words in too_long(json.dumps({"model": {}} | parts).encode())


def test_added_tokens_of_the_configuration_are_bounded_too(make_tokenizer) -> None:
    tokens = {str(400 + i): {"content": chr(97 + i) * (1 << 20), "special": True} for i in range(4)}
    with pytest.raises(WgradError, match="the added tokens of the tokenizer have [0-9,]+ bytes of text"):
        load_tokenizer(make_tokenizer(added_tokens_decoder=tokens))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"pre_tokenizer": split("(?:a|aa){1,20}c")}, "it does not end within 1"),  # 0.1 s at each character
        ({"pre_tokenizer": split("(a+)+b")}, "retry-limit-in-match over"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAA"}}, "it ends the process that runs"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 1 << 40, "stop": 1 << 40}}, "index out of bounds"),
    ],
    ids=["endless", "backtracking", "panic", "8 GiB", "decoder"],
)
def test_a_tokenizer_that_fails_in_the_limited_process_is_one_line(
    make_tokenizer, parts: dict, words: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    process = TemplateProcess(1.0)
    monkeypatch.setattr(template_process, "_shared", process)
    monkeypatch.setattr(tokenizer_growth, "_is_whole", lambda table: True)
    folder = change(make_tokenizer(), **parts)
    with pytest.raises(WgradError, match=rf"^--model: .*tokenizer.json is not a tokenizer that can be read: .*{words}"):
        load_tokenizer(folder)
    assert capfd.readouterr().err == ""
    assert process._process is None


def test_a_tokenizer_that_is_slow_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unigram looks up all pieces that begin at a character."""
    monkeypatch.setattr(tokenizer_trial, "_GRACE", 0.0)
    pieces = [["<unk>", 0.0], *(["a" * count, -1.0 * count] for count in range(1, 600))]
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model} | NOTHING))
    assert "s for a text of 4096 characters" in try_out(str(tmp_path / "tokenizer.json"))


def test_only_what_has_no_known_cost_is_tried_out(make_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *args: object) -> str:
        raise AssertionError

    monkeypatch.setattr(TemplateProcess, "try_tokenizer", refuse)
    known = [{"type": "Sequence", "pretokenizers": [split(cut[0]), LEVEL]} for cut in CUTS if len(cut[0]) > 9]
    for i, step in enumerate([LEVEL, *known]):
        assert load_tokenizer(change(make_tokenizer(str(i)), pre_tokenizer=step)).encode("x")
    tried = []

    def accept(self: object, path: str, seconds: float) -> str:
        tried.append(path)
        return ""

    monkeypatch.setattr(TemplateProcess, "try_tokenizer", accept)
    folder = change(make_tokenizer("other"), pre_tokenizer=split("[a-z]+"))
    for _ in range(2):
        load_tokenizer(folder)
    assert tried == [str(folder / "tokenizer.json")]  # once only


def test_encoding_that_does_not_end_is_an_error(make_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    class Backend:
        def encode_batch(self, *args: object, **options: object) -> None:
            end.wait()

    monkeypatch.setattr("wgrad.train.data.tokenizer.BATCH_SECONDS", 0.05)
    tokenizer = load_tokenizer(make_tokenizer())
    tokenizer._backend, tokenizer._has_known_cost = Backend(), False  # type: ignore[assignment]
    with pytest.raises(WgradError, match=r"fails on this text: it does not end within 0\.05 s: .*begins with 'xy'"):
        tokenizer.encode("xy")
    end.set()


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "Prepend", "prepend": "\u2581"}, replace("\u2581", String=" ")],  # Llama
        [{"type": "NFC"}, replace(" ", Regex=r"\s+"), {"type": "Lowercase"}],  # CLIP
        [replace('"', String="``"), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]
        + [charsmap(b"a" * 30), replace(" ", Regex=" {2,}")],  # ALBERT
    ],
    ids=["Llama", "CLIP", "ALBERT"],
)
def test_rules_of_known_tokenizers_are_accepted(steps: list[dict]) -> None:
    data = {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": LEVEL, "model": {}}
    assert too_long(json.dumps(data).encode()) == ""


@pytest.mark.parametrize(
    "text", ["x\ud800", "\udce9t\udce9", "\U0001f600".encode("utf-16-le")[:2].decode("utf-16-le", "surrogatepass")]
)
def test_half_of_a_surrogate_pair_is_refused(make_tokenizer, text: str) -> None:
    with pytest.raises(
        WgradError,
        match=r"character \d of the text is U\+D[89C-F]..",
    ) as caught:
        load_tokenizer(make_tokenizer()).encode(text)
    assert str(caught.value).isascii()


class PanicException(BaseException):
    """Stand-in for the exception that pyo3 raises if Rust code panics."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), Exception("no\nvocabulary")])
def test_a_library_that_fails_is_an_error(make_tokenizer, monkeypatch, error: BaseException) -> None:
    class Backend:
        @staticmethod
        def from_buffer(data: bytes) -> None:
            raise error

        def encode_batch(self, *args: object, **options: object) -> None:
            raise error

    tokenizer = load_tokenizer(make_tokenizer("good"))
    tokenizer._backend = Backend()  # type: ignore[assignment]
    with pytest.raises(WgradError, match="^--model: the tokenizer of .* fails on this text: (index|no vocabulary)"):
        tokenizer.encode("x")
    monkeypatch.setattr("tokenizers.Tokenizer", Backend)
    with pytest.raises(WgradError, match="^--model: .*tokenizer.json is not a tokenizer that can be read: (index|no)"):
        load_tokenizer(make_tokenizer("bad"))


def test_ctrl_c_is_no_error_of_the_library(make_tokenizer) -> None:
    class Backend:
        def encode_batch(self, *args: object, **options: object) -> None:
            raise KeyboardInterrupt

    tokenizer = load_tokenizer(make_tokenizer())
    tokenizer._backend = Backend()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("x")


@pytest.mark.parametrize(
    ("name", "line"), [("chat_template.jinja", 2), ("additional_chat_templates/tool_use.jinja", 2)]
)
def test_a_template_file_in_another_encoding_is_refused(make_tokenizer, name: str, line: int) -> None:
    folder = make_tokenizer()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes("x\n{{ 'é' }}".encode("latin-1"))
    with pytest.raises(WgradError, match=rf"^--model: .*{name} must be UTF-8 text; got byte 0xe9 in line {line}"):
        load_tokenizer(folder)


def test_templates_in_files_of_their_own_are_found(make_tokenizer) -> None:
    folder = make_tokenizer()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools{{ messages[0].content }}")
    (folder / "chat_template.jinja").write_text("{{ image_token + messages[0].content }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"image_token": "<image>"}))
    found = load_tokenizer(folder).chat_template
    assert found.render(TURNS[:1]) == "<image>Who is wise?"
    assert found.render(Conversation(TURNS[:1], tools=[])) == "toolsWho is wise?"
