"""`/v1/embeddings`: its requests and its answers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from wgrad.train.serve.answers import Choice, usage
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.requests import Body, Text, texts_of

_MOST_TEXTS = 2048  # of one request


class EmbeddingRequest(Body, kw_only=True):
    input: Text
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def texts(self, width: int) -> list[str | list[int]]:
        """Return the texts and lists of token ids. width: length of a vector. Raises ApiError."""
        if self.dimensions not in (None, width):
            rule = f"dimensions must be the {width} of this model; got {self.dimensions}: leave it out"
            raise ApiError(400, f"the request: {rule}", "dimensions")
        return texts_of(self.input, "input", _MOST_TEXTS)

    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the vectors in the form of OpenAI's API."""
        data = [
            {"object": "embedding", "index": choice.number, "embedding": self._written(choice.vector)}
            for choice in choices
            if choice.vector is not None
        ]
        told = {name: usage(choices)[name] for name in ("prompt_tokens", "total_tokens")}
        return {"object": "list", "data": data, "model": self.model, "usage": told}

    def _written(self, vector: np.ndarray) -> str | list[float]:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers
