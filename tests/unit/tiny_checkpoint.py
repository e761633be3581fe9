"""A random llama with a byte tokenizer, saved as a folder that `midstream.load` takes; made in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAYERS = 4
HIDDEN = 32
#: A byte whose embedding is not a number, so that a prompt with it cannot be stored as integers.
POISON = "Z"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, a BOS before text, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {char: place for place, char in enumerate(alphabet, 2)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    )
    return tokenizer


def save_tiny(folder: Path, *, poisoned: bool = False) -> Path:
    """The folder, with model and tokenizer; every call writes the same weights."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
    if poisoned:
        (token,) = tokenizer.encode(POISON, add_special_tokens=False)
        with torch.no_grad():
            model.get_input_embeddings().weight[token] = torch.nan
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
