"""Training examples in a few flat arrays, instead of small arrays for each of a file's millions of lines."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np

from wgrad.train.data.packing import Document, Example, Pair

T = TypeVar("T", bound=Example, covariant=True)


class Documents(Sequence[T]):
    """A sequence of documents or pairs of documents, each made when it is read."""

    def _get(self, index: int) -> T:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._get(i) for i in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        return self._get(place)


class LineDocuments(Documents[Document]):
    """Documents of the lines of a file, in 5 bytes per token and 17 per line. `add` all, then read.

    seq_len: most tokens of a document; further ones become `Document.beyond`.
    """

    def __init__(self, name: str, seq_len: int) -> None:
        self._name, self._seq_len = name, seq_len
        self._ids, self._loss_mask = array("i"), bytearray()
        self._ends, self._lines, self._labels = array("q", [0]), array("q"), array("b")

    def add(self, ids: np.ndarray, loss_mask: np.ndarray, line: int, label: int = 0) -> None:
        """Append a document. ids: int32 [n]; loss_mask: bool [n]; line: number of its line; label: as in `Document`."""
        self._ids.frombytes(np.ascontiguousarray(ids, np.int32).tobytes())
        self._loss_mask += np.ascontiguousarray(loss_mask, np.bool_).tobytes()
        self._ends.append(len(self._ids))
        self._lines.append(line)
        self._labels.append(label)

    def __len__(self) -> int:
        return len(self._lines)

    def _get(self, index: int) -> Document:
        start, end = self._ends[index], self._ends[index + 1]
        ids = np.frombuffer(self._ids, np.int32)[start:end] if end > start else np.zeros(0, np.int32)
        loss_mask = np.frombuffer(self._loss_mask, np.bool_)[start:end] if end > start else np.zeros(0, np.bool_)
        kept, source = self._seq_len, f"{self._name}:{self._lines[index]}"
        return Document(ids[:kept], loss_mask[:kept], source, self._labels[index], ids[kept:])


class PairDocuments(Documents[Pair]):
    """Pairs of documents that alternate between chosen and rejected."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents) // 2

    def _get(self, index: int) -> Pair:
        return Pair(self._documents[2 * index], self._documents[2 * index + 1])


class StreamDocuments(Documents[Document]):
    """Pieces of at most `length` tokens of one stream, which together predict each of its tokens exactly once.

    If the stream begins with bos (`has_bos`), each piece does; else a piece begins with the last token of the piece
    before. stream: int32.
    """

    def __init__(self, name: str, stream: np.ndarray, length: int, has_bos: bool) -> None:
        self._name, self._stream, self._step, self._has_bos = name, stream, length - 1, has_bos

    def __len__(self) -> int:
        return -(-(len(self._stream) - 1) // self._step)

    def _get(self, index: int) -> Document:
        at = 1 + index * self._step
        if self._has_bos:
            ids = np.concatenate([self._stream[:1], self._stream[at : at + self._step]])
        else:
            ids = self._stream[at - 1 : at + self._step]
        return Document(ids, np.broadcast_to(np.bool_(True), ids.shape), f"{self._name}: token {at}")


class ChosenDocuments(Documents[Example]):
    """The documents of a sequence with the indices `chosen`, in that order."""

    def __init__(self, documents: Sequence[Example], chosen: np.ndarray) -> None:
        self._documents, self.chosen = documents, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def _get(self, index: int) -> Example:
        return self._documents[int(self.chosen[index])]


class JoinedDocuments(Documents[Example]):
    """Several sequences of documents, concatenated."""

    def __init__(self, parts: Sequence[Sequence[Example]]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _get(self, index: int) -> Example:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]
