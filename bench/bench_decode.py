"""Tokens/s of generating text on shapes of known models, with random NF4 weights; the GEMV by tile.

    python bench/bench_decode.py [--shapes llama-3.1-8b,llama-3.2-1b] [--prompts 1,16] [--tokens 256] [--out FILE]
        [--stream-weights [--resident-layers N [--stream-head]] [--whole-layers]] [--layers N]
        [--slots N,N [--skew S] [--embedding-scale S]]
    python bench/bench_decode.py --sweep [--rows 1,8,16]     which VectorTile is fastest, for each GEMM of the shapes

A row of the first kind: greedy, from a prompt of --prompt-tokens each, timed when the first tokens are there: the step
is recorded by then. weight_bytes: what a step reads of weights at least, whatever the number of prompts. A row of the
second kind: one GEMM of a layer or of the head, compared with the tile that is `chosen`.
--stream-weights: from main memory, of experts only those that a token chose; --whole-layers: all of them. With layers
that stay, the head of a model with experts stays too, as in a run; --stream-head: it does not. --slots: all but experts
stays, and of these as many of each layer. Random layers choose much the same experts for every token; --routed: they
choose as those of trained models do (routing.py). Then each prompt is 23 tokens longer than the one before.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from bench_gemm import random_nf4
from common import Report, time_device
from routing import route_as_trained
from streamed import streamed_weights

from wgrad.autograd.bench import timing
from wgrad.autograd.bind import bind
from wgrad.device.errors import DeviceError
from wgrad.train.commands.bench_model import SHAPES, Shape, random_weights
from wgrad.train.inference.batch_step import MOST_STEPS
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.generation import Decoder
from wgrad.train.inference.growing import Block, Growing
from wgrad.train.model import mixture
from wgrad.train.model import streamed_weights as streaming
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.model import Model
from wgrad.train.model.stacks import GATE_UP, QKV
from wgrad.train.options.generate_config import GREEDY, Sampling
from wgrad.train.step.resident import keeps_head
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm.gemm import matmul
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.gemv import VectorTile, choose_tile

TILES = [
    VectorTile(threads, lanes) for threads in (64, 128, 256) for lanes in (8, 16, 32, 64, 128, 256) if lanes <= threads
]
LONGER = 23  # tokens of each prompt than of the one before, with --routed
PROMPT_RUNS = 5
NOT_TIMED = 3  # tokens: of the prompt, of the first step, of the one that is recorded


def weight_bytes(model: Model) -> int:
    """Bytes of all weights that a token is multiplied with: a table of embeddings that is not the head is looked up
    only, and a stack is its parts."""
    looked_up = set() if model.config.tie_word_embeddings else {"model.embed_tokens.weight"}
    stacks = (f"{QKV}.weight", f"{GATE_UP}.weight")
    return sum(w.nbytes for name, w in model.weights.items() if name not in looked_up and not name.endswith(stacks))


def bench_text(report: Report, name: str, prompts: int, args: argparse.Namespace, slots: int = 0) -> None:
    device = bind(WgpuDevice)(args.device)
    shape = replace(SHAPES[name], layers=args.layers) if args.layers else SHAPES[name]
    config = replace(parse_model_config(shape.config()), embedding_scale=args.embedding_scale)
    lengths = [args.prompt_tokens + LONGER * b * args.routed for b in range(prompts)]
    positions = lengths[-1] + args.tokens
    if args.gathered_rows is not None:
        streaming._GATHERED_ROWS = args.gathered_rows
    if args.stream_weights:
        head = args.keep_head or (keeps_head(args.resident_layers or slots, config) and not args.stream_head)
        more = {"resident": args.resident_layers, "whole_layers": args.whole_layers, "keep_head": head}
        more |= {"slots": slots, "skew": args.skew}
        weights: Any = streamed_weights(config, device, shape.mxfp4_experts, **more)
    else:
        weights = random_weights(config, device)
    model = Model(config, weights, device, positions=positions, dtype=np.dtype(args.compute))
    choose = mixture.choose
    if args.routed:
        route_as_trained(model, positions)
    rng, sampling = np.random.default_rng(0), replace(GREEDY, temperature=args.temperature)
    ids = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
    begin = time.perf_counter()
    while time.perf_counter() - begin < timing.WARM_SECONDS:
        list(Decoder(model, ids, args.tokens, sampling).tokens())
    if args.paged:
        bench_pages(report, name, model, ids, args)
        return
    decoder, prompt_seconds = time_prompts(model, ids, args.tokens, sampling)
    before = weights.use if slots else (0, 0)
    start, cpu, count = 0.0, 0.0, 0
    for count, _ in enumerate(decoder.tokens(), start=1):
        if count == NOT_TIMED:
            start, cpu = time.perf_counter(), time.process_time()
    steps = count - NOT_TIMED
    prompt = float(np.median(prompt_seconds))
    seconds, cpu = (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps
    if args.profile:
        device.profile()
        list(Decoder(model, ids, 6, GREEDY).tokens())
        print(device.profile_table())
    row: dict[str, Any] = {"layers": config.num_hidden_layers}
    if args.stream_weights:
        row |= {"streamed": True, "resident_layers": args.resident_layers, "whole_layers": args.whole_layers}
        row |= {"head_streamed": not head, "slots": slots, "skew": args.skew, "temperature": args.temperature}
        row |= {"embedding_scale": args.embedding_scale, "routed": args.routed}
        row |= {} if args.gathered_rows is None else {"gathered_rows": args.gathered_rows}
        if slots:
            needed, missing = (now - then for now, then in zip(weights.use, before))
            row |= {"needed": needed, "hits": 1 - missing / max(needed, 1)}
    else:
        row |= {"weight_bytes": weight_bytes(model), "gb_per_second": weight_bytes(model) / seconds / 1e9}
    report.row(
        work=name, prompts=prompts, compute=args.compute, prompt_tokens=args.prompt_tokens, tokens=count,
        tokens_per_second=prompts / seconds, ms_per_step=1e3 * seconds, cpu_ms_per_step=1e3 * cpu,
        prompt_ms=1e3 * prompt, prompt_spread=float(np.ptp(prompt_seconds) / prompt),
        dispatches=decoder.dispatches, peak_gib=device.memory().peak_bytes / (1 << 30), **row,
    )  # fmt: skip
    mixture.choose = choose


def time_prompts(model: Model, ids: list[list[int]], tokens: int, sampling: Sampling) -> tuple[Decoder, list[float]]:
    """Run the prompts several times. Returns the last decoder, which has generated nothing yet, and the seconds."""
    seconds = []
    for _ in range(PROMPT_RUNS):
        model.device.synchronize()
        begin = time.perf_counter()
        decoder = Decoder(model, ids, tokens, sampling)
        model.device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return decoder, seconds


def bench_pages(report: Report, name: str, model: Model, ids: list[list[int]], args: argparse.Namespace) -> None:
    """A server's batch, without a server: blocks of steps of sequences in pages."""
    batch, device, seconds = Batch(model, len(ids)), model.device, float("inf")
    for _ in range(3):  # the first one records
        batch.join([Growing.begin(prompt, args.tokens, GREEDY) for prompt in ids])
        start, steps, blocks = 0.0, 0, deque[Block]()
        while batch.growing or blocks:
            if batch.growing:
                blocks.append(batch.queue(MOST_STEPS if start else 1))
            if len(blocks) == 2 or not batch.growing:
                read = blocks.popleft()
                read.tokens()
                start, steps = start or time.perf_counter(), steps + read.steps
        seconds = min(seconds, (time.perf_counter() - start) / (steps - 1))
    if args.profile:
        device.profile()
        batch = Batch(model, len(ids))
        batch.join([Growing.begin(prompt, args.tokens, GREEDY) for prompt in ids])
        device.profile()
        batch.queue(6).tokens()
        print(device.profile_table())
        device.profile(False)
    report.row(
        work=name, prompts=len(ids), compute=args.compute, prompt_tokens=args.prompt_tokens, tokens=args.tokens,
        pages=True, tokens_per_second=len(ids) / seconds, ms_per_step=1e3 * seconds,
    )  # fmt: skip


def products(shape: Shape) -> list[tuple[str, int, int]]:
    """(kind of weight, N, K) of each kind of GEMM of a token, each once."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = [(q, shape.hidden), (kv, shape.hidden), (shape.hidden, q)]
    layer += [(shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)]
    return [*(("nf4", n, k) for n, k in dict.fromkeys(layer)), ("float16", shape.vocab, shape.hidden)]


def bench_tiles(report: Report, name: str, kind: str, n: int, k: int, m: int, device: Any, compute: str) -> None:
    rng = np.random.default_rng(0)
    if kind == "nf4":
        weight, unit = random_nf4(device, n, k), 8
    else:
        normal = (0.02 * rng.standard_normal(1 << 20)).astype(np.float16)
        weight, unit = device.upload(np.resize(normal, (n, k))), 4
    x, out = device.upload(rng.standard_normal((m, k)).astype(compute)), device.empty((m, n))
    chosen = choose_tile(m, n, k, unit, False)
    expected = None
    for tile in dict.fromkeys([chosen, *TILES]):

        def work(tile: VectorTile = tile) -> None:
            matmul(device, x, weight, Epilogue(out), trans_b=True, tile=tile)

        try:
            work()
            found = device.download(out)
            expected = found if expected is None else expected
            seconds, spread = time_device(device, work)
        except DeviceError as problem:  # more workgroup memory than the GPU has
            print("failed", tile, str(problem)[:200])
            continue
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        report.row(
            work=name, op=f"gemv_{kind}", m=m, n=n, k=k, threads=tile.threads, lanes=tile.lanes, chosen=tile == chosen,
            us=1e6 * seconds, spread=spread, gb_per_second=weight.nbytes / seconds / 1e9, difference=error,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--shapes", default="llama-3.1-8b,llama-3.2-1b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--prompts", default="1,16", help="how many at once, for each a row")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="new ones of each prompt")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--layers", type=int, default=0, help="as many layers")
    parser.add_argument("--stream-weights", action="store_true", help="from main memory")
    parser.add_argument("--resident-layers", type=int, default=0, help="of these, layers that stay on the device")
    parser.add_argument("--whole-layers", action="store_true", help="of these, with experts that no token chose")
    parser.add_argument("--stream-head", action="store_true", help="of these, the head although layers stay")
    parser.add_argument("--slots", default="0", help="of these, experts of each layer that stay, for each a row")
    parser.add_argument("--skew", type=float, default=0.0, help="of these, how much routers prefer some experts")
    parser.add_argument("--routed", action="store_true", help="routers choose as trained ones do")
    parser.add_argument("--gathered-rows", type=float, help="of these, rows of an expert up to which it is gathered")
    parser.add_argument("--keep-head", action="store_true", help="of these, the head stays though no layer does")
    parser.add_argument("--embedding-scale", type=float, default=1.0, help="64: tokens differ more in their experts")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--paged", action="store_true", help="as a server's batch has them, in pages")
    parser.add_argument("--profile", action="store_true", help="a table of the kernels as well")
    parser.add_argument("--sweep", action="store_true", help="tiles of the matrix-vector product instead of texts")
    parser.add_argument("--rows", default="1,8,16", help="of the product, with --sweep")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if args.tokens <= NOT_TIMED:
        parser.error(f"--tokens: must be more than {NOT_TIMED}, of which the timing begins, got {args.tokens}")
    device = bind(WgpuDevice)(args.device)
    report = Report("decode_tiles" if args.sweep else "decode", device, args.out)
    for name in args.shapes.split(","):
        if not args.sweep:
            for prompts in map(int, args.prompts.split(",")):
                for slots in map(int, args.slots.split(",")):
                    bench_text(report, name, prompts, args, slots)
            continue
        for kind, n, k in products(SHAPES[name]):
            for m in map(int, args.rows.split(",")):
                bench_tiles(report, name, kind, n, k, m, device, args.compute)


if __name__ == "__main__":
    main()
