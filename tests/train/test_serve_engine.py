"""`wgrad serve`: one thread has the device; batches, requests that are given up, limits, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.train.serving import BASE, Client, serving
from wgrad.device.errors import DeviceLost, OutOfMemory
from wgrad.train.options.generate_config import Sampling
from wgrad.train.serve import engine as engine_module
from wgrad.train.serve.engine import Engine, Limits
from wgrad.train.serve.jobs import Answer, Event, Failed, Job, Piece


@pytest.fixture(scope="module")
def waiting() -> Iterator[Client]:
    """A server whose engine runs only when a test has it run."""
    with serving(start=False, batch_size=4, max_waiting=3) as found:
        yield found


@pytest.fixture
def engine(waiting: Client) -> Engine:
    """A new one, for jobs given by hand."""
    return Engine(waiting.engine.models, waiting.engine.tokenizers, Limits(512, 4, 3))


def job(found: list[Event], prompt: int = 3, **options: Any) -> Job:
    defaults: dict[str, Any] = {
        "model": "base_model", "prompt": list(range(40, 40 + prompt)), "max_new_tokens": 6,
        "sampling": Sampling(temperature=1.0, top_p=1.0), "stops": (), "top": None, "score": False, "seconds": 1e6,
    }  # fmt: skip
    return Job(**{**defaults, "emit": found.append, **options})


def run(engine: Engine, *jobs: Job) -> None:
    """Answer what waits, then end."""
    engine.submit(jobs)
    step = engine._next

    def next_or_end() -> list[Job]:
        if not engine._line:
            engine.close()
        return step()

    engine._next = next_or_end  # type: ignore[method-assign]
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
def test_what_goes_together_is_one_batch_and_each_is_as_alone(waiting: Client, engine: Engine) -> None:
    def asked(found: list[Event], number: int) -> Job:
        top = 2 if number == 1 else None
        return job(
            found,
            3 + 5 * number,
            max_new_tokens=4 + number,
            sampling=Sampling(temperature=1.0, top_p=1.0, seed=number),
            top=top,
        )

    together: list[list[Event]] = [[], [], []]
    other: list[Event] = []
    run(
        engine,
        *(asked(found, n) for n, found in enumerate(together)),
        job(other, sampling=Sampling(temperature=0.5, top_p=1.0, seed=1)),
    )
    assert engine.batches == 2 and text(other)
    for number, found in enumerate(together):
        alone: list[Event] = []
        run(Engine(engine.models, engine.tokenizers, engine.limits), asked(alone, number))
        assert text(alone) == text(found)
        pieces = [event for event in found if isinstance(event, Piece)]
        assert sum(piece.new for piece in pieces) == 4 + number or pieces[-1].finish == "stop"
        assert bool(pieces[0].tokens) == (number == 1)


def test_what_does_not_fit_together_is_not(engine: Engine) -> None:
    def batches(*jobs: Job) -> list[list[Job]]:
        engine._line, found = list(jobs), []
        while engine._line:
            found.append(engine._next())
        return found

    few: list[Event] = []
    plain = [job(few) for _ in range(6)]
    assert batches(*plain) == [plain[:4], plain[4:]]
    long, many = job(few, 400), job(few, max_new_tokens=300)
    assert batches(long, many, plain[0]) == [[long, plain[0]], [many]]  # 400 and 300 have no room in 512 positions
    model, score = job(few, model="other"), job(few, score=True, top=1)
    assert batches(plain[0], score, model, plain[1]) == [[plain[0], plain[1]], [score], [model]]
    wide = [job(few, 505) for _ in range(5)]  # four read at once as many tokens as one may have
    assert [len(batch) for batch in batches(*wide)] == [4, 1]
    engine.limits = Limits(1024, 16, 99)
    assert [len(batch) for batch in batches(*wide)] == [4, 1]


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
    second = job(stays, max_new_tokens=9)
    engine._decode([Answer(first, engine.tokenizers["base_model"]), Answer(second, engine.tokenizers["base_model"])])
    assert len(gone) == 1 and text(stays)


def test_time_is_limited(engine: Engine) -> None:
    found, begun = list[Event](), list[Event]()
    assert engine._given_up(job(found, seconds=0.0)) and not engine._given_up(job(found))
    assert found == [Failed(503, "waited 0 s for the device (--max-seconds): ask again later, or for less")]
    engine._decode([Answer(job(begun, seconds=0.0), engine.tokenizers["base_model"])])
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
        (gone, *others) = list(client.engine._line)
        gone.cancelled = True  # whom nobody waits for has no place in the line
        client.engine.submit([job([])])
        assert client.engine._line[:2] == others and len(client.engine._line) == 3
        gone.emit(Failed(503, "the server is ending: ask again later"))
        client.engine.close()
        first.join(60)
        assert replies[0].status == 503 and replies[0].error["message"] == "the server is ending: ask again later"
        assert client.post("completions", ask).status == 503


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
    decoder, calls = engine_module.Decoder, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise error
        return decoder(*args, **options)

    monkeypatch.setattr(engine_module, "Decoder", failing)
    bad, good = list[Event](), list[Event]()
    run(engine, job(bad), job(good, sampling=Sampling(temperature=0.0)))
    assert bad == [Failed(500, message)] and text(good)
    assert "Traceback" not in capsys.readouterr().err


def test_a_lost_device_ends_the_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **options: Any) -> Any:
        raise DeviceLost("the device is lost")

    monkeypatch.setattr(engine_module, "Decoder", lost)
    first, second = list[Event](), list[Event]()
    with pytest.raises(DeviceLost):
        run(engine, job(first), job(second, sampling=Sampling(temperature=0.0)))
    assert first == [Failed(500, "the device is lost")] and second == [
        Failed(503, "the server is ending: ask again later")
    ]


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
