"""Head anatomy: which keys chosen heads attend to, by softmax and by every substitute that has weights.

One forward over the text, in which the attention calls of the chosen layers are looked at; weights are computed a block
of rows at a time and only the largest of each row are kept, so no T x T matrix is ever held. The weights of softmax are
those of the model: with its scaling, softcap, finite biases and learned sinks. Those of a mechanism are what it would
give to the same queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softgap.attention import Mechanism, Visible
from softgap.attention.quadratic import weight_blocks
from softgap.errors import ModelError, ValueInputError
from softgap.inputs import as_items
from softgap.models.placement import input_device
from softgap.models.support import check_measurable, layer_numbers
from softgap.probe.capture import check_lengths, check_sinks
from softgap.probe.prompts import prompt_ids
from softgap.probe.recording import instrument_arithmetic, prepare_mechanism
from softgap.probe.softmax import softmax_rows
from softgap.probe.tap import AttentionCall, observe_attention, takes_positions
from softgap.probe.visibility import VisibleSets
from softgap.trajectories import Trajectories
from softgap.trajectories.anatomy import SOFTMAX, TOP_KEYS, Anatomy, parse_heads

__all__ = ["check_heads", "has_weights", "head_anatomy", "run_anatomy", "run_ids"]

Heads = str | Sequence[str] | Sequence[tuple[int, int]]


def has_weights(mechanism: Mechanism) -> bool:
    """Whether there is something to see: a constant has no weights, and the mean of values the same for all keys."""
    return mechanism.kind != "constant" and mechanism.name != "uniform"


def head_anatomy(
    model: PreTrainedModel,
    ids: Sequence[int],
    heads: Heads,
    mechanisms: Sequence[str | Mechanism] = (),
    *,
    top: int = TOP_KEYS,
    drop_sinks: int = 0,
    sample_id: str = "0",
    first: str = "",
) -> tuple[Anatomy, ...]:
    """The keys that some heads attend to while the model reads tokens.

    Parameters
    ----------
    model
        Any causal model of transformers whose attention goes through the registry.
    ids
        The tokens; each of them is a query.
    heads
        ``"18.8,3.2"``, a list of such names, or pairs of layer and head.
    mechanisms
        What to show beside softmax. Those without weights of their own are left out.
    top
        How many keys to keep for each query.
    drop_sinks
        Hide this many first keys, from softmax and from the mechanisms.
    sample_id, first
        The name of the sample and the text of its first token, as ``Anatomy`` holds them.

    Returns
    -------
    tuple of Anatomy
        One for each head, in the order in which they were named.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model of two layers with four heads:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> ids = tokenizer("A fox went out")["input_ids"]
    >>> (head,) = softgap.probe.head_anatomy(model, ids, "1.2", ["elu1"])
    >>> head.mechanisms, head.keys.shape == (2, len(ids), 16)
    (('softmax', 'elu1'), True)
    >>> bool((abs(head.weights.sum(axis=2) + head.rest - 1) < 1e-5).all())
    True
    """
    check_measurable(model)
    pairs = _pairs(heads)
    if top < 1:
        raise ValueInputError(f"top must be at least 1 key, got {top}")
    if not len(ids):
        raise ValueInputError("ids must hold at least one token, got none")
    check_lengths(model, [ids], 0)
    check_sinks([ids], drop_sinks)
    prepared = [prepare_mechanism(mechanism, model) for mechanism in as_items(mechanisms)]
    shown = [mechanism for mechanism in prepared if has_weights(mechanism)]
    with torch.inference_mode():
        sizes = check_heads(model, pairs)
        reader = _Reader(pairs, tuple(sizes), shown, top, drop_sinks)
        with observe_attention(model, reader.observe), suppress(_Complete):
            _forward(model, ids)
    names = (SOFTMAX, *(mechanism.label for mechanism in shown))
    return tuple(
        Anatomy(layer, head, names, *reader.results[layer, head], sample_id=sample_id, first=first)
        for layer, head in pairs
    )


def run_anatomy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: Trajectories,
    heads: Heads,
    mechanisms: Sequence[str | Mechanism] | None = None,
) -> tuple[Anatomy, ...]:
    """The anatomy of a run that was measured with this model: its text is read once more.

    Parameters
    ----------
    model, tokenizer
        Those that the run was measured with.
    run
        A run of ``softgap.generate`` or ``softgap.read``.
    heads
        As ``head_anatomy`` takes them.
    mechanisms
        By default those of the run.

    Returns
    -------
    tuple of Anatomy
        One for each head; its queries are the positions of the text, from the first on.

    Raises
    ------
    ValueInputError
        If the tokenizer does not give the tokens of the run.
    """
    ids = run_ids(tokenizer, run)
    return head_anatomy(
        model,
        ids,
        heads,
        run.mechanisms if mechanisms is None else mechanisms,
        drop_sinks=run.manifest.dropped_sinks,
        sample_id=run.sample_id,
        first=str(tokenizer.decode(ids[:1])),
    )


def run_ids(tokenizer: PreTrainedTokenizerBase, run: Trajectories) -> list[int]:
    """The tokens that a model was fed in a run: the store does not keep the first one, so the text tells it."""
    chat = bool(run.manifest.options.get("chat"))
    if run.prompt_text:
        before = prompt_ids(tokenizer, run.prompt_text, chat)
        ids = [*before, *run.token_ids.tolist()[:-1]]
    else:
        ids = prompt_ids(tokenizer, run.completion_text, chat)
    parts = [part for part in (run.prompt, run) if part is not None]
    for part in parts:
        for position, token in zip(part.positions.tolist(), part.token_ids.tolist(), strict=True):
            if token >= 0 and position + 1 < len(ids) and ids[position + 1] != token:
                raise ValueInputError(
                    f"the tokenizer does not give the tokens of sample '{run.sample_id}' (token {position + 1} "
                    "differs); "
                    "load the model and tokenizer that the run was measured with"
                )
    if run.n_steps and len(ids) != int(run.positions[-1]) + 1:
        raise ValueInputError(
            f"the tokenizer gives {len(ids)} tokens for sample '{run.sample_id}', which has "
            f"{int(run.positions[-1]) + 1}; load the model and tokenizer that the run was measured with"
        )
    return ids


class _Complete(Exception):  # no error: it ends a forward whose later layers nobody needs
    """All heads have been seen."""


def check_heads(model: PreTrainedModel, heads: Heads) -> dict[int, int]:
    """Refuse heads that a model does not have; its layers with attention, in the order of their calls, and their heads.

    A short forward tells, so that nobody waits for a long one in vain.
    """
    called: list[tuple[int | None, int]] = []

    def note(call: AttentionCall) -> None:
        called.append((getattr(call.module, "layer_idx", None), call.query.shape[1]))

    with torch.inference_mode(), observe_attention(model, note):
        _forward(model, [0, 1])
    sizes = dict(zip(layer_numbers([index for index, _ in called]), (count for _, count in called), strict=True))
    for layer, head in _pairs(heads):
        if layer not in sizes:
            raise ValueInputError(
                f"head {layer}.{head} must be in a layer with attention, which are {min(sizes)} to {max(sizes)} here; "
                "name another head"
            )
        if head >= sizes[layer]:
            raise ValueInputError(
                f"head {layer}.{head} does not exist: layer {layer} has heads 0 to {sizes[layer] - 1}; name another "
                "head"
            )
    return sizes


class _Reader:
    """Looks at the calls of the layers of some heads, and keeps the largest weights of every row."""

    def __init__(
        self,
        pairs: Sequence[tuple[int, int]],
        layers: Sequence[int],
        mechanisms: Sequence[Mechanism],
        top: int,
        drop_sinks: int,
    ) -> None:
        self._pairs = pairs
        self._layers = layers
        self._mechanisms = mechanisms
        self._top = top
        self._drop = drop_sinks
        self._visible = VisibleSets()
        self._index = 0
        self.results: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def observe(self, call: AttentionCall) -> None:
        """Take in one attention call."""
        index = self._index
        self._index += 1
        if index >= len(self._layers) or call.query.shape[0] != 1:
            raise ModelError(
                f"'{type(call.module).__name__}' attends to a long text in another way than to a short one, so "
                "the keys of its heads cannot be listed"
            )
        layer = self._layers[index]
        wanted = [head for at, head in self._pairs if at == layer]
        if wanted:
            with instrument_arithmetic(call.query.device):
                self._read(call, index, layer, wanted)
        if len(self.results) == len(self._pairs):
            raise _Complete

    def _read(self, call: AttentionCall, index: int, layer: int, wanted: Sequence[int]) -> None:
        heads, n, n_keys = call.query.shape[1], call.query.shape[2], call.key.shape[2]
        visible = self._visible.of(call).fitted_to(1, heads, n, n_keys)
        visible = _without_first(visible, self._drop, n_keys, call.query.device)
        group = heads // call.key.shape[1]
        # Whole KV groups: the far keys of a hybrid are chosen by all heads that share them.
        groups = sorted({head // group for head in wanted})
        members = [head for kv in groups for head in range(kv * group, (kv + 1) * group)]
        part, shown = _part_of(call, visible, groups, members)
        sources: list[Iterable[Any]] = [softmax_rows(part, shown)]
        ordinal = _with_ordinals(shown, n_keys, call.query.device)
        for mechanism in self._mechanisms:
            own = _parameters_of(mechanism.for_layers([index]), call.key.shape[1], heads, groups, members)
            counted = ordinal if mechanism.kind in ("window", "hybrid") else shown
            sources.append(weight_blocks(own, part.query, part.key, visible=counted, scale=call.scale, rule=part.rule))
        places = [members.index(head) for head in wanted]
        columns = [_largest(source, places, n, self._top) for source in sources]
        for i, head in enumerate(wanted):
            keys, weights, rest = (np.stack([column[j][i] for column in columns]) for j in range(3))
            self.results[layer, head] = keys, weights, rest


def _largest(
    blocks: Iterable[Any], places: Sequence[int], n: int, top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every row the keys with the largest weights, these weights, and the sum of all others; by head."""
    keys = np.full((len(places), n, top), -1, np.int32)
    weights = np.zeros((len(places), n, top), np.float32)
    rest = np.zeros((len(places), n), np.float32)
    for block in blocks:
        own: Float[Tensor, "head query key"] = block.weights[0, places]
        count = min(top, own.shape[-1])
        place = own.abs().topk(count, dim=-1)
        largest = own.gather(-1, place.indices)
        # In float64, and over the others alone: a difference of two sums near 1 has lost the digits of a small rest.
        others = own.double().scatter(-1, place.indices, 0.0).sum(dim=-1)
        known = largest != 0
        keys[:, block.rows, :count] = torch.where(known, place.indices + block.keys.start, -1).cpu().numpy()
        weights[:, block.rows, :count] = largest.cpu().numpy()
        rest[:, block.rows] = others.cpu().numpy()
    return keys, weights, rest


def _part_of(
    call: AttentionCall, visible: Visible, groups: Sequence[int], members: Sequence[int]
) -> tuple[AttentionCall, Visible]:
    """One call as if the model had these heads only, in float32."""
    options = dict(call.options)
    heads = call.query.shape[1]
    if isinstance(options.get("s_aux"), Tensor):
        options["s_aux"] = options["s_aux"].detach().reshape(-1)[members]
    bias = options.get("position_bias")
    if isinstance(bias, Tensor) and bias.dim() >= 3 and bias.shape[-3] == heads:
        options["position_bias"] = bias[..., members, :, :]
    mask = call.mask
    if mask is not None and mask.dim() == 4 and mask.shape[1] == heads and heads > 1:
        mask = mask[:, members]
    if visible.mask is not None and visible.mask.shape[1] == heads and heads > 1:
        visible = replace(visible, mask=visible.mask[:, members])
    options["scaling"] = call.scale
    part = call._replace(
        query=call.query.detach()[:, members].float(),
        key=call.key.detach()[:, groups].float(),
        mask=mask,
        options=options,
    )
    return part, visible


def _parameters_of(
    mechanism: Mechanism, kv_heads: int, heads: int, groups: Sequence[int], members: Sequence[int]
) -> Mechanism:
    """The mechanism with the parameters of some heads; what all heads share stays."""

    def of_heads(tensor: Tensor) -> Tensor:
        if tensor.shape[1] == 1:
            return tensor
        return tensor[:, groups if tensor.shape[1] == kv_heads else members]

    picked = {name: of_heads(tensor) for name, tensor in mechanism.parameters.items()}
    return replace(mechanism, parameters=MappingProxyType(picked))


def _without_first(visible: Visible, count: int, n_keys: int, device: torch.device) -> Visible:
    """The same visible set less the first keys; positions go on as if they were there."""
    if not count:
        return visible
    beyond = torch.arange(n_keys, device=device) >= count
    if visible.mask is not None:
        return replace(visible, mask=visible.mask & beyond)
    real = beyond[None] if visible.key_valid is None else visible.key_valid & beyond
    origin = torch.full((1,), count, device=device) if visible.origin is None else visible.origin + count
    return replace(visible, key_valid=real, origin=origin)


def _with_ordinals(visible: Visible, n_keys: int, device: torch.device) -> Visible:
    """The same visible set, each key counted by its position: what is hidden counts too."""
    if visible.mask is None and visible.key_valid is None:
        return visible
    return replace(visible, ordinals=torch.arange(n_keys, device=device)[None])


def _forward(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """One pass over the tokens; the head of the model is not needed."""
    device = input_device(model)
    row = torch.tensor([list(ids)], device=device)
    inputs: dict[str, Any] = {"input_ids": row, "use_cache": False}
    if takes_positions(model):
        inputs["position_ids"] = torch.arange(len(ids), device=device)[None]
    model(**inputs)


def _pairs(heads: Heads) -> tuple[tuple[int, int], ...]:
    listed: list[Any] = [heads] if isinstance(heads, str) else list(heads)
    names = [head for head in listed if isinstance(head, str)]
    if names and len(names) < len(listed):
        raise ValueInputError("heads must be names such as 18.8, or pairs of layer and head, got both; use one of them")
    pairs = parse_heads(names) if names else tuple((int(layer), int(head)) for layer, head in listed)
    if not pairs:
        raise ValueInputError("heads must name at least one head, such as 18.8, got none")
    return pairs
