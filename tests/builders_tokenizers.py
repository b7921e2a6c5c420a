"""Two planted tokenizers of different kinds, small enough to be followed by hand, and models that speak them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTE_LEVEL = ["<s>", "</s>", "<|turn|>", "a", "b", "c", "d", "e", "Ġ", "Ã", "©", "ab", "cd", "Ã©", "Ġa"]
"""Ids in order. The merges: a b, c d, Ã ©, Ġ a."""
FALLBACK = ["<pad>", "<bos>", "<end>", "<0xC3>", "<0xA9>", "<0xF0>", "a", "b", "c", "d", "e", "▁", "bc", "▁a", "f", "g"]
"""Ids in order. The merges: b c, ▁ a. An é is two byte tokens."""


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind."""
    merges = [("a", "b"), ("c", "d"), ("Ã", "©"), ("Ġ", "a")]
    vocabulary = {token: index for index, token in enumerate(BYTE_LEVEL)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|turn|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def fallback(*, tokens: Sequence[str] = FALLBACK, byte_fallback: bool = True) -> PreTrainedTokenizerFast:
    """Llama 2's kind: a space before every text, and `<think>` as a token that is text."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("b", "c"), ("▁", "a")], byte_fallback=byte_fallback, unk_token="<pad>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<end>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<end>")


def write_speaker(folder: Path, tokenizer: Any, *, head_rows: int, seed: int, hidden: int = 32) -> Path:
    """A tiny Llama-shaped model that speaks `tokenizer`; head rows past its ids are padding."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=head_rows,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
