"""Make examples/base_model: a Llama of about a million parameters, trained by wgrad itself on one text file.

    python examples/make_base_model.py tinyshakespeare.txt --device auto

1. train a byte-level BPE tokenizer on the text; 2. write a model with random weights; 3. train all its parameters
with `wgrad finetune --full`; 4. write the result as bfloat16 in Hugging Face layout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from wgrad.device.files import make_folder, write_json
from wgrad.train.commands.cli import main as wgrad
from wgrad.train.files.safetensors_files import from_arrays, write_safetensors
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.model.weights import weight_specs

END = "<|endoftext|>"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def train_tokenizer(text: Path, folder: Path, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every text can be written, nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": None, "eos_token": END, "pad_token": END}
    write_json(folder / "tokenizer_config.json", {**special, "tokenizer_class": "PreTrainedTokenizerFast"})
    return tokenizer


def write_random_checkpoint(folder: Path, tokenizer: Tokenizer, seed: int) -> int:
    """GPT-2's start: normal with deviation 0.02, projections into the residual stream smaller by sqrt(2 layers)."""
    end = tokenizer.token_to_id(END)
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    config = {**CONFIG, **ids, "vocab_size": tokenizer.get_vocab_size()}
    generator = np.random.default_rng(seed)
    weights = {}
    for spec in weight_specs(parse_model_config(config)):
        deviation = CONFIG["initializer_range"]
        if spec.name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= (2 * CONFIG["num_hidden_layers"]) ** 0.5
        values = generator.standard_normal(spec.shape) * deviation
        weights[spec.name] = (np.ones(spec.shape) if spec.kind == "norm" else values).astype(np.float32)
    write_json(folder / "config.json", {**config, "dtype": "float32"})
    write_safetensors(folder / "model.safetensors", from_arrays(weights))
    return sum(w.size for w in weights.values())


def write_bfloat16(trained: Path, out: Path) -> None:
    """The trained model in half the bytes, with its configuration and tokenizer."""
    config = json.loads((trained / "config.json").read_text())
    write_json(out / "config.json", {**config, "dtype": "bfloat16"})
    entries = ModelFiles(trained).entries
    weights = {name: np.asarray(entry.array()).astype(ml_dtypes.bfloat16) for name, entry in entries.items()}
    write_safetensors(out / "model.safetensors", from_arrays(weights))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(trained / name, out / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent
    parser.add_argument("text", type=Path, help="text to train on, such as tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, default=here / "base_model", help="where the model goes")
    parser.add_argument("--work", type=Path, default=here / "base_model_work", help="folder for the run, new or empty")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    start, run = make_folder(args.work / "start"), args.work / "run"
    tokenizer = train_tokenizer(args.text, start, args.vocab_size)
    count = write_random_checkpoint(start, tokenizer, args.seed)
    print(f"random start: {count:,} parameters, {tokenizer.get_vocab_size()} tokens, in {start}", flush=True)
    options = ["--model", start, "--data", args.text, "--out", run, "--full"]
    options += ["--max-steps", args.steps, "--batch-size", args.batch_size, "--gradient-accumulation-steps", 1]
    options += ["--max-length", args.max_length, "--learning-rate", args.learning_rate]
    options += ["--warmup-steps", 0.05, "--weight-decay", 0.1]
    options += ["--device", args.device, "--compute", args.compute, "--seed", args.seed]
    options += ["--save-steps", 500, "--logging-steps", 20, "--sample-prompt", "ROMEO:\n"]
    status = wgrad(["finetune", *map(str, options)])
    if status == 0:
        write_bfloat16(run, make_folder(args.out))
        print(f"base model: {args.out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
