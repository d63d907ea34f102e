"""wgrad watch: what it answers and to whom; files that grow, are cut back, or are no run's. The page itself, in a
browser: tests/portability/test_watch_page.py."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.commands.watch import MOST_RUNS, open_watch
from wgrad.train.output import watched
from wgrad.train.output.metrics import MetricsFile, SamplesFile
from wgrad.train.output.watched import Tail, WatchedRun, as_metrics, as_sample
from wgrad.train.serve import connection as connection_module
from wgrad.train.serve import http_server
from wgrad.train.serve.watch_server import WatchServer


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0 / step, "lr": 1e-4} | more


def write(folder: Path, *steps: int) -> None:
    with MetricsFile(folder, 10**6) as metrics:
        for step in steps:
            metrics.write(record(step))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def server(folder: Path) -> Iterator[WatchServer]:
    write(folder, 1, 2)
    with WatchServer(0, open_watch([str(folder)])) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,))
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def ask(server: WatchServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, Any, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    try:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


# ---- the server ----------------------------------------------------------------------------------
def test_more_connections_than_may_be_are_turned_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory for as long as its client likes."""
    monkeypatch.setattr(http_server, "_CONNECTIONS", 3)
    write(folder, 1)
    with WatchServer(0, open_watch([str(folder)])) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,))
        thread.start()
        try:
            assert ask(opened)[0] == 200
            idle = [socket.create_connection(("127.0.0.1", opened.server_port)) for _ in range(3)]
            assert ask(opened)[0] == 503
            for connection in idle:
                connection.close()
        finally:
            opened.shutdown()
            thread.join()


def test_the_page_loads_nothing_and_runs_nothing_but_its_own(server: WatchServer) -> None:
    status, headers, page = ask(server)
    policy = headers["Content-Security-Policy"]
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    files = re.findall(r'(?:src|href)="(/[^"]+)"', page)
    assert len(files) == 3 and "https:" not in page and "http:" not in page
    for path in (*files, "/pages/page.js", "/pages/charts.js"):
        status, own, text = ask(server, path)
        assert status == 200 and own["Content-Security-Policy"] == policy
        found = re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| style=", text)
        assert "uplot" in path or not found, path
    assert not re.search(r"\bon\w+=| style=", page)
    assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers


def test_each_answer_has_only_what_is_new(server: WatchServer, folder: Path) -> None:
    (first,) = json.loads(ask(server, "/news")[2])["runs"]
    assert first["metrics"]["records"] == [record(1), record(2)] and first["metrics"]["anew"] and first["there"]
    have = f"{first['metrics']['generation']}.2.0.0"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record(3)) + '\n{"step": 4, "lo')
    (next_one,) = json.loads(ask(server, f"/news?have={have}")[2])["runs"]
    assert next_one["metrics"]["records"] == [record(3)] and not next_one["metrics"]["anew"]


@pytest.mark.parametrize("site", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:{port}"])
def test_names_of_this_machine_are_answered(server: WatchServer, site: str) -> None:
    site = site.format(port=server.server_port)
    assert ask(server, "/news", Host=site, Origin=f"http://{site}", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"Host": "evil.example"}, "Host"),
        ({"Host": "127.0.0.1.evil.example"}, "Host"),
        ({"Host": "localhost@evil.example"}, "Host"),
        ({"Host": ""}, "Host"),
        ({"Origin": "http://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Origin": "http://127.0.0.1:1"}, "Origin"),
        ({"Sec_Fetch_Site": "cross-site"}, "Sec-Fetch-Site"),
        ({"Sec_Fetch_Site": "same-site"}, "Sec-Fetch-Site"),
    ],
)
def test_other_sites_are_not(server: WatchServer, headers: dict[str, str], name: str) -> None:
    for path in ("/", "/news", "/none"):
        status, _, text = ask(server, path, **headers)
        assert status == 403 and text.startswith(f"{name}: ") and "loss" not in text


def test_no_host_and_two_hosts_are_refused(server: WatchServer) -> None:
    for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as client:
            client.sendall(b"GET /news HTTP/1.1\r\n" + hosts + b"\r\n")
            assert client.makefile("rb").readline().split()[1] == b"400"  # h11's own rule


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "get", "ANY"])
def test_nothing_but_get(server: WatchServer, method: str) -> None:
    status, headers, _ = ask(server, "/news", method)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../etc/passwd", 404), ("/metrics.jsonl", 404), ("/%2e%2e/out/metrics.jsonl", 404), ("/index.html", 404),
        ("/?a", 404), ("/news/", 404), ("/news?", 200), ("/news?have=", 404), ("/news?have=1.2.3", 404),
        ("/news?have=1.2.3.-4", 404), ("/news?have=1.2.3.4&file=/etc/passwd", 404),
        ("/news?have=9999999999.1.1.1", 404),
        ("/news?have=1.2.3.4,1.2.3.4", 400), ("/news?have=7.999999999.7.7", 200), ("http://localhost/", 404),
    ],
)  # fmt: skip
def test_no_path_leads_to_a_file(server: WatchServer, path: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    real = watched.open_input

    def noted(file: Any, source: str) -> Any:
        opened.append(file)
        return real(file, source)

    monkeypatch.setattr(watched, "open_input", noted)
    found, _, text = ask(server, path)
    assert found == status and "root:" not in text
    assert {Path(file).parent for file in opened} <= {server.watch.runs[0].folder}


def test_slow_clients_have_no_threads(server: WatchServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that are slow to ask, nor those that do not take their answer: that connection is ended."""
    monkeypatch.setattr(connection_module, "ANSWER_SECONDS", 0.2)
    threads, address = threading.active_count(), ("127.0.0.1", server.server_port)
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(address, timeout=120)).sendall(b"GET /news HTTP/1.1\r\n")
        large = Response(b" " * (32 << 20))  # more than the system's buffers hold
        monkeypatch.setitem(server.watch.files, "/", lambda: large)
        idle = stack.enter_context(socket.create_connection(address, timeout=120))
        idle.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ask(server, "/none")[0] == 404
        assert threading.active_count() == threads
        time.sleep(0.25)
        size = 0
        with suppress(ConnectionError):
            while data := idle.recv(1 << 20):
                size += len(data)
        assert size < 32 << 20


def test_a_port_in_use_is_one_line(server: WatchServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--port", str(server.server_port), str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"wgrad: error: --port: cannot listen on 127.0.0.1, port {server.server_port}: ")
    assert error.endswith("--port (0: any that is free)\n") and error.count("\n") == 1


def test_the_command_prints_its_address_and_ends_at_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "wgrad", "watch", "--port", "0", str(folder), str(folder / "later")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"watching 2 runs at http://127\.0\.0\.1:(\d+) \(Ctrl-C ends it\)\n", line)
        assert found, line
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=120)
        connection.request("GET", "/news")
        assert [run["there"] for run in json.loads(connection.getresponse().read())["runs"]] == [True, False]
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=300)
    assert (process.returncode, out, error) == (130, "", "wgrad: interrupted\n")
    assert list(folder.iterdir()) == []


def test_folders_without_a_run_are_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").write_text("")
    for arguments, message in (
        ([str(folder / "file")], f"RUN: {folder / 'file'} must be the folder of a run (its --out); got a file"),
        ([str(folder / str(i)) for i in range(MOST_RUNS + 1)], f"at most {MOST_RUNS} runs; got {MOST_RUNS + 1}"),
        (["--port", "70000", "x"], "--port: must be between 0 and 65535; got 70000"),
        ([], "RUN"),
        (["x" * 300], "RUN: a part of "),
    ):
        assert main(["watch", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert len(open_watch([str(folder), str(folder)]).runs) == 1


# ---- files ---------------------------------------------------------------------------------------
def test_a_file_that_grows_in_any_pieces_is_read_line_by_line(folder: Path) -> None:
    whole = b"".join(json.dumps(record(step)).encode() + b"\n" for step in range(1, 9))
    tail, path = Tail(folder / "metrics.jsonl", as_metrics), folder / "metrics.jsonl"
    assert not tail.read() and tail.news(0, 0)["records"] == []
    for end in (*range(0, len(whole), 7), len(whole)):
        path.write_bytes(whole[:end])  # the same file, longer
        tail.read()
        assert len(tail.records) == whole[:end].count(b"\n")
    assert tail.records == [record(step) for step in range(1, 9)] and tail.generation == 1 and not tail.passed_over


@pytest.mark.parametrize("grown", [0, 5])
def test_a_resumed_run_begins_anew(folder: Path, grown: int) -> None:
    """Also where its file is longer by the time that it is looked at."""
    write(folder, 1, 2, 3, 4, 5)
    tail = Tail(folder / "metrics.jsonl", as_metrics)
    tail.read()
    with MetricsFile(folder, steps_done=2) as metrics:
        for step in range(3, 4 + grown):
            metrics.write(record(step, loss=7.5))
    tail.read()
    news = tail.news(1, 5)
    assert news["anew"] and news["generation"] == 2
    assert news["records"] == [record(1), record(2), *(record(step, loss=7.5) for step in range(3, 4 + grown))]


def test_a_file_that_is_cut_back_or_overwritten_is_read_anew(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    tail = Tail(path, as_metrics)
    for generation, steps in ((1, [1, 2, 3]), (2, [1]), (3, [4]), (4, []), (4, [5, 6])):
        path.write_text("".join(json.dumps(record(step)) + "\n" for step in steps))
        tail.read()
        assert tail.records == [record(step) for step in steps] and tail.generation == generation
    path.unlink()
    tail.read()
    assert tail.news(tail.generation - 1, 2) == {
        "generation": 5, "anew": True, "records": [], "more": False, "passed_over": 0, "note": ""
    }  # fmt: skip


def test_another_file_that_ends_alike_is_another(folder: Path) -> None:
    tail = Tail(folder / "samples.jsonl", as_sample)
    for generation in (1, 2):
        sample = {"step": generation, "prompt": "a", "text": "b" * 1000}
        (folder / "other").write_text(json.dumps(sample) + "\n")
        (folder / "other").replace(folder / "samples.jsonl")
        tail.read()
        assert tail.records == [sample] and tail.generation == generation


RUBBISH = [
    b"\xff\xfe\n", b"null\n", b"[1]\n", b"[" * 9999 + b"\n", b'{"loss": 1}\n', b'{"step": true}\n', b'{"step": -1}\n',
    b'{"step": 1e3}\n', b'{"step": ' + b"9" * 5000 + b"}\n", b"{\n", b"\0" * 90 + b"\n",
    b'{"step": 99999999999999999}\n',
]  # fmt: skip


def test_rubbish_is_counted_and_passed_over(folder: Path) -> None:
    lines = [json.dumps(record(step)).encode() + b"\r\n\n" for step in range(1, len(RUBBISH) + 1)]
    (folder / "metrics.jsonl").write_bytes(b"".join(a + b for a, b in zip(RUBBISH, lines)))
    tail = Tail(folder / "metrics.jsonl", as_metrics)
    tail.read()
    assert [r["step"] for r in tail.records] == list(range(1, len(RUBBISH) + 1)) and tail.passed_over == len(RUBBISH)


def test_only_numbers_that_json_holds_are_kept() -> None:
    line = '{"step": 1, "format": 1, "a": NaN, "b": -Infinity, "c": 1e999, "d": null, "e": "<b>", "f": [1], "g": true'
    line += ', "h": 0.5, "i": 1' + "0" * 400 + ', "' + "k" * 500 + '": 2}'
    kept = as_metrics(json.loads(line))
    assert kept == {"step": 1, **dict.fromkeys("abcdgi"), "h": 0.5, "k" * watched.LONGEST_KEY: 2}
    assert len(as_metrics({"step": 1, **{str(i): i for i in range(10**4)}})) <= watched.MOST_KEYS
    sample = {"step": 0, "prompt": "a", "text": "b"}
    assert as_sample(sample | {"more": 1}) == sample
    for wrong in ({"step": "1"}, {"step": None}, {"prompt": 1}, {"prompt": None}, {"text": 1}):
        with pytest.raises(ValueError):
            as_sample(sample | wrong)
    assert len(as_sample({"step": 0, "prompt": "a" * 10**5, "text": None})["prompt"]) == watched.LONGEST_TEXT


def test_large_files_are_read_in_pieces_and_up_to_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PIECE", 200)
    monkeypatch.setattr(watched, "MOST_BYTES", 1000)
    monkeypatch.setattr(watched, "MOST_SENT", 7)
    write(folder, *range(1, 101))
    tail = Tail(folder / "metrics.jsonl", as_metrics)
    reads = 1
    while tail.read():
        reads += 1
    assert 5 <= reads <= 8 and "only its first" in tail.note and 10 < len(tail.records) < 30
    news = tail.news(0, 0)
    assert len(news["records"]) == 7 and news["more"]
    assert tail.news(1, 7)["records"] == tail.records[7:14]
    (folder / "metrics.jsonl").write_bytes(b"\0" * 10_000)
    assert not tail.read() and not tail.read() and "a line of more than" in tail.note and tail.records == []


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_what_is_no_file_is_said_and_not_waited_for(folder: Path, kind: str) -> None:
    path = folder / "metrics.jsonl"
    if kind == "folder":
        path.mkdir()
    elif not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes here")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(folder / "nowhere")
    run = WatchedRun(str(folder))
    assert not run.read()
    (note,) = run.news((0, 0, 0, 0))["notes"]
    assert "RUN: " in note and "metrics.jsonl" in note


def test_a_run_that_comes_goes_on_and_ends(tmp_path: Path) -> None:
    """With all its files; nothing of them is written, and nothing beside them."""
    run = WatchedRun(str(tmp_path / "out"))
    nothing = (0, 0, 0, 0)
    run.read()
    news = run.news(nothing)
    assert not news["there"] and news["silent_seconds"] is None and news["notes"] == []
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", 1)
    with SamplesFile(tmp_path / "out", None) as samples:
        samples.write({"step": 0, "prompt": "<script>", "text": None})
    (tmp_path / "out" / "config.yaml").write_text(
        "lr: 0.5\nmodel: '<img src=x>'\ndata: [a, b]\n2024-01-01: {1: .nan}\n"
    )
    (tmp_path / "out" / "results.json").write_text('{"steps": 1, "sample_after": "a\\"b", "deep": {"a": [1]}}')
    (tmp_path / "out" / "profile.txt").write_bytes(b"kernel\xff 1")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()}
    run.read()
    news = run.news(nothing)
    assert news["metrics"]["records"] == [record(1)] and news["silent_seconds"] >= 0
    assert news["samples"]["records"] == [{"step": 0, "prompt": "<script>", "text": None}]
    assert news["options"] == {
        "lr": "0.5", "model": "<img src=x>", "data": '["a", "b"]', "2024-01-01": '{"1": NaN}'
    }  # fmt: skip
    assert news["results"] == {"steps": "1", "sample_after": 'a"b', "deep": '{"a": [1]}'}
    assert news["profile"] == "kernel\ufffd 1" and news["notes"] == []
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "out" / "results.json").write_text("{")
    (tmp_path / "out" / "config.yaml").write_text("a: [1")
    run.read()
    news = run.news(nothing)
    assert news["results"] is None and news["options"] is None
    assert sorted(("results.json" in note, "config.yaml" in note) for note in news["notes"]) == [
        (False, True), (True, False)
    ]  # fmt: skip
    (tmp_path / "out" / "results.json").unlink()
    run.read()
    assert len(run.news(nothing)["notes"]) == 1


def test_what_it_says_of_a_folder_is_an_error_only_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WgradError, match="got a file: give its folder"):
        WatchedRun(str(tmp_path / "file"))
    WatchedRun(str(tmp_path / "file" / "below")).read()
