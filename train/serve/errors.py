"""Error responses in the forms of OpenAI's and Ollama's APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response. status: of HTTP. param: the wrong key of the request. code: a word that clients look for."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the error with the wrong key renamed by `names`."""
        new = names.get(self.param or "", self.param)
        message = self.message.replace(f": {self.param}", f": {new}", 1)
        return ApiError(self.status, message, new, self.code)

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the body of the response, in the form of the API to which the request's path belongs."""
        if path.startswith("/api/"):
            return {"error": self.message}
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
