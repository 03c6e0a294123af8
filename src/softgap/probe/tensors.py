"""Visit the queries, keys, values and outputs of every layer of a model on one text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from softgap.attention import Visible
from softgap.errors import ValueInputError
from softgap.probe.tap import AttentionCall, observe_attention
from softgap.probe.token_scores import forward_then_logits
from softgap.probe.visibility import VisibleSets

__all__ = ["LayerTensors", "visit_layers"]

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """One layer on one text, in float32: after rotary embedding, KV heads not repeated.

    Attributes
    ----------
    layer
        Its number in the order of the calls.
    scale
        The model's scaling.
    visible
        Which keys each query sees.
    softcap
        Bound of its scores, where it has one.
    """

    layer: int
    query: Float[Tensor, "head query dim"]
    key: Float[Tensor, "kv_head key dim"]
    value: Float[Tensor, "kv_head key value_dim"]
    output: Float[Tensor, "head query value_dim"]
    scale: float
    visible: Visible
    softcap: float | None = None


def visit_layers(
    model: PreTrainedModel, token_ids: Sequence[int], visit: Callable[[LayerTensors], Result]
) -> list[Result]:
    """Run a model once over a text and hand every layer's tensors to ``visit``, one layer at a time.

    Only what ``visit`` returns is kept, so memory does not grow with the number of layers.
    """
    if not len(token_ids):
        raise ValueInputError("a text must hold at least one token, got none")
    results: list[Result] = []
    sets = VisibleSets()

    def listen(call: AttentionCall) -> None:
        q, k, v = (x.detach()[0].float() for x in (call.query, call.key, call.value))
        output = call.output.detach()[0].transpose(0, 1).float()
        results.append(
            visit(LayerTensors(len(results), q, k, v, output, call.scale, sets.of(call), call.options.get("softcap")))
        )

    with torch.inference_mode(), observe_attention(model, listen):
        inputs = {"input_ids": torch.tensor([list(token_ids)], device=model.device), "use_cache": False}
        # The logits of a long text would be the largest tensor of all, and nobody asks for them.
        forward_then_logits(model, inputs, len(token_ids))
    return results
