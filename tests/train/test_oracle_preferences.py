"""Thirty steps on preferences compared with TRL's trainers: same file, order and initial adapter."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools import oracle_package
from tests.train.conftest import SENTENCES
from wgrad.device.contract import Device
from wgrad.train.data.data import load_data
from wgrad.train.data.packing import BatchStream
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.build import build_optimizer, build_trainable
from wgrad.train.step.trainer import Trainer

torch = oracle_package("torch")
transformers = oracle_package("transformers")
peft = oracle_package("peft")
datasets = oracle_package("datasets")
trl = oracle_package("trl")

pytestmark = pytest.mark.oracle

STEPS = 30
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SAME = {"learning_rate": 1e-3, "max_grad_norm": 0.5, "batch_size": 2, "max_length": 64}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small take longer on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def ours(
    folder: Path, data: Path, device: Device, out: Path, **options: Any
) -> tuple[list[dict[str, float]], list[int]]:
    """Return the metrics of each step, and the lines of the file in the order of training."""
    settings: dict[str, Any] = {
        "lora_r": 4,
        "lora_alpha": 8.0,
        "quantize": False,
        "compute": "float32",
        "gradient_accumulation_steps": 1,
    }
    config = RunOptions(data=(str(data),), eval_fraction=0.0, **settings | SAME | options)
    found = load_data(config, load_tokenizer(folder))
    stream = BatchStream(found.train, config)
    built = build_trainable(config, load_model_config(folder), folder, device, positions=config.max_length)
    assert built.lora is not None
    start = {name: built.parameters.get(name) for name in built.parameters.tensors}
    save_adapter(out, built.lora, start, str(folder))
    trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
    told, lines = [], []
    for index in range(STEPS):
        epoch, within = divmod(index, stream.steps_per_epoch)
        for (number,) in stream._epoch_rows(epoch)[within * config.examples_per_step :][: config.examples_per_step]:
            lines.append(int(found.train[number].source.rpartition(":")[2]))
        trainer.step(stream.get(index), config.learning_rate)
        (row,) = trainer.read_history()
        told.append({"loss": float(row[0]), **trainer.metrics(row)})
    return told, lines


def module_of(kind: str) -> Any:
    """Return the module of TRL that has a trainer."""
    return importlib.import_module(f"trl.experimental.{kind.lower()}") if kind in ("ORPO", "CPO") else trl


def theirs(kind: str, folder: Path, start: Path, records: list[dict[str, Any]], out: Path, **options: Any) -> Any:
    """TRL's trainer after its steps."""
    config, trainer = (getattr(module_of(kind), f"{kind}{name}") for name in ("Config", "Trainer"))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    made = trainer(
        model=peft.PeftModel.from_pretrained(base, start, is_trainable=True),
        args=config(
            output_dir=str(out),
            learning_rate=SAME["learning_rate"],
            max_grad_norm=SAME["max_grad_norm"],
            max_length=SAME["max_length"],
            max_steps=STEPS,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
            **{"per_device_train_batch_size": SAME["batch_size"], **options},
        ),
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=tokenizer,
    )
    made.train()
    return made


def compare(found: list[dict[str, float]], trainer: Any, names: list[str]) -> None:
    """Losses within 0.5 %, metrics within 0.5 % of the largest, at every step."""
    history = [record for record in trainer.state.log_history if "loss" in record]
    assert len(history) == len(found) == STEPS
    for name in names:
        mine, wanted = (np.array([record[name] for record in told]) for told in (found, history))
        np.testing.assert_allclose(mine, wanted, rtol=0.005, atol=0.005 * np.abs(wanted).max(), err_msg=name)
        if name != "rewards/accuracies":
            assert np.ptp(wanted) > 0.03 * np.abs(wanted).max(), name  # it is no constant


PAIR_METRICS = [
    f"{kind}/{of}" for kind, names in (("rewards", "chosen rejected margins accuracies"), ("logps", "chosen rejected"))
    for of in names.split()
]  # fmt: skip


def pairs() -> list[dict[str, Any]]:
    """Answers of unequal length, some beyond what a row holds."""
    chosen, rejected = (SENTENCES[i:] + SENTENCES[:i] for i in (1, 3))
    return [
        {"prompt": a, "chosen": f" {b}" * (1 + i % 3), "rejected": f" {c[: 9 + 5 * i]}"}
        for i, (a, b, c) in enumerate(zip(SENTENCES, chosen, rejected))
    ]


def test_dpo_has_the_losses_of_trl(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    """With label smoothing, which is the robust loss and has the plain one in it. A step has two micro-batches."""
    folder, records = make_checkpoint(num_hidden_layers=1), pairs()
    data = write_lines(tmp_path / "data.jsonl", records)
    options: dict[str, Any] = {"beta": 0.3, "label_smoothing": 0.1}
    accumulated = {"batch_size": 1, "gradient_accumulation_steps": 2}
    found, lines = ours(folder, data, cpu, tmp_path / "start", objective="dpo", **accumulated, **options)
    ordered = [records[line - 1] for line in lines]
    options |= {"loss_type": ["robust"], "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = theirs("DPO", folder, tmp_path / "start", ordered, tmp_path / "theirs", **options)
    compare(found, trainer, ["loss", *PAIR_METRICS])


def add_settings(folder: Path, **settings: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_orpo_has_the_losses_of_trl(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    """Whose step is one micro-batch: of several, TRL takes the mean of their means of tokens. TRL adds a bos, whatever
    the tokenizer does."""
    folder = make_checkpoint(num_hidden_layers=1)
    add_settings(folder, bos_token="<|end|>")
    records = pairs()
    data = write_lines(tmp_path / "data.jsonl", records)
    found, lines = ours(folder, data, cpu, tmp_path / "start", objective="orpo", beta=0.3)
    ordered = [records[line - 1] for line in lines]
    trainer = theirs("ORPO", folder, tmp_path / "start", ordered, tmp_path / "theirs", beta=0.3)
    compare(found, trainer, ["loss", *PAIR_METRICS])


@pytest.mark.parametrize("bos", [None, "<|end|>"])
def test_simpo_has_the_losses_of_trl(make_checkpoint: Any, cpu: Device, tmp_path: Path, bos: str | None) -> None:
    """TRL has it as a loss of CPO without its cross-entropy, of texts with bos and eos."""
    folder = make_checkpoint(num_hidden_layers=1)
    if bos:
        add_settings(folder, bos_token=bos)
    records = pairs()
    data = write_lines(tmp_path / "data.jsonl", records)
    options: dict[str, Any] = {"beta": 2.0, "simpo_gamma": 0.6}
    found, lines = ours(folder, data, cpu, tmp_path / "start", objective="simpo", **options)
    ordered = [records[line - 1] for line in lines]
    options |= {"loss_type": "simpo", "cpo_alpha": 0.0}
    trainer = theirs("CPO", folder, tmp_path / "start", ordered, tmp_path / "theirs", **options)
    compare(found, trainer, ["loss", *PAIR_METRICS])


def test_kto_has_the_losses_of_trl(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    """On conversations: a completion is cut behind the prompt that it stands behind, its own or another one's."""
    folder = make_checkpoint(num_hidden_layers=1)
    add_settings(folder, chat_template=TEMPLATE)
    records = [
        {
            "prompt": [{"role": "user", "content": pair["prompt"][: 6 + 9 * (i % 4)]}],
            "completion": [{"role": "assistant", "content": pair[("chosen", "rejected")[i % 3 == 0]]}],
            "label": i % 3 != 0,
        }
        for i, pair in enumerate(pairs())
    ]
    data = write_lines(tmp_path / "data.jsonl", records)
    options = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}
    found, lines = ours(folder, data, cpu, tmp_path / "start", objective="kto", **options)
    ordered = [records[line - 1] for line in lines]
    trainer = theirs("KTO", folder, tmp_path / "start", ordered, tmp_path / "theirs", **options)
    compare(found, trainer, ["loss", "kl"])


@pytest.mark.parametrize("bos", [None, "<|end|>"])
def test_orpo_on_conversations_has_the_losses_of_trl(
    make_checkpoint: Any, cpu: Device, tmp_path: Path, bos: str | None
) -> None:
    """TRL adds an eos to what the template ends otherwise, and a bos to what it begins otherwise."""
    folder = make_checkpoint(num_hidden_layers=1)
    add_settings(folder, chat_template=TEMPLATE, bos_token=bos)
    records = [
        {
            "prompt": [{"role": "user", "content": pair["prompt"][:12]}],
            "chosen": [{"role": "assistant", "content": pair["chosen"]}],
            "rejected": [{"role": "assistant", "content": pair["rejected"]}],
        }
        for pair in pairs()
    ]
    data = write_lines(tmp_path / "data.jsonl", records)
    found, lines = ours(folder, data, cpu, tmp_path / "start", objective="orpo", beta=0.3)
    ordered = [records[line - 1] for line in lines]
    trainer = theirs("ORPO", folder, tmp_path / "start", ordered, tmp_path / "theirs", beta=0.3)
    compare(found, trainer, ["loss", *PAIR_METRICS])
