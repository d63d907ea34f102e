"""Launches and bytes written by the host for a block of decoding of a server's batch, from a dry run: no GPU is needed.

python bench/count_decoding.py [--shapes llama-3.2-1b] [--rows 16] [--context 1024] [--matrix-units]
"""

from __future__ import annotations

import argparse

import numpy as np
from count_launches import counting_device

from wgrad.train.commands.bench_model import SHAPES, random_weights
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.growing import Growing
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import GREEDY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="llama-3.2-1b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--compute", default="float16")
    parser.add_argument("--matrix-units", action="store_true", help="count for a GPU on which they are enabled")
    args = parser.parse_args()
    for name in args.shapes.split(","):
        device, config = counting_device(args.matrix_units), parse_model_config(SHAPES[name].config())
        weights = random_weights(config, device)
        model = Model(config, weights, device, positions=args.context, dtype=np.dtype(args.compute))
        batch = Batch(model, args.rows)
        counts = {}
        for label, prompts in (("two prompts", 2), ("a group", args.rows - 2)):
            device.counts.clear()
            batch.join([Growing.begin([batch.free + n] * 32, 512, GREEDY) for n in range(prompts)])
            counts[label] = sum(device.counts.values())
        for label in ("first step", "step"):
            device.counts.clear()
            batch.queue(1)
            counts[label] = sum(device.counts.values())
        print(f"{name}, {args.rows} rows, {args.compute}: {counts}")
        for (operator, shader), number in device.counts.most_common():
            print(f"  {number:6} {operator:28} {shader}")


if __name__ == "__main__":
    main()
