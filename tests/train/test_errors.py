"""A user's mistake, or the machine's limit: exit 2, one line that says what to do, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.template_process import shared_process
from wgrad.train.files.safetensors_files import from_arrays, write_safetensors
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.options.option_text import size
from wgrad.train.output.checkpoints import KEEP
from wgrad.train.run import session, whole_run
from wgrad.train.run.disk_room import check_disk, disk_need

pytestmark = pytest.mark.usefixtures("short_samples")

Case = Callable[[Path, Path], list[str]]  # model folder, data file -> further options


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def missing_shard(model: Path, data: Path) -> list[str]:
    (model / "model-00002-of-00002.safetensors").unlink()
    return []


def truncated_shard(model: Path, data: Path) -> list[str]:
    path = model / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return []


def wrong_dtype(model: Path, data: Path) -> list[str]:
    name = "model.layers.0.mlp.up_proj.weight"
    path = ModelFiles(model).entries[name].path
    arrays = {n: np.array(e.array()) for n, e in ModelFiles(model).entries.items() if e.path == path}
    write_safetensors(path, from_arrays(arrays | {name: arrays[name].astype(np.int8)}))
    return []


def other_architecture(model: Path, data: Path) -> list[str]:
    edit_config(model, architectures=["BloomForCausalLM"], model_type="bloom")
    return []


def small_vocabulary(model: Path, data: Path) -> list[str]:
    edit_config(model, vocab_size=200)
    return []


def no_tokenizer(model: Path, data: Path) -> list[str]:
    (model / "tokenizer.json").unlink()
    return []


def no_line(model: Path, data: Path) -> list[str]:
    data.write_text("\n \n")
    return []


def malformed_line(model: Path, data: Path) -> list[str]:
    data.write_text('{"text": "one two"}\n{"text": "three"\n')
    return ["--on-bad-line", "stop"]


def no_target(model: Path, data: Path) -> list[str]:
    data.write_text(json.dumps({"prompt": "a long prompt " * 30, "completion": "never seen"}) + "\n")
    return []


def a_table(model: Path, data: Path) -> list[str]:
    data.with_suffix(".xlsx").write_bytes(b"PK\3\4 one two\n")
    return ["--data", str(data.with_suffix(".xlsx"))]


def endless_template(model: Path, data: Path) -> list[str]:
    (model / "chat_template.jinja").write_text("{% for i in range(10**5) %}" * 3 + "{% endfor %}" * 3)
    data.write_text(json.dumps({"messages": [{"role": "assistant", "content": "x"}]}) + "\n")
    return []


def no_such_module(model: Path, data: Path) -> list[str]:
    return ["--target-modules", "q_proj", "query_key_value"]


def huge_rank(model: Path, data: Path) -> list[str]:
    return ["--lora-r", "100000"]


def endless_rank(model: Path, data: Path) -> list[str]:
    return ["--lora-r", str(2**63 - 1), "--target-modules", "q_proj"]


def endless_rank_of_one(model: Path, data: Path) -> list[str]:
    return ["--target-modules", "q_proj=999999999", "k_proj"]


def rank_that_is_no_text(model: Path, data: Path) -> list[str]:
    return ["--lora-r", "\udcff"]


def model_beyond_its_files(model: Path, data: Path) -> list[str]:
    edit_config(model, hidden_size=1 << 22, intermediate_size=1 << 22, num_hidden_layers=1 << 12)
    return []


def pointers_of_git_lfs(model: Path, data: Path) -> list[str]:
    for shard in model.glob("*.safetensors"):
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    return []


def no_such_adapter(model: Path, data: Path) -> list[str]:
    return ["--adapter", str(model)]


def no_such_device(model: Path, data: Path) -> list[str]:
    return ["--device", "wgpu:no such card"]


CASES: dict[Case, str] = {
    missing_shard: r"lacks 1 of 2 shards \(model-00002-of-00002.safetensors\)",
    truncated_shard: r"model-00001-of-00002.safetensors is cut off or damaged \(.+\): fetch the file again",
    wrong_dtype: r"model.layers.0.mlp.up_proj.weight in .* is I8: expected F32, F16, BF16",
    other_architecture: r"model_type 'bloom', architecture BloomForCausalLM is not supported: use a model",
    small_vocabulary: r"embed_tokens.weight in .* has shape \[300, 48\]: config.json asks for \[200, 48\]",
    no_tokenizer: r"has no tokenizer.json",
    no_line: r"data.jsonl is empty",
    malformed_line: r"data.jsonl:2: not valid JSON",
    no_target: r"data.jsonl:1: no token to learn is left after truncation to 32 tokens",
    a_table: r"data.xlsx is a table by its name \(.xlsx\)",
    endless_template: r"chat template does not end within 0.5 s",
    no_such_module: r"'query_key_value' matches no projection of this model: it has down_proj, gate_proj",
    huge_rank: r"--lora-r: must be at most 88, the longest side of the "
    r"projections that it adapts; got 100000: a larger",
    endless_rank: r"--lora-r: must be at most 48,",
    endless_rank_of_one: r"--target-modules: a rank must be at most 48,",
    rank_that_is_no_text: r"--lora-r: expected a whole number",
    model_beyond_its_files: r"embed_tokens.weight in .* has shape \[300, 48\]: config.json asks for \[300, 4194304\]",
    pointers_of_git_lfs: r"model-00001-of-00002.safetensors is a pointer of Git LFS.*: run 'git lfs pull' in ",
    no_such_adapter: r"has no adapter_config.json",
    no_such_device: r"wgpu",
}


def options_for(model: Path, data: Path, out: Path) -> list[str]:
    options = ["finetune", "--model", model, "--data", data, "--out", out, "--device", "cpu", "--max-length", 32]
    return list(map(str, [*options, "--max-steps", 3, "--logging-steps", 1, "--save-steps", 1]))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_mistakes_end_with_one_line_status_2_and_nothing_written(
    case: Case, make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_process(), "_seconds", 0.5)  # for an endless template
    model = make_checkpoint(shards=2)
    more = case(model, text_data)
    assert main([*options_for(model, text_data, tmp_path / "out"), *more]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("wgrad: error: ")
    assert re.search(CASES[case], captured.err), captured.err
    assert "Traceback" not in captured.out
    assert not (tmp_path / "out").exists()


def test_a_base_model_that_an_adapter_could_not_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["finetune", "--model", "a\udcffb", "--data", "d.jsonl", "--out", str(out)]) == 2
    assert "is not UTF-8, so adapter_config.json could not name it" in capsys.readouterr().err and not out.exists()


def test_weights_are_compared_with_config_json_before_data_is_read(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a wrong folder is told at once, and no memory is taken for what its files do not hold."""
    model = make_checkpoint()
    edit_config(model, intermediate_size=96)
    monkeypatch.setattr(session, "load_data", None)
    assert main(options_for(model, text_data, tmp_path / "out")) == 2
    assert re.search(r"gate_proj.weight in .* has shape \[88, 48\]", capsys.readouterr().err)


def test_a_full_disk_ends_the_run_with_one_line(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> None:
    """No file may grow beyond 16 kB (as a full disk, for every process): the first checkpoint cannot be written."""
    model, out = make_checkpoint(), tmp_path / "out"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))

    # Python before 3.14 keeps the part of a module's bytecode that it could write, and every later import of it fails.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "wgrad.train.commands.cli", *options_for(model, text_data, out)]
    process = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, env=environment)
    assert process.returncode == 2, process.stderr
    assert process.stderr.count("\n") == 1 and "Traceback" not in process.stderr
    assert "cannot write" in process.stderr and "--out" in process.stderr
    assert not list(out.rglob("*.partial")) and not list(out.rglob("*.safetensors"))
    # With room again the same command with --resume goes through.
    assert subprocess.run([*command, "--resume"], capture_output=True).returncode == 0
    assert (out / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("full", [False, True])
def test_the_disk_is_compared_with_what_a_run_takes(
    full: bool, make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it begins. Too little for the first checkpoint is an error, too little for all of it is said."""
    model, out = make_checkpoint(), tmp_path / "out"
    kind = ["--full", "--learning-rate", "1e-4"] if full else ["--lora-r", "16"]
    with monkeypatch.context() as patched:
        patched.setattr(whole_run, "check_disk", seen := Mock(wraps=check_disk))
        assert main([*options_for(model, text_data, out), *kind]) == 0
    assert "the disk has" not in capsys.readouterr().out
    ((_, trained, steps), _) = seen.call_args
    assert steps == 3
    config = FinetuneConfig(model="m", data=("d",), out=str(out), full=full, save_steps=1)
    need = disk_need(config, trained, steps=3)
    checkpoint = sum(path.stat().st_size for path in (out / "checkpoints" / "step-3").iterdir())
    result = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert need.first == pytest.approx(checkpoint, rel=0.15)
    assert need.most == pytest.approx(3 * checkpoint + result, rel=0.15)
    assert disk_need(config, trained, steps=3, there=2).most == pytest.approx(checkpoint + result, rel=0.15)
    assert disk_need(config, trained, steps=3, there=KEEP + 1).most == need.first + 4 * trained  # of one with more kept
    best = {"keep_best": 2, "eval_steps": 1, "eval_fraction": 0.5}
    for changes, steps, kept in (({"save_steps": 0}, 3, 1), ({"save_steps": 2}, 3, 2), (best, 9, KEEP + 3)):
        assert disk_need(replace(config, **changes), trained, steps).most == kept * need.first + 4 * trained
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:  # its checkpoints are there already
        patched.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need.first + 4 * trained))
        assert check_disk(config, trained, 3) == "" != check_disk(replace(config, out=str(tmp_path)), trained, 3)
        patched.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        assert check_disk(replace(config, lr_sweep=(1e-4, 1e-3)), trained, 3) == ""
        patched.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0, total=0))  # as some systems say
        assert check_disk(config, trained, 3) == ""
    runs = (
        ("little", need.first - 1, 2, f"--out: a checkpoint in {tmp_path / 'little'} takes about {size(need.first)}"),
        ("some", need.first, 0, f"{tmp_path / 'some'}: checkpoints and the result take up to {size(need.most)}"),
        ("enough", need.most, 0, ""),
    )
    for name, free, status, words in runs:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", Mock(return_value=usage._replace(free=free)))
            assert main([*options_for(model, text_data, tmp_path / name), *kind]) == status
        said = "".join(capsys.readouterr())
        assert (f"{words}, and the disk has {size(free)} free" in said) == bool(words) and words in said
        assert (tmp_path / name).exists() == (status == 0)


@pytest.mark.usefixtures("shared_pipelines")
def test_the_disk_is_compared_before_weights_are_read_and_with_the_steps_that_are_left(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint()
    options = options_for(model, text_data, tmp_path / "out")
    monkeypatch.setattr(whole_run, "check_disk", seen := Mock(return_value=""))
    assert main(options) == 0 == main([*options, "--resume", "--max-steps", "5"])
    assert [call.args[2] for call in seen.call_args_list] == [3, 2]
    monkeypatch.setattr(whole_run, "check_disk", Mock(side_effect=WgradError("full")))
    monkeypatch.setattr(whole_run, "build_session", build := Mock())
    assert main([*options_for(model, text_data, tmp_path / "other"), "--device", "wgpu"]) == 2
    assert not build.called


def test_a_model_that_does_not_fit_is_one_line_with_advice(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("wgrad.device.errors")

    def build(*args: Any, **kwargs: Any) -> Any:
        raise errors.OutOfMemory("no memory for 12 bytes")

    monkeypatch.setattr(whole_run, "build_session", build)
    assert main(options_for(make_checkpoint(), text_data, tmp_path / "out")) == 2
    err = capsys.readouterr().err
    assert err == "wgrad: error: no memory for 12 bytes: use a smaller model\n"


def test_a_lost_device_keeps_the_last_checkpoint(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("wgrad.device.errors")
    model, out = make_checkpoint(), tmp_path / "out"
    step = whole_run.Trainer.step

    def lost(self: Any, item: Any, lr: float) -> None:
        if item.index == 2:
            raise errors.DeviceLost("the device was lost: restart the driver")
        step(self, item, lr)

    monkeypatch.setattr(whole_run.Trainer, "step", lost)
    assert main(options_for(model, text_data, out)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the device was lost" in err
    monkeypatch.undo()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-1", "step-2"]
    shutil.rmtree(out / "checkpoints" / "step-1")
    assert main([*options_for(model, text_data, out), "--resume"]) == 0


def test_float16_where_the_device_has_none(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wgrad.autograd.reference import ReferenceDevice

    monkeypatch.setattr(ReferenceDevice, "float16", False)
    options = options_for(make_checkpoint(), text_data, tmp_path / "out")
    assert main([*options, "--compute", "float16"]) == 2
    assert "--compute float16: " in capsys.readouterr().err
    monkeypatch.setattr(ReferenceDevice, "bfloat16", False)
    assert main([*options, "--compute", "bfloat16"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--compute bfloat16: " in err and "--device hip" in err
