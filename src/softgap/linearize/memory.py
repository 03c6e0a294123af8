"""What the KV cache of a model takes, and what is left of it where some KV groups live in states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softgap.linearize.substitute import Substitute
from softgap.probe.layout import attention_layers
from softgap.probe.models import Model
from softgap.probe.state_cache import bounded_layers

__all__ = ["memory_of"]


def memory_of(model: Model, groups: Sequence[tuple[int, int]], used: Substitute) -> dict[str, float]:
    """Bytes of the KV cache per token of context, of the model and under a plan; of all states, at any length.

    And of the maps and readouts that the plan brings along, which are held once for all texts. Layers whose cache does
    not grow with the text count for nothing.
    """
    bounded = bounded_layers(model)
    layers = attention_layers(model)
    config: Any = model.config.get_text_config()
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    each = 2 * dim * model.dtype.itemsize
    total = sum(layer.kv_heads for layer in layers if layer.number not in bounded)
    features = used.mechanism.feature_dim(dim) or 0
    maps = used.mechanism.parameters.get("key_weight")
    # Key maps of query heads have a state each.
    copies = 1 if maps is None else max(1, maps.shape[1] // layers[0].kv_heads)
    state = copies * features * (dim + 1 + 2 * used.mechanism.log) * 4
    near = 0 if used.window is None else (used.window - 1) * (2 * dim + copies * (features + dim)) * 4
    return {
        "per_token_original": float(each * total),
        "per_token": float(each * (total - len(groups))),
        "saved_per_token": float(each * len(groups)),
        "states": float(len(groups) * (state + near)),
        "parameters": float(sum(x.nbytes for x in used.tensors().values())),
    }
