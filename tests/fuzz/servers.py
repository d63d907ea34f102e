"""Requests to the web servers, as bytes: `http serve`, `http serve-key`, `http studio`, `http watch`.

The folders of runs that the pages show are changed too.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import uvicorn

from tests.fuzz.case import Case, Content, Files, Special
from tests.fuzz.options import option_names
from tests.fuzz.readers import PATHS, PROMPTS, request_body
from tests.fuzz.texts import odd_text
from tests.fuzz.values import hostile, mutate_bytes, mutate_json, mutate_value, write_json
from tests.fuzz.wire import connections, converse, request_bytes, target
from tests.fuzz.words import READ_PATHS, ROLE_TEMPLATES, WRITE_PATHS, YAML_VALUES

HTTP = "http"
_GET = ("/", "/health", "/metrics", "/v1/models", "/v1/models/model", "/api/version", "/api/tags", "/api/ps")
_REFUSED = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete")
_PAGES = ("/pages/page.css", "/pages/page.js", "/pages/nope.js", "/pages/../serve.py", "/favicon.ico")
_RUN = "out"
_LOG = (
    b"$ wgrad finetune --out out\nstep 1/2  loss 5.1  left 0:01\nstep 2/2  loss 5.0  left 0:00\nwgrad: interrupted\n",
    b"step " + b"9" * 5000 + b"/2\n", b"step \xd9\xa1/\xd9\xa2\n", b"\n$ wgrad \n" * 9, b"wgrad: error: \x1b[31m\n",
    b"\xff\xfe",
    b"wgrad: \nx" * 4000, b"step 1/2 left " + b"x" * 40_000, b"\n", b"wgrad: error: " + b"y" * 9000,
)  # fmt: skip
_HOLDER = b'{"pid": 4194304, "host": "h", "started": "2026-01-01 00:00:00", "format": 1}'
_RECORDS = (
    b'{"step": 3, "loss": 1e999}', b'{"step": 1' + b"0" * 30 + b"}", b'{"step": ' + b"1" * 5000 + b"}", b"[" * 90_000,
    b'{"step": 2, "loss": NaN, "x": {}}', b'{"step": true}', b'{"step": 4, "loss": 1' + b"0" * 320 + b"}", b"null",
    b"\xff",
    b'{"step": 4, "' + b"k" * 999 + b'": 1}', b'{"step": 5, "a": "\\ud800", "\\ud800": 1}', b'{"a": 1, ' * 5000, b"",
    b'{"step": 5, "prompt": "\\ud800", "text": "\\u0000"}', b'{"step": 5, "prompt": 1}', b"x" * 100_000,
)  # fmt: skip


def serve_case(rng: Random, groups: Any) -> Case:
    """One to four requests to `wgrad serve`, of any path and method."""
    requests = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        if rng.random() < 0.3:
            path, body = rng.choice((*_GET, *_REFUSED, *_PAGES)), b""
            if rng.random() < 0.2:
                body = write_json(rng, hostile(rng))
        else:
            kind = rng.choice(sorted(PATHS))
            asked: Any = {"model": "model", **PROMPTS.get(kind, {}), **request_body(rng, kind)}
            path, body = PATHS[kind], write_json(rng, mutate_value(rng, asked) if rng.random() < 0.3 else asked)
        requests.append(request_bytes(rng, "POST" if body else "GET", target(rng, path), body))
    files = connections(rng, requests)
    if rng.random() < 0.2:
        files["model/chat_template.jinja"] = rng.choice(ROLE_TEMPLATES).encode()
    return Case([HTTP, "serve" if rng.random() < 0.8 else "serve-key"], ["model"], files)


def _value(rng: Random, name: str) -> Any:
    """A value that the studio's form may send for an option, or none that it may."""
    chance = rng.random()
    if name in ("model", "data", "adapter", "config", "eval_data"):
        chosen: Any = rng.choice(READ_PATHS)
    elif name == "out":
        chosen = rng.choice((_RUN, "new", "out/deep/er", *WRITE_PATHS))
    else:
        chosen = rng.choice(YAML_VALUES) if chance < 0.7 else odd_text(rng)
    if chance > 0.95:
        return hostile(rng)
    return [chosen, odd_text(rng)] if chance > 0.85 else chance > 0.8 if chance > 0.75 else chosen


def _options(rng: Random) -> Any:
    names = option_names()
    sound = {"model": "model", "data": ["data.jsonl"], "out": rng.choice((_RUN, "new"))}
    chosen = {name: _value(rng, name) for name in rng.sample(names, rng.choice((0, 1, 1, 2, 5)))}
    return sound | chosen if rng.random() < 0.8 else chosen


def _studio_body(rng: Random, name: str) -> Any:
    run: Any = _RUN if rng.random() < 0.85 else rng.choice((*READ_PATHS, None, 1, [], {}))
    if name == "state":
        have = [rng.choice((0, 1, 2, 9, 2**70, -1)) for _ in range(4 if rng.random() < 0.9 else 3)]
        return {"have": {run if isinstance(run, str) else "x": have}, "logs": {_RUN: rng.choice((0, -1, None))}}
    if name == "paths":
        return {"text": rng.choice((*READ_PATHS, *WRITE_PATHS, *_TYPED))}
    if name == "model":
        return {"model": rng.choice(("model", "model", *READ_PATHS))}
    body: dict[str, Any] = {"options": _options(rng), "run": run}
    if name == "resume":
        body["options"] = rng.choice(({}, {"max_steps": "3"}, {"epochs": rng.choice(YAML_VALUES)}, body["options"]))
    if name == "export":
        options = {n: _value(rng, n) for n in rng.sample(("name", "out", "quantize", "create", "device"), 2)}
        body |= {"tool": rng.choice(("ollama", "lmstudio", "llama.cpp", "", None, [])), "options": options}
    if name == "chat/open" and rng.random() < 0.5:
        body = {"model": rng.choice(("model", "", *READ_PATHS)), "device": rng.choice(("", "cpu", "x", "\x00"))}
    return body


_TYPED = ("mo", "~", "~nobody/", "model/", "\x00/", "\ud800/", "/")
_STUDIO = ("about", "check", "model", "paths", "start", "resume", "stop", "draft", "state", "export", "export/stop",
           "chat/open", "chat/close", "data", "plan")  # fmt: skip


def studio_case(rng: Random, groups: Any) -> Case:
    """One to five requests of the studio's page, with a run whose files are changed."""
    requests = []
    for _ in range(rng.choice((1, 2, 3, 5))):
        if rng.random() < 0.12:
            path, body = rng.choice(("/", "/pages/studio.js", "/v1/models", "/v1/chat/completions", "/api/none")), b""
        else:
            name = rng.choice(_STUDIO)
            asked = _studio_body(rng, name)
            path, body = f"/api/{name}", write_json(rng, mutate_value(rng, asked) if rng.random() < 0.25 else asked)
        requests.append(request_bytes(rng, "POST" if body else "GET", target(rng, path), body))
    base = ["model", "data", rng.choice(("finished", "unfinished"))]
    return Case([HTTP, "studio"], base, connections(rng, requests) | _run_files(rng, groups), around=_around(rng))


def _around(rng: Random) -> dict[str, Any]:
    """Return a folder or file of a run that may not be read, now and then."""
    names = ("out", "out/checkpoints", "out/checkpoints/step-2", "out/metrics.jsonl", "out/log.txt", "out/config.yaml")
    return {"modes": {rng.choice(names): rng.choice((0, 0o200, 0o400))}} if rng.random() < 0.1 else {}


_COUNTS = ("0", "1", "2", "99", "9" * 9, "1" * 10, "-1", "\xb2")


def watch_case(rng: Random, groups: Any) -> Case:
    """Requests of the page of `wgrad watch`, with a run whose files are changed."""
    requests = []
    for _ in range(rng.choice((1, 1, 2))):
        counts = [rng.choice(_COUNTS) for _ in range(rng.choice((4, 4, 4, 8)))]
        query = "?have=" + ",".join(".".join(counts[n : n + 4]) for n in range(0, len(counts), 4))
        path = rng.choice(("/news", "/news", "/news" + query, "/", "/pages/watch.js", "/nope"))
        requests.append(request_bytes(rng, "GET", target(rng, path)))
    base = [rng.choice(("finished", "unfinished"))]
    return Case([HTTP, "watch"], base, connections(rng, requests) | _run_files(rng, groups), around=_around(rng))


def _run_files(rng: Random, groups: Any) -> Files:
    """Changed files of a run, those that pages read likelier than others."""
    whole = groups["finished"]
    read = ["metrics.jsonl", "samples.jsonl", "config.yaml", "results.json", "profile.txt", "log.txt", ".lock.json"]
    names = [f"{_RUN}/{name}" for name in [*read * 2, "sweep.json"]] + sorted(whole)
    files: Files = {f"{_RUN}/log.txt": rng.choice(_LOG)}
    for name in rng.sample(names, rng.choice((0, 1, 1, 2, 4))):
        content = whole.get(name, _HOLDER if name.endswith("lock.json") else rng.choice(_LOG))
        files[name] = _changed(rng, name, content)
    return files


def _changed(rng: Random, name: str, content: bytes) -> Content:
    chance = rng.random()
    if chance < 0.15:
        link = rng.choice(("/dev/zero", ".", "/proc/self/mem", "nope"))
        return rng.choice(
            (Special("absent"), Special("folder"), Special("fifo"), Special("link", link), Special("sparse", 1 << 33))
        )
    if name.endswith(".jsonl") and chance < 0.8:
        lines = content.splitlines() or [b"{}"]
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(_RECORDS))
        return b"\n".join(lines) + rng.choice((b"\n", b""))
    if name.endswith(".json") and chance < 0.8 and content[:1] in (b"{", b"["):
        return mutate_json(rng, content)
    return mutate_bytes(rng, content)


# ---- the servers ---------------------------------------------------------------------------------
def answer(name: str) -> int:
    """Serve what a case's connections send, in this process."""
    _SERVERS[name]()
    return 0


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def _serve(**options: Any) -> None:
    from wgrad.train.commands.serve import guarded, load
    from wgrad.train.inference.open_model import open_model
    from wgrad.train.options.serve_config import ServeConfig

    config = ServeConfig(model="model", device="cpu", context=96, max_new_tokens=4, request_log=False, **options)
    engine, preparation = load(open_model(config), {})
    device = threading.Thread(target=engine.run, daemon=True)
    device.start()
    try:
        converse(guarded(engine, preparation, config), _get("/health"))
        assert engine.health == "ok" and device.is_alive()
    finally:
        engine.close()
        device.join(5)


def _watch() -> None:
    from wgrad.device.errors import WgradError
    from wgrad.train.commands.watch import open_watch

    try:
        watch = open_watch([_RUN])
    except WgradError:
        return
    converse(watch, _get("/news"))


def _studio() -> None:
    from wgrad.train.commands.studio import guarded_studio
    from wgrad.train.options.studio_config import StudioConfig
    from wgrad.train.serve import children, run_list, studio

    opened = studio.Studio(run_list.RunList("."))
    body = json.dumps({"have": {_RUN: [0, 0, 0, 0]}, "logs": {_RUN: 0}}).encode()
    head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    last = f"POST /api/state HTTP/1.1\r\n{head}".encode() + body
    with patch.object(children, "start", _start), patch.object(run_list, "start", _start):
        with patch.object(studio, "start", _start):
            try:
                converse(guarded_studio(opened, StudioConfig()), last)
            finally:
                opened.close()
                for child in opened.runs._children.values():
                    child.wait()


def _start(words: Sequence[str], apart: bool = False, **options: Any) -> subprocess.Popen[bytes]:
    """In place of `children.start`: see that wgrad takes the words, and run a program that prints and ends."""
    from wgrad.device.errors import WgradError
    from wgrad.train.commands.cli import build_parser

    try:
        build_parser().parse_args(list(words))
    except SystemExit as error:
        raise AssertionError(f"words that wgrad does not take: {list(words)[:20]}") from error
    except WgradError:
        pass
    if any("\0" in word for word in words):  # as Popen refuses them
        raise WgradError(f"wgrad {words[0]} does not start: embedded null byte")
    options["stdin"] = subprocess.DEVNULL if apart else subprocess.PIPE
    said = "serving model at http://127.0.0.1:1/v1" if words[0] == "serve" else "{}"
    return subprocess.Popen(["/bin/echo", said], **options)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let a command that serves end as soon as it listens, within a `with`."""

    def look_up(host: Any, port: Any, family: Any = 0, type: Any = 0, proto: Any = 0, flags: Any = 0) -> Any:
        """Answer for addresses; a name would be asked for on the network."""
        return found(host, port, family, type, proto, flags | socket.AI_NUMERICHOST)

    found = socket.getaddrinfo
    with patch.object(uvicorn.Server, "run"), patch.object(socket, "getaddrinfo", look_up):
        yield


def _serve_with_key() -> None:
    _serve(api_key="x", allow_origin=("*",), allow_host=("evil.example",))


_SERVERS: dict[str, Callable[[], None]] = {
    "serve": _serve,
    "serve-key": _serve_with_key,
    "studio": _studio,
    "watch": _watch,
}
