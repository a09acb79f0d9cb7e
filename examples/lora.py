"""Federated LoRA with PEFT: three clients train adapters of a small Llama, and `fedcore.merge` averages their folders.

The folder of each round is loaded by `PeftModel.from_pretrained`; the last one has the tokenizer too. Needs
`pip install "fedcore-fl[torch]" peft transformers`. For your own model, replace `BASE` by its name or folder, and
`batches` by your data.
"""

import json
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fedcore

CLIENTS, ROUNDS, STEPS = 3, 6, 8
WORDS = ["<pad>", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
home = Path(tempfile.mkdtemp())
BASE = home / "base"


def make_base():
    """Write a Llama of 20,000 numbers and its tokenizer, as the Hub has them."""
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, **size)).save_pretrained(BASE)
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>").save_pretrained(BASE)


def batches(client, tokenizer):
    """Each client counts from some numbers on; together they count from all."""
    starts = range(1 + client, len(WORDS) - 3, CLIENTS)
    return tokenizer([" ".join(WORDS[start : start + 4]) for start in starts], return_tensors="pt")["input_ids"]


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def train(model, tokens):
    optimizer = torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad], lr=0.02)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()


def adapted(folder, **options):
    """Load the base model with the adapter of a folder, as a user of the result does."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), folder, **options)


make_base()
tokenizer = AutoTokenizer.from_pretrained(BASE)
tokens = [batches(client, tokenizer) for client in range(CLIENTS)]
everyone = torch.cat(tokens)
lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear")
start = get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), lora)
start.save_pretrained(home / "round0")
first = loss_of(start, everyone).item()

for number in range(ROUNDS):
    folders = [home / f"round{number}-client{client}" for client in range(CLIENTS)]
    for folder, own in zip(folders, tokens, strict=True):  # on the clients' machines
        model = adapted(home / f"round{number}", is_trainable=True)
        train(model, own)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    fedcore.merge(home / f"round{number + 1}", folders, [len(own) for own in tokens])  # lora="product" mixes ranks

result = home / f"round{ROUNDS}"
last = loss_of(adapted(result).eval(), everyone).item()
scale = json.loads((result / "adapter_config.json").read_text())["lora_alpha"]
words = AutoTokenizer.from_pretrained(result).decode([3, 4])
print(f"loss {first:.2f} before, {last:.2f} after {ROUNDS} rounds; lora_alpha {scale}, tokens {words!r}")
print(f"PeftModel.from_pretrained loads the result: {'yes' if last < first / 2 else 'no better than the base'}")
