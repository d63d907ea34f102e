"""The same QLoRA step in Unsloth (CUDA). Usage: peer_unsloth.py CONFIG_JSON SEQ_LEN CHECKPOINTING BATCH [...]

As peer_peft.py: NF4 with double quantization, bfloat16, r = 16 on all seven projections, fused AdamW, random weights.
Other than wgrad's and PEFT's, its step does not clip gradients. CHECKPOINTING 1 is Unsloth's own, which offloads
activations. Prints a JSON object for each pair of the last two. Needs `pip install unsloth`.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version

from unsloth import FastLanguageModel  # type: ignore[import-not-found]  # isort: skip  # first: it patches the others
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save(config: dict[str, object], folder: str) -> None:
    """A checkpoint with random weights, and a tokenizer of bytes, which Unsloth asks for."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        LlamaForCausalLM(LlamaConfig(**config, pad_token_id=3)).save_pretrained(folder)  # type: ignore[arg-type]
    torch.set_default_dtype(torch.float32)
    torch.cuda.empty_cache()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = {text: i for i, text in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8192, **names).save_pretrained(folder)


def measure(folder: str, vocab: int, seq_len: int, checkpointing: int, batch: int) -> dict[str, object]:
    """Load the checkpoint, warm up, and return the row of one setting."""
    mode = "unsloth" if checkpointing else False
    model, _ = FastLanguageModel.from_pretrained(
        folder,
        max_seq_length=seq_len,
        dtype=torch.bfloat16,
        load_in_4bit=True,
        device_map={"": 0},
        local_files_only=True,
        use_gradient_checkpointing=mode,
    )
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, use_gradient_checkpointing=mode
    )
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    ids = torch.randint(0, vocab, (batch, seq_len), device="cuda")

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    steps(3)
    torch.cuda.reset_peak_memory_stats()
    samples = [steps(3) for _ in range(5)]
    median = statistics.median(samples)
    return {
        "stack": "unsloth",
        "compute": "bfloat16",
        "batch": batch,
        "seq_len": seq_len,
        "checkpointing": bool(checkpointing),
        "tokens_per_second": batch * seq_len / median,
        "ms_per_step": 1e3 * median,
        "spread": (max(samples) - min(samples)) / median,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "unsloth": version("unsloth"),
        "torch": torch.__version__,
    }


def main() -> None:
    config, (seq_len, *pairs) = json.loads(sys.argv[1]), map(int, sys.argv[2:])
    config.pop("architectures")
    config.pop("model_type")
    with tempfile.TemporaryDirectory() as folder:
        save(config, folder)
        for checkpointing, batch in zip(pairs[::2], pairs[1::2]):
            try:
                print(json.dumps(measure(folder, config["vocab_size"], seq_len, checkpointing, batch)), flush=True)
            except torch.OutOfMemoryError as error:
                print(f"checkpointing {checkpointing}, batch {batch}:", error, file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
