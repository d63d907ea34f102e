"""README and docs are right: figures match bench/results, commands parse and run, and links exist."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import wgrad
from tests.conftest import require_wgpu
from wgrad.autograd.custom_operator import unregister_operator
from wgrad.autograd.custom_shader import unregister_shader
from wgrad.device.errors import WgradError
from wgrad.hip.runtime.architectures import SUPPORTED
from wgrad.train.commands.cli import build_parser, main
from wgrad.train.data.data import load_data
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.model.lora_variants import VARIANTS
from wgrad.train.options.finetune_config import RunOptions

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "bench/notes").glob("*"))]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"


def _blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for named, block in found if named == language]


def _commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each `wgrad` command in the page's shell blocks."""
    for block in _blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line.split("  #")[0]):
                part = re.sub(r"^\s*([A-Z_]+=\S+ )*(\S*mpirun .*?|srun .*?|docker run .*?)?(?=\S*\bwgrad )", "", part)
                if re.match(r"(\S*/)?wgrad ", part):
                    yield shlex.split(part)[1:]


# ---- figures -------------------------------------------------------------------------------------
def test_figures_are_those_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "bench" / "make_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"checkpointing": False, "offload_checkpoints": False}, "off"),
        ({"checkpointing": True}, "on"),
        ({"checkpointing": True, "offload_checkpoints": True}, "on, offloaded"),
        ({"checkpointing": True, "offload_checkpoints": 0, "layers": 32}, "on"),
        ({"checkpointing": True, "offload_checkpoints": 1, "layers": 32}, "on, 1 of 32 offloaded"),
        ({"checkpointing": True, "offload_checkpoints": 14, "layers": 32}, "on, 14 of 32 offloaded"),
        ({"checkpointing": True, "attention_kept": True}, "on, attention kept"),
        (
            {"checkpointing": True, "offload_checkpoints": True, "attention_kept": True},
            "on, offloaded, attention kept",
        ),
    ],
)
def test_rows_say_how_many_layers_are_offloaded(row: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    assert importlib.import_module("make_table").recomputed(row) == said


def test_hip_tables_take_what_rows_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables without rows are left out. Forward rows are next to the peer's, and slower ones are named."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    render_hip = importlib.import_module("hip_tables").render_hip
    assert "62.2" in render_hip(tmp_path) and "backward" not in render_hip(tmp_path)
    row = {"arch": "gfx942", "kernel": "attention_forward_bf16_rtne_128", "vgpr": 248, "lds": 32768, "spills": 0}
    row |= {"scratch": 0, "busy": {"300": 0.8, "600": 0.5, "1200": 0.42}, "busy_loop": {"600": 0.7}}
    (tmp_path / "hip_attention.jsonl").write_text(json.dumps(row) + "\n")
    text = render_hip(tmp_path)
    assert "| 248 | 32 KiB | 80.0 / 50.0 / 42.0 | – / 70.0 / – | – | – |" in text
    assert "It loses to the peer at 600 clocks." in text
    # The model gives no speed: no figure is above the one that somebody has measured.
    assert "605 TFLOP/s at 131,072 tokens and 535 TFLOP/s at 8,192" in text
    assert max(int(n.replace(",", "")) for n in re.findall(r"([\d,]+) TFLOP/s", text)) == 605


def test_a_report_of_a_gpu_makes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so whatever a stranger's file contains, and wherever the report stopped."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    module = importlib.import_module("gpu_table")
    assert module.gpu_table([]) == "No report has been taken in yet."
    summary = {"name": "GPU | <b>X", "driver": "1.2", "backend": "Vulkan", "memory_bytes_per_second": 8.004e11}
    summary |= {"float32_per_second": 6.1e13, "tensor_cores_per_second": None, "times_cpu": 812.4}
    report = {"format": 1, "wgrad": "0.1", "date": "2026-01-02", "summary": summary}
    report |= {"system": {"platform": "Linux-6.1-x86_64", "machine": "x86_64"}}
    good = {"self-test": {"passed": 9, "failed": 0}, "fine-tune": {"ok": True, "compute": "float16"}}
    bad = {"self-test": {"passed": 7, "failed": 2, "deaths": [{}]}, "fine-tune": {"ok": False, "compute": "float32"}}
    early = {"self-test": {"state": "hung at rope"}}
    said = []
    for parts in (good, bad, early):
        (tmp_path / "gpu.json").write_text(json.dumps({**report, **parts}))
        said.append(module.gpu_table([tmp_path / "gpu.json"]).splitlines()[-1])
    begin = "| GPU  bX | 1.2 (Vulkan) | Linux x86_64 |"
    rates = "| 800 GB/s | 61 TFLOP/s | – | 812 |"
    assert said[0] == f"{begin} 9 passed {rates} as NumPy (float16) | 0.1, 2026-01-02 |"
    assert said[1] == f"{begin} 2 of 9 failed, 1 crashed {rates} wrong (float32) | 0.1, 2026-01-02 |"
    assert said[2] == f"{begin} hung at rope {rates} not run | 0.1, 2026-01-02 |"
    (tmp_path / "gpu.json").write_text(json.dumps({**report, "format": 2}))
    with pytest.raises(WgradError, match="format 2, and this script reads 1"):
        module.gpu_table([tmp_path / "gpu.json"])
    (tmp_path / "gpu.json").write_text(json.dumps({**report, "fine-tune": {"ok": 3}}))
    with pytest.raises(WgradError, match=r"gpu\.json: fine-tune\.ok must be"):
        module.gpu_table([tmp_path / "gpu.json"])
    (tmp_path / "gpu.json").write_text(json.dumps({**report, "system": {"platform": 3, "machine": ""}}))
    with pytest.raises(WgradError, match=r"gpu\.json: system\.platform must be text; got 3"):
        module.gpu_table([tmp_path / "gpu.json"])


# ---- form ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    generated = re.compile(r"(reference/)?(cli(/[\w-]+)?|operators)\.md$")  # docs/_hooks/reference.py
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in target or generated.search(target) or (page.parent / target).exists(), target


def test_pages_stay_short() -> None:
    """A page answers one question, and README fits on a few screens."""
    lines = {p.relative_to(ROOT).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in PAGES}
    assert lines["README.md"] <= 120 and lines["docs/benchmarks.md"] <= 200
    assert {name: n for name, n in lines.items() if name.startswith("docs/") and n > 250} == {}


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")} <= listed


# ---- commands ------------------------------------------------------------------------------------
def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        name for page in PAGES for name in re.findall(r"^make ([\w-]+)", "\n".join(_blocks(page, "bash")), re.MULTILINE)
    }
    assert named >= {"finetune", "test", "test-fast", "lint"}
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_the_workflow_runs_tests_that_are_there() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert named and not [path for path in named if not (ROOT / path).exists()]


def _workflow_commands() -> list[list[str]]:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["other-systems"][
        "steps"
    ]
    return [shlex.split(step["run"])[1:] for step in steps if step.get("run", "").startswith("wgrad ")]


def _notebook_commands() -> list[list[str]]:
    cells = json.loads((ROOT / "examples/colab_kaggle.ipynb").read_text(encoding="utf-8"))["cells"]
    lines = [line.strip() for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    return [shlex.split(line)[1:] for line in lines if line.startswith("!wgrad ")]


def test_commands_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option in commands of README, docs and CI is in the command's help."""
    commands = [*(words for page in PAGES for words in _commands(page)), *_workflow_commands()]
    docker = list(_commands(ROOT / "docs/how-to/install.md"))
    assert [words[0] for words in docker] == [*["devices"] * 3, "doctor", "devices", "finetune"]
    commands += (notebook := _notebook_commands())
    assert {words[0] for words in notebook} == {"devices", "doctor", "finetune", "generate"}
    assert {words[0] for words in commands} >= {"finetune", "generate", "devices", "selftest", "merge", "plan", "serve"}
    helps: dict[str, str] = {}
    for words in commands:
        if words[0] not in helps:
            assert main([words[0], "--help"]) == 0
            helps[words[0]] = capsys.readouterr().out
            if "--help-all" in helps[words[0]]:
                assert main([words[0], "--help-all"]) == 0
                helps[words[0]] = capsys.readouterr().out
        for option in (word for word in words[1:] if word.startswith("--")):
            assert re.search(rf"{option.split('=')[0]}\b", helps[words[0]]), (words[0], option)


OF_OTHER_PROGRAMS = {"--bind-to", "--mca", "--cpus-per-task", "--rows"}  # of mpirun, srun, a bench script


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and its commands, without hidden ones (former names)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
        elif action.help is not argparse.SUPPRESS:
            yield from action.option_strings


def test_options_in_sentences_exist() -> None:
    """An option in backquotes is in the help of some command. In Python it is spelled with `_`."""
    known = {*_options(build_parser()), *OF_OTHER_PROGRAMS}
    for page in (page for page in PAGES if "notes" not in page.parts and page.name != "CHANGELOG.md"):
        text = page.read_text(encoding="utf-8")
        assert {*re.findall(r"`(--[a-z][\w-]*)", text)} <= known, page
        for option, argument in re.findall(r"`--([a-z-]+)` is `(\w+)`", text):
            assert argument == option.replace("-", "_"), page


def test_the_table_of_gpus_knows_what_hip_runs() -> None:
    """A chip has HIP in its row if and only if the kernels run on it. Every row says whether it was tested."""
    lines = (ROOT / "docs/reference/gpus.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    rows = [row for row in rows if re.match("no|yes", row[-1])]
    assert len(rows) >= 25
    chips = {chip: row for row in rows for chip in re.findall(r"gfx\w+", row[1])}
    for chip, (_, _, takes, advice, _) in chips.items():
        assert ("HIP" in takes) == ("HIP" in advice) == (chip in SUPPORTED), chip
    assert set(SUPPORTED) - set(chips) <= {"gfx1152", "gfx1153"}  # small processors


# ---- code blocks run -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the embedded model, with a chat template, and a file of each kind of record."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(ROOT / "examples" / "base_model", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (record, *_) = _blocks(ROOT / "docs/tutorials/preferences.md", "json")
    (folder / "pairs.jsonl").write_text(record * 20, encoding="utf-8")
    (records, *_) = _blocks(ROOT / "docs/tutorials/chat-data.md", "json")
    (folder / "chat.jsonl").write_text(records * 10, encoding="utf-8")
    (records,) = _blocks(ROOT / "README.md", "json")
    (folder / "data.jsonl").write_text(records * 10, encoding="utf-8")
    return folder


def test_the_sample_lines_are_data(workshop: Path) -> None:
    config = RunOptions(data=(str(workshop / "data.jsonl"),), eval_fraction=0)
    assert len(load_data(config, load_tokenizer(workshop / "model")).train) == 30


STARTS_A_SERVER = {"watch", "serve", "studio"}
SHORTER = {
    "finetune": "--device cpu --max-steps 2 --batch-size 2 --gradient-accumulation-steps "
    "1 --max-length 64 --lora-r 2 --eval-tokens 64 --no-sample",
    "generate": "--device cpu --max-new-tokens 2",
    "chat": "--device cpu --max-new-tokens 2 --context 128",
    "merge": "--device cpu --no-compare",
    "plan": "--data data.jsonl --max-length 64",
    "data": "",
    "export": "",
    "export ollama": "--device cpu --no-create",
    "export lmstudio": "--device cpu",
    "export llama.cpp": "--device cpu",
    "devices": "",
}
NAMES = {"DIR_OR_HUB_ID": "model", "HuggingFaceTB/SmolLM2-135M-Instruct": "model", "FILE": "data.jsonl"}
NAMES |= {"base.gguf": "out/chat/llama.cpp/model.gguf"}
RUN = ["README.md", "docs/tutorials/first-fine-tune.md", "docs/tutorials/chat-data.md", "docs/tutorials/preferences.md"]
# A tutorial goes on where another ends, so both are in one test: tests may run in different processes.
TOGETHER = [[page] for page in RUN if "chat-data" not in page]
TOGETHER += [["docs/tutorials/chat-data.md", "docs/tutorials/adapter-to-ollama.md"]]


@pytest.mark.parametrize("pages", TOGETHER, ids=lambda pages: pages[-1])
def test_commands_run(pages: list[str], workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of README and each tutorial in order, shortened, on the embedded model."""
    monkeypatch.chdir(workshop)
    for page in pages:
        run_commands(page, monkeypatch)


def run_commands(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = 0
    for words in _commands(ROOT / page):
        if words[0] in STARTS_A_SERVER or words[0] not in SHORTER:
            continue
        if words[0] == "plan":
            require_wgpu()
        words = [NAMES.get(word, word) for word in words]
        if words[:2] == ["export", "lmstudio"]:
            words += ["--out", "models"]
        out = words[words.index("--out") + 1] if "--out" in words else None
        if out is not None:
            shutil.rmtree(out, ignore_errors=True)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who wrote Emma?\n")))
        short = SHORTER.get(" ".join(words[:2]), SHORTER[words[0]])
        assert main([*words, *short.split()]) == 0, words
        ran += 1
    assert ran >= 2, page


def test_the_page_of_the_autograd_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Its code blocks are one program. The page's registered operators are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wgrad.autograd.creation._default", ["cpu"])
    text = "\n".join(_blocks(ROOT / "docs/tutorials/autograd.md", "python"))
    assert text.count('"auto"') == 1
    space: dict[str, Any] = {}
    exec(text.replace('"auto"', '"cpu"'), space)
    unregister_operator("squared_relu")
    unregister_shader("row_sums")
    assert space["fast"].launches > 0 and space["loaded"].keys() == {"w0", "w1", "w2"}
    assert float(capsys.readouterr().out.split()[-1]) > 0.5


def test_the_python_page_runs(workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    first, guided, second, third, variant = _blocks(ROOT / "docs/reference/python.md", "python")
    monkeypatch.chdir(workshop)
    shutil.rmtree("out", ignore_errors=True)
    space: dict[str, Any] = {}
    for text, short in (
        ("max_steps=20", 'max_steps=2, device="cpu"'),
        ("result.out) as", 'result.out, device="cpu", context=64) as'),
    ):
        assert text in first
        first = first.replace(text, short)
    exec(first, space)
    assert space["result"].steps == 2 and "out/mine" in capsys.readouterr().out
    exec(guided.replace('base_model")', 'base_model", device="cpu", context=160)'), space)
    assert re.search("^[0-9]{4}-[0-9]{2}-[0-9]{2}$", capsys.readouterr().out, re.MULTILINE)
    exec(second, space)
    options = {"model": "examples/base_model", "data": space["records"], "device": "cpu", "sample": False}
    options |= {"seq_len": 64, "gradient_accumulation_steps": 1, "max_steps": 1}
    space["wgrad"].finetune(out="out/watched", callbacks=[space["Watch"](), print], **options)
    said = capsys.readouterr().out
    assert "checkpoints/step-1" in said and "StepReport(step=1" in said
    exec(third, space)
    metrics = {"accuracy": space["accuracy"]}
    space["wgrad"].finetune(out="out/own", loss=space["loss"], metrics=metrics, **options)
    assert "held_out_accuracy_after" in Path("out/own/results.json").read_text()
    exec(variant, space)
    assert isinstance(VARIANTS.pop("gated"), wgrad.LoraVariant)


# Beginnings of sentences that a reader has to solve first; private words, and the field's word for each.
RIDDLES = re.compile(r'^\s*"""(What|That|Which|Whether|Of) ')
PRIVATE = {"parked": "offloaded", "parking": "offloading", "made again": "recomputed", "passed over": "skipped"}
PRIVATE |= {"matrix units": "tensor cores", "beside": "next to", "roofs?": "peak rate"}
PRIVATE |= {"(the|a|an|graphics|such|this|no) cards?": "GPU", "rows of the batch": "sequences"}


def test_docstrings_say_first_what_a_thing_is() -> None:
    """A summary is a noun phrase or an imperative."""
    folders = ("src", "device", "wgsl", "hip", "autograd", "train", "bench", "tests", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "node_modules" not in path.parts]
    lines = [(path, line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(files) > 600
    assert [f"{path.relative_to(ROOT)}: {line.strip()}" for path, line in lines if RIDDLES.match(line)] == []


def test_docstrings_of_public_functions_name_their_parameters_results_and_errors() -> None:
    functions = {name: getattr(wgrad, name) for name in wgrad.__all__ if inspect.isfunction(getattr(wgrad, name))}
    missing = []
    for name, function in functions.items():
        args = (function.__doc__ or "").partition("Args:")[2]
        wanted = [] if name == "where" else inspect.signature(function).parameters  # it is one of a table: *operands
        missing += [f"{name}: {n}" for n in wanted if not re.search(rf"^ +(\w+, )*\**{n}(, \w+)*:", args, re.MULTILINE)]
        returns = inspect.signature(function).return_annotation not in ("None", "Any")
        missing += [f"{name}: Returns"] * (returns and "Returns:" not in (function.__doc__ or ""))
    for name in ("compile", "einsum", "finetune", "generate", "load", "select_device", "sweep", "tensor"):
        missing += [f"{name}: Raises"] * ("Raises:" not in (functions[name].__doc__ or ""))
    assert len(functions) > 20 and missing == []


def _messages() -> dict[str, str]:
    """Return the texts in each source that users may see: those of several words, without docstrings."""
    found = {}
    for path in (p for room in ("device", "wgsl", "hip", "autograd", "train") for p in (ROOT / room).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
        found[f"{path.relative_to(ROOT)}, a message"] = "\n".join(t for t in texts if isinstance(t, str) and " " in t)
    return found


def test_pages_and_help_use_the_fields_words(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES if "notes" not in page.parts
    }
    for command in ("finetune", "generate", "serve", "merge", "eval", "bench", "matrix-units", "plan", "warm"):
        main([command, "--help-all" if command in ("finetune", "plan", "warm") else "--help"])
        texts[f"wgrad {command} --help"] = " ".join(capsys.readouterr().out.split())
    texts.pop("CHANGELOG.md")
    texts |= _messages()
    found = [
        f"{name}: {word!r}: say {said!r}"
        for name, text in texts.items()
        for word, said in PRIVATE.items()
        if re.search(rf"\b{word}\b", text)
    ]
    assert found == []


def test_rejected_ideas_say_when_they_could_help() -> None:
    notes = sorted((ROOT / "bench/notes").glob("rejected-*.md"))
    assert len(notes) >= 7
    for note in notes:
        text = note.read_text(encoding="utf-8")
        assert "| Idea | Result | Kept instead |" in text and "\n## When it could help\n\n" in text, note.name


def test_the_python_api_page_shows_every_argument() -> None:
    """The arguments of finetune are the command's options with types and defaults, and not `**given`."""
    griffe = pytest.importorskip("griffe", reason="the docs are not installed: make docs")
    spec = importlib.util.spec_from_file_location("signatures", ROOT / "docs/_hooks/signatures.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    name, source = "wgrad.train.library.finetune", ROOT / "train/library/finetune.py"
    extensions = griffe.Extensions(hook.Signatures())
    module = griffe.visit(name, filepath=source, code=source.read_text(encoding="utf-8"), extensions=extensions)
    shown = module["finetune"]
    assert [p.name for p in shown.parameters] == list(inspect.signature(wgrad.finetune).parameters)
    assert (str(shown.parameters["lora_r"].annotation), shown.parameters["lora_r"].default) == ("int", "16")
    assert "lora_r: Rank of the adapters" in shown.docstring.value
