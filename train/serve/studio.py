"""The application of `wgrad studio`: a page and its requests. Long work, and work on a device, is done by a command of
wgrad in a child process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import shlex
import subprocess
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import wgrad
from wgrad.device.errors import WgradError
from wgrad.train.data.tokenizer_source import open_tokenizer
from wgrad.train.files.input_files import expand_path, one_line
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.export_config import EXPORT_TOOLS, ModelExportConfig
from wgrad.train.options.finetune_config import USUAL, FinetuneConfig
from wgrad.train.options.option_fields import command_words, describe_fields, given_values, yaml_text
from wgrad.train.options.options import flag
from wgrad.train.options.resolve import resolve_config, resolve_options
from wgrad.train.output.previous_run import previous_run
from wgrad.train.serve.body import read_body
from wgrad.train.serve.chat_server import ChatServer
from wgrad.train.serve.children import Command, start, why_ended
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.pages import page_routes
from wgrad.train.serve.run_list import RunList
from wgrad.train.step.find_model import find_model
from wgrad.train.terminal.ending import ending_of

PAGE_FILES = ("page.css", "page.js", "chat.js", "charts.js", "studio.js", "uplot.js")
_ELSEWHERE = ("model", "data", "out", "resume")  # options with their own place on the page
_ALSO_USUAL = ("max_steps", "device", "chat_template")
_LONGER = ("epochs", "max_steps")
_EXAMPLES = 4
_MOST_PATHS = 30
MOST_RUNS = 100
_EXPORTED = ("name", "out", "quantize", "create", "device")  # options of `wgrad export TOOL` that the page has
Handler = Callable[[dict[str, Any]], Any]


@dataclass
class Studio:
    """State shared by all tabs: the runs, the options of the next one, an export, and the models to chat with."""

    runs: RunList
    page_routes: list[Route] = field(default_factory=lambda: page_routes("studio.html", *PAGE_FILES))
    draft: dict[str, Any] = field(default_factory=dict)
    draft_number: int = 0
    export: Command | None = None
    chat: ChatServer = field(default_factory=ChatServer)
    name: str = field(default_factory=lambda: secrets.token_hex(8))  # lets a page notice a restarted server
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """End the chat and the export. Runs continue."""
        self.chat.close()
        if self.export is not None:
            self.export.end()

    # ---- requests of the page ------------------------------------------------------------------
    def about(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the facts that do not change."""
        export = describe_fields(ModelExportConfig)
        return {
            "version": wgrad.__version__,
            "folder": str(self.runs.folder),
            "here": _working_folder(),
            "options": describe_fields(FinetuneConfig, "objective"),
            "usual": [*(name for name in USUAL if name not in _ELSEWHERE), *_ALSO_USUAL],
            "longer": _LONGER,
            "tools": EXPORT_TOOLS,
            "export": [option for option in export if option["name"] in _EXPORTED],
        }

    def check(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the command line and the YAML of a run, and its first error, if there is one."""
        values = given_values(FinetuneConfig, asked.get("options"))
        command = shlex.join(["wgrad", "finetune", *command_words(FinetuneConfig, values)])
        try:
            return {"command": command, "yaml": yaml_text(values, resolve_options(values)), "error": None}
        except WgradError as error:
            return {"command": command, "yaml": "", "error": _told(error)}

    def model(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Describe a base model, without reading its weights."""
        spec = str(asked.get("model", "")).strip()
        if not spec:
            raise WgradError("--model is required: give a folder, a GGUF file or a Hub id")
        folder = find_model(spec, weights=False)
        config = load_model_config(folder)
        tokenizer, note = open_tokenizer(folder, None, config.vocab_size)
        return {
            "architecture": config.architecture,
            "parameters": sum(math.prod(spec.shape) for spec in weight_specs(config)),
            "layers": config.num_hidden_layers,
            "positions": config.positions,
            "chat_template": tokenizer.has_chat_template,
            "note": note,
        }

    def paths(self, asked: dict[str, Any]) -> list[str]:
        """Return completions of a path that is being typed; folders end with a slash."""
        text = str(asked.get("text", ""))
        head, _, start = text.replace("\\", "/").rpartition("/")
        folder = Path(expand_path(f"{head}/" if head or text.startswith("/") else ".", "path"))
        prefix = f"{head}/" if "/" in text else ""
        try:
            found = sorted(path for path in folder.iterdir() if path.name.lower().startswith(start.lower()))
            shown = [path for path in found if start.startswith(".") or not path.name.startswith(".")]
            return [f"{prefix}{path.name}{'/' if path.is_dir() else ''}" for path in shown[:_MOST_PATHS]]
        except OSError:
            return []

    def begin(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Start a run."""
        values = given_values(FinetuneConfig, asked.get("options"))
        if values.get("resume"):
            raise WgradError("--resume: is for a run that was begun: open it under Runs, and resume it there")
        previous_run(resolve_config(values))
        return {"run": str(self.runs.begin(values))}

    def resume(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Resume a run with its options; a finished one with more of `_LONGER`."""
        path = self.runs.find(asked.get("run"))
        values = given_values(FinetuneConfig, asked.get("options", {}))
        if others := values.keys() - set(_LONGER):
            raise WgradError(f"{flag(min(others))}: cannot change here: use the run's options for another run")
        whole = {"out": str(path), "resume": True} | values
        if previous_run(resolve_config(whole)).finished:
            raise WgradError(f"run: {path} is finished: give more --epochs or --max-steps")
        self.runs.resume(path, whole)
        return {}

    def stop(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Ask a run to end."""
        self.runs.stop(self.runs.find(asked.get("run")))
        return {}

    def keep_draft(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Keep the options of the next run for other tabs."""
        draft = given_values(FinetuneConfig, asked.get("options"))
        with self.lock:
            self.draft_number += draft != self.draft
            self.draft = draft
            return {"draft_number": self.draft_number}

    def state(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the whole state, and the news of the runs named in `have`.

        Listed are these runs, and the newest of those whose names contain `find`; `found` counts those. A run's
        `number` is that of its start.
        """
        have, logs, find = asked.get("have", {}), asked.get("logs", {}), asked.get("find", "")
        if not isinstance(have, dict) or not isinstance(logs, dict):
            raise WgradError("have, logs: expected objects with a value for each run: load the page anew")
        if not isinstance(find, str):
            raise WgradError("find: expected a text: load the page anew")
        with self.lock:
            folders = self.runs.folders()
            found = [path for path in folders if find.casefold() in path.name.casefold()]
            wanted = {*map(str, found[:MOST_RUNS]), *have, *logs}
            listed = {str(path): path for path in folders if str(path) in wanted}
            numbers = {str(path): len(folders) - 1 - at for at, path in enumerate(folders)}
            runs = [{**self.runs.state(path), "number": numbers[name]} for name, path in listed.items()]
            news = {name: self._news(listed[name], had) for name, had in have.items() if name in listed}
        sizes = {run["run"]: run["log_bytes"] for run in runs}
        changed = [name for name, size in logs.items() if name in listed and size != sizes[name]]
        return {
            "server": self.name,
            "runs": runs,
            "found": len(found),
            "free": str(self.runs.free(len(folders))),
            "news": news,
            "logs": {name: {"size": sizes[name], "text": self.runs.log(listed[name])} for name in changed},
            "draft": self.draft,
            "draft_number": self.draft_number,
            "chat": self.chat.state(),
            "export": self._export_state(),
        }

    def _news(self, path: Path, had: Any) -> dict[str, Any]:
        if not (isinstance(had, list) and len(had) == 4 and all(isinstance(n, int) and n >= 0 for n in had)):
            raise WgradError("have: expected four numbers of each run: load the page anew")
        run = self.runs.watched(path)
        run.read()
        return run.news((had[0], had[1], had[2], had[3]))

    def _export_state(self) -> dict[str, Any] | None:
        if self.export is None:
            return None
        lines = list(self.export.lines)
        command = shlex.join(["wgrad", *self.export.words])
        return {"state": self.export.state, "command": command, "lines": lines, "reason": self.export.reason}

    def begin_export(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Write the merged model for another tool."""
        tool = asked.get("tool")
        if tool not in EXPORT_TOOLS:
            raise WgradError(f"tool: must be one of {', '.join(EXPORT_TOOLS)}; got {str(tool)[:80]!r}")
        values: dict[str, Any] = {"adapter": str(self.runs.find(asked.get("run")))}
        values |= given_values(ModelExportConfig, asked.get("options", {}))
        if tool != "ollama":
            values.pop("create", None)
        ModelExportConfig(**values)
        with self.lock:
            if self.export is not None and self.export.state == "running":
                raise WgradError("export: another one is being written: wait for its end, or stop it")
            self.export = Command(["export", str(tool), *command_words(ModelExportConfig, values)])
        return {}

    def stop_export(self, asked: dict[str, Any]) -> dict[str, Any]:
        """End an export."""
        if self.export is not None:
            self.export.end()
        return {}

    def open_chat(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Load a model to chat with, or a run's base model and its adapter."""
        if asked.get("run"):
            self.chat.open_run(self.runs.find(asked["run"]))
        else:
            self.chat.open_model(str(asked.get("model", "")).strip(), str(asked.get("device", "")).strip() or "auto")
        return {}

    def close_chat(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Free the models that were loaded to chat with."""
        self.chat.close()
        return {}


def _working_folder() -> str:
    """Return the folder that relative paths begin at; "": it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def make_studio(studio: Studio) -> Starlette:
    """Return the web application."""
    handlers: dict[str, Handler] = {
        "about": studio.about,
        "check": studio.check,
        "model": studio.model,
        "paths": studio.paths,
        "start": studio.begin,
        "resume": studio.resume,
        "stop": studio.stop,
        "draft": studio.keep_draft,
        "state": studio.state,
        "export": studio.begin_export,
        "export/stop": studio.stop_export,
        "chat/open": studio.open_chat,
        "chat/close": studio.close_chat,
    }
    routes = [Route(f"/api/{name}", _answering(handler), methods=["POST"]) for name, handler in handlers.items()]
    routes += [
        Route("/api/data", _data, methods=["POST"]),
        Route("/api/plan", _plan, methods=["POST"]),
        Route("/v1/{path:path}", studio.chat.forward, methods=["GET", "POST"]),
        *studio.page_routes,
    ]
    handlers_of_errors: Any = {ApiError: _api_error, WgradError: _wgrad_error, HTTPException: _http_error}
    handlers_of_errors |= {kind: _refused_by_system for kind in (OSError, RuntimeError, MemoryError)}
    return Starlette(routes=routes, exception_handlers=handlers_of_errors)


def _answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        asked = await _object(request)
        found = await run_in_threadpool(handler, asked)
        return _json(json.dumps(found, allow_nan=False))

    return answer


async def _object(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises ApiError if it is not one, or too large."""
    try:
        value = json.loads(await read_body(request))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "the request: expected a JSON object: send one")
    return value


async def _data(request: Request) -> Response:
    """Answer with examples of the data, the tokens that are trained on, and statistics."""
    values = given_values(FinetuneConfig, (await _object(request)).get("options"))
    files = values.pop("data", [])
    if not isinstance(files, list):
        raise WgradError("--data: expected a list of files: give one per line")
    if "-" in files:
        raise WgradError("--data: standard input cannot be read from a page: give a file")
    words = command_words(FinetuneConfig, {k: v for k, v in values.items() if k not in ("out", "resume")})
    named = [f"./{name}" if name.startswith("-") else name for name in files]
    return await _command(request, ["data", "show", *named, "--examples", str(_EXAMPLES), "--json", *words])


async def _plan(request: Request) -> Response:
    """Answer with the memory and speed of a run."""
    values = given_values(FinetuneConfig, (await _object(request)).get("options"))
    for name in ("data", "out", "resume", "eval_data", "columns"):
        values.pop(name, None)
    return await _command(request, ["plan", "--json", *command_words(FinetuneConfig, values)])


async def _command(request: Request, words: list[str]) -> Response:
    """Answer with the output of a command, which is ended when the client has gone."""
    process = await run_in_threadpool(lambda: start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    done = asyncio.ensure_future(run_in_threadpool(_output, process))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not done.done():
            process.terminate()
    out, error = await done
    if process.returncode:
        raise WgradError(why_ended(process.returncode, error.decode("utf-8", "replace")))
    return _json(out)


def _output(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Return standard output and error of a command, keeping its standard input open meanwhile."""
    assert process.stdout is not None and process.stderr is not None
    with ThreadPoolExecutor(1) as other:
        error = other.submit(process.stderr.read)
        out = process.stdout.read()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        return out, error.result()


async def _gone(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _told(error: WgradError) -> dict[str, Any]:
    """Return the message of an error, and the option that it is about."""
    message = one_line(str(error), 2000)
    name = message.partition(":")[0].partition(" ")[0]
    return {"message": message, "param": name[2:].replace("-", "_") if name.startswith("--") else None}


async def _wgrad_error(request: Request, error: Any) -> Response:
    return _json(json.dumps({"error": _told(error)}), 400)


async def _refused_by_system(request: Request, error: Any) -> Response:
    """Answer with what a command would say: the folder of a run may not be read, or the disk is full."""
    ending = ending_of(error)
    if ending is None:
        raise error
    return await _wgrad_error(request, WgradError(ending[0]))


async def _api_error(request: Request, error: Any) -> Response:
    return _json(json.dumps(error.body()), error.status)


async def _http_error(request: Request, error: Any) -> Response:
    message = f"{request.method[:20]} {one_line(request.url.path)}: {error.detail}: load the page anew"
    answer = _json(json.dumps(ApiError(error.status_code, message).body()), error.status_code)
    answer.headers.update(error.headers or {})
    return answer


def _json(text: str | bytes, status: int = 200) -> Response:
    """Return an answer. Its text is ASCII, so that file names that are not UTF-8 survive both ways."""
    return Response(text, status, {"Cache-Control": "no-store"}, "application/json")
