"""Ollama's API, for clients that speak no other: conversations, completions, embeddings, and what is served.

Models cannot be pulled, made or removed through it.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.serve.answer_parts import style_of
from wgrad.train.serve.answering import Answering, choices_of
from wgrad.train.serve.answers import Choice, token_entry
from wgrad.train.serve.body import read_body
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.ollama_form import OllamaForm, loaded, now
from wgrad.train.serve.ollama_requests import (
    NAMES,
    OllamaChat,
    OllamaEmbed,
    OllamaGenerate,
    OllamaRequest,
    OllamaShow,
)
from wgrad.train.serve.requests import ChatRequest, CompletionRequest, parse_request
from wgrad.train.serve.tool_calls import format_of

API_VERSION = "0.12.0"  # of Ollama, whose API is followed: clients look for what it has
_NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded
_REFUSED = ("pull", "push", "create", "copy", "delete")


def ollama_routes(answering: Answering) -> list[Route]:
    """Return the paths of Ollama's API."""
    api = OllamaApi(answering)
    return [
        Route("/api/version", api.version),
        Route("/api/tags", api.tags),
        Route("/api/ps", api.running),
        Route("/api/show", api.show, methods=["POST"]),
        Route("/api/chat", api.chat, methods=["POST"]),
        Route("/api/generate", api.generate, methods=["POST"]),
        Route("/api/embed", api.embed, methods=["POST"]),
        Route("/api/embeddings", api.embeddings, methods=["POST"]),
        *(Route(f"/api/{name}", api.refuse, methods=["POST", "DELETE"]) for name in _REFUSED),
    ]


class OllamaApi:
    """The answers to each path."""

    def __init__(self, answering: Answering) -> None:
        self._answering, self._preparation, self._begun = answering, answering.preparation, now()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": API_VERSION})

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": [self._entry(name) for name in self._preparation.tokenizers]})

    async def running(self, request: Request) -> Response:
        stays = {"expires_at": _NEVER, "size_vram": self._preparation.facts.device_bytes}
        stays["context_length"] = self._preparation.positions
        return JSONResponse({"models": [{**self._entry(name), **stays} for name in self._preparation.tokenizers]})

    async def show(self, request: Request) -> Response:
        asked = parse_request(await read_body(request, any_type=True), OllamaShow)
        template = _template(self._preparation.tokenizer(asked.served))
        facts = self._preparation.facts
        info = {
            "general.architecture": facts.family,
            "general.parameter_count": facts.parameters,
            f"{facts.family}.context_length": self._preparation.positions,
            f"{facts.family}.embedding_length": self._preparation.width,
        }
        found = {"modelfile": "", "parameters": "", "template": template, "details": self._details()}
        rest = {"capabilities": self._capabilities(asked.served), "modified_at": self._begun}
        return JSONResponse({**found, "model_info": info, **rest})

    async def chat(self, request: Request) -> Response:
        asked = parse_request(await read_body(request, any_type=True), OllamaChat)
        self._preparation.tokenizer(asked.served)
        if not asked.messages:
            return JSONResponse(loaded(asked.model, chat=True))
        return await self._chat(request, asked, chat=True)

    async def generate(self, request: Request) -> Response:
        asked = parse_request(await read_body(request, any_type=True), OllamaGenerate)
        tokenizer = self._preparation.tokenizer(asked.served)
        if not asked.prompt:
            return JSONResponse(loaded(asked.model, chat=False))
        if tokenizer.has_chat_template and not asked.raw:
            return await self._chat(request, asked, chat=False)
        try:
            ids, most = await run_in_threadpool(self._preparation.raw_prompt, asked.served, asked.prompt)
            wanted, events = asked.as_completion(ids, most), self._answering.events()
            jobs, _ = await run_in_threadpool(self._preparation.completion_jobs, wanted, events.put)
        except ApiError as error:
            raise error.renamed(NAMES) from error
        choices = [Choice(0, len(jobs[0].prompt))]
        return await self._answering.answer(request, wanted, jobs, choices, self._form(asked, wanted, False), events)

    async def _chat(self, request: Request, asked: OllamaChat | OllamaGenerate, chat: bool) -> Response:
        events = self._answering.events()
        try:
            wanted = asked.as_chat()
            jobs, style = await run_in_threadpool(self._preparation.chat_jobs, wanted, events.put)
        except ApiError as error:
            raise error.renamed(NAMES) from error
        form = self._form(asked, wanted, chat)
        return await self._answering.answer(request, wanted, jobs, choices_of(jobs, style), form, events)

    def _form(self, asked: OllamaRequest, wanted: ChatRequest | CompletionRequest, chat: bool) -> OllamaForm:
        if not asked.logprobs:
            return OllamaForm(asked.model, chat)
        text, octets = self._answering.token_text(wanted), self._answering.octets(wanted)
        return OllamaForm(asked.model, chat, lambda token: token_entry(token, text, octets))

    async def embed(self, request: Request) -> Response:
        begun = time.monotonic_ns()
        asked, vectors, tokens = await self._vectors(request)
        counts = {"total_duration": time.monotonic_ns() - begun, "load_duration": 0, "prompt_eval_count": tokens}
        return JSONResponse({"model": asked.model, "embeddings": vectors, **counts})

    async def embeddings(self, request: Request) -> Response:
        """As older clients ask for one."""
        _, vectors, _ = await self._vectors(request)
        return JSONResponse({"embedding": vectors[0]})

    async def _vectors(self, request: Request) -> tuple[OllamaEmbed, list[list[float]], int]:
        asked = parse_request(await read_body(request, any_type=True), OllamaEmbed)
        wanted, events = asked.as_embedding(), self._answering.events()
        jobs = await run_in_threadpool(self._preparation.embedding_jobs, wanted, events.put)
        choices = [Choice(number, len(job.prompt)) for number, job in enumerate(jobs)]
        async for _ in self._answering.pieces(request, wanted, jobs, choices, events):
            pass
        found = [choice.vector.tolist() for choice in choices if choice.vector is not None]
        return asked, found, sum(choice.prompt_tokens for choice in choices)

    async def refuse(self, request: Request) -> Response:
        message = f"{request.url.path}: the models of this server are chosen when it starts: wgrad serve --adapter"
        raise ApiError(400, message)

    def _entry(self, name: str) -> dict[str, Any]:
        facts = self._preparation.facts
        digest = hashlib.sha256(json.dumps([name, asdict(facts)]).encode()).hexdigest()
        told = {"modified_at": self._begun, "size": facts.bytes, "digest": digest, "details": self._details()}
        return {"name": name, "model": name, **told, "capabilities": self._capabilities(name)}

    def _capabilities(self, name: str) -> list[str]:
        tokenizer = self._preparation.tokenizer(name)
        found = ["completion", "embedding"]
        found += ["tools"] * (format_of(_template(tokenizer)) is not None)
        return found + ["thinking"] * (tokenizer.has_chat_template and style_of(tokenizer).thought is not None)

    def _details(self) -> dict[str, Any]:
        facts = self._preparation.facts
        billions, millions = facts.parameters / 1e9, facts.parameters / 1e6
        return {
            "parent_model": "",
            "format": "",
            "family": facts.family,
            "families": [facts.family],
            "parameter_size": f"{billions:.1f}B" if billions >= 1 else f"{millions:.0f}M",
            "quantization_level": facts.quantization,
            "context_length": self._preparation.positions,
            "embedding_length": self._preparation.width,
        }


def _template(tokenizer: Tokenizer) -> str:
    return "\n".join(tokenizer.templates.values())
