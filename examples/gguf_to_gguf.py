"""From a GGUF file to GGUF files: train on it as it is, then an adapter for llama.cpp, and a merged model.

    pip install 'wgrad[gguf]'
    python examples/gguf_to_gguf.py model-Q4_K_M.gguf data.jsonl

The blocks of the file stay as they are on the device; tokenizer, template and sizes come from the file.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import wgrad


def main(base: str, data: Any, out: str = "out/gguf", **options: Any) -> list[Path]:
    result = wgrad.finetune(model=base, data=data, out=out, **options)
    adapter, merged = Path(out, "adapter.gguf"), Path(out, "merged")
    device = ["--device", options.get("device", "auto")]
    command = [sys.executable, "-m", "wgrad"]
    export = ["export", "--adapter", str(result.out), "--model", base, "--gguf-lora", str(adapter)]
    subprocess.run([*command, *export], check=True)  # llama-cli -m base.gguf --lora adapter.gguf
    merge = ["merge", "--adapter", str(result.out), "--model", base, "--out", str(merged), "--format", "gguf"]
    subprocess.run([*command, *merge, "--quantize", "q8_0", "--no-compare", *device], check=True)
    return [adapter, merged / "model.gguf"]


if __name__ == "__main__":
    print(*main(*sys.argv[1:3]), sep="\n")
