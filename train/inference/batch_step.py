"""A decoding step of a batch that sequences join and leave, recorded once per number of rows and width of pages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wgrad.autograd.replay import Recorded
from wgrad.autograd.tensor import no_grad
from wgrad.device.contract import Array, Readback
from wgrad.train.inference.repetition import penalize
from wgrad.train.inference.row_cache import RowCache
from wgrad.train.model.adapter_mix import shares_of_rows
from wgrad.train.model.kv_cache import put_rows
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs

MOST_STEPS = 32  # of a block
_VIEW = 64  # elements: where a view may begin


class BatchStep:
    """A step of the first `rows` rows: draw ids from the logits, and compute the next logits from them.

    width: most pages of a row.
    """

    def __init__(self, model: Model, cache: RowCache, rows: int, width: int) -> None:
        device = model.device
        self.model, self.device, self.rows, self.width = model, device, rows, width
        wide = -(-rows // _VIEW) * _VIEW
        # Fewer arrays need fewer writes; but a kernel cannot read one part of a buffer and write to another.
        self._counters = device.zeros((wide + 2 * _VIEW + rows * width,), np.int32)
        self._starts = device.zeros((rows, 1), np.int32)
        self._uniform, self._settings = device.zeros((rows,)), device.zeros((rows, 4))
        self._uniforms = device.zeros((MOST_STEPS, rows))

        def counter(first: int, *shape: int) -> Array:
            return device.view(self._counters, shape, first)

        self._wide = wide
        self.inputs = Inputs(
            ids=device.zeros((rows,), np.int32),
            positions=counter(0, rows),
            doc_start=self._starts,
            cache_len=counter(wide, 1),
        )
        # With several adapters: the ranks that belong to each row, for each kind of projection.
        kinds = {module.shares for module in model.adapter.modules.values()} if model.adapter else set()
        self._adapters = np.full(rows, -1, np.int32)
        self.inputs.adapters = {
            shares: device.zeros((rows, sum(rank for _, rank in shares))) for shares in kinds if shares
        }
        self._number = counter(wide + _VIEW, 1)
        self._drawn = device.zeros((MOST_STEPS, rows), np.int32)
        pages, places = counter(wide + 2 * _VIEW, rows, width), self.inputs.positions
        self._cache = cache.paged(cache.first_rows(rows), pages=pages, places=places)
        self.logits = cache.logits(rows)
        self._recorded, self._drawing, self._penalizing, self._going_on = (Recorded(device) for _ in range(4))
        self._bias, self._factors = _Rows(self, 0.0), _Rows(self, 1.0)

    def begin(
        self,
        cached: np.ndarray,
        pages: np.ndarray,
        settings: np.ndarray,
        uniforms: np.ndarray,
        adapters: np.ndarray,
    ) -> None:
        """Write the inputs of the next steps.

        cached: int32 [rows], tokens of each row in the cache. pages: int32 [rows, width]. settings: float32 [rows, 4].
        uniforms: float32 [steps, rows]. adapters: int32 [rows], the number of each row's adapter, if there are several.
        """
        wide, device, at = self._wide, self.device, int(cached.max())
        counters, numbers = np.zeros(self._counters.shape, np.int32), np.zeros((MOST_STEPS, self.rows), np.float32)
        # `advance` increments these before the forward.
        counters[: self.rows], counters[wide] = cached - 1, at - 1
        counters[wide + 2 * _VIEW :] = pages.reshape(-1)
        numbers[: len(uniforms)] = uniforms
        device.write(self._counters, counters)
        device.write(self._starts, (at - cached)[:, None])
        device.write(self._uniforms, numbers)
        device.write(self._uniform, uniforms[0])
        device.write(self._settings, settings)
        if self.inputs.adapters and not np.array_equal(adapters, self._adapters):
            for shares, array in self.inputs.adapters.items():
                device.write(array, shares_of_rows(shares, adapters))
            self._adapters = adapters

    def run(self) -> None:
        self._recorded(self._work)

    def draw(self, biases: Mapping[int, np.ndarray], factors: Mapping[int, np.ndarray]) -> None:
        """Run the first half of a step with changed logits; `go_on` is the other half.

        biases: float32 [V] by row, added to the logits. factors: float32 [V] by row, of the repetition penalty.
        """
        if factors:
            self._factors.put(factors)
            self._penalizing(lambda: penalize(self.device, self.logits, self._factors.array))
        self._bias.put(biases)
        self._drawing(self._draw_biased)

    def go_on(self) -> None:
        self._going_on(self._forward)

    def _draw_biased(self) -> None:
        self.device.add(self.logits, self._bias.array, out=self.logits)
        self._draw()

    def _work(self) -> None:
        self._draw()
        self._forward()

    def _draw(self) -> None:
        device, inputs = self.device, self.inputs
        drawn = device.sample(self.logits, self._uniform, self._settings)
        counters = (self._number, inputs.ids, inputs.positions, inputs.cache_len)
        device.advance(drawn, self._uniforms, self._drawn, *counters, self._uniform)

    def _forward(self) -> None:
        with no_grad():
            logits = self.model.logits(self.model.hidden(self.inputs, self._cache).data)
        self.device.copy(logits, self.logits)

    def read(self, steps: int) -> Readback:
        return self.device.readback(self.device.view(self._drawn, (steps * self.rows,)))


class _Rows:
    """Values float32 [rows, V] of a step; rows without their own have a default."""

    def __init__(self, step: BatchStep, default: float) -> None:
        self._step, self._default = step, default
        self._made: Array | None = None
        self._known = dict[int, np.ndarray]()  # the values on the device, by row

    @property
    def array(self) -> Array:
        if self._made is None:
            self._made = self._step.device.empty(self._step.logits.shape)
            self._step.device.fill(self._made, self._default)
        return self._made

    def put(self, values: Mapping[int, np.ndarray]) -> None:
        """Write the values, float32 [V] by row. An array that is on the device already is not copied again."""
        device, vocab = self._step.device, self._step.logits.shape[1]
        gone = {row: np.full(vocab, self._default, np.float32) for row in self._known.keys() - values.keys()}
        for row, value in {**gone, **values}.items():
            if self._known.get(row) is not value:
                put_rows(device, self.array, device.upload(value[None]), device.upload(np.array([row], np.int32)))
        self._known = dict(values)
