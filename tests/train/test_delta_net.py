"""Models with gated DeltaNet or Mamba: training compared with torch, generation in and out of a batch, packing,
and refusals.

Their logits and gradients are those of test_oracle_model.py, their adapters of test_oracle_adapter.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import distance, random_weights, tiny_config, write_checkpoint
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.generation import generate_batch, generate_ids
from wgrad.train.inference.growing import Growing
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import LoraConfig, linear_modules
from wgrad.train.model.model import Model
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen, build_trainable

MULTIMODAL, ARCHITECTURE = "Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"
MAMBA = "GraniteMoeHybridForCausalLM"
LENGTHS = (3, 40, 9, 1, 33)
NEW = 12


@pytest.fixture(scope="module", params=[ARCHITECTURE, MAMBA, "JambaForCausalLM", "Lfm2ForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with gated DeltaNet, with Mamba-2 and experts, with Mamba-1 and experts, or with a gated
    convolution, which has no state."""
    more: dict[str, Any] = {"rms_norm_eps": 1e-2}  # what is near 0 in first tokens does not become large
    if request.param == MAMBA:
        more |= {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 5}
    elif request.param == "JambaForCausalLM":
        more |= {"attn_layer_period": 3, "expert_layer_offset": 0}
    elif request.param != ARCHITECTURE:
        more["layer_types"] = ["conv", "full_attention", "conv"]
    raw = tiny_config(request.param, num_hidden_layers=3, **more)
    return write_checkpoint(tmp_path_factory.mktemp("delta") / "model", raw, random_weights(raw))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return build_frozen(load_model_config(folder), folder, ReferenceDevice(), positions=96, quantize=False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(4)
    return [generator.integers(1, 300, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    return [list(generate_ids(model, prompt, NEW, GREEDY)) for prompt in prompts]


@pytest.mark.oracle
def test_greedy_text_is_that_of_transformers(folder: Path, prompts: Any, alone: Any) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    wanted = [theirs.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    assert alone == wanted


def test_prompts_of_a_batch_do_not_see_what_fills_them_up(model: Model, prompts: Any, alone: Any) -> None:
    assert generate_batch(model, prompts, NEW, GREEDY) == alone


@pytest.mark.parametrize("together", [1, 3])
def test_sequences_that_come_and_go_read_as_each_alone(
    model: Model, prompts: Any, alone: Any, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other and in a group, into rows that others have left, while the cache moves. Those that are long
    are read at once, as steps of others in between would change their states."""
    monkeypatch.setattr("wgrad.train.inference.continuous.CHUNK", 32 if together == 1 else 512)
    batch, found = Batch(model, 4), dict[int, list[int]]()
    waiting = [Growing.begin(prompt, NEW, GREEDY) for prompt in prompts]
    numbers = {id(one): number for number, one in enumerate(waiting)}
    while waiting or batch.members:
        count = min(together, len(waiting), batch.free)
        if count and batch.can_join(waiting[:count]):
            batch.join(waiting[:count])
            del waiting[:count]
        block = batch.queue(5)
        drawn = block.tokens()
        for part in block.parts:
            found.setdefault(numbers[id(part.sequence)], []).extend(drawn[: part.steps, part.row].tolist())
    assert [found[number] for number in range(len(alone))] == alone


@pytest.mark.oracle
@pytest.mark.parametrize("folder", [ARCHITECTURE, MAMBA], indirect=True)
@pytest.mark.parametrize("full", [False, True], ids=["nf4", "full"])
def test_eight_steps_follow_torch(full: bool, folder: Path, tmp_path: Path) -> None:
    """Train an adapter of all projections on NF4 weights, or all parameters."""
    oracle = pytest.importorskip("tests.train.peft_oracle")
    torch, device = oracle.torch, ReferenceDevice()
    settings: dict[str, Any] = {"full": True} if full else {"lora_r": 4, "lora_alpha": 8.0}
    settings |= {"learning_rate": 1e-3 if full else 5e-3, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    config = RunOptions(max_length=oracle.TOKENS, batch_size=2, compute="float32", weight_decay=0.0, **settings)
    built = build_trainable(config, load_model_config(folder), folder, device, positions=oracle.TOKENS)
    if full:
        theirs = oracle.their_base(folder)
    else:
        start = {name: built.parameters.get(name) for name in built.parameters.tensors}
        # By default all but MLPs', where there are experts; also those that the first layer has not.
        modules = {name for name in linear_modules(built.model.config) if ".mlp." not in name}
        assert {name.rpartition(".")[0] for name in start} == modules
        paths = {name.rpartition(".")[2] for name in modules}
        assert paths >= {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"} or paths >= {
            "in_proj",
            "out_proj",
            "q_proj",
        }
        assert built.lora is not None
        save_adapter(tmp_path / "start", built.lora, start, str(folder))
        base = oracle.dequantized_base(folder, dict(built.model.weights), device)
        theirs = oracle.peft.PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True)
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], weight_decay=0.0)
    ours, wanted = oracle.side_by_side(config, built, theirs, optimizer, steps=8)
    np.testing.assert_allclose(ours, wanted, rtol=1e-3)
    assert wanted[-1] < 0.97 * wanted[0]


@pytest.mark.oracle
def test_packed_documents_and_recomputed_layers_give_the_same_gradients(folder: Path) -> None:
    """A row of two documents gives the sum of their gradients, whatever is kept for the backward."""
    oracle = pytest.importorskip("tests.train.model_oracle")
    ids, targets = oracle.batch(300)
    cut, device = 9, ReferenceDevice()
    targets[:, cut - 1] = -100
    starts = np.tile(np.where(np.arange(oracle.TOKENS) < cut, 0, cut).astype(np.int32), (2, 1))

    def gradient(ids: np.ndarray, targets: np.ndarray, starts: np.ndarray | None, *recompute: bool) -> np.ndarray:
        model, parameters = oracle.full_model(folder, device)
        model.recompute, model.keep_attention = recompute or (False, False)
        model.loss(oracle.make_inputs(device, np.ascontiguousarray(ids), targets.copy(), starts)).backward()
        return np.array(device.download(parameters.grad))

    packed = gradient(ids, targets, starts)
    first, second = (gradient(ids[:, part], targets[:, part], None) for part in (slice(cut), slice(cut, None)))
    assert distance(packed, first + second) < 1e-4
    for keep in (False, True):
        np.testing.assert_array_equal(gradient(ids, targets, starts, True, keep), packed)


@pytest.mark.oracle
def test_the_text_part_of_a_multimodal_model_is_trained_and_merged(tmp_path: Path) -> None:
    """As published: with a part for images and one for several tokens at once, which merging keeps. PEFT's adapters are
    of the text part, which AutoModelForCausalLM loads alone."""
    oracle, transformers = pytest.importorskip("tests.train.peft_oracle"), pytest.importorskip("transformers")
    text = tiny_config(MULTIMODAL, tie_word_embeddings=True, mtp_num_hidden_layers=1, mamba_ssm_dtype="float32")
    axes = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": text.pop("rope_theta"), **axes}
    text["rope_parameters"]["partial_rotary_factor"] = text.pop("partial_rotary_factor")
    weights = {f"model.language_model.{n.removeprefix('model.')}": a for n, a in random_weights(text).items()}
    weights |= {"model.visual.pos_embed.weight": np.ones((4, 8), np.float32), "mtp.fc.weight": np.eye(3)}
    raw: dict[str, Any] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
    }
    raw |= {"vision_config": {"depth": 0, "hidden_size": 8, "num_heads": 1}, "tie_word_embeddings": True}
    folder = write_checkpoint(tmp_path / "model", raw | {"text_config": text | {"architectures": None}}, weights)
    config, ids, device = load_model_config(folder), oracle.random_ids(), ReferenceDevice()
    lora = LoraConfig(r=3, alpha=6.0)
    arrays = oracle.random_adapter(lora, linear_modules(config))
    save_adapter(tmp_path / "adapter", lora, arrays, str(folder), config.in_peft)
    named = str(tmp_path / "adapter")
    ours = oracle.our_logits(build_frozen(config, folder, device, positions=64, adapter=named, quantize=False), ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=oracle.torch.float32)
    plain = oracle.their_logits(theirs, ids)
    adapted = oracle.their_logits(oracle.peft.PeftModel.from_pretrained(theirs, named), ids)
    assert distance(ours, adapted) < 2e-5 < 0.1 < distance(plain, adapted)
    merged = tmp_path / "merged"
    assert main(f"merge --adapter {named} --out {merged} --device cpu --onto original --no-compare".split()) == 0
    before, after = (read_entries(path / "model.safetensors", "") for path in (folder, merged))
    assert before.keys() == after.keys()
    again = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=oracle.torch.float32)
    assert distance(oracle.their_logits(again, ids), adapted) < 2e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types must be linear_attention or full"),
        ({"layer_types": ["linear_attention"]}, r"layer_types must name each of the 2 layers"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be silu"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple of linear_num_key_heads, 2; got 3"),
        ({"linear_key_head_dim": 512}, "linear_key_head_dim must be at most 256; got 512"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WgradError, match=said):
        parse_model_config(tiny_config(ARCHITECTURE, **changes))
