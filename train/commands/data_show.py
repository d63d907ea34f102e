"""`wgrad data show`: what a run would learn from its data, example by example and in numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.data.data import Dataset, load_data
from wgrad.train.data.named_templates import use_chat_template
from wgrad.train.data.packing import Document, Example, Pair, pack_documents
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.data.tokenizer_source import find_source
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.lengths import within_positions
from wgrad.train.run.schedule import few_steps
from wgrad.train.step.find_model import find_model
from wgrad.train.terminal.output import make_console, say
from wgrad.train.terminal.progress import Display

LEARNED, MASKED = "bold green", "dim"
_ENDS = 200  # tokens shown at the beginning and at the end of a long example


def run_data_show(config: RunOptions, examples: int, as_json: bool = False) -> int:
    """Print examples, with trained tokens marked, and statistics of the data; or one JSON object.

    Returns:
        The exit status.

    Raises:
        WgradError: Model or data cannot be used.
    """
    folder = find_model(config.model, weights=False)
    tokenizer, note = find_source(folder, config.adapter).load()
    for remark in (note, use_chat_template(tokenizer, config.chat_template)):
        if remark:
            say(f"note: {remark}", "stderr")
    config, shortened = _as_in_a_run(config, folder)
    if shortened:
        say(shortened, "stderr")
    with Display(make_console("stderr")).phase("reading and tokenizing", unit="%") as phase:
        data = load_data(config, tokenizer, phase.update)
    if as_json:
        print(json.dumps(described(data, tokenizer, config, examples)))
        return 0
    console = make_console()
    colors = console.color_system is not None
    for example in _spread(data.train, examples):
        for document, what in zip(example.parts, _names(example)):
            tokens = f"{counted(len(document), 'token')}, {document.num_targets} {_counts(config)}"
            say(f"{_plain(example.source)}: {what}{tokens}")
            console.print(example_text(document, tokenizer, colors), soft_wrap=True)
            say("")
    say(f"{_counts(config)} is {'green' if colors else 'in «»'}; all else is only read")
    for line in summary(data, config):
        say(line)
    return 0


def _as_in_a_run(config: RunOptions, folder: Path) -> tuple[RunOptions, str]:
    """Do as `within_positions`, but leave the options as they are if the model cannot be read."""
    try:
        return within_positions(config, load_model_config(folder))
    except WgradError:
        return config, ""


def _names(example: Example) -> Sequence[str]:
    """Return labels for the parts of an example; "" for plain texts."""
    if isinstance(example, Pair):
        return "chosen, ", "rejected, "
    return ({1: "desirable, ", -1: "not desirable, "}.get(example.label, ""),)


def _counts(config: RunOptions) -> str:
    return "trained on" if config.objective_kind.records == "texts" else "compared"


def _spread(documents: Sequence[Example], count: int) -> Iterator[Example]:
    """Return `count` of the documents, evenly spread from the first to the last."""
    places = np.linspace(0, len(documents) - 1, min(count, len(documents))).round().astype(int)
    return (documents[int(place)] for place in places)


def described(data: Dataset, tokenizer: Tokenizer, config: RunOptions, count: int) -> dict[str, Any]:
    """Return the JSON object: `count` examples with their `pieces` (text, and whether it is trained on; null: an
    omission), a summary in lines for people, the `steps` of the run, and a `note` if they are few."""
    examples = [
        {
            "source": _plain(example.source),
            "label": label.removesuffix(", "),
            "tokens": len(document),
            "trained": document.num_targets,
            "pieces": list(pieces(document, tokenizer)),
        }
        for example in _spread(data.train, count)
        for document, label in zip(example.parts, _names(example))
    ]
    steps = config.max_steps or config.epochs * _steps_of_an_epoch(data, config)
    return {
        "counts": _counts(config),
        "examples": examples,
        "summary": summary(data, config),
        "steps": steps,
        "note": few_steps(config, steps),
    }


def pieces(document: Document, tokenizer: Tokenizer) -> Iterator[tuple[str, bool | None]]:
    """Yield the texts of a document, with special tokens, and whether each is trained on; None: a note about tokens
    that are left out."""
    learned, count = document.loss_mask.copy(), len(document)
    learned[0] = False  # nothing precedes it to predict it from
    for first, last in [(0, count)] if count <= 2 * _ENDS else [(0, _ENDS), (count - _ENDS, count)]:
        if first:
            yield f" ... {count - 2 * _ENDS} tokens ... ", None
        edges = first + 1 + np.flatnonzero(np.diff(learned[first:last]))
        for begin, end in zip([first, *edges], [*edges, last]):
            ids = document.ids[begin:end].tolist()
            yield _plain(tokenizer.decode(ids, skip_special_tokens=False)), bool(learned[begin])


def example_text(document: Document, tokenizer: Tokenizer, colors: bool) -> Text:
    """Return the text of a document, with special tokens. Trained tokens are green, or in «» without colors."""
    text = Text()
    for words, trained in pieces(document, tokenizer):
        if trained is None:
            text.append(words, "reverse" if colors else "")
        elif colors:
            text.append(words, LEARNED if trained else MASKED)
        else:
            text.append(f"«{words}»" if trained else words)
    return text


def _plain(text: str) -> str:
    """Replace control characters, which a terminal would obey, by Python's escapes; newlines stay."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def summary(data: Dataset, config: RunOptions) -> list[str]:
    """Return statistics of the data in lines: what `finetune` prints, lengths, targets, and filling of sequences."""
    sizes = [(len(part), part.num_targets) for example in data.train for part in example.parts]
    lengths, targets = np.array(sizes).T
    low, middle, high = np.percentile(lengths, [0, 50, 100]).astype(int)
    lines = [data.summary(), *(f"  {_plain(remark)}" for remark in (data.turns, *data.remarks) if remark)]
    what = "a completion with its prompt" if config.objective_kind.records != "texts" else "an example"
    spread = f"{low} to {high}, half of them at most {middle}" if low < high else str(low)
    lines.append(f"tokens of {what}: {spread}")
    learned = 100 * targets.sum() / lengths.sum()
    lines.append(f"{_counts(config)}: {targets.sum()} of {lengths.sum()} tokens ({learned:.1f} %)")
    rows, filled, of_step = _sequences(data, config)
    steps = -(-rows // of_step)
    packed = "" if config.packs else f" ({what} each)" if config.packing else " (--no-packing: an example each)"
    epoch = "an epoch" if data.mix is None else "the first epoch"
    lines.append(
        f"sequences of {config.max_length} tokens{packed}: {rows}, {filled:.1f} % filled; {epoch} has "
        f"{counted(steps, 'step')} of {counted(of_step, 'sequence')}"
    )
    note = few_steps(config, config.epochs * steps)
    return [*lines, note] if note else lines


def _steps_of_an_epoch(data: Dataset, config: RunOptions) -> int:
    rows, _, of_step = _sequences(data, config)
    return -(-rows // of_step)


def _sequences(data: Dataset, config: RunOptions) -> tuple[int, float, int]:
    """Return the sequences of an epoch, the percentage of their tokens that is text, and the sequences of a step."""
    examples = data.train
    if data.mix is not None:
        examples = [data.train[int(number)] for number in data.mix.epoch(config.seed, 0)]
    lengths = np.array([len(part) for example in examples for part in example.parts])
    rows = len(pack_documents(lengths.tolist(), config.max_length)) if config.packs else len(lengths)
    filled = 100 * lengths.sum() / (rows * config.max_length)
    return rows, filled, config.rows * config.gradient_accumulation_steps
