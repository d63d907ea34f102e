"""The command `wgrad`: exit statuses, one-line errors, and the output of small commands."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import wgrad
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import DeviceError, DeviceUnavailable, WgradError
from wgrad.device.files import writing
from wgrad.train.commands import cli, devices
from wgrad.train.commands.devices import describe, readable_bytes
from wgrad.train.commands.selftest import package_versions
from wgrad.train.files import hub as hub_module
from wgrad.train.files import hub_answers
from wgrad.train.files.hub import resolve_model
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.options.options import flag
from wgrad.train.output.checkpoints import STATE_FILE, Checkpoints
from wgrad.train.ranks.world import RankFailure

pytestmark = pytest.mark.usefixtures("short_samples")


def run(*words: str) -> int:
    return cli.main(list(words))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line on stderr of a command, which must exit with 2."""
    assert run(*words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("wgrad: error: ")
    return lines[0].removeprefix("wgrad: error: ")


def put(monkeypatch: pytest.MonkeyPatch, module: str, **functions) -> None:
    """Replace the module wgrad.train.<module> by one with these functions."""
    name = f"wgrad.train.{module}"
    fake = types.ModuleType(name)
    vars(fake).update(functions)
    monkeypatch.setitem(sys.modules, name, fake)


NEEDED = ("--model", "m", "--data", "d", "--out", "o")


# ---- arguments ---------------------------------------------------------------------------------
def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("finetune", "generate", "devices", "selftest"))
    for words in (["--help"], ["finetune", "--help"], ["generate", "--help"], ["devices", "-h"], ["selftest", "-h"]):
        assert run(*words) == 0
        assert capsys.readouterr().out.startswith("usage: wgrad")
    assert run("studio", "--help") == 0
    assert capsys.readouterr().out.startswith("usage: wgrad studio [RUNS] [options]\n")
    assert run("--version") == 0
    assert capsys.readouterr().out == f"wgrad {wgrad.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["finetun"], "unknown command 'finetun'"),
        (["finetune", "--rnak", "3"], "unknown argument --rnak (did you mean --lora-r?): see wgrad finetune --help"),
        (["finetune", "--rnak=3"], "unknown argument --rnak (did you mean --lora-r?)"),
        (["finetune", "stray", *NEEDED], "unknown argument stray: see wgrad finetune --help"),
        (
            ["finetune", *NEEDED, "--columns", "prompt=a", "text=b", "answer=c"],
            "unknown argument text=b (write --columns before each value: --columns OURS=THEIRS --columns OURS=THEIRS)",
        ),
        (["finetune", *NEEDED, "--data=d", "e"], "unknown argument e (write --data before each value"),
        (["finetune", *NEEDED, "--out", "my", "run"], "unknown argument run (--out takes one value: put a value with"),
        (
            ["finetune", "--epochs", "run", *NEEDED, "--out", "my", "run"],
            "unknown argument run (--out takes one value: put a value with",
        ),
        (["finetune", *NEEDED, "--full", "x"], "unknown argument x: see wgrad finetune --help"),
        (["--bogus"], "unknown argument --bogus"),
        (["finetune", "--epoch", "3", *NEEDED], "unknown argument --epoch (did you mean --epochs?)"),
        (["finetune", "--lora-r"], "argument --lora-r: expected one argument: see wgrad finetune --help"),
        (["finetune", "--lora-r", "x", *NEEDED], "--lora-r: expected a whole number, got 'x'"),
        (["finetune", "--model", "m"], "--data is required"),
        (["generate", "--model", "m"], "--prompt is required: give it"),
        (["generate", "--model", "m", "--prompt", ""], "--prompt is required: give it"),
        (["generate", "--model", "m", "--prompt", "x", "--top-p", "0"], "--top-p: must be above 0 and at most 1"),
        (["generate", "--model", "m", "--prompt", "x", "--top-k", "-1"], "--top-k: must not be negative"),
        (["generate", "--model", "m", "--prompt", "x", "--top-k", "a"], "--top-k: expected a whole number, got 'a'"),
        (["generate", "--model", "m", "--prompt", "x", "--temperature", "-1"], "--temperature: must not be negative"),
        (
            ["generate", "--model", "m", "--prompt", "x", "--max-new-tokens", "0"],
            "--max-new-tokens: must be at least 1",
        ),
        (
            ["generate", "--model", "m", "--prompt", "x", "--compute", "int8"],
            "--compute: must be one of auto, float32, float16",
        ),
        (["selftest", "--device", "abacus"], "abacus"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in refused(capsys, *words)


def test_finetune_passes_the_configuration_on_and_prints_nothing_before_a_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def take(config) -> int:
        seen.append(config)
        return 0

    put(monkeypatch, "run.finetune", run_finetune=take)
    assert run("finetune", *NEEDED, "--lora-r", "3") == 0
    assert (seen[0].model, seen[0].lora_r) == ("m", 3)
    assert capsys.readouterr().out == ""


def test_generate_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GenerateConfig] = []

    def take(args: GenerateConfig) -> int:
        seen.append(args)
        return 0

    put(monkeypatch, "commands.generate", run_generate=take)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"A wise\nman"), encoding="ascii"))
    assert run("generate", "--model", "m", "--prompt", "-", "--chat", "--no-quantize", "--temperature", "0") == 0
    args = seen[0]
    assert (args.prompt, args.chat, args.quantize, args.temperature, args.adapter) == (
        "A wise\nman",
        True,
        False,
        0,
        None,
    )
    assert (args.max_new_tokens, args.top_k, args.seed, args.device, args.compute) == (128, 0, 0, "auto", "auto")


# ---- what goes wrong while it runs -------------------------------------------------------------
@pytest.mark.parametrize(
    "error",
    [
        WgradError("the disk\n  is full"),
        DeviceUnavailable("the disk is full"),
        *(e("the disk is full") for e in (DeviceError,)),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_expected_error_has_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(config) -> int:
        raise error

    put(monkeypatch, "run.finetune", run_finetune=fail)
    assert refused(capsys, "finetune", *NEEDED) == "the disk is full"


@pytest.mark.parametrize("said", [True, False])
def test_one_rank_says_why_all_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: bool
) -> None:
    def fail(config) -> int:
        raise RankFailure("rank 1 (there): no such file", 2, said)

    put(monkeypatch, "run.finetune", run_finetune=fail)
    assert run("finetune", *NEEDED) == 2
    assert capsys.readouterr().err == "wgrad: error: rank 1 (there): no such file\n" * said


def test_the_devices_own_errors_are_expected() -> None:
    from wgrad.device.errors import DeviceLost, OutOfMemory

    assert issubclass(DeviceLost, DeviceError) and issubclass(OutOfMemory, DeviceError)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "run.finetune", run_finetune=lambda config: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run("finetune", *NEEDED)


def interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path, *message: str) -> str:
    def stop(config) -> int:
        raise KeyboardInterrupt(*message)

    put(monkeypatch, "run.finetune", run_finetune=stop)
    assert run("finetune", "--model", "m", "--data", "d", "--out", str(out)) == 130
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_interrupt_says_what_is_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "no checkpoint was saved yet" in interrupt(monkeypatch, capsys, tmp_path)
    for step in (9, 100):
        Checkpoints(tmp_path).save(step, {"parameters": np.zeros(3, np.float32)}, {})
    for name in ("step-200.77.partial", "step-x9", "step-9x8", "step-", "step-300", "step-\u0663"):  # not of ours
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-400").write_text("a file")
    shutil.copytree(tmp_path / "checkpoints" / "step-100", tmp_path / "checkpoints" / "step-500")
    Checkpoints(tmp_path).save(600, {"parameters": np.zeros(3, np.float32)}, {}, best=[9, 100, 300, 400, 500])
    (tmp_path / "checkpoints" / "step-600" / STATE_FILE).unlink()
    line = interrupt(monkeypatch, capsys, tmp_path)
    newest = tmp_path / "checkpoints" / "step-100"
    assert line == f"wgrad: interrupted: {newest} is saved; go on with the same command and --resume"
    assert interrupt(monkeypatch, capsys, tmp_path, "stopped, step 7") == "wgrad: stopped, step 7"


def test_a_full_disk_says_what_is_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fill(config) -> int:
        with writing(tmp_path / "x"):
            raise OSError(errno.ENOSPC, "")

    put(monkeypatch, "run.finetune", run_finetune=fill)
    words = ("--model", "m", "--data", "d", "--out", str(tmp_path))
    first = refused(capsys, "finetune", *words)
    assert first.startswith(f"cannot write {tmp_path / 'x'}: the disk is full") and "saved" not in first
    Checkpoints(tmp_path).save(9, {"parameters": np.zeros(3, np.float32)}, {})
    assert refused(capsys, "finetune", *words) == (
        f"{first}; {tmp_path / 'checkpoints' / 'step-9'} is saved, and --resume goes on from it"
    )
    assert "saved" not in refused(capsys, "finetune", *words, "--lr-sweep", "1e-4,2e-4")  # which does not resume


def test_the_installed_command_and_the_module_agree() -> None:
    for module in ("wgrad", "wgrad.train"):
        command = [sys.executable, "-m", module, "finetune", "--rnak", "3"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "error"})
        assert done.returncode == 2 and done.stdout == ""
        assert (
            done.stderr == "wgrad: error: unknown argument --rnak (did you mean --lora-r?): see wgrad finetune --help\n"
        )


PRINTS = pytest.mark.parametrize("words", [["--help"], ["selftest", "--device", "cpu", "--only", "rms_norm"]])
BUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"])


def printing_to(output: int, words: list[str], unbuffered: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "wgrad.train", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment)
    return done.returncode, done.stderr


@PRINTS
@BUFFERED
def test_a_reader_that_goes_away_is_no_error(words: list[str], unbuffered: str) -> None:
    """`wgrad selftest | head -n 1` ends silently once nobody reads its output."""
    read, write = os.pipe()
    os.close(read)
    assert printing_to(write, words, unbuffered) == (1, "")
    os.close(write)


@PRINTS
@BUFFERED
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_behind_standard_output_is_an_error(words: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        status, errors = printing_to(full.fileno(), words, unbuffered)
    assert (status, errors) == (2, f"wgrad: error: cannot write to standard output: {os.strerror(errno.ENOSPC)}\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    "words", ["cache list", "data show examples/data/proverbs.jsonl --model examples/base_model"], ids=["cache", "data"]
)
def test_output_that_cannot_be_written_is_an_error(words: str) -> None:
    with open("/dev/full", "wb") as full:
        status, errors = printing_to(full.fileno(), words.split(), "1")  # else the last flush says so
    assert (status, errors) == (2, f"wgrad: error: cannot write to standard output: {os.strerror(errno.ENOSPC)}\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_behind_standard_error_changes_no_status() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "wgrad", "finetune", "--rnak", "3"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, env=environment).returncode == 2


# ---- models ------------------------------------------------------------------------------------
def test_a_model_is_a_folder(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("spec", ["nowhere", "./a/b", "/nowhere/at/all", "a/b/c", "../a", "a b/c"])
def test_a_model_that_is_neither_folder_nor_hub_id_is_refused(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WgradError, match="--model: no such folder: .*org/name"):
        resolve_model(spec)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WgradError, match="--adapter: .* is a file: give the folder"):
        resolve_model(str(tmp_path / "model.safetensors"), "--adapter")


def test_weights_and_tokenizer_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and tokenizer are fetched once, without other formats or copies of the weights."""
    hub = pytest.importorskip("huggingface_hub")
    seen = {}

    def download(hub_id: str, local_files_only: bool = False, **patterns: list[str]) -> str:
        seen.update(patterns)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub.HfApi, "model_info", lambda self, name, timeout: None)
    assert resolve_model("org/name") == tmp_path
    files = [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "chat_template.jinja", "README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/config.json",
        "original/params.json",
    ]  # fmt: skip
    assert list(hub.utils.filter_repo_objects(files, **seen)) == files[:5]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GatedRepoError", "accept a license first: do so on huggingface.co/org/name"),
        ("RepositoryNotFoundError", "there is no such model, or it is private"),
        ("LocalEntryNotFoundError", "it cannot be reached and the model is not in its cache"),
        ("OSError", r"fetching failed \(disk gone\): check the network"),
    ],
)
def test_errors_of_the_hub_are_explained(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    hub = pytest.importorskip("huggingface_hub")
    kind = OSError if name == "OSError" else getattr(pytest.importorskip("huggingface_hub.errors"), name)

    def download(*args, **kwargs) -> str:
        error = kind.__new__(kind)  # their constructors want a whole response
        error.args = ("disk gone",)
        raise error

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub.HfApi, "model_info", lambda self, name, timeout: None)
    with pytest.raises(WgradError, match=f"--model: no such folder: org/name; .*{words}"):
        resolve_model("org/name")


def test_a_hub_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the connection and says nothing."""
    hub = pytest.importorskip("huggingface_hub")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(hub, "HfApi", functools.partial(hub.HfApi, endpoint=address))
        for module in (hub_module, hub_answers):
            monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
        with pytest.raises(WgradError, match=r"org/name; .* fetching failed \(no answer in 0.2 s\): check the network"):
            resolve_model("org/name")


def test_a_hub_that_cannot_be_reached_is_an_error(tmp_path: Path) -> None:
    """This runs in a new process, because the hub's client reads its settings once. Nothing listens on port 9."""
    pytest.importorskip("huggingface_hub")
    code = "from wgrad.train.files.hub import resolve_model; resolve_model('org/name')"
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "wgrad.device.errors.WgradError: --model: no such folder: org/name; from the Hugging Face Hub"
    )
    assert "give a local folder" in last


# ---- devices and selftest ----------------------------------------------------------------------
def test_devices_lists_and_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("devices") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("cpu") for line in lines)
    assert lines[-1].startswith("--device auto takes ")


def test_devices_describes_a_gpu() -> None:
    text = describe(
        {
            "spec": "wgpu:0",
            "name": "Some Card",
            "backend": "Vulkan",
            "type": "DiscreteGPU",
            "driver": "1.2",
            "memory_bytes": 8 * 2**30,
            "features": ["shader-f16", "texture-atomic"],
            "limits": {"max-buffer-size": 2**31 - 1, "max-compute-invocations-per-workgroup": 1024},
        }
    )
    assert text.splitlines() == [
        "wgpu:0: Some Card (Vulkan, DiscreteGPU, 1.2)",
        "    memory 8 GiB",
        "    has    shader-f16 (--compute float16)",
        "    lacks  timestamp-query (--profile)",
        "    limits largest buffer 2.0 GiB, workgroup invocations 1024",
    ]
    assert [readable_bytes(n) for n in (0, 1023, 1024, 1536, 2**40 * 3)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "3 TiB",
    ]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"spec": "cpu"}, "16 GiB, main memory"),
        ({"spec": "wgpu:0", "type": "CPU", "memory_bytes": None}, "16 GiB, main memory"),
        ({"spec": "wgpu:0", "type": "IntegratedGPU", "memory_bytes": 2**32}, "4 GiB, of main memory"),
        (
            {"spec": "wgpu:0", "type": "IntegratedGPU", "backend": "Metal", "memory_bytes": None},
            "shared with the CPU, which has 16 GiB",
        ),
        ({"spec": "wgpu:0", "type": "DiscreteGPU", "memory_bytes": None}, "unknown: the driver does not tell"),
        ({"spec": "wgpu:0", "type": "DiscreteGPU", "backend": "Metal"}, "unknown: the driver does not tell"),
    ],
)
def test_devices_says_whose_memory_it_is(monkeypatch: pytest.MonkeyPatch, device: dict, words: str) -> None:
    monkeypatch.setattr(devices, "main_memory", lambda: 16 * 2**30)
    assert f"    memory {words}" in describe({"name": "x", "usable": True, **device}).splitlines()
    monkeypatch.setattr(devices, "main_memory", lambda: None)
    unknown = "unknown" in describe({"name": "x", "usable": True, **device})
    assert unknown == (device.get("memory_bytes") is None)


def test_main_memory_is_that_of_this_machine() -> None:
    total = devices.main_memory()
    assert total is None or 2**28 < total < 2**48
    if Path("/proc/meminfo").exists():
        assert total is not None and total <= 1024 * int(Path("/proc/meminfo").read_text().split()[1])


def test_selftest_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("selftest", "--device", "cpu", "--only", "rms_norm") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("device: cpu: ")
    assert lines[1].split() == ["operator", "direction", "dtype", "shape", "error", "limit", "verdict"]
    assert all(line.startswith("rms_norm") and line.endswith(" ok") for line in lines[2:-1]) and len(lines) > 4
    assert lines[-1].startswith(f"all {len(lines) - 3} passed in ")


def test_selftest_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("selftest", "--device", "cpu", "--only", "rms_norm", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 0 and report["passed"] == len(report["results"]) > 1
    assert report["wgrad"] == wgrad.__version__ and report["device"]["name"] == "cpu"
    assert {"op", "direction", "dtype", "shape", "error", "limit", "ok"} <= set(report["results"][0])


def test_package_versions_are_known_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout has no metadata of wgrad, but the versions of other packages are still reported."""

    def none(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    assert package_versions()["numpy"] == np.__version__


class Wrong(ReferenceDevice):
    """A device whose gradient of the norm is off by 1 %, and whose silu fails."""

    reason = "made wrong"

    def rms_norm_backward(self, *args, **kwargs):
        dx, *rest = super().rms_norm_backward(*args, **kwargs)  # type: ignore[misc]
        return (dx * np.float32(1.01), *rest)

    def silu(self, *args, **kwargs):
        raise RuntimeError("no silu here")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("only", "words"), [("rms_norm_backward", ""), ("silu", "no silu here")])
def test_a_wrong_operator_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool, only: str, words: str
) -> None:
    """The oracle in run_selftest is the reference itself, which stays right."""
    monkeypatch.setattr("wgrad.train.commands.selftest.select_device", lambda spec, kernels: Wrong())
    assert run("selftest", "--only", only, *["--json"] * as_json) == 1
    out = capsys.readouterr().out
    assert words in out
    if as_json:
        assert json.loads(out)["failed"] > 0
    else:
        assert "FAILED" in out and out.splitlines()[-1].endswith("do not train on this device")


def test_a_name_that_no_case_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--only: no case has 'zzz' in its name" in refused(capsys, "selftest", "--device", "cpu", "--only", "zzz")


# ---- help --------------------------------------------------------------------------------------
def test_help_lists_every_command_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    parser = cli.build_parser()
    (commands,) = (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    assert sorted(name for names in cli.GROUPS.values() for name in names) == sorted(commands)
    assert all(f"\n{title}:\n" in text for title in cli.GROUPS)
    assert all(text.count(f"\n  {name} ") == 1 for name in commands)


def test_the_command_that_is_parsed_alone_has_its_options() -> None:
    """Creating the options of all commands takes ten milliseconds."""
    (commands,) = (a.choices for a in cli.build_parser("eval")._actions if isinstance(a, argparse._SubParsersAction))
    assert max(commands, key=lambda name: len(commands[name]._actions)) == "eval"


def test_help_of_a_run_shows_ten_options_and_help_all_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> set[str]:
        assert run(*words) == 0
        return set(re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))

    few, every = shown("finetune", "--help"), shown("finetune", "--help-all")
    assert len(few) == len(cli.USUAL) == 10
    assert every >= few | {flag(field.name) for field in dataclasses.fields(FinetuneConfig)}
    for command in ("plan", "data", "sweep", "warm"):
        some = shown(command, "--help")
        assert "--model" in some and 6 <= len(some - {"--json"}) <= 12
    assert not {"--resume", "--ranks", "--lr-sweep"} & shown("sweep", "--help-all")  # which it refuses
    assert "--data" not in shown("data", "--help-all") and "--data" in shown("sweep", "--help-all")
    assert len(shown("generate", "--help")) > 10


@pytest.mark.parametrize(
    ("command", "usage", "first"),
    [
        ("sweep", "--vary NAME=V,V --model DIR_OR_HUB_ID --data FILE --out DIR", ["--vary", "--trials", "--model"]),
        ("data", "show FILE [FILE ...] --model DIR_OR_HUB_ID", ["--examples", "--json", "--model"]),
        ("generate", "--model DIR_OR_HUB_ID --prompt TEXT", ["--model", "--adapter", "--prompt"]),
        ("chat", "--model DIR_OR_HUB_ID", ["--model", "--adapter"]),
        ("serve", "--model DIR_OR_HUB_ID", ["--model", "--adapter"]),
    ],
)
def test_help_begins_with_what_a_command_needs(
    command: str, usage: str, first: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: wgrad {command} {usage} [options]\n")
    assert re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)[: len(first)] == first
    if told := re.search(r"--help-all shows all (\d+) options", " ".join(text.split())):
        assert run(command, "--help-all") == 0
        names = set(re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help-all"}
        assert len({name.replace("--no-", "--") for name in names}) == int(told[1])


@pytest.mark.parametrize(
    ("word", "meant"), [("finetun", "finetune"), ("Generate", "generate"), ("matrix_units", "matrix-units")]
)
def test_a_mistyped_command_is_guessed(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, word) == f"unknown command {word!r} (did you mean {meant}?): see wgrad --help"
    assert refused(capsys, "zzzzzz") == "unknown command 'zzzzzz': see wgrad --help"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert run("completion", shell) == 0
    text = capsys.readouterr().out
    assert "finetune" in text and "target-modules" in text


def test_completion_says_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert refused(capsys, "completion", "bash") == "completion: shtab is not installed: pip install shtab"
