"""Generation: greedy against the whole sequence each time, sampling, stopping, the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import scale_last_norm
from wgrad.device.contract import Device
from wgrad.device.errors import UnusableResult, WgradError
from wgrad.train.commands.cli import main
from wgrad.train.inference.generation import generate_batch, generate_ids
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig, init_lora, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.options.generate_config import GREEDY, Sampling
from wgrad.train.step.build import build_frozen

PROMPT = [3, 141, 59, 26, 53, 58, 97]


def model_for(folder: Path, device: Device, **options: Any) -> Model:
    return build_frozen(load_model_config(folder), folder, device, positions=64, **options)


def greedy_by_hand(model: Model, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest next tokens, computed from the whole sequence without a cache.

    Padding makes all sequences equally long, since each number of rows up to 16 has its own shaders.
    """
    device, ids = model.device, list(prompt)
    for _ in range(count):
        rows = max(24, len(ids))
        inputs = Inputs(
            ids=device.upload(np.asarray(ids + [7] * (rows - len(ids)), np.int32)),
            positions=device.upload(np.arange(rows, dtype=np.int32)),
            doc_start=device.upload(np.zeros((1, rows), np.int32)),
            cache_len=device.upload(np.zeros(1, np.int32)),
        )
        logits = device.download(model.logits(model.hidden(inputs).data))
        ids.append(int(np.argmax(logits[len(ids) - 1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "architecture, options",
    [("LlamaForCausalLM", {}), ("MistralForCausalLM", {"sliding_window": 5}), ("Qwen3ForCausalLM", {})],
)
def test_greedy_is_the_likeliest_token_of_the_whole_sequence(
    architecture: str, options: dict[str, Any], make_checkpoint: Any, device: Device
) -> None:
    model = model_for(make_checkpoint(architecture, **options), device)
    wanted = greedy_by_hand(model, PROMPT, 12)
    assert len(set(wanted)) > 3
    assert list(generate_ids(model, PROMPT, 12, GREEDY)) == wanted
    assert list(generate_ids(model, PROMPT[:1], 3, GREEDY)) == greedy_by_hand(model, PROMPT[:1], 3)


def test_a_stop_id_ends_the_text(make_checkpoint: Any, device: Device) -> None:
    model = model_for(make_checkpoint(), device)
    ids = list(generate_ids(model, PROMPT, 12, GREEDY))
    stop = ids[4]
    assert list(generate_ids(model, PROMPT, 12, GREEDY, {stop})) == ids[: ids.index(stop)]


def test_sampling_follows_its_seed_and_limits(make_checkpoint: Any, device: Device) -> None:
    model = model_for(make_checkpoint(), device)

    def draw(**options: Any) -> list[int]:
        return list(generate_ids(model, PROMPT, 16, Sampling(**options)))

    greedy = draw(temperature=0)
    assert draw(temperature=1.0, seed=1) == draw(temperature=1.0, seed=1)
    assert draw(temperature=1.0, seed=1) != draw(temperature=1.0, seed=2)
    assert draw(temperature=1.0, top_k=1, seed=3) == greedy
    assert draw(temperature=1.0, top_p=1e-6, seed=3) == greedy
    assert draw(temperature=1e-3, seed=3) == greedy


def test_nothing_is_compiled_once_two_tokens_are_out(make_checkpoint: Any, device: Device) -> None:
    tokens = generate_ids(model_for(make_checkpoint(), device), PROMPT, 12, Sampling(temperature=1.0))
    for _ in range(3):
        next(tokens)
    compiled = device.pipelines_compiled()
    assert len(list(tokens)) == 9 and device.pipelines_compiled() == compiled


def test_tokens_cost_the_host_nothing_but_reading_them_in_blocks(
    make_checkpoint: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, positions, the numbers that are drawn by and the cache's length stay on the device, which is ahead."""
    model, moved = model_for(make_checkpoint(), device), []

    def count(name: str) -> None:
        original = getattr(device, name)

        def counted(*arrays: Any) -> Any:
            moved.append((name, arrays[0].shape))
            return original(*arrays)

        monkeypatch.setattr(device, name, counted)

    for name in ("upload", "write", "download", "readback"):
        count(name)
    monkeypatch.setattr("wgrad.train.inference.generation.READ_SECONDS", 1e9)
    tokens = generate_ids(model, PROMPT, 40, Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=5))
    next(tokens)
    assert [shape for name, shape in moved if name == "readback"] == [(1,), (2,)]
    moved.clear()
    assert len(list(tokens)) == 39
    assert moved == [("readback", (n,)) for n in (4, 8, 16, 32, 40)]


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "OPTForCausalLM"]
)
def test_prompts_of_different_lengths_give_the_text_of_each_alone(
    architecture: str, make_checkpoint: Any, device: Device
) -> None:
    """As one by one, with windows, soft-caps and an end in the middle of one of them."""
    options = {"sliding_window": 5} if architecture != "LlamaForCausalLM" else {}
    model = model_for(make_checkpoint(architecture, **options), device)
    prompts = [PROMPT, PROMPT[:1], PROMPT[2:5], PROMPT * 2]
    one_by_one = [list(generate_ids(model, prompt, 20, GREEDY)) for prompt in prompts]
    assert generate_batch(model, prompts, 20, GREEDY) == one_by_one
    stop = one_by_one[0][4]
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in one_by_one]
    assert generate_batch(model, prompts, 20, GREEDY, {stop}) == cut and len(cut[0]) <= 4


def test_each_prompt_of_a_batch_is_drawn_by_a_seed_of_its_own(make_checkpoint: Any, device: Device) -> None:
    model = model_for(make_checkpoint(), device)
    alone = [list(generate_ids(model, PROMPT, 7, Sampling(temperature=1.0, seed=3 + b))) for b in range(3)]
    assert generate_batch(model, [PROMPT] * 3, 7, Sampling(temperature=1.0, seed=3)) == alone
    assert alone[0] != alone[1]


def test_an_empty_prompt_is_refused(make_checkpoint: Any, cpu: Device) -> None:
    with pytest.raises(WgradError, match="--prompt: has no token"):
        list(generate_ids(model_for(make_checkpoint(), cpu), [], 3, GREEDY))


# ---- logits that are not finite ----------------------------------------------------------------
@pytest.mark.parametrize(
    "compute, factor, cause", [("float32", 1e38, "failed: fetch them"), ("float16", 1e6, "use --compute float32")]
)
def test_a_model_that_computes_no_numbers_gives_no_text(
    compute: str, factor: float, cause: str, make_checkpoint: Any, device: Device
) -> None:
    if compute == "float16" and not device.float16:
        pytest.skip(f"{device.description} has no float16")
    folder = make_checkpoint()
    scale_last_norm(folder, factor)
    words = rf"not finite \(NaN or infinity\) within the first 1 token, .*{cause}"
    with np.errstate(all="ignore"), pytest.raises(UnusableResult, match=words):
        next(generate_ids(model_for(folder, device, compute=compute), PROMPT, 8, GREEDY))


def test_logits_that_turn_infinite_end_the_text_at_their_token(
    make_checkpoint: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found at the token itself: the host is one behind where it reads every token."""
    monkeypatch.setattr("wgrad.train.inference.generation.READ_SECONDS", 0.0)
    model, seen = model_for(make_checkpoint(), device), 0
    norm = model.weights["model.norm.weight"]
    with np.errstate(all="ignore"), pytest.raises(UnusableResult, match="within the first 7 tokens"):
        for _ in generate_ids(model, PROMPT, 40, GREEDY):
            seen += 1
            if seen == 5:
                device.write(norm, np.full(norm.shape, np.inf, np.float32))
    assert seen == 6


# ---- the command -------------------------------------------------------------------------------
def run(capsys: Any, *options: object) -> tuple[int, str, str]:
    status = main(["generate", "--device", "cpu", "--max-new-tokens", "8", *map(str, options)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_writes_the_text_and_nothing_else_to_stdout(make_checkpoint: Any, capsys: Any) -> None:
    folder = make_checkpoint()
    status, out, err = run(capsys, "--model", folder, "--prompt", "the quick", "--temperature", 0)
    assert status == 0 and out.startswith("the quick") and len(out) > len("the quick\n")
    assert err.startswith("device: ")
    assert run(capsys, "--model", folder, "--prompt", "the quick", "--temperature", 0)[1] == out


def test_the_command_ends_with_an_error_where_there_is_no_text(make_checkpoint: Any, capsys: Any) -> None:
    folder = make_checkpoint()
    scale_last_norm(folder, 1e38)
    status, out, err = run(capsys, "--model", folder, "--prompt", "the quick")
    assert (status, out) == (1, "") and "error: the model's logits are not finite" in err and "Traceback" not in err


def test_the_command_takes_an_adapter(make_checkpoint: Any, tmp_path: Path, capsys: Any) -> None:
    folder = make_checkpoint()
    lora = LoraConfig(r=2, alpha=8.0)
    generator = np.random.default_rng(0)
    shapes = lora_shapes(lora, linear_modules(load_model_config(folder)))
    values = {n: generator.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    save_adapter(tmp_path / "adapter", lora, values, str(folder))
    options = ("--model", folder, "--prompt", "all that", "--temperature", 0)
    with_adapter = run(capsys, *options, "--adapter", tmp_path / "adapter")
    assert with_adapter[0] == 0 and with_adapter[1] != run(capsys, *options)[1]


def test_an_adapter_whose_base_is_gone_says_so(make_checkpoint: Any, tmp_path: Path, capsys: Any) -> None:
    folder = make_checkpoint()
    lora = LoraConfig(r=2, alpha=4.0, target_modules=("q_proj",))
    values = init_lora(lora_shapes(lora, linear_modules(load_model_config(folder))), 0)
    save_adapter(tmp_path / "adapter", lora, values, "a folder that was moved")
    words = ["generate", "--adapter", str(tmp_path / "adapter"), "--prompt", "a", "--device", "cpu"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--adapter: its base model, 'a folder that was moved', is not to be had (no such folder" in said
    assert main([*words, "--model", "nowhere"]) == 2
    assert "error: --model: no such folder: nowhere" in capsys.readouterr().err


def test_chat_without_a_template_is_one_line(make_checkpoint: Any, capsys: Any) -> None:
    status, out, err = run(capsys, "--model", make_checkpoint(), "--prompt", "hello", "--chat")
    assert status == 2 and out == ""
    assert "has no chat template" in err.splitlines()[-1] and "Traceback" not in err


def test_what_a_user_should_know_of_the_files_is_said(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any
) -> None:
    """A head that is not the embedding it is said to be, and an adapter of another model that changes nothing."""
    folder = make_checkpoint(tie_word_embeddings=False)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    save_adapter(tmp_path / "adapter", LoraConfig(r=2, alpha=0.0), zeros_for(folder), "another/base")
    options = ["--model", str(folder), "--adapter", str(tmp_path / "adapter")]
    status, _, err = run(capsys, *options, "--prompt", "all that")
    train = ["finetune", *options, "--data", str(text_data), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert status == 0 and main([*train, "--max-steps", "1", "--max-length", "16"]) == 0
    for said in (err, capsys.readouterr().out):
        assert "note: config.json ties the head to the embedding, but lm_head.weight has other values" in said
        assert "note: lora_alpha of the adapter is 0: its scale is 0, so it changes nothing" in said
        assert f"note: the adapter names another/base as its base model, not {folder}: the result is right" in said


def zeros_for(folder: Path) -> dict[str, np.ndarray]:
    shapes = lora_shapes(LoraConfig(r=2, alpha=1.0), linear_modules(load_model_config(folder)))
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
