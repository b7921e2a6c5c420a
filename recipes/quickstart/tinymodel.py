"""One alphabet and one small Llama that base, experts and student share, both ordinary Hugging Face objects."""

from __future__ import annotations

from string import ascii_lowercase, digits

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ALPHABET = (PAD, BOS, EOS, *digits, *ascii_lowercase, *"+=:IVXLCDM()[]{}<>|")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
MAX_POSITION = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer: ids of a text are BOS and one id a character; decoding joins them without spaces.

    A character outside of the alphabet is an error: there is no unknown token that would hide it.
    """
    ids = {token: index for index, token in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=MAX_POSITION,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """A fresh Llama of 654,720 parameters (2.6 MB in float32)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=MAX_POSITION,
        tie_word_embeddings=False,
        initializer_range=0.02,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return model
