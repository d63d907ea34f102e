"""Uploading files to a repository of the Hugging Face Hub, in one commit. No other module writes to the Hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.hub_answers import ANSWER_SECONDS, answers_in_time

_COMMIT_SECONDS = 90.0  # for an answer: the Hub checks what it was sent


def upload(repo: str, files: Mapping[str, Path | bytes], public: bool) -> str:
    """Upload files (contents by name in the repository), and create the repository if it does not exist.

    Files with the same content are not sent again, so an interrupted upload continues where it ended.

    Returns:
        The address of the repository's page.

    Raises:
        WgradError: the Hub refuses or cannot be reached; the repository is public, and `public` is False.
    """
    with _errors(repo) as huggingface_hub:
        api = huggingface_hub.HfApi(library_name="wgrad")
        with answers_in_time():
            url = api.create_repo(repo, private=not public, exist_ok=True, repo_type="model")
            is_private = public or api.repo_info(repo, timeout=ANSWER_SECONDS).private
        if not is_private:
            raise WgradError(f"push: {repo} is there already and public: add --public, or choose another name")
        adds = [
            huggingface_hub.CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        with answers_in_time(_COMMIT_SECONDS):
            api.create_commit(repo, adds, commit_message="Upload with wgrad", repo_type="model")
        return str(url)


@contextmanager
def _errors(repo: str) -> Iterator[Any]:
    """Give the Hub's client, and turn its errors within the block into WgradError."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise WgradError("push: huggingface_hub is not installed: pip install 'wgrad[hub]'") from None
    again = "the same command goes on where this one ended"
    try:
        yield huggingface_hub
    except WgradError:
        raise
    except errors.OfflineModeIsEnabled:
        raise WgradError("push: HF_HUB_OFFLINE is set: unset it to upload") from None
    except errors.LocalTokenNotFoundError:
        raise WgradError("push: there is no token: run 'hf auth login', or set HF_TOKEN") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        reason = " ".join(str(error.server_message or error).split())[:200]
        if status in (401, 403):
            raise WgradError(
                f"push: the Hub refuses to write to {repo} ({reason}): run 'hf auth login' with a token that may write"
            ) from None
        raise WgradError(f"push: the upload to {repo} failed ({reason}): {again}") from None
    except Exception as error:  # any error of its network library
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise WgradError(f"push: the upload to {repo} failed ({reason}): check the network; {again}") from None
