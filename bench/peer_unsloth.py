"""The same QLoRA step in Unsloth (CUDA), which bench_train.py starts.

    python bench/peer_unsloth.py CONFIG_JSON SEQ_LEN CHECKPOINTING BATCH ADAPT_EXPERTS [...]

As peer_peft.py: NF4 with double quantization, bfloat16, r = 16 on all seven projections, fused AdamW, random weights.
Of a mixture of experts Unsloth quantizes the experts, too. Other than wgrad's and PEFT's, its step does not clip
gradients. CHECKPOINTING 1 is Unsloth's own, which offloads activations. Needs `pip install unsloth`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from unsloth import FastLanguageModel  # type: ignore[import-not-found]  # isort: skip  # first: it patches the others
import peer_steps
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_tokenizer(folder: str) -> None:
    """Write a tokenizer of bytes, which Unsloth asks for."""
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = {text: i for i, text in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8192, **names).save_pretrained(folder)


def measure(
    folder: str, config: dict[str, Any], seq_len: int, checkpointing: bool, batch: int, adapt_experts: bool
) -> dict[str, Any]:
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
    targets = peer_steps.targets_of(config, adapt_experts)
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0.0, use_gradient_checkpointing=mode, **targets
    )
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(0, config["vocab_size"], (batch, seq_len), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    row = peer_steps.row_of(step, trained, batch, seq_len)
    experts = {str(p.dtype) for name, p in model.named_parameters() if ".experts." in name and not p.requires_grad}
    return row | {"unsloth": version("unsloth"), "torch": torch.__version__, "experts_dtype": ",".join(sorted(experts))}


if __name__ == "__main__":
    peer_steps.main("unsloth", measure, save_tokenizer)
