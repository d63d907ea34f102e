"""Records of preferences: which texts are compared, what is refused, and the rows that a micro-batch is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.data import Dataset, load_data
from wgrad.train.data.named_templates import use_chat_template
from wgrad.train.data.packing import BatchStream, Document, Pair, eval_batches, preference_batch
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.options.finetune_config import RunOptions

ASK = {"role": "user", "content": "Is it wise?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("It is.", "No, and never was."))
PAIR = {"prompt": "Is it wise?", "chosen": " It is.", "rejected": " No, and never was."}


def load(path: str, tokenizer: Tokenizer, objective: Any = "dpo", **options: Any) -> Dataset:
    more = {"batch_size": 2, "eval_fraction": 0.0, **options}
    return load_data(RunOptions(data=(path,), objective=objective, **more), tokenizer)


def answers(data: Dataset, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the text before the answer, and the answer, of each text."""
    found = []
    for document in (part for example in data.train for part in example.parts):
        at = int(np.argmax(document.loss_mask))
        assert document.loss_mask[at:].all() and not document.loss_mask[:at].any()
        before, answer = (
            tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in (document.ids[:at], document.ids[at:])
        )
        found.append((before, answer))
    return found


TEXT = [("<s>Is it wise?", " It is.</s>"), ("<s>Is it wise?", " No, and never was.</s>")]
HEAD = "<|im_start|>user\nIs it wise?<|im_end|>\n<|im_start|>assistant\n"
CHAT = [(HEAD, "It is.<|im_end|>\n"), (HEAD, "No, and never was.<|im_end|>\n")]


@pytest.mark.parametrize(
    ("record", "wanted", "form"),
    [
        (PAIR, TEXT, "has preference pairs"),
        ({"chosen": "Is it wise? It is.", "rejected": "Is it wise? No, and never was."}, TEXT, "what chosen and"),
        ({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, CHAT, "has preference pairs"),
        ({"chosen": [ASK, YES], "rejected": [ASK, NO]}, CHAT, "whose prompt is what chosen and rejected begin with"),
        ({"system": "", "chosen": [ASK, YES], "rejected": [ASK, NO]}, CHAT, "whose prompt is what"),
    ],
)
def test_pairs_are_read_in_every_form(
    record: dict, wanted: list, form: str, tokenizer: Tokenizer, write_lines: Any
) -> None:
    data = load(write_lines(record, record), tokenizer)
    assert answers(data, tokenizer) == wanted * 2 and all(isinstance(pair, Pair) for pair in data.train)
    assert len(data.remarks) == 1 and form in data.remarks[0]
    assert data.summary().startswith(f"2 examples to train on, 0 held out, {2 * len(data.train[0])} tokens")


def test_one_begins_as_the_other_does_to_its_end(tokenizer: Tokenizer, write_lines: Any) -> None:
    """Each still has an answer: the last character, or message, of the shorter is none of the prompt."""
    data = load(write_lines({"chosen": "a b", "rejected": "a bc"}), tokenizer)
    assert answers(data, tokenizer) == [("<s>a", " b</s>"), ("<s>a", " bc</s>")]


def test_the_answers_of_a_pair_begin_at_one_place(tokenizer: Tokenizer, write_lines: Any, tmp_path: Path) -> None:
    """As in TRL: where the template writes one of them as the prompt ends and the other otherwise, and, but for ORPO,
    where a token of one begins in the prompt."""
    thought, form = "<think>\n\n</think>\n\n", tmp_path / "form.jinja"
    form.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
        f"{thought}{{% endif %}}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{thought}{{% endif %}}"
    )
    turns = write_lines({"prompt": [ASK], "chosen": [YES], "rejected": [NO, ASK, YES]})
    cut = write_lines({"prompt": "Is it ", "chosen": "wise", "rejected": "\n"}, name="cut.jsonl")
    for objective, no in (("dpo", ("<s>Is it", " \n</s>")), ("orpo", ("<s>Is it ", "\n</s>"))):
        assert answers(load(cut, tokenizer, objective), tokenizer) == [("<s>Is it", " wise</s>"), no]
    use_chat_template(tokenizer, str(form))
    for objective in ("dpo", "orpo"):
        yes, no = answers(load(turns, tokenizer, objective), tokenizer)
        assert yes[0].endswith(HEAD) and yes[1].startswith(f"{thought}It is.")
        assert no[0].endswith(HEAD) and no[1].startswith("No, and never was.<|im_end|>")


def test_empty_columns_next_to_a_pair_are_ignored(tokenizer: Tokenizer, write_lines: Any) -> None:
    data = load(write_lines({"messages": None, "chosen": "a b", "rejected": "a bc", "prompt": None}), tokenizer)
    assert answers(data, tokenizer) == [("<s>a", " b</s>"), ("<s>a", " bc</s>")]


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_labeled_answers_are_read_from_every_kind_of_file(
    kind: str, tokenizer: Tokenizer, write_lines: Any, tmp_path: Path
) -> None:
    if kind == "json":
        records = [
            {"prompt": PAIR["prompt"], "completion": PAIR["chosen"], "label": True, "kto_tag": ""},
            {"prompt": PAIR["prompt"], "completion": PAIR["rejected"], "label": 0.0},
        ]
        path = write_lines(*records)
    else:
        path = str(tmp_path / "data.csv")
        lines = ("prompt,completion,label", "Is it wise?, It is.,True", 'Is it wise?," No, and never was.",0.0')
        Path(path).write_text("\n".join(lines) + "\n")
    data = load(path, tokenizer, "kto")
    assert answers(data, tokenizer) == TEXT and [d.label for d in data.train] == [1, -1]
    assert "has KTO's records" in data.remarks[-1]
    pairs = load(write_lines(PAIR, name="pairs.jsonl"), tokenizer, "kto")
    assert answers(pairs, tokenizer) == TEXT and [d.label for d in pairs.train] == [1, -1]
    assert "has preference pairs: each is one desirable example and one that is not" in pairs.remarks[0]


@pytest.mark.parametrize(
    ("objective", "record", "words"),
    [
        ("dpo", {"text": "a"}, "needs 'chosen' and 'rejected' for --objective dpo; it has 'text'"),
        ("orpo", {"prompt": "a", "completion": "b", "label": True}, "it has .*; a 'label' is for --objective kto"),
        ("kto", {"prompt": "a", "completion": "b"}, "needs .* or 'prompt', 'completion' and 'label', for --objective"),
        ("kto", {"prompt": "a", "completion": "b", "label": 3}, "'label' must be true or false; got '3'"),
        ("kto", {"prompt": "a", "completion": "b", "label": 0, "kto_tag": True}, "'label' and 'kto_tag' differ"),
        ("dpo", PAIR | {"chosen": PAIR["rejected"]}, "'chosen' and 'rejected' are the same"),
        ("dpo", PAIR | {"chosen": ""}, "'chosen' is empty"),
        ("dpo", PAIR | {"chosen": 3}, "'chosen' must be text; got a number"),
        ("dpo", {"prompt": [ASK], "chosen": [YES], "rejected": "b"}, "'prompt' and 'rejected' must both be text, or"),
        ("dpo", {"chosen": [YES], "rejected": [NO]}, "begin with no message in common"),
        ("dpo", {"chosen": "a", "rejected": [NO]}, "'chosen' and 'rejected' must both be text, or both lists"),
        ("sft", PAIR, "'chosen' and 'rejected' are a preference: give --objective dpo, orpo, kto or simpo"),
        ("sft", {"prompt": "a", "completion": "b", "label": False}, "--objective sft would learn all alike: give"),
        ("sft", {"prompt": "a", "completion": "b", "label": 0}, "--objective sft would learn all alike: give"),
        ("sft", {"prompt": "a", "completion": "b", "label": "1"}, "--objective sft would learn all alike: give"),
    ],
)
def test_records_that_are_no_pairs_are_refused(
    objective: str, record: dict, words: str, tokenizer: Tokenizer, write_lines: Any
) -> None:
    with pytest.raises(WgradError, match=rf"data.jsonl:1: .*{words}") as caught:
        load(write_lines(record), tokenizer, objective)
    assert "\n" not in str(caught.value)


def test_plain_text_has_no_preferences(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hear.")
    with pytest.raises(WgradError, match="--objective: dpo learns from preferences, and .*a.txt is plain text: give"):
        load(str(tmp_path / "a.txt"), tokenizer)


def test_a_pair_is_left_out_whole(tokenizer: Tokenizer, write_lines: Any) -> None:
    """Where the answer of one begins beyond --max-length so does the other's; a cut answer stays."""
    path = write_lines(PAIR, {**PAIR, "prompt": PAIR["prompt"] * 30}, {**PAIR, "rejected": PAIR["rejected"] * 30})
    data = load(path, tokenizer, max_length=48)
    assert [pair.source.rpartition(":")[2] for pair in data.train] == ["1", "3"]
    assert (data.left_out, data.truncated) == (1, 1) and len(data.train[1].rejected) == 48


def document(length: int, label: int = 0) -> Document:
    return Document(np.arange(1, length + 1, dtype=np.int32), np.arange(length) >= 2, label=label)


def test_a_batch_has_chosen_rows_before_rejected_ones() -> None:
    pairs = [Pair(document(5), document(7)), Pair(document(6), document(4))]
    batch = preference_batch(pairs, 3, 8)
    assert batch.ids.shape == (6, 8) and batch.num_targets == 2 and batch.num_tokens == 22
    assert batch.labels is not None and batch.labels.tolist() == [1, 1, 0, -1, -1, 0]
    assert (batch.ids > 0).sum(axis=1).tolist() == [5, 6, 0, 7, 4, 0]
    assert (batch.targets != -100).sum(axis=1).tolist() == [3, 4, 0, 5, 2, 0]
    config = RunOptions(objective="kto", batch_size=2, max_length=8)
    batches = eval_batches([document(5, 1), document(3, -1), document(4, -1)], config)
    assert [b.labels.tolist() for b in batches if b.labels is not None] == [[1, -1], [-1, 0]]
    assert [b.num_targets for b in batches] == [2, 1]
    other, alone = (b.mismatched for b in batches)
    assert other is not None and other.ids[:, :5].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert alone is not None and alone.ids.tolist() == batches[1].ids.tolist()


def test_another_label_is_other_data() -> None:
    config = RunOptions(objective="kto", batch_size=2, max_length=8)
    prints = {BatchStream([document(5, label)] * 2, config).fingerprint() for label in (1, -1)}
    assert len(prints) == 2


def test_data_show(make_checkpoint: Any, write_lines: Any, capsys: Any) -> None:
    data, show = (
        write_lines(PAIR, PAIR),
        ["--eval-fraction", "0", "--max-length", "32", "--gradient-accumulation-steps", "1"],
    )
    command = ["data", "show", data, "--model", str(make_checkpoint()), "--objective", "dpo", *show]
    assert main([*command, "--examples", "1"]) == 0
    out = capsys.readouterr().out
    assert "data.jsonl:1: chosen, " in out and "data.jsonl:1: rejected, " in out and "Is it wise?« It is." in out
    assert "sequences of 32 tokens (a completion with its prompt each): 4, " in out and "2 steps of 2 sequences" in out
