"""Ollama's API, for its clients: conversations, completions, embeddings, and the list of models.

Models cannot be pulled, created or deleted through it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import numpy as np
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
from wgrad.train.serve.ollama_fit import fitting
from wgrad.train.serve.ollama_form import OllamaForm, now, without_answer
from wgrad.train.serve.ollama_requests import (
    NAMES,
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaGenerate,
    OllamaRequest,
    OllamaShow,
)
from wgrad.train.serve.requests import ChatRequest, CompletionRequest, parse_request
from wgrad.train.serve.tool_calls import format_of

API_VERSION = "0.12.0"  # version of Ollama with the same API, for clients that check it
_NEVER = "9999-12-31T23:59:59Z"  # time at which a model is unloaded
B = TypeVar("B", bound=OllamaBody)
_REFUSED = ("pull", "push", "create", "copy", "delete")


def ollama_routes(answering: Answering) -> list[Route]:
    """Return the routes of Ollama's API."""
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
    """The handlers of Ollama's API."""

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
        asked = await self._asked(request, OllamaShow)
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
        asked = await self._asked(request, OllamaChat)
        if not asked.messages:
            return JSONResponse(without_answer(asked.model, True, asked.unloads))
        return await self._chat(request, asked)

    async def generate(self, request: Request) -> Response:
        asked = await self._asked(request, OllamaGenerate)
        if not asked.prompt:
            return JSONResponse(without_answer(asked.model, False, asked.unloads))
        tokenizer = self._preparation.tokenizer(asked.served)
        if tokenizer.has_chat_template and not asked.raw:
            return await self._chat(request, asked)
        asked.check_plain()
        try:
            ids, most = await run_in_threadpool(self._preparation.raw_prompt, asked.served, asked.prompt, asked.context)
            wanted, events = asked.as_completion(ids, most), self._answering.events()
            jobs, _ = await run_in_threadpool(self._preparation.completion_jobs, wanted, events.put)
        except ApiError as error:
            raise error.renamed(NAMES) from error
        choices, form = [Choice(0, len(jobs[0].prompt))], self._form(asked, wanted, jobs[0].prompt)
        return await self._answering.answer(request, wanted, jobs, choices, form, events)

    async def _asked(self, request: Request, kind: type[B]) -> B:
        """ApiError."""
        asked = parse_request(await read_body(request, any_type=True), kind)
        self._preparation.tokenizer(asked.served)
        asked.check()
        return asked

    async def _chat(self, request: Request, asked: OllamaChat | OllamaGenerate) -> Response:
        events = self._answering.events()
        wanted = asked.as_chat(_template(self._preparation.tokenizer(asked.served)))
        before = asked.context if isinstance(asked, OllamaGenerate) else ()
        make = partial(self._preparation.chat_jobs, emit=events.put, before=before)
        try:
            jobs, style = await run_in_threadpool(*((fitting, wanted, make) if asked.truncate else (make, wanted)))
        except ApiError as error:
            raise error.renamed(NAMES) from error
        form = self._form(asked, wanted, jobs[0].prompt)
        return await self._answering.answer(request, wanted, jobs, choices_of(jobs, style), form, events)

    def _form(self, asked: OllamaRequest, wanted: ChatRequest | CompletionRequest, prompt: Sequence[int]) -> OllamaForm:
        form, tokenizer = (
            OllamaForm(asked.model, isinstance(asked, OllamaChat)),
            self._preparation.tokenizer(asked.served),
        )
        if asked.logprobs:
            text, octets = self._answering.token_text(wanted), self._answering.octets(wanted)
            form.entry = lambda token: token_entry(token, text, octets)
        if isinstance(asked, OllamaGenerate) and not asked.raw:
            form.context = partial(_context, tokenizer, prompt)
        return form

    async def embed(self, request: Request) -> Response:
        begun = time.monotonic_ns()
        asked = await self._asked(request, OllamaEmbed)
        vectors, tokens = await self._vectors(request, asked)
        counts = {"total_duration": time.monotonic_ns() - begun, "load_duration": 0, "prompt_eval_count": tokens}
        return JSONResponse({"model": asked.model, "embeddings": vectors, **counts})

    async def embeddings(self, request: Request) -> Response:
        """Answer the older path for a single embedding."""
        vectors, _ = await self._vectors(request, await self._asked(request, OllamaEmbedding))
        return JSONResponse({"embedding": vectors[0] if vectors else []})

    async def _vectors(self, request: Request, asked: OllamaEmbed) -> tuple[list[list[float]], int]:
        """Return the vectors, none of no text, and how many tokens were read. Raises ApiError."""
        if not asked.texts:
            return [], 0
        wanted, events = asked.as_embedding(self._preparation.width), self._answering.events()
        jobs = await run_in_threadpool(self._preparation.embedding_jobs, wanted, events.put, asked.truncate)
        choices = [Choice(number, len(job.prompt)) for number, job in enumerate(jobs)]
        async for _ in self._answering.pieces(request, wanted, jobs, choices, events):
            pass
        vectors = [choice.vector for choice in choices if choice.vector is not None]
        found = [_shortened(vector, asked.dimensions).tolist() for vector in vectors]
        return found, sum(choice.prompt_tokens for choice in choices)

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


def _shortened(vector: np.ndarray, dimensions: int) -> np.ndarray:
    """Return the first numbers of a vector, of length 1 again; all for 0."""
    if not dimensions or dimensions == len(vector):
        return vector
    first = vector[:dimensions]
    return first / max(float(np.linalg.norm(first)), 1e-12)


def _context(tokenizer: Tokenizer, prompt: Sequence[int], answer: str, finish: str) -> list[int]:
    """Return the ids of a conversation so far, for the request that continues it."""
    end = tokenizer.turn_end_id if finish == "stop" else None
    ids = [*prompt, *tokenizer.encode(answer, add_special_tokens=False)]
    return ids if end is None else [*ids, end]


def _template(tokenizer: Tokenizer) -> str:
    return "\n".join(tokenizer.templates.values())
