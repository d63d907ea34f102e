"""Pages of a cache: sequences that begin alike have the same ones, and text as if they did not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.train.growing_batches import alone, grow, model_for
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import PAGE, Device
from wgrad.device.errors import OutOfMemory
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.growing import Growing
from wgrad.train.inference.pages import NOWHERE, Pages
from wgrad.train.model.families import FAMILIES
from wgrad.train.options.generate_config import GREEDY, Sampling


def test_a_page_that_nobody_has_is_kept_until_its_memory_is_wanted() -> None:
    pages = Pages(7)
    pages.grow(4)
    assert (pages.available, pages.lacks(3), pages.lacks(5)) == (6, 0, 2)
    text = list(range(3 * PAGE))
    own = pages.take(3)
    assert NOWHERE not in own
    pages.publish("a", text, own)
    assert pages.match("a", text) == own[:2], "the last token must be read"
    assert pages.match("a", [*text, 1]) == own and pages.match("b", [*text, 1]) == []
    assert pages.match("a", [9, *text]) == [] == pages.match("a", text[PAGE:])
    other = pages.share("a", [*text[: 2 * PAGE], 5])
    pages.let_go(own)
    assert other == own[:2] and (pages.held, pages.kept, pages.available) == (2, 1, 4)
    assert pages.wanted("a", [*text, 1]) == 2, "one that is kept, and a new one"
    pages.let_go(other)
    assert pages.take(1) == [own[2]], "of what was let go of the end goes first"
    assert pages.match("a", [*text, 1]) == own[:2]
    pages.grow(7)
    assert len(pages.take(4)) == 4 and pages.match("a", text) == own[:1]


def test_a_beginning_that_is_there_already_is_published_once() -> None:
    pages, text = Pages(9), list(range(2 * PAGE))
    pages.grow(9)
    first, second = pages.take(2), pages.take(2)
    for own in (first, second):
        pages.publish("a", text, own)
    assert pages.match("a", [*text, 1]) == first
    pages.let_go(second)
    assert (pages.held, pages.kept) == (2, 0)
    pages.publish("a", [*text[:PAGE], *[7] * PAGE], [first[0], *pages.take(1)])
    assert len(pages.match("a", [*text[:PAGE], *[7] * PAGE, 1])) == 2


def test_prompts_that_begin_alike_are_read_once(make_checkpoint: Any, device: Device, rng: np.random.Generator) -> None:
    """While one is there and after it, on every device; text is as without."""
    model = model_for(make_checkpoint(), device)
    system, batch = rng.integers(1, 90, PAGE + 5).tolist(), Batch(model, 4)
    members = [Growing.begin([*system, *last], 3, Sampling(temperature=1.2, seed=7)) for last in ([7], [8, 9])]
    wanted = [alone(model, [*one.prompt], 3, Sampling(temperature=1.2, seed=7)) for one in members]
    assert grow(batch, [(turn, one) for turn, one in enumerate(members)], [1]) == wanted
    assert [one.shared for one in members] == [0, PAGE]
    assert batch.used_keys == 0 and batch.kept_keys == PAGE


def test_a_sequence_goes_on_from_what_was_drawn_before(make_checkpoint: Any, rng: np.random.Generator) -> None:
    """As the turns of a chat do."""
    model = model_for(make_checkpoint(), ReferenceDevice())
    batch, text = Batch(model, 4), rng.integers(1, 90, PAGE + 9).tolist()
    for shared, most in ((0, 60), (2 * PAGE, 60), (3 * PAGE, 3)):
        turn = Growing.begin(text, most, GREEDY)
        (answer,) = grow(batch, [(0, turn)], [9])
        assert answer == alone(model, text, most, GREEDY) and turn.shared == shared
        text = [*text, *answer, 5, 6]


def test_several_that_share_are_read_in_a_group(make_checkpoint: Any, rng: np.random.Generator) -> None:
    model = model_for(make_checkpoint(), ReferenceDevice())
    system, batch = rng.integers(1, 90, PAGE + 7).tolist(), Batch(model, 8)
    first = Growing.begin([*system, 3], 2, GREEDY)
    grow(batch, [(0, first)], [9])
    one, other = (Growing.begin([*system, n], 1, GREEDY) for n in (1, 2))
    assert not batch.should_wait(one, [other]), "it is there already"
    prompts = [[*system[: 60 + n], n] for n in range(6)]  # of the shared page none but three have all
    members = [Growing.begin(p, 5, GREEDY) for p in prompts]
    assert grow(batch, [(0, one) for one in members], [5]) == [alone(model, p, 5, GREEDY) for p in prompts]
    assert [one.shared for one in members] == [0, 0, 0, 0, PAGE, PAGE]
    assert Batch(model, 8).should_wait(one, [other])


def test_states_and_angles_of_a_length_are_not_shared(make_checkpoint: Any) -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.1] * 6, "long_factor": [4.5, 7.0, 9.0, 3.0, 2.0, 1.5]}
    changes = {"rope_scaling": longrope, "original_max_position_embeddings": 16, "max_position_embeddings": 256}
    for model in (
        model_for(make_checkpoint("Phi3ForCausalLM", **changes), ReferenceDevice()),
        model_for(make_checkpoint("Lfm2ForCausalLM"), ReferenceDevice()),
    ):
        batch, prompt = Batch(model, 2), list(range(1, PAGE + 9))
        for _ in range(2):
            one = Growing.begin(prompt, 2, GREEDY)
            assert grow(batch, [(0, one)], [1]) == [alone(model, prompt, 2, GREEDY)] and one.shared == 0
        assert batch.kept_keys == 0


def test_memory_follows_the_tokens(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence does not make room for others as long."""
    model = model_for(make_checkpoint(), ReferenceDevice())
    batch = Batch(model, 8)
    members = [Growing.begin([n + 1] * (200 if n == 0 else 3), 30, GREEDY) for n in range(6)]
    batch.join(members[:1])
    batch.join(members[1:])
    batch.queue(4).tokens()
    assert batch.used_keys == (4 + 5) * PAGE and batch.total_keys < 6 * 4 * PAGE


def test_where_memory_ends_the_cache_stays_as_large(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept pages go first, and then the youngest sequence leaves."""
    model = model_for(make_checkpoint(), ReferenceDevice())
    batch, text = Batch(model, 4), list(range(1, 2 * PAGE + 2))
    grow(batch, [(0, Growing.begin(text, 2, GREEDY))], [2])
    had = batch.total_keys
    assert batch.kept_keys == 2 * PAGE

    def no_memory(pages: int) -> None:
        raise OutOfMemory("none")

    monkeypatch.setattr(batch._cache, "grow", no_memory)
    prompts = [[n] * 150 for n in (3, 4)]
    found = [Growing.begin(p, 4, GREEDY) for p in prompts]
    assert grow(batch, [(0, found[0]), (1, found[1])], [2]) == [alone(model, p, 4, GREEDY) for p in prompts]
    assert batch.total_keys == had and batch.kept_keys <= had
    many = [Growing.begin([n] * 200, 4, GREEDY) for n in (5, 6, 7)]
    assert not batch.can_join(many)
    batch.reset()
    batch.reserve(1, PAGE)
    monkeypatch.setattr(batch._cache, "grow", no_memory)
    with pytest.raises(OutOfMemory):
        batch.join(many)


def test_no_more_leave_than_must(make_checkpoint: Any) -> None:
    """Three that have all pages, and want one more each: the youngest has two."""
    batch = Batch(model_for(make_checkpoint(), ReferenceDevice()), 4, 6 * PAGE)
    members = [Growing.begin([n] * (2 * PAGE - 1), 9, GREEDY) for n in (1, 2, 3)]
    batch.join(members)
    assert batch.crowded(1) == [] and batch.crowded(4) == members[2:]


@pytest.mark.all
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_alone(family: str, make_checkpoint: Any, rng: np.random.Generator) -> None:
    model = model_for(make_checkpoint(family), ReferenceDevice())
    system = rng.integers(1, 90, PAGE + 2).tolist()
    prompts = [[*system, 3], [*system, 4, 5], [7, 8], [9] * 20]
    members = [Growing.begin(prompt, 4, GREEDY) for prompt in prompts]
    found = grow(Batch(model, 4), [(n // 2, one) for n, one in enumerate(members)], [2])
    assert found == [alone(model, prompt, 4, GREEDY) for prompt in prompts]
