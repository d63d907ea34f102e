"""`wgrad serve`: serve a model and its adapters with the APIs of OpenAI and Ollama.

The main thread drives the device; the web server has a thread of its own.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from wgrad.device.errors import WgradError
from wgrad.train.data.named_templates import use_chat_template
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.data.tokenizer_source import open_tokenizer
from wgrad.train.inference.all_kernels import run_all_kernels
from wgrad.train.inference.embedding import pooling_of
from wgrad.train.inference.open_model import Opened, context_of, open_model
from wgrad.train.inference.scoring import score
from wgrad.train.inference.text_models import build_text_models
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.model import Model
from wgrad.train.options.serve_config import CACHE_SEQUENCES, ServeConfig
from wgrad.train.step.build import count_parameters
from wgrad.train.step.find_model import other_base
from wgrad.train.terminal.interrupts import end_at_signals
from wgrad.train.terminal.output import harmless, say

try:
    from starlette.types import ASGIApp

    from wgrad.train.serve.app import chat_page, make_app
    from wgrad.train.serve.engine import Engine
    from wgrad.train.serve.guard import Guard
    from wgrad.train.serve.http_server import HttpServer, address_text, open_address
    from wgrad.train.serve.limits import Limits
    from wgrad.train.serve.losses import Losses
    from wgrad.train.serve.preparation import ModelFacts, Preparation
    from wgrad.train.serve.request_log import RequestLog
except ImportError as error:
    raise WgradError(f"wgrad serve: {error.name} is not installed: pip install 'wgrad[serve]'") from error

_WARM_UP_SECONDS = 5.0  # most time to warm up before serving


def run_serve(config: ServeConfig) -> int:
    """Serve until a signal. The address goes to standard output, everything else to standard error.

    Raises:
        WgradError: A key, an address, a name or the model cannot be used.
    """
    key, adapters = config.key, config.adapters
    listening = open_address(config.host, config.port, key)
    try:
        opened = open_model(config)
        if opened.head_note:
            say(f"note: {opened.head_note}", "stderr")
        engine, preparation = load(opened, adapters)
        return _serve(engine, HttpServer(guarded(engine, preparation, config), listening, engine.close), listening)
    finally:
        listening.close()


def guarded(engine: Engine, preparation: Preparation, config: ServeConfig) -> ASGIApp:
    """Return the web application, behind the checks of requests and the request log."""
    app = make_app(engine, preparation)
    pages = [route.path for route in chat_page()]
    guard = Guard(app, config.host, config.allow_host, config.key, config.allow_origin, pages, ollama=True)
    return RequestLog(guard, engine.metrics, quiet=not config.request_log)


def load(opened: Opened[ServeConfig], adapters: dict[str, str]) -> tuple[Engine, Preparation]:
    """Load the models. Return the engine that runs them, and the preparation that turns requests into its jobs."""
    args, positions = opened.args, context_of(opened)
    base = Path(os.path.abspath(args.model)).name.removesuffix(".gguf") if os.path.exists(args.model) else args.model
    if base in adapters:
        raise WgradError(f"--adapter: {base!r} is the name of the model: give another, for example {base}-mine=DIR")
    limits = Limits(positions, args.batch_size, args.max_waiting, args.cache_tokens or CACHE_SEQUENCES * positions)

    def run(model: Model) -> None:
        score(model, [0] * positions, top=1)
        run_all_kernels(model, limits.rows, limits.prompt_tokens, limits.keys)

    tokenizers = {base: opened.tokenizer}
    remarks: dict[str, list[str]] = {}  # each with the adapters that it is about
    for name, adapter in adapters.items():
        tokenizers[name], note = open_tokenizer(opened.folder, adapter, opened.config.vocab_size)
        told = use_chat_template(tokenizers[name], args.chat_template)
        for remark in (other_base(args.model, adapter), note, told):
            if remark:
                remarks.setdefault(remark, []).append(name)
    for remark, names in remarks.items():
        opened.display.say(f"note: {', '.join(names)}: {remark}")
    if lender := _lend_template(tokenizers, base):
        opened.display.say(f"note: {base}: it has no chat template, so that of {lender} is used")
    for tokenizer in tokenizers.values():
        _ = tokenizer.stop_ids  # renders a template, which only one thread may do at a time

    def build() -> Mapping[str, Model]:
        return build_text_models(opened, {base: None, **adapters}, positions, run)

    def reload(losses: int) -> Mapping[str, Model]:
        nonlocal opened
        opened = replace(opened, device=opened.device.reopen(losses))
        opened.display.say(f"device: {opened.device.description}, opened again")
        return build()

    losses = Losses(reload if opened.device.reopens else None)
    engine = Engine(losses.loaded(build), tokenizers, limits, losses)
    return engine, Preparation(
        tokenizers,
        opened.config.vocab_size,
        positions,
        min(args.max_new_tokens or positions, positions - 1),
        args.max_seconds,
        threading.Lock(),
        args.pooling or pooling_of(opened.folder),
        opened.config.table_width,
        _facts(opened),
    )


def _lend_template(tokenizers: Mapping[str, Tokenizer], base: str) -> str:
    """Let a base model without a chat template use its adapters', if they have the same, so that both can be compared.

    Returns:
        The name of the first adapter with that template; "": nothing has changed.
    """
    lenders = [name for name, tokenizer in tokenizers.items() if tokenizer.has_chat_template]
    templates = [tokenizers[name].templates for name in lenders]
    if tokenizers[base].has_chat_template or not lenders or any(other != templates[0] for other in templates):
        return ""
    tokenizers[base].use_templates(templates[0])
    return lenders[0]


def _facts(opened: Opened[ServeConfig]) -> ModelFacts:
    """Return the facts that clients of Ollama's API show."""
    files = [opened.folder] if opened.folder.is_file() else opened.folder.glob("*.safetensors")
    family = FAMILIES[opened.config.architecture].model_type
    quantized = "" if opened.folder.is_file() else "NF4" if opened.args.quantize else "F32"
    size = sum(path.stat().st_size for path in files)
    on_gpu = 0 if opened.device.name == "cpu" else size
    return ModelFacts(family, count_parameters(opened.config), quantized, size, on_gpu)


def _serve(engine: Engine, server: HttpServer, listening: socket.socket) -> int:
    end_at_signals()
    engine.warm_up(_WARM_UP_SECONDS)
    server.start()
    try:
        names = harmless(", ".join(engine.models))
        print(f"serving {names} at {address_text(listening)}/v1 (Ctrl-C ends it)", flush=True)
        engine.run()
    finally:
        engine.close()
        server.stop()
        shared_process().close()
    raise WgradError("the web server ended by itself: start it again")
