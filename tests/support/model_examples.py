"""Tiny models on disk: folders as save_pretrained writes them, and GGUF files as llama.cpp does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
VOCABULARY = ["<unk>", "<s>", "</s>", *bytes_to_unicode().values(), "ĠĠ", "ĠĠĠ"]
MERGES = ["Ġ Ġ", "ĠĠ Ġ"]
_SPECIAL = 3


def tiny_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{
            "vocab_size": len(VOCABULARY),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            **settings,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.eval()
    return model


def attending_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A tiny Llama whose softmax is far from the mean of values in every head: there is a gap to close."""
    model = tiny_llama(seed, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(12)
    return model


def overflowing_llama(**settings: Any) -> LlamaForCausalLM:
    """A tiny Llama with weights that float16 holds, whose activations it does not."""
    model = tiny_llama(**settings)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e5)
        model.model.layers[0].mlp.down_proj.weight.mul_(3e5)
    return model


def byte_tokenizer(*, first: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens; with ``first`` every text begins with ``<s>``, as those of Gemma and Llama do."""
    merges = [(left, right) for left, right in (line.split(" ") for line in MERGES)]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(VOCABULARY)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if first:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", VOCABULARY.index("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def save_folder(folder: Path, model: PreTrainedModel) -> Path:
    """A model folder with the byte tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def config_folder(folder: Path, **config: Any) -> Path:
    """A folder with a config.json and an empty file where the weights would be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").touch()
    return folder


def hub_cache(root: Path, name: str, folder: Path) -> Path:
    """Lay a model folder out as the hub's cache does, under revision 'main'."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = root / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    return snapshot


def write_gguf(
    path: Path, model: LlamaForCausalLM, *, architecture: str = "llama", drop: str = "", add_bos: bool = False
) -> Path:
    """A float32 GGUF file of a Llama model, its queries and keys permuted as llama.cpp stores them."""
    config: Any = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3 if index < _SPECIAL else 1 for index in range(len(VOCABULARY))])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(add_bos)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in _gguf_tensors(model).items():
        if not drop or drop not in name:
            writer.add_tensor(name, np.ascontiguousarray(tensor.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    tensors = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    config: Any = model.config
    for index, layer in enumerate(model.model.layers):
        block = f"blk.{index}"
        tensors |= {
            f"{block}.attn_q.weight": _permuted(layer.self_attn.q_proj.weight, config.num_attention_heads),
            f"{block}.attn_k.weight": _permuted(layer.self_attn.k_proj.weight, config.num_key_value_heads),
            f"{block}.attn_v.weight": layer.self_attn.v_proj.weight,
            f"{block}.attn_output.weight": layer.self_attn.o_proj.weight,
            f"{block}.ffn_gate.weight": layer.mlp.gate_proj.weight,
            f"{block}.ffn_up.weight": layer.mlp.up_proj.weight,
            f"{block}.ffn_down.weight": layer.mlp.down_proj.weight,
            f"{block}.attn_norm.weight": layer.input_layernorm.weight,
            f"{block}.ffn_norm.weight": layer.post_attention_layernorm.weight,
        }
    return tensors


def _permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from halves to interleaved pairs, the order of llama.cpp's rotation."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
