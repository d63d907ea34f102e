"""`wgrad studio`: the requests of its page to the server."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from starlette.requests import Request

from tests.modes import modes_count
from tests.train.studio_server import BASE, SHORT, Client, studio_in
from wgrad.train.commands.cli import build_parser, main
from wgrad.train.options.finetune_config import FinetuneConfig, RunOptions
from wgrad.train.options.option_fields import command_words, describe_fields, given_values, yaml_text
from wgrad.train.options.resolve import resolve_options
from wgrad.train.output.out_folder import OutFolder, holder_of
from wgrad.train.serve import children
from wgrad.train.serve import studio as studio_module
from wgrad.train.serve.chat_server import ChatServer
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.run_list import RunList

RECORD = {"prompt": "Hear, my son,", "completion": " the instruction of <b>thy father</b>."}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that are started use one thread."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text((json.dumps(RECORD) + "\n") * 8)
    return str(path)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with studio_in(tmp_path / "out") as found:
        yield found


# ---- options -------------------------------------------------------------------------------------
def test_every_field_is_an_option_of_finetune_with_its_own_description(client: Client) -> None:
    about = client.do("about")
    fields = {field["name"]: field for field in about["options"]}
    assert list(fields) == [field.name for field in dataclasses.fields(FinetuneConfig)] and set(about["usual"]) < set(
        fields
    )
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(FinetuneConfig)}
    assert {name: field["help"] for name, field in fields.items()} == helps
    assert {field["type"] for field in fields.values()} == {"bool", "int", "float", "str", "list", "lines"}
    assert fields["lora_r"] | {"help": ""} == {
        "name": "lora_r", "flag": "--lora-r", "help": "", "group": "adapter", "type": "int", "choices": [],
        "default": "16", "required": False, "path": False, "metavar": "R", "open": False,
    }  # fmt: skip
    assert fields["keep_norms"]["open"] and not fields["packing"]["open"] and fields["packing"]["default"] == "true"
    assert all(field["group"] for field in fields.values())


def test_command_and_yaml_say_what_the_form_says(tmp_path: Path) -> None:
    """Parsed again, both give the same options, for values of each kind, also with a leading dash."""
    given = {
        "model": "a b", "data": ["x=3", "-y"], "out": "o", "columns": ["prompt=a", "completion="], "packing": False,
        "target_modules": "q_proj, v_proj=4", "gradient_checkpointing": "3", "offload_activations": "true",
        "keep_norms": "false", "learning_rate": "1e-3", "memory_limit": " ", "sample_prompt": ["-v'\n;$(x)"],
        "batch_size": "auto", "report_to": [],
    }  # fmt: skip
    values = given_values(FinetuneConfig, given)
    assert "memory_limit" not in values and "report_to" not in values
    words = command_words(FinetuneConfig, values)
    read = vars(build_parser().parse_args(["finetune", *shlex.split(shlex.join(words))]))
    expected = resolve_options(values)
    assert resolve_options({k: v for k, v in read.items() if k not in ("command", "run")}) == expected
    (tmp_path / "c.yaml").write_text(yaml_text(values, resolve_options(values)), encoding="utf-8")
    assert resolve_options({"config": str(tmp_path / "c.yaml")}) == resolve_options(values)


def test_each_default_is_that_of_the_command() -> None:
    """A form that sends all defaults as it shows them requests the run without options."""
    for field in describe_fields(RunOptions):
        default = field["default"]
        if default:
            value = default.split(", ") if field["type"] == "lines" else default
            assert RunOptions(**{field["name"]: value}) == RunOptions(), field["name"]


def test_what_is_wrong_is_said_of_its_option(client: Client) -> None:
    found = client.do("check", options={"model": "m", "lora_r": "0", "data": ["d"]})
    assert found["command"] == "wgrad finetune --model m --data d --lora-r 0" and found["yaml"] == ""
    assert found["error"] == {"message": "--lora-r: must be at least 1; got 0", "param": "lora_r"}
    assert client.do("check", options={"model": "m", "lora_r": "3"})["yaml"] == "model: m\nlora_r: 3\n"
    assert client.do("check", options={})["error"] is None
    for options, message in (
        ([], "expected an object"), ({"modle": "x"}, "there is no option 'modle'"), ({"model": 3}, "--model: expected"),
    ):  # fmt: skip
        assert message in client.refused("check", options=options)


# ---- model, data, estimate -------------------------------------------------------------------------
def test_a_model_is_described_or_refused(client: Client, tmp_path: Path) -> None:
    found = client.do("model", model=BASE)
    assert (found["architecture"], found["layers"], found["positions"]) == ("LlamaForCausalLM", 4, 512)
    assert found["parameters"] == 918_656 and found["chat_template"] is False
    assert "--model is required" in client.refused("model", model=" ")
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in client.refused("model", model=str(tmp_path))


def test_examples_have_their_trained_tokens_marked(client: Client, data: str, tmp_path: Path) -> None:
    found = client.do("data", options={"model": BASE, "data": [data], "max_length": "64", "epochs": "3"})
    assert len(found["examples"]) == 4 and found["counts"] == "trained on" and found["steps"] == 3
    first = found["examples"][0]
    assert first["pieces"][0] == [RECORD["prompt"], False]
    assert first["pieces"][1][0].startswith(RECORD["completion"]) and first["pieces"][1][1] is True
    assert first["source"].endswith("data.jsonl:1") and 0 < first["trained"] < first["tokens"]
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n')
    message = client.refused("data", options={"model": BASE, "data": [str(tmp_path / "broken.jsonl")]})
    assert "broken.jsonl" in message and "wgrad:" not in message
    assert "standard input" in client.refused("data", options={"model": BASE, "data": ["-"]})


# In place of wgrad: its words as JSON, or what a command says that fails.
ECHO = "import json, sys; sys.stderr.write('a note\\n'); print(json.dumps(sys.argv[1:]))"
FAIL = "import sys; sys.stderr.write('a note\\nwgrad: error: --device: it has none\\n'); sys.exit(2)"


def test_an_estimate_is_that_of_plan(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model": "m", "data": ["d"], "out": "o", "lora_r": "3"}
    monkeypatch.setattr(children, "_CODE", ECHO)
    assert client.do("plan", options=options) == ["plan", "--json", "--model", "m", "--lora-r", "3"]
    monkeypatch.setattr(children, "_CODE", FAIL)
    assert client.refused("plan", options=options) == "--device: it has none"
    monkeypatch.setattr(children, "_CODE", "import os; os.abort()")
    assert "the process ended by signal 6" in client.refused("plan", options=options)


def test_a_command_that_nobody_waits_for_is_ended(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = studio_module.start

    def noted(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*words, **options))
        return started[-1]

    monkeypatch.setattr(studio_module, "start", noted)
    monkeypatch.setattr(children, "_CODE", "import time; time.sleep(600)")
    connection = http.client.HTTPConnection("127.0.0.1", client.port)
    connection.request("POST", "/api/plan", b'{"options": {"model": "m"}}', {"Content-Type": "application/json"})
    while not started:
        time.sleep(0.01)
    connection.close()
    assert started[0].wait(60) == -signal.SIGTERM


def test_a_command_ends_with_the_studio_however_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_CODE", "import time; time.sleep(600)")
    command = children.Command(["serve"])
    assert command.state == "running" and command._process.stdin is not None
    command._process.stdin.close()  # as the system does
    assert command._process.wait(60) == -signal.SIGTERM


def test_paths_go_on(client: Client, tmp_path: Path) -> None:
    for name in ("model-a", "Model-b", ".hidden", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "mode.jsonl").write_text("")
    prefix = f"{tmp_path}/"
    assert client.do("paths", text=f"{prefix}mo") == [f"{prefix}{n}" for n in ("Model-b/", "mode.jsonl", "model-a/")]
    assert client.do("paths", text=f"{prefix}.h") == [f"{prefix}.hidden/"]
    assert client.do("paths", text=f"{prefix}none/x") == [] and client.do("paths", text="\0") == []


# ---- who may ask -----------------------------------------------------------------------------------
def test_pages_of_other_sites_are_refused(client: Client) -> None:
    for path, method in (("/", "GET"), ("/pages/studio.js", "GET"), ("/api/about", "POST"), ("/v1/models", "GET")):
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
            status, found, _ = client.ask(method, path, {} if method == "POST" else None, **headers)
            assert status == 403 and "error" in found
    for kind in ("text/plain", "application/x-www-form-urlencoded"):  # all that a form of a page can send
        assert client.ask("POST", "/api/start", {}, Content_Type=kind)[0] == 415
    assert client.ask("GET", "/api/start")[0] == 405
    assert client.ask("POST", "/api/about", b"[" * 9999)[0] == client.ask("POST", "/api/about", b"[]")[0] == 400


def test_the_page_runs_its_own_files_only(client: Client) -> None:
    status, text, headers = client.ask("GET", "/")
    policy = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in policy and "script-src 'self';" in policy
    assert "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
    assert "http:" not in text and "https:" not in text and " style=" not in text and " on" + "click" not in text
    assert client.ask("GET", "/pages/../studio.py")[0] == client.ask("GET", "/pages/%2e%2e/studio.py")[0] == 404
    license = client.ask("GET", "/pages/uplot.js")[1]
    assert "MIT License" in license[:200] and "Leon Sorokin" in license[:300] and len(license) < 60_000


def test_every_request_but_for_the_page_needs_the_key(tmp_path: Path) -> None:
    """The page is served without it and asks for it; all other requests need it."""
    with studio_in(tmp_path, api_key="secret") as client:
        assert client.ask("GET", "/")[0] == client.ask("GET", "/pages/page.js")[0] == 200
        assert client.ask("POST", "/api/about", {})[0] == client.ask("GET", "/v1/models")[0] == 401
        assert client.ask("POST", "/api/about", {}, Authorization="Bearer secret")[0] == 200


def test_other_machines_need_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studio", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--host: 0.0.0.0 is reached from other machines: set WGRAD_API_KEY" in capsys.readouterr().err
    assert main(["studio", "--port", "0", __file__]) == 2
    assert "must be the folder of the runs; got a file" in capsys.readouterr().err


def test_without_the_web_server_studio_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "wgrad.train.commands.studio")
    for name in [name for name in sys.modules if name.split(".")[0] == "starlette"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["studio"]) == 2
    assert "is not installed: pip install 'wgrad[serve]'" in capsys.readouterr().err


# ---- runs ------------------------------------------------------------------------------------------
def test_a_run_from_nothing_to_its_result(client: Client, data: str, tmp_path: Path) -> None:
    """Another studio finds the run while it continues."""
    assert client.do("state")["runs"] == [] and not (tmp_path / "out").exists()
    out = str(tmp_path / "out" / "first")
    assert client.do("start", options={**SHORT, "data": [data], "out": out}) == {"run": out}
    assert "goes on already" in client.refused("start", options={**SHORT, "data": [data], "out": out})
    with studio_in(tmp_path / "out") as other:
        assert other.wait(out, "running", "done")
        found = other.wait(out, "done")
    assert client.wait(out, "done")["name"] == "first" and found["adapter"] and found["step"] == found["steps"] == 2
    state = client.do("state", have={out: [0, 0, 0, 0], "elsewhere": [0, 0, 0, 0]}, logs={out: -1})
    (news,) = state["news"].values()
    assert [record["step"] for record in news["metrics"]["records"]][:3] == [0, 1, 2]
    assert found["loss"] == news["metrics"]["records"][2]["loss"] and found["held_out_loss"] is not None
    log = state["logs"][out]
    assert log["text"].startswith(f"$ wgrad finetune --model {BASE} --data {data} --out {out} ")
    assert client.do("state", logs={out: log["size"]})["logs"] == {}
    again = {**SHORT, "data": [data], "out": f"{tmp_path}/./out/../out/first"}
    assert "already holds a finished run" in client.refused("start", options=again)
    assert client.run_state(out)["state"] == "done"
    for options, message in (
        ({}, "is finished: give more --epochs"), ({"max_steps": "1"}, "--max-steps: the run in"),
        ({"lora_r": "3"}, "--lora-r: cannot change here"),
    ):  # fmt: skip
        assert message in client.refused("resume", run=out, options=options)
    client.do("resume", run=out, options={"max_steps": "3"})
    assert client.wait(out, "done")["step"] == 3


def test_a_run_is_stopped_resumed_and_killed(client: Client, data: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out" / "long")
    client.do("start", options={**SHORT, "data": [data], "out": out, "max_steps": "100000"})
    while not (client.run_state(out)["step"] or 0) > 0:
        assert client.run_state(out)["state"] == "running"
        time.sleep(0.02)
    assert os.getsid(holder_of(out) or 0) == holder_of(out) != os.getsid(0)  # no Ctrl-C of this terminal ends it
    client.do("stop", run=out)
    found = client.wait(out, "stopped")
    assert found["resumes"] and "is saved; go on with --resume" in found["reason"]
    assert "does not go on" in client.refused("stop", run=out)
    assert "there is none in" in client.refused("stop", run=str(tmp_path))
    client.do("resume", run=out)
    assert client.run_state(out)["steps"] is None  # which the log told of the time before
    while holder_of(out) is None:
        assert client.run_state(out)["state"] == "running"
        time.sleep(0.02)
    os.kill(holder_of(out) or 0, signal.SIGKILL)
    found = client.wait(out, "failed")
    assert found["reason"] == "the process ended by signal 9 and gave no reason: see its output" and found["resumes"]
    with studio_in(tmp_path / "out") as other:  # which was not its parent
        assert other.run_state(out)["state"] == "stopped"


def test_a_run_that_fails_says_why(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "elsewhere" / "run")  # not in the folder of the studio
    monkeypatch.setattr(children, "_CODE", FAIL)
    client.do("start", options={**SHORT, "data": ["d"], "out": out})
    found = client.wait(out, "failed")
    assert found["reason"] == "--device: it has none" and not found["resumes"] and not found["adapter"]
    for options, message in (
        ({}, "--model is required"), ({**SHORT, "out": out}, "--data is required"),
        ({**SHORT, "data": ["x"], "out": out, "resume": True}, "--resume: is for a run that was begun"),
    ):  # fmt: skip
        assert message in client.refused("start", options=options)


def test_a_folder_is_held_while_its_process_lives(tmp_path: Path) -> None:
    """A lock whose process has ended holds nothing, even if another process has its number now."""
    assert holder_of(tmp_path) is None
    with OutFolder(tmp_path):
        assert holder_of(tmp_path) == os.getpid()
        note = (tmp_path / ".lock.json").read_bytes()
    assert holder_of(tmp_path) is None
    (tmp_path / ".lock.json").write_bytes(note)
    assert holder_of(tmp_path) is None
    with OutFolder(tmp_path) as again:
        assert again.left_by and holder_of(tmp_path) == os.getpid()


def test_a_run_whose_name_is_not_utf_8_is_listed(client: Client, tmp_path: Path) -> None:
    """Its files have such names, too, and the studio lists it like others."""
    name = os.fsdecode(os.fsencode(str(tmp_path / "out")) + b"/run\xff")
    os.makedirs(name)
    for file in ("config.yaml", "metrics.jsonl", "log.txt", "results.json"):
        Path(name, file).write_bytes(b"\xff\x00{\nwgrad: \xff")
    found = client.run_state(name)
    assert found["state"] == "stopped" and found["reason"] == "\ufffd" and found["loss"] is None
    state = client.do("state", have={name: [0, 0, 0, 0]}, logs={name: -1})
    assert state["news"][name]["options"] is None and len(state["news"][name]["notes"]) >= 2
    assert "\ufffd" in state["logs"][name]["text"]


def test_a_run_ended_before_it_answers_is_stopped_not_failed(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    """It is stopped, not failed. However its folder is named, it is in the list once."""
    monkeypatch.setattr(children, "_CODE", "import time; time.sleep(600)")
    out = f"{tmp_path}/elsewhere/../out/slow"
    (tmp_path / "elsewhere").mkdir()
    run = client.do("start", options={**SHORT, "data": [data], "out": out})["run"]
    assert run == str(tmp_path / "out" / "slow")
    client.do("stop", run=run)
    assert client.wait(run, "stopped", "failed")["state"] == "stopped"
    assert [one["name"] for one in client.do("state")["runs"]] == ["slow"]


def test_older_runs_are_found_by_their_names(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has the newest, and the runs that a page shows. Each keeps its number."""
    monkeypatch.setattr(studio_module, "MOST_RUNS", 2)
    for at, name in enumerate(("Run-5", "other", "run-6", "run-7")):
        config = tmp_path / "out" / name / "config.yaml"
        config.parent.mkdir(parents=True)
        config.write_text("")
        os.utime(config, (at, at))
    have = {str(tmp_path / "out" / "other"): [0, 0, 0, 0]}
    for asked, names, found in (
        ({}, {"run-7": 3, "run-6": 2}, 4),
        ({"have": have}, {"run-7": 3, "run-6": 2, "other": 1}, 4),
        ({"find": "UN-5"}, {"Run-5": 0}, 1),
        ({"find": "run", "have": have}, {"run-7": 3, "run-6": 2, "other": 1}, 3),
        ({"find": "none"}, {}, 0),
    ):
        state = client.do("state", **asked)
        assert {run["name"]: run["number"] for run in state["runs"]} == names and state["found"] == found
    (tmp_path / "out" / "run-8").mkdir()  # no run: none of its files
    (tmp_path / "out" / "run-5").mkdir()
    assert client.do("state")["free"] == str(tmp_path / "out" / "run-9")
    assert "find: expected a text" in client.refused("state", find=[1])


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's capabilities")
def test_a_folder_that_may_not_be_read_hides_no_run(client: Client, tmp_path: Path) -> None:
    for name in ("run-1", "run-2", "lost+found"):
        (tmp_path / "out" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "out" / name / "config.yaml").write_text("")
    (tmp_path / "out" / "lost+found").chmod(0)
    (tmp_path / "out" / "run-2" / "checkpoints").chmod(0)
    try:
        with modes_count():
            runs = RunList(str(tmp_path / "out"))
            assert {path.name for path in runs.folders()} == {"run-1", "run-2"}
            assert runs.state(tmp_path / "out" / "run-2")["resumes"] is False
    finally:
        (tmp_path / "out" / "lost+found").chmod(0o700)
        (tmp_path / "out" / "run-2" / "checkpoints").chmod(0o700)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "", "a"), "a: the disk is full"),
        (RuntimeError("can't start new thread"), "the system starts no further thread"),
        (MemoryError(), "out of main memory"),
    ],
)
def test_a_refusal_of_the_system_is_answered(
    error: Exception, words: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **named: object) -> NoReturn:
        raise error

    monkeypatch.setattr(studio_module, "find_model", refuse)
    assert client.refused("model", model="m").startswith(words)


def test_a_working_folder_that_is_gone_is_no_error(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "")

    monkeypatch.setattr(os, "getcwd", refuse)
    assert client.studio.about({})["here"] == ""


def test_a_draft_is_seen_by_other_tabs(client: Client) -> None:
    first = client.do("draft", options={"model": "m", "lora_r": ""})["draft_number"]
    assert client.do("draft", options={"model": "m"})["draft_number"] == first
    state = client.do("state")
    assert (state["draft"], state["draft_number"]) == ({"model": "m"}, first)


def test_an_export_is_a_command(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_CODE", FAIL)
    (tmp_path / "out" / "run").mkdir(parents=True)
    (tmp_path / "out" / "run" / "config.yaml").write_text("format: 1\n")
    run = str(tmp_path / "out" / "run")
    assert "must be one of ollama" in client.refused("export", run=run, tool="rm")
    assert "--quantize: must be one of" in client.refused("export", run=run, tool="ollama", options={"quantize": "q"})
    client.do("export", run=run, tool="llama.cpp", options={"quantize": "q8_0", "create": False})
    found = _ended_export(client)
    assert found["command"] == f"wgrad export llama.cpp --adapter {run} --quantize q8_0"
    assert found["state"] == "failed" and found["reason"] == "--device: it has none" and "a note" in found["lines"]
    monkeypatch.setattr(children, "_CODE", ECHO)
    client.do("export", run=run, tool="ollama", options={"create": False})
    assert _ended_export(client)["state"] == "done"
    monkeypatch.setattr(children, "_CODE", "import time; time.sleep(600)")
    client.do("export", run=run, tool="ollama")
    assert "another one is being written" in client.refused("export", run=run, tool="ollama")
    client.do("export/stop")
    assert _ended_export(client)["reason"] == "the process ended by signal 15 and gave no reason: see its output"


def _ended_export(client: Client) -> dict[str, Any]:
    while (found := client.do("state")["export"])["state"] == "running":
        time.sleep(0.02)
    return dict(found)


# A server in place of that of the models: it wants its key, and answers in parts.
SERVER = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.headers["Authorization"] == "Bearer " + os.environ["WGRAD_API_KEY"]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if b"none" not in body else 404)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for _ in range(2):
            self.wfile.write(b"data: " + body + b"\\n\\n")
    def log_message(self, *a): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print("loading", sys.argv[1:], flush=True)
print("serving base, run at http://127.0.0.1:%d/v1 (Ctrl-C ends it)" % server.server_port, flush=True)
server.serve_forever()
"""


def test_a_chat_is_with_a_server_of_its_own(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "out" / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("format: 1\nmodel: base\nchat_template: chatml\ndevice: cpu\n")
    assert "has no result to chat with yet" in client.refused("chat/open", run=str(run))
    assert client.ask("POST", "/v1/chat/completions", {})[0] == 503
    (run / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(children, "_CODE", SERVER.replace("{", "{{").replace("}", "}}"))
    client.do("chat/open", run=str(run))
    while (chat := client.do("state")["chat"])["state"] == "loading":
        time.sleep(0.02)
    assert chat["state"] == "ready" and chat["run"] == str(run) and chat["title"] == "run", chat
    words = client.studio.chat._command.words if client.studio.chat._command else []
    assert words[words.index("--adapter") :] == [
        "--adapter", f"run={run}", "--model", "base", "--chat-template", "chatml", "--device", "cpu"
    ]  # fmt: skip
    status, text, headers = client.ask("POST", "/v1/chat/completions", {"model": "run"})
    assert (status, text) == (200, 'data: {"model": "run"}\n\n' * 2) and headers["content-type"] == "text/event-stream"
    assert client.ask("POST", "/v1/chat/completions", {"model": "none"})[0] == 404
    client.do("chat/close")
    assert client.do("state")["chat"]["state"] == "closed" and client.ask("GET", "/v1/models")[0] == 503
    monkeypatch.setattr(children, "_CODE", FAIL)
    client.do("chat/open", model="m")
    while (chat := client.do("state")["chat"])["state"] == "loading":
        time.sleep(0.02)
    assert (chat["state"], chat["reason"]) == ("failed", "--device: it has none")


def test_the_command_prints_its_address_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "wgrad", "studio", "--port", "0", str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("wgrad studio at http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
    assert (process.returncode, out, error) == (130, "", "wgrad: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reply", [b"", b"nonsense\r\n\r\n"], ids=["nothing", "no HTTP"])
def test_a_broken_reply_of_the_model_is_an_error_of_the_gateway(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        chat = ChatServer()
        chat._command = SimpleNamespace(address=f"http://127.0.0.1:{listener.getsockname()[1]}")  # type: ignore[assignment]
        request = Request({"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "query_string": b""})
        with pytest.raises(ApiError, match="the model's process does not answer") as caught:
            asyncio.run(chat.forward(request))
        thread.join(10)
    assert caught.value.status == 502
