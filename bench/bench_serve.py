"""Tokens/s of `wgrad serve` over HTTP next to raw decoding in the same process, with random NF4 weights.

    python bench/bench_serve.py [--shapes llama-3.2-1b] [--clients 1,16,64] [--tokens 128] [--compute float32]

Every client is a connection of one other process: it sends a prompt of its own and reads the streamed answer. `ratio`
compares with raw decoding of as many prompts. The last rows have one long prompt arrive while the others decode:
`first_token_seconds` is that prompt's.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SHORT, LONG, AFTER_SECONDS = 32, 512, 0.25  # tokens of a prompt; of the one that comes later, and how much later
LEAST_KEYS = 1 << 15  # of the cache
NOT_TIMED = 3  # tokens of raw decoding, until the step is recorded


# ---- the clients' process ------------------------------------------------------------------------
async def ask(
    port: int, prompt: list[int], tokens: int, stream: bool = True, edited: bool = False
) -> tuple[float, float, int]:
    """-> seconds to the first token and to the last, tokens."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    body |= {"logit_bias": {"5": 1}} if edited else {}
    data, begin, first = json.dumps(body).encode(), time.perf_counter(), 0.0
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    count = 0
    while line := await reader.readline():
        if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            raise SystemExit(f"{line!r} {await reader.read()!r}")
        if line.startswith((b'data: {"id"', b'{"id"')):
            first = first or time.perf_counter() - begin
            count = (json.loads(line.removeprefix(b"data: ")).get("usage") or {}).get("completion_tokens", count)
    writer.close()
    return first, time.perf_counter() - begin, count


async def clients(
    port: int, count: int, tokens: int, vocab: int, late: bool, stream: bool, shared: int, edited: int, seed: int
) -> dict[str, float]:
    rng = np.random.default_rng(seed)  # the pages of prompts that were there before are shared
    prompts = rng.integers(1, vocab, (count, SHORT)).tolist()
    first = rng.integers(1, vocab, shared).tolist()
    begin = time.perf_counter()
    asked = [
        asyncio.create_task(ask(port, first + prompt, tokens, stream, number < edited))
        for number, prompt in enumerate(prompts)
    ]
    later = {}
    if late:
        await asyncio.sleep(AFTER_SECONDS)
        first, _, _ = await ask(port, rng.integers(1, vocab, LONG).tolist(), 4)
        later = {"first_token_seconds": first}
    found = await asyncio.gather(*asked)
    wall = time.perf_counter() - begin
    made = sum(n for _, _, n in found)
    assert made == count * tokens, made
    return {
        "tokens_per_second": made / wall,
        "median_first_seconds": float(np.median([f for f, _, _ in found])),
        **later,
    }


# ---- the server's process ------------------------------------------------------------------------
def tokenizer_files(folder: Path, vocab: int) -> None:
    """Byte-level, each further id a made-up word."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = [*sorted(ByteLevel.alphabet()), *(f"\u0120w{i}" for i in range(vocab - 256))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []}
    made = {"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text("{}")


def raw(model: Any, prompts: int, tokens: int) -> float:
    """Tokens/s of `Decoder`, once its step is recorded."""
    from wgrad.train.inference.generation import Decoder
    from wgrad.train.options.generate_config import GREEDY

    ids = np.random.default_rng(0).integers(1, model.config.vocab_size, (prompts, SHORT)).tolist()
    best = 0.0
    for _ in range(2):
        start = 0.0
        for count, _ in enumerate(Decoder(model, ids, tokens, GREEDY).tokens(), start=1):
            if count == NOT_TIMED:
                start = time.perf_counter()
        best = max(best, prompts * (tokens - NOT_TIMED) / (time.perf_counter() - start))
    return best


def run(args: argparse.Namespace) -> None:
    from common import Report

    from wgrad.autograd.bind import bind
    from wgrad.train.commands.bench_model import SHAPES, random_weights
    from wgrad.train.commands.serve import guarded
    from wgrad.train.data.tokenizer_source import open_tokenizer
    from wgrad.train.inference.all_kernels import run_all_kernels
    from wgrad.train.model.load_config import parse_model_config
    from wgrad.train.model.model import Model
    from wgrad.train.options.serve_config import CACHE_SEQUENCES, ServeConfig
    from wgrad.train.serve.engine import Engine
    from wgrad.train.serve.http_server import HttpServer, listen, resolve
    from wgrad.train.serve.limits import Limits
    from wgrad.train.serve.preparation import Preparation
    from wgrad.wgsl.device import WgpuDevice

    device = bind(WgpuDevice)(args.device)
    report = Report("serve", device, args.out)
    compute = device.fastest_compute if args.compute == "auto" else args.compute
    for name in args.shapes.split(","):
        config = parse_model_config(SHAPES[name].config())
        weights = random_weights(config, device)
        model = Model(config, weights, device, positions=args.context, dtype=np.dtype(compute))
        with tempfile.TemporaryDirectory() as folder:
            tokenizer_files(Path(folder), config.vocab_size)
            tokenizer, _ = open_tokenizer(Path(folder), None, config.vocab_size)
        tokenizers = {"bench": tokenizer}
        limits = Limits(args.context, args.batch_size, 1000, max(CACHE_SEQUENCES * args.context, LEAST_KEYS))
        engine = Engine({"bench": model}, tokenizers, limits)
        rest: Any = (args.context, 1024, 300.0, threading.Lock())
        preparation = Preparation(tokenizers, config.vocab_size, *rest)
        serve = ServeConfig(model=name, port=0, request_log=False)
        listening = listen(resolve(serve.host, 0))
        server = HttpServer(guarded(engine, preparation, serve), listening, engine.close)
        counts = [int(count) for count in args.clients.split(",")]
        rates = {count: raw(model, count, args.tokens) for count in counts}
        server.start()
        run_all_kernels(model, args.batch_size, limits.prompt_tokens, limits.keys)
        engine.warm_up(args.warm_up)
        given = (args, report, listening, name, compute, rates, engine)
        threading.Thread(target=measure, args=given).start()
        if args.profile:
            host = cProfile.Profile()
            host.runcall(engine.run)
            pstats.Stats(host).sort_stats("tottime").print_stats(30)
        else:
            engine.run()
        server.stop()


def measure(
    args: argparse.Namespace, report: Any, listening: Any, name: str, compute: str, rates: dict[int, float], engine: Any
) -> None:
    port, vocab = listening.getsockname()[1], engine.tokenizers["bench"].vocab_size
    command = [sys.executable, str(Path(__file__).resolve()), "--connect", f"{port},{vocab}"]
    command += ["--tokens", str(args.tokens), "--shared", str(args.shared), "--edited", str(args.edited)]
    seed = 0
    try:
        for count, rate in rates.items():
            for kind in ("", "--whole", "--late")[: 3 if count > 1 else 2]:
                found: dict[str, float] = {}
                for _ in range(args.repeat):  # the first compiles, and records
                    seed += 1
                    once = [*command, "--clients", str(count), "--seed", str(seed), *filter(None, [kind])]
                    done = subprocess.run(once, capture_output=True, text=True, timeout=300)
                    if done.returncode:
                        print(done.stderr[-2000:], flush=True)
                        return
                    found = max(found, json.loads(done.stdout), key=lambda row: row.get("tokens_per_second", 0.0))
                ratio = found["tokens_per_second"] / rate
                work = {"work": name, "compute": compute, "clients": count, "answers": kind[2:] or "streamed"}
                work |= {"shared": args.shared} if args.shared else {}
                work |= {"edited": args.edited} if args.edited else {}
                report.row(**work, raw_tokens_per_second=rate, **found, ratio=ratio)
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--shapes", default="llama-3.2-1b")
    parser.add_argument("--clients", default="1,16,64", help="how many at once, for each three rows")
    parser.add_argument("--tokens", type=int, default=128, help="new ones of each prompt")
    parser.add_argument("--compute", default="float32", help="auto: the fastest")
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--shared", type=int, default=0, help="further tokens that all prompts begin with")
    parser.add_argument("--edited", type=int, default=0, help="clients with a logit_bias")
    parser.add_argument("--repeat", type=int, default=3, help="the best of as many")
    parser.add_argument("--warm-up", type=float, default=5.0, metavar="SECONDS", help="0: as cold as may be")
    parser.add_argument("--profile", action="store_true", help="what the device's thread does; slower")
    parser.add_argument("--connect", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--late", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if not args.connect:
        run(args)
        return
    port, vocab = map(int, args.connect.split(","))
    how = args.late, not args.whole, args.shared, args.edited, args.seed
    print(json.dumps(asyncio.run(clients(port, int(args.clients), args.tokens, vocab, *how))))


if __name__ == "__main__":
    main()
