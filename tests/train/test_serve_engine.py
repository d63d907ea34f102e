"""The engine of `wgrad serve`, a thread that owns the device: batches, abandoned requests, limits and its end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.lossy_device import Front, LossyDevice
from tests.train.serving import BASE, Client, make_talker, serving
from wgrad.device.errors import DeviceLost, OutOfMemory
from wgrad.train.commands import serve as serve_command
from wgrad.train.commands.serve import load
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.growing import Growing
from wgrad.train.inference.open_model import open_model
from wgrad.train.model.model import Mixed
from wgrad.train.options.generate_config import Sampling
from wgrad.train.options.serve_config import ServeConfig
from wgrad.train.serve import engine as engine_module
from wgrad.train.serve import pace, prompts
from wgrad.train.serve.engine import Engine
from wgrad.train.serve.exchange import Events, Outbox
from wgrad.train.serve.http_server import HttpServer, listen, resolve
from wgrad.train.serve.jobs import Event, Failed, Job, Piece
from wgrad.train.serve.limits import Limits
from wgrad.train.serve.logit_edits import LogitEdits
from wgrad.train.serve.losses import Losses


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yield a client of a server whose engine runs only when a test runs it."""
    model = make_talker(tmp_path_factory.mktemp("models") / "base_model", max_position_embeddings=512)
    with serving(model=str(model), start=False, batch_size=4, max_waiting=3) as found:
        yield found


@pytest.fixture
def engine(waiting: Client) -> Engine:
    """Return a new engine, for jobs that tests submit."""
    return Engine(waiting.engine.models, waiting.engine.tokenizers, Limits(512, 4, 3))


def job(found: list[Event], prompt: int = 3, **options: Any) -> Job:
    defaults: dict[str, Any] = {
        "model": "base_model", "prompt": list(range(40, 40 + prompt)), "max_new_tokens": 6,
        "sampling": Sampling(temperature=1.0, top_p=1.0), "stops": (), "top": None, "score": False, "seconds": 1e6,
    }  # fmt: skip
    return Job(**{**defaults, "emit": found.append, **options})


def run(engine: Engine, *jobs: Job) -> None:
    """Run the engine until these jobs are answered, then end it."""
    engine.submit(jobs)
    wait = engine._wait

    def wait_or_end() -> bool:
        if not engine._line and not engine._members:
            engine.close()
        return wait()

    engine._wait = wait_or_end  # type: ignore[method-assign]
    engine.run()


def text(found: list[Event]) -> str:
    assert all(isinstance(event, Piece) for event in found) and found[-1].finish  # type: ignore[union-attr]
    return "".join(event.text for event in found if isinstance(event, Piece))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


# ---- batches -------------------------------------------------------------------------------------
def sampled(found: list[Event], number: int) -> Job:
    """Return a job whose prompt, length and sampling depend on its number."""
    sampling = Sampling(temperature=0.5 * number, top_p=1.0, seed=number)
    top = 2 if number == 1 else None
    return job(found, 3 + 5 * number, max_new_tokens=4 + 4 * number, sampling=sampling, top=top)


def test_who_comes_joins_those_who_are_there_and_each_is_as_alone(engine: Engine) -> None:
    """The last request comes with the first token of the first one."""
    found: list[list[Event]] = [[] for _ in range(4)]
    order: list[int] = []
    jobs = [sampled(events, number) for number, events in enumerate(found)]
    for number, asked in enumerate(jobs):

        def emit(event: Event, number: int = number) -> None:
            order.append(number)
            found[number].append(event)
            if len(order) == 1:
                engine.submit(jobs[3:])

        asked.emit = emit
    run(engine, *jobs[:3])
    assert order.index(3) < len(order) - 1 - order[::-1].index(2), "the last waits for no other's end"
    for number, events in enumerate(found):
        one: list[Event] = []
        run(Engine(engine.models, engine.tokenizers, engine.limits), sampled(one, number))
        assert text(one) == text(events)
        pieces = [event for event in events if isinstance(event, Piece)]
        assert sum(piece.new for piece in pieces) == 4 + 4 * number or pieces[-1].finish == "stop"
        assert bool(pieces[0].tokens) == (number == 1)


def test_a_block_of_tokens_is_one_event(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._pace, "read", lambda steps, waited: setattr(engine._pace, "steps", 8))
    found: list[Event] = []
    run(engine, job(found, max_new_tokens=25, sampling=Sampling(temperature=0.0)))
    assert [event.new for event in found if isinstance(event, Piece)] == [1, 1, 8, 8, 7]


def test_blocks_are_as_long_as_the_slower_of_host_and_device_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 1 ms on the device, and a block takes `host` on the host."""
    now, found = [100.0], dict[float, int]()
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    for host in (0.001, 0.015, 0.2):
        one = pace.Pace()
        for _ in range(60):
            steps = one.steps
            now[0] += max(host, 0.001 * steps)
            one.read(steps, max(0.001 * steps - host, 0.0))
        found[host] = one.steps
    assert 18 <= found[0.001] <= 20 and 16 <= found[0.015] <= 20 and found[0.2] == 16


def test_a_host_that_comes_late_reads_two_blocks_and_lengthens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block was ready, so reading it took no time. A step takes 2.5 ms, and later there is a pause."""
    now, one, longest = [100.0], pace.Pace(), 0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    for block in range(60):
        steps = one.steps
        late = block % 10 == 5
        took = 0.0 if block % 10 == 6 else 0.0025 * steps
        now[0] += took + (0.0025 * steps if late else 0.0)
        one.read(steps, 0.0 if late else took)
        longest = max(longest, one.steps)
    assert one.steps in (7, 8) and longest <= 12
    one.pause()
    assert one.steps == 1


def test_where_the_cache_is_full_the_last_ones_wait_and_go_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight pages of 64 tokens, the last request leaves, and rejoins with all its tokens once there is room."""
    engine._batch = Batch(engine.models["base_model"], 4, 256)
    found: list[list[Event]] = [[] for _ in range(4)]
    jobs = [
        job(events, 2 + n, max_new_tokens=130 if n else 30, sampling=Sampling(temperature=1.0, top_p=1.0, seed=n))
        for n, events in enumerate(found)
    ]
    rows, join = list[int](), Batch.join

    def watched(batch: Batch, newcomers: Sequence[Growing]) -> None:
        join(batch, newcomers)
        rows.append(len(batch.members))
        assert batch.total_keys <= 512

    monkeypatch.setattr(Batch, "join", watched)
    engine.limits = Limits(512, 4, 9)
    run(engine, *jobs)
    assert rows[0] == 4 and len(rows) > 1, "one has joined again"
    monkeypatch.undo()
    for n, events in enumerate(found):
        alone: list[Event] = []
        run(Engine(engine.models, engine.tokenizers, engine.limits), replace(jobs[n], emit=alone.append))
        assert text(events) == text(alone)


class Counting(LogitEdits):
    """Edits of logits that make the n-th token of an answer 50 + n."""

    def add_to(self, logits: np.ndarray, drawn: Sequence[int]) -> None:
        logits[50 + len(drawn)] += 1000.0


def test_edits_of_logits_are_told_all_that_was_drawn(engine: Engine) -> None:
    edited, other = list[Event](), list[Event]()
    edits = Counting(presence=1.0)
    run(engine, job(edited, edits=edits, top=0), job(other, max_new_tokens=9))
    ids = [token.id for event in edited if isinstance(event, Piece) for token in event.tokens]
    assert ids == [50, 51, 52, 53, 54, 55] and text(other)


def test_edits_of_one_make_no_more_events_of_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have one step then, but texts are sent no more often than after longer blocks."""
    monkeypatch.setattr(pace, "BLOCK_SECONDS", 1e9)
    edited, other, alone = list[Event](), list[Event](), list[Event]()
    seen = Sampling(temperature=1.0, top_p=1.0, seed=4)
    run(engine, job(edited, edits=LogitEdits(bias={5: 1.0})), job(other, max_new_tokens=9, sampling=seen))
    run(Engine(engine.models, engine.tokenizers, Limits(512, 4, 3)), job(alone, max_new_tokens=9, sampling=seen))
    assert len(other) <= 4 and text(other) == text(alone), "the first token, and the last three when edits have ended"


def test_a_batch_has_one_base_and_no_more_rows_than_it_may(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    few: list[Event] = []
    plain = [job(few) for _ in range(6)]

    def taken(*jobs: Job) -> list[Job]:
        engine._line = list(jobs)
        return [member.answer.job for member in engine._next_members()]

    assert taken(*plain) == plain[:4] and engine._line == plain[4:]
    engine.models = {**engine.models, "other": copy(engine.models["base_model"])}
    engine.tokenizers = {**engine.tokenizers, "other": engine.tokenizers["base_model"]}
    other, score = job(few, model="other"), job(few, score=True, top=1)
    assert taken(plain[0], score, plain[1]) == [plain[0]]
    assert taken(score, plain[0]) == [score]
    assert taken(plain[0], other, plain[1]) == [plain[0]]
    assert taken(other, plain[0]) == [other] and engine._batch.model is engine.models["other"]
    assert taken(plain[0]) == plain[:1]
    for number, model in enumerate(engine.models.values()):
        monkeypatch.setattr(model, "mixed", Mixed(engine.models["base_model"], number))
    assert taken(plain[0], other, plain[1]) == [plain[0], other, plain[1]]
    engine._batch = Batch(engine.models["other"], 16)
    wide = [replace(job(few, model="other"), prompt=[n] * 505) for n in range(5)]
    assert taken(*wide) == wide[:4], "2048 tokens of prompts are read at once"
    assert taken(wide[0], wide[0], wide[1]) == wide[:1], "the second shares what the first reads"


def test_the_loop_is_woken_once_for_all_events_of_a_block() -> None:
    async def play() -> None:
        outbox = Outbox()
        events, wakes = [Events(outbox) for _ in range(3)], list[int]()

        def wake() -> None:
            wakes.append(1)
            outbox._deliver()

        outbox._wake = wake  # type: ignore[method-assign]
        with outbox.together():
            for number, one in enumerate(events):
                one.put(number, Piece(str(number)))
            assert not wakes
        assert len(wakes) == 1
        assert [(await one.get())[0] for one in events] == [0, 1, 2]
        events[0].put(7, Piece(""))
        assert len(wakes) == 2 and (await events[0].get())[0] == 7

    asyncio.run(play())


# ---- given up, too late, too many ----------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(waiting: Client, stream: bool) -> None:
    body = json.dumps({"model": "base_model", "prompt": "x", "max_tokens": 400, "stream": stream}).encode()
    connection = waiting.connect()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    until(lambda: bool(waiting.engine._line))
    (asked,) = waiting.engine._line
    assert not asked.cancelled
    connection.close()
    until(lambda: asked.cancelled)
    waiting.engine._line = [j for j in waiting.engine._line if not waiting.engine._given_up(j)]
    assert waiting.engine._line == []


def test_in_a_batch_the_others_go_on(engine: Engine) -> None:
    gone, stays = list[Event](), list[Event]()
    first = job(gone, max_new_tokens=300)

    def go(event: Event) -> None:
        gone.append(event)
        first.cancelled = True

    first.emit = go
    run(engine, first, job(stays, max_new_tokens=40))
    assert len(gone) == 1 and text(stays) and engine._batch.free == 4


def test_time_is_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found, begun = list[Event](), list[Event]()
    assert engine._given_up(job(found, seconds=0.0)) and not engine._given_up(job(found))
    assert found == [Failed(503, "waited 0 s for the device (--max-seconds): ask again later, or for less")]
    monkeypatch.setattr(engine, "_given_up", lambda asked: False)
    run(engine, job(begun, seconds=0.0))
    assert (
        isinstance(begun[-1], Piece)
        and begun[-1].finish == "length"
        and sum(p.new for p in begun if isinstance(p, Piece)) == 1
    )


def test_as_many_wait_as_may_and_all_are_told_of_the_end() -> None:
    with serving(start=False, max_waiting=3) as client:
        replies: list[Any] = []
        ask = {"model": "base_model", "prompt": ["x", "y", "z"]}
        first = threading.Thread(target=lambda: replies.append(client.post("completions", ask)))
        first.start()
        until(lambda: len(client.engine._line) == 3)
        refused = client.post("completions", {**ask, "stream": True})
        assert refused.status == 429 and refused.error["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        (gone, *others) = list(client.engine._line)
        gone.cancelled = True  # whom nobody waits for has no place in the line
        client.engine.submit([job([])])
        assert client.engine._line[:2] == others and len(client.engine._line) == 3
        gone.emit(Failed(503, "the server is ending: ask again later"))
        client.engine.close()
        first.join(60)
        assert replies[0].status == 503 and replies[0].error["message"] == "the server is ending: ask again later"
        assert client.post("completions", ask).status == 503


def test_an_answer_may_be_as_long_as_the_context(tmp_path: Path) -> None:
    talker = make_talker(tmp_path / "talker", max_position_embeddings=2048)
    with serving(start=False, model=str(talker)) as client:
        ask, replies = {"model": "talker", "prompt": [5], "max_tokens": 2047}, list[Any]()
        threading.Thread(target=lambda: replies.append(client.post("completions", ask)), daemon=True).start()
        until(lambda: bool(client.engine._line or replies))
        assert client.engine._line[0].max_new_tokens == 2047


# ---- what goes wrong on the device ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OutOfMemory("no room for 3 bytes"), "no room for 3 bytes"),
        (MemoryError(), "MemoryError"),
        (KeyError("a\nb"), "internal error: KeyError: 'a\\nb'"),
    ],
)
def test_an_error_ends_a_batch_and_not_the_server(
    error: Exception, message: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, calls = Batch.queue, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise error
        return queue(*args, **options)

    monkeypatch.setattr(Batch, "queue", failing)
    bad, good = list[Event](), list[Event]()
    run(engine, *(job(bad) for _ in range(4)), job(good))
    assert bad == [Failed(500, message)] * 4 and text(good)
    assert "Traceback" not in capsys.readouterr().err


def test_a_lost_device_ends_the_server_where_it_does_not_open_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: Any, **options: Any) -> Any:
        raise DeviceLost("the device is lost")

    monkeypatch.setattr(Batch, "join", lost)
    first, second = list[Event](), list[Event]()
    with pytest.raises(DeviceLost):
        run(engine, *(job(first) for _ in range(4)), job(second))
    assert first == [Failed(503, "the device is lost. Start the server again")] * 4
    assert second == [Failed(503, "the server is ending: ask again later")]


def losing(engine: Engine, monkeypatch: pytest.MonkeyPatch, calls: Sequence[int]) -> tuple[Engine, list[int]]:
    """Return an engine whose device is lost in these calls of `Batch.queue` or `score`, and a list of the losses."""
    queue, score, count, losses = Batch.queue, prompts.score, [0], list[int]()
    models = dict(engine.models)

    def reload(number: int) -> Any:
        losses.append(number)
        assert found.health == "recovering" and found.state().running == 0
        return models

    def counted(work: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] in calls:
                raise DeviceLost("the device was lost")
            return work(*args, **options)

        return call

    monkeypatch.setattr(Batch, "queue", counted(queue))
    monkeypatch.setattr(prompts, "score", counted(score))
    found = Engine(models, engine.tokenizers, Limits(512, 4, 9), Losses(reload))
    return found, losses


def test_requests_go_on_after_a_loss_with_the_same_texts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(found: list[list[Event]]) -> list[Job]:
        jobs = [sampled(events, number) for number, events in enumerate(found)]
        return [*jobs, job(found[-1], score=True, top=1, max_new_tokens=3)]

    found, alone = [[list[Event]() for _ in range(4)] for _ in range(2)]
    run(Engine(engine.models, engine.tokenizers, Limits(512, 4, 9)), *ask(alone)[:3])
    run(Engine(engine.models, engine.tokenizers, Limits(512, 4, 9)), ask(alone)[4])
    for call in (1, 2, 5):
        lost, losses = losing(engine, monkeypatch, [call])
        again = [list[Event]() for _ in range(4)]
        run(lost, *ask(again)[:3], ask(again)[4])
        assert losses == [1] and [text(events) for events in again] == [text(events) for events in alone]
        assert lost._batch.free == 4 and lost.health == "ending"


def test_a_request_that_sees_a_second_loss_fails_and_others_are_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, losses = losing(engine, monkeypatch, [2, 4])
    first, second = list[Event](), list[Event]()
    run(lost, *(job(first) for _ in range(4)), job(second))
    failed = Failed(503, "the device was lost 2 times within this request: the device was lost")
    assert [event for event in first if isinstance(event, Failed)] == [failed] * 4 and losses == [1, 2]
    assert text(second)


def test_after_three_losses_with_no_answer_in_between_it_ends_with_a_report(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, losses = losing(engine, monkeypatch, range(1, 99))
    found: list[Event] = []
    with pytest.raises(DeviceLost, match="lost 3 times with no answer in between: the device was lost. Try a smaller"):
        run(lost, *(job(found) for _ in range(6)))
    assert (
        losses == [1, 2] and len(found) == 6 and {event.status for event in found if isinstance(event, Failed)} == {503}
    )
    within, losses = losing(engine, monkeypatch, [1])

    def fails(number: int) -> Any:
        losses.append(number)
        raise DeviceLost("it does not open again")

    within._losses._reload = fails
    with pytest.raises(DeviceLost, match="it does not open again"):
        run(within, job(found))
    assert losses == [1, 2]


def test_a_device_that_is_lost_before_the_first_request_is_opened_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the models are loaded, and while the server warms up."""
    front, jobs, losses = Front(), list[Event](), [0]
    opened = replace(open_model(ServeConfig(model=str(BASE), device="cpu", context=64)), device=front.device())

    def losing(work: Any) -> Any:
        def call(first: Any, *rest: Any) -> Any:
            losses[0] += 1
            if losses[0] in (1, 3):  # of: loaded, loaded again, warmed up, loaded again
                first.device.lost = True
                raise DeviceLost("the device was lost")
            return work(first, *rest)

        return call

    monkeypatch.setattr(LossyDevice, "name", "lossy")
    monkeypatch.setattr(serve_command, "build_text_models", losing(serve_command.build_text_models))
    monkeypatch.setattr(engine_module, "warm_up", losing(lambda *_: None))
    found, _ = load(opened, {})
    found.warm_up(1.0)
    assert front.shares == [1, 2] and losses == [4]
    run(found, job(jobs, max_new_tokens=2))
    assert text(jobs)


def test_a_device_that_is_lost_while_models_are_loaded_may_not_open_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Any:
        raise DeviceLost("the device was lost")

    front = Front(reopens=False)
    opened = replace(open_model(ServeConfig(model=str(BASE), device="cpu", context=64)), device=front.device())
    monkeypatch.setattr(serve_command, "build_text_models", lost)
    with pytest.raises(DeviceLost, match=r"^the device was lost\. Start the server again$"):
        load(opened, {})
    assert front.shares == []


def test_a_signal_while_the_web_server_ends_does_not_take_its_socket_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would print a traceback."""
    listening = listen(resolve("127.0.0.1", 0))
    server = HttpServer(lambda *_: None, listening, lambda: None)  # type: ignore[arg-type]
    server.start()
    until(lambda: server._server.started)
    join, open_then = server._thread.join, list[bool]()

    def interrupted(seconds: float) -> None:
        open_then.append(listening.fileno() >= 0)
        if len(open_then) == 1:
            raise KeyboardInterrupt
        join(seconds)

    monkeypatch.setattr(server._thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert server._server.force_exit and not server._thread.is_alive()
    assert open_then == [True, True] and listening.fileno() < 0


def test_an_error_within_a_stream_is_its_last_event(waiting: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[Any] = []
    ask = {"model": "base_model", "prompt": "x", "stream": True}
    client = threading.Thread(target=lambda: replies.append(waiting.post("completions", ask)))
    client.start()
    until(lambda: bool(waiting.engine._line))
    (asked,) = waiting.engine._line
    waiting.engine._line = []
    asked.emit(Piece("one"))
    asked.emit(Failed(500, "the device is lost"))
    client.join(60)
    one, error, end = replies[0].body.decode().split("\n\n")
    assert '"one"' in one and end == ""
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the device is lost"


def test_a_client_that_goes_away_within_a_stream_is_not_written_to(
    waiting: Client, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"model": "base_model", "prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    client = socket.create_connection(("127.0.0.1", waiting.port), timeout=120)
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    until(lambda: bool(waiting.engine._line))
    (asked,) = waiting.engine._line
    waiting.engine._line = []
    asked.emit(Piece("one"))
    assert client.recv(1 << 16)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it is reset, not closed
    for _ in range(300):
        asked.emit(Piece("more " * 100))
    client.close()
    for _ in range(300):
        asked.emit(Piece("more " * 100))
    until(lambda: asked.cancelled)
    assert "socket.send" not in caplog.text


# ---- the end -------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals between processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)])
def test_a_signal_ends_it_cleanly(number: int) -> None:
    command = [sys.executable, "-m", "wgrad", "serve", "--model", str(BASE), "--device", "cpu", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving base_model at http://127.0.0.1:")
        client = Client(int(line.partition(":")[2].split(":")[1].split("/")[0]), None)  # type: ignore[arg-type]
        ask = {"model": "base_model", "prompt": "x", "stream": True, "max_tokens": 500}
        connection = client.connect()
        connection.request("POST", "/v1/completions", json.dumps(ask), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        process.send_signal(number)
        rest = answer.read()
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number and said.endswith("wgrad: interrupted\n") and "Traceback" not in said
    assert b"the server is ending" in rest or b"[DONE]" in rest
