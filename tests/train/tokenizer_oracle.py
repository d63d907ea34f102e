"""Ids of transformers' tokenizers, as ours are compared with them."""

from __future__ import annotations

from typing import Any


def once(ids: list[int], ours: Any) -> list[int]:
    """The ids without what transformers adds in front and behind although the text has it itself."""
    before, behind = ours.added_ids()
    if before and ids[: 2 * len(before)] == before * 2:
        ids = ids[len(before) :]
    return ids[: -len(behind)] if behind and ids[-2 * len(behind) :] == behind * 2 else ids
