"""A tiny Llama with hand-set weights whose recall runs through one known KV group, and a tokenizer by words.

Tokens have random codes. Head 0 of layer 0 attends to the previous token and copies its code: it needs the nearest keys
alone. Head 2 of layer 1 (KV group 1) looks for its own token's code among these copies, which is the place behind the
earlier same token, and writes the code of the token there into the dimensions that the logits read: an induction head.
All other heads write small noise.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

CARRIER = ((1, 2), (1, 3))
"""The KV group that all of recall runs through."""

VOCABULARY, CODE, HIDDEN, HEAD = 512, 52, 160, 64
# Rotary frequencies from the seventh pair on hardly turn: codes match at any distance there.
PAIRS = HEAD // 2
STEADY = torch.tensor([*range(6, PAIRS), *range(PAIRS + 6, HEAD)])
THIS, PREVIOUS, FOUND, CONSTANT = slice(0, CODE), slice(CODE, 2 * CODE), slice(2 * CODE, 3 * CODE), 3 * CODE


class WordTokenizer:
    """Every word, with its space or colon, is one token; numbers are given in the order of appearance."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        words = re.findall(r" ?[^\s:]+:?|\n", text)
        return {"input_ids": [self.known.setdefault(word, len(self.known)) % VOCABULARY for word in words]}


def planted_recall() -> Any:
    """The model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=HEAD, max_position_embeddings=2048, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e38},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(VOCABULARY, CODE, generator=generator).sign() / CODE**0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
            if "mlp" in name:
                parameter.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, THIS] = codes
        model.model.embed_tokens.weight[:, CONSTANT] = 1
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, FOUND] = 1.5 * codes  # sure of its answers, but not so sure that a slope vanishes
        _plant_previous_token(model.model.layers[0].self_attn)
        _plant_induction(model.model.layers[1].self_attn)
    return model


def _rows(head: int) -> slice:
    return slice(head * HEAD, (head + 1) * HEAD)


def _plant_previous_token(attention: Any) -> None:
    turn = torch.tensor([1.0, 1e38 ** (-1 / PAIRS)])
    for weight, head, even, odd in (
        (attention.q_proj.weight, 0, torch.ones(2), torch.zeros(2)),
        # A key turned on by one position: the score is largest one position behind it.
        (attention.k_proj.weight, 0, turn.cos(), turn.sin()),
    ):
        weight[_rows(head)] = 0
        weight[_rows(head)][[0, 1], CONSTANT], weight[_rows(head)][[PAIRS, PAIRS + 1], CONSTANT] = 5 * even, 5 * odd
    _copy_codes(attention, kv_head=0, head=0, to=PREVIOUS, scale=(2 / HIDDEN) ** 0.5)


def _plant_induction(attention: Any) -> None:
    for weight, head, source in ((attention.q_proj.weight, 2, THIS), (attention.k_proj.weight, 1, PREVIOUS)):
        weight[_rows(head)] = 0
        weight[_rows(head)][STEADY, source] = 3 * torch.eye(CODE)
    _copy_codes(attention, kv_head=1, head=2, to=FOUND, scale=(3 / HIDDEN) ** 0.5)


def _copy_codes(attention: Any, *, kv_head: int, head: int, to: slice, scale: float) -> None:
    """Values are the codes of the tokens, and the head writes them to these dimensions."""
    value, output = attention.v_proj.weight, attention.o_proj.weight
    value[_rows(kv_head)] = 0
    value[_rows(kv_head)][:CODE, THIS] = scale * torch.eye(CODE)
    written: Tensor = torch.zeros(HIDDEN, HEAD)
    written[to, :CODE] = torch.eye(CODE)
    output[:, _rows(head)] = written
