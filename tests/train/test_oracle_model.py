"""Logits, loss and every gradient of small random models against transformers.

The oracle is transformers in float64, with its norms, which compute in float32, replaced by float64 ones. The limit is
twice (logits, loss) or three times (gradients) the error of transformers in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.common import UNGROUPED_LATENTS, YARN
from tests.families.table import CASES, FAMILY_ROWS
from tests.family_table import PAGE, page
from tests.train.conftest import distance
from tests.train.model_oracle import (
    TOKENS,
    batch,
    check_against_the_oracle,
    exact_norms,
    full_model,
    load_oracle,
    make_inputs,
    oracle,
    torch,
    transformers,
)
from wgrad.autograd import functional as F
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.model import model as model_file
from wgrad.train.model.alibi import alibi_table
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.save_model import save_full
from wgrad.train.model.weights import weight_specs

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_transformers(case: str, make_checkpoint: Any, device: Device) -> None:
    architecture, changes = CASES[case]
    if "rope_parameters" in changes:  # transformers 5 writes this instead of rope_theta
        changes = changes | {"rope_theta": None}
    check_against_the_oracle(make_checkpoint(architecture, **changes), device)


@pytest.mark.parametrize("heads", [4, 6, 32, 71])
def test_alibi_is_that_of_transformers(heads: int) -> None:
    """Also beyond 256 positions, from where bfloat16 rounds them."""
    build = transformers.models.falcon.modeling_falcon.build_alibi_tensor
    wanted = build(torch.ones((1, 700), dtype=torch.long), heads, torch.float32)[:, 0].numpy()
    np.testing.assert_array_equal(alibi_table(heads, 700), wanted.T)


def test_errors_over_several_batches_are_those_of_a_plain_implementation(
    make_checkpoint: Any, wgpu_device: Any
) -> None:
    """For one batch an error may be small by chance, in transformers as well: for the first one here, a norm's gradient
    has 3.6 times its error, all of it from the order of sums in the forward's matmuls. Geometric means are alike."""
    folder = make_checkpoint("NemotronHForCausalLM", **UNGROUPED_LATENTS)
    loaded, errors = load_oracle(folder), []
    model, parameters = full_model(folder, wgpu_device)
    batches = [batch(model.config.vocab_size, seed=seed) for seed in (3, 4, 5, 6)]
    rounded, exact = ([oracle(loaded, t, *given)[2] for given in batches] for t in (torch.float32, torch.float64))
    names = [name for name, value in exact[0].items() if value.size > 6]
    for plain, true, (ids, targets) in zip(rounded, exact, batches, strict=True):
        wgpu_device.fill(parameters.grad, 0.0)
        model.loss(make_inputs(wgpu_device, ids, targets)).backward()
        ours = {name: wgpu_device.download(parameters.tensors[name].gradient) for name in names}
        errors.append([[distance(found[name], true[name]) for name in names] for found in (ours, plain)])
    found, expected = np.exp(np.log(errors).mean(0))
    assert (found < 1.5 * expected).all(), dict(zip(names, found / expected, strict=True))


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "StableLmForCausalLM"])
def test_full_training_saves_norm_weights_as_the_file_had_them(
    architecture: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Gemma 2's files hold weight - 1, StableLM's a weight for each head. Weights of norms do not decay."""
    folder, device = make_checkpoint(architecture, tie_word_embeddings=True), ReferenceDevice()
    assert not any(spec.decays for spec in weight_specs(load_model_config(folder)) if spec.kind == "norm")
    _, parameters = full_model(folder, device)
    save_full(tmp_path, folder, parameters.tensors, load_model_config(folder), lambda out: None)
    before, after = (read_entries(path / "model.safetensors", "") for path in (folder, tmp_path))
    assert before.keys() == after.keys()
    for name, entry in before.items():
        np.testing.assert_allclose(after[name].array(), entry.array(), atol=2**-23, err_msg=name)


def test_checkpointed_layers_give_the_same_gradients(make_checkpoint: Any, device: Device) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM")
    ids, targets = batch(300)
    grads = []
    for checkpointing, keep in ((False, False), (True, False), (True, True)):
        model, parameters = full_model(folder, device)
        model.recompute, model.keep_attention = checkpointing, keep
        model.loss(make_inputs(device, ids, targets)).backward()
        grads.append(device.download(parameters.grad))
    np.testing.assert_array_equal(grads[0], grads[1])
    np.testing.assert_array_equal(grads[0], grads[2])


@pytest.mark.parametrize(("architecture", "last"), [("LlamaForCausalLM", 1), ("PhiForCausalLM", 2)])
def test_what_only_a_layers_output_needs_is_not_computed_again(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, architecture: str, last: int
) -> None:
    """These are the last projection, and in a parallel block that of both halves."""
    model, _ = full_model(make_checkpoint(architecture), device := ReferenceDevice())
    model.recompute, left_out = True, []
    linear = F.linear

    def counted(*args: Any, **options: Any) -> Any:
        left_out.append(options.get("unread", False))
        return linear(*args, **options)

    monkeypatch.setattr(F, "linear", counted)
    loss = model.loss(make_inputs(device, *batch(300)))
    assert not any(left_out)
    loss.backward()
    assert sum(left_out) == last * model.config.num_hidden_layers


@pytest.mark.parametrize("architecture", ["PhiForCausalLM", "FalconForCausalLM"])
def test_a_parallel_block_in_chunks_of_its_rows_has_the_same_gradients(
    architecture: str, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLP's chunks norm their rows themselves, and leave to attention what both halves read."""
    folder, device = make_checkpoint(architecture), ReferenceDevice()
    spent, in_row_chunks = [], model_file.in_row_chunks

    def noted(*args: Any, **options: Any) -> Any:
        spent.append(options["spent"])
        return in_row_chunks(*args, **options)

    monkeypatch.setattr(model_file, "in_row_chunks", noted)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNKS_ABOVE", 0)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNK_BYTES", 6 * 88 * 4 * 16)
    grads = []
    for chunks in (False, True):
        model, parameters = full_model(folder, device)
        model.recompute = chunks
        model.loss(make_inputs(device, *batch(300))).backward()
        grads.append(device.download(parameters.grad))
    assert 0 < distance(grads[1], grads[0]) < 1e-5
    assert spent and not any(spent)


def test_packed_documents_do_not_see_each_other(make_checkpoint: Any, device: Device) -> None:
    """A sequence of two documents gives the sum of their losses and gradients."""
    folder = make_checkpoint("MistralForCausalLM", sliding_window=6)
    ids, targets = batch(300)
    cut = 9
    targets[0, cut - 1] = -100
    parts = [(ids[:1, :cut], targets[:1, :cut]), (ids[:1, cut:], targets[:1, cut:])]
    loaded = load_oracle(folder)
    plain, true = (
        [oracle(loaded, dtype, np.ascontiguousarray(i), np.ascontiguousarray(t)) for i, t in parts]
        for dtype in (torch.float32, torch.float64)
    )
    model, parameters = full_model(folder, device)
    doc_start = np.where(np.arange(TOKENS) < cut, 0, cut).astype(np.int32)[None]
    model.loss(make_inputs(device, ids[:1], targets[:1], doc_start)).backward()
    for name, tensor in parameters.tensors.items():
        wanted = true[0][2][name] + true[1][2][name]
        limit = 3 * distance(plain[0][2][name] + plain[1][2][name], wanted)
        assert distance(device.download(tensor.gradient), wanted) <= limit, name


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("JambaForCausalLM", {}),
        (
            "FalconForCausalLM",
            {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None},
        ),
    ],
)
def test_packed_documents_have_states_and_positions_of_their_own(
    architecture: str, changes: dict[str, Any], make_checkpoint: Any, cpu: Device
) -> None:
    folder, cut = make_checkpoint(architecture, **changes), 9
    (ids, targets), (model, _) = batch(300), full_model(folder, cpu)
    starts = np.where(np.arange(TOKENS) < cut, 0, cut).astype(np.int32)[None]
    packed = cpu.download(model.hidden(make_inputs(cpu, ids[:1], targets[:1], starts)).data)
    parts = [(ids[:1, part], targets[:1, part]) for part in (slice(cut), slice(cut, None))]
    alone = [cpu.download(model.hidden(make_inputs(cpu, *map(np.ascontiguousarray, part))).data) for part in parts]
    np.testing.assert_allclose(packed, np.concatenate(alone), rtol=1e-4, atol=1e-4)


def test_transformers_loads_what_full_training_saved(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> None:
    """It loads weights, configuration and tokenizer of --full, which started from bfloat16."""
    from wgrad.train.commands.cli import main

    folder, out = make_checkpoint("Qwen3ForCausalLM", dtype="bfloat16", tie_word_embeddings=True), tmp_path / "out"
    options = (
        f"--model {folder} --data {text_data} --out {out} --device cpu --full "
        f"--max-length 40 --max-steps 3 --learning-rate 1e-2"
    )
    assert main(["finetune", *options.split()]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert next(theirs.parameters()).dtype == torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = np.array([tokenizer("the quick brown fox")["input_ids"]], np.int32)
    words = torch.tensor(ids).long()
    with torch.no_grad():
        before = transformers.AutoModelForCausalLM.from_pretrained(folder)(words).logits.float()
        plain = theirs(words).logits[0].double().numpy()
        true = exact_norms(theirs.double())(words).logits[0].numpy()
    assert distance(plain, before[0].double().numpy()) > 0.05
    device = ReferenceDevice()
    model, _ = full_model(out, device)
    logits = device.download(model.logits(model.hidden(make_inputs(device, ids, np.full_like(ids, -100))).data))
    assert distance(logits, true) <= 2 * distance(plain, true)


def test_the_tables_of_the_docs_are_current() -> None:
    assert all(row.cases for row in FAMILY_ROWS.values())
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run python -m tests.family_table"


def test_rope_parameters_of_either_version_agree(tmp_path: Path) -> None:
    """transformers 4 and 5 write the same scaling in different places."""
    from wgrad.train.model.load_config import parse_model_config

    base = json.loads(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 48, "num_hidden_layers": 1}))
    base |= {"num_attention_heads": 4, "vocab_size": 8, "intermediate_size": 8}
    old = parse_model_config({**base, "rope_theta": 500.0, "rope_scaling": YARN})
    new = parse_model_config({**base, "rope_parameters": {**YARN, "rope_theta": 500.0}})
    assert old.rope == new.rope and old.rope.theta == 500.0
