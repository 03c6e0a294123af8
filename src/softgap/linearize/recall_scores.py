"""Score KV groups by what recall loses when their softmax goes.

Text hardly asks for recall, so scores by text miss the few groups that carry it. These scores come from recall lists
whose answers lie beyond every window (``recall_sequences(..., filler=..., distance=...)``). For a unit u (a KV group),
its heads' softmax outputs o and the outputs l of the substitute, over the first tokens y of the answers:

    ablation(u)         = mean log p(y) - mean log p(y with o -> l in u alone),
    gate(u)             = mean over the steps of g_u, which minimise KL(p || p_g) + penalty sum_u g_u
                          with g_u o + (1 - g_u) l in every unit at once,
    output_norm(u)      = mean over queries of |sum_{h in u} W_O,h o_h|,
    source_attention(u) = mean over questions of sum_{h in u} a_h(question, source),
    unrotation(u)       = mean over questions of sum_{h in u} 1 - |o_h - o'_h| / (|o_h| + |o'_h|),
    fisher(u)           = half the Fisher curvature of log p(y) along o -> l (``scores.unit_scores``).

The learned gates are those of DuoAttention (arXiv:2410.10819), with the KL divergence of the answers in the place of
the distance of hidden states; the output norm is that of arXiv:2504.03889, for a group in the place of a head. The
source of an answer is the first token of its value in the list. o' is what a head gives with queries and keys before
rotary embedding: a head that finds keys by their content changes little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softgap.attention import Mechanism
from softgap.errors import UnsupportedError, ValueInputError, unknown_name
from softgap.inputs import as_items
from softgap.intervene.layerwise import Blocks
from softgap.intervene.substitute import Substitute, SwappedLayer, substitute, swapped_layer
from softgap.intervene.swap import heads_by_layer, swap
from softgap.linearize.distil import log_probabilities, sequence_order
from softgap.linearize.frontier import Unit, units_of
from softgap.linearize.impact import BATCH_TOKENS, TOLERANCE, SideBySide
from softgap.linearize.scores import SAMPLES, unit_scores
from softgap.linearize.sequences import Sequences
from softgap.models.loading import Model
from softgap.models.placement import freeze_weights, input_device
from softgap.models.support import check_measurable
from softgap.probe.layout import AttentionLayer, attention_layers, layer_rotations, output_weight
from softgap.probe.softmax import softmax_rows
from softgap.probe.tap import AttentionCall, observe_attention, replace_attention
from softgap.probe.token_scores import forward_then_logits
from softgap.probe.visibility import VisibleSets
from softgap.progress import Progress, partial_progress, silent

__all__ = [
    "RECALL_SCORES",
    "UnitImpact",
    "UnitScores",
    "impact_of_units",
    "learn_gates",
    "recall_scores",
    "source_places",
]

RECALL_SCORES: Mapping[str, str] = {
    "ablation": "drop in the log-probability of the answers when the group alone is swapped",
    "gate": "mean over the training of a gate between softmax and the substitute, learned for all groups at once",
    "output_norm": "norm of the group's output after the output projection",
    "source_attention": "attention of the questions on the sources of their answers",
    "unrotation": "how little the output at the questions changes without the rotary embedding",
    "fisher": "half the Fisher curvature of the answers along the swap",
}
"""What each score is. All are such that a larger one means that recall misses the group more."""

GATE_STEPS = 32
GATE_RATE = 0.05
GATE_PENALTY = 0.02
# Rows of logits computed at once. The same for any number of copies, so that blocks of copies and original align.
ROWS = 128


@dataclass(frozen=True, eq=False)
class UnitScores:
    """Scores of units, per recall list (``gate`` has one column); the mean over lists is what ranks them.

    Attributes
    ----------
    units
        The heads of each unit.
    values
        By name, ``[unit, list]``.
    passes
        What each of them cost in forward passes over one list, a backward pass counted as two.
    """

    units: tuple[Unit, ...]
    values: Mapping[str, Float[np.ndarray, "unit list"]]
    passes: Mapping[str, float] = field(default_factory=dict)

    def mean(self, name: str) -> Float[np.ndarray, " unit"]:
        """A score of every unit."""
        if name not in self.values:
            raise unknown_name("score", name, tuple(self.values))
        means: np.ndarray = self.values[name].mean(axis=-1)
        return means


def recall_scores(
    model: Model,
    recall_lists: Sequences,
    mechanism: str | Mechanism | Substitute,
    *,
    names: Sequence[str] = tuple(RECALL_SCORES),
    units: Sequence[Unit] | None = None,
    samples: int = SAMPLES,
    steps: int = GATE_STEPS,
    seed: int = 0,
    progress: Progress = silent,
) -> UnitScores:
    """Score every KV group for recall; larger means that recall misses its softmax more.

    Parameters
    ----------
    model
        Any causal model of transformers that softgap supports.
    recall_lists
        Recall lists, made by ``recall_sequences`` with a distance that no window of the mechanism covers.
    mechanism
        What groups would become.
    names
        Which scores; see ``RECALL_SCORES``.
    units
        Heads that go together; None for all KV groups.
    samples
        Draws of labels for ``fisher``.
    steps
        Training steps of ``gate``.
    seed
        Random seed of the drawn labels and of the order of the lists.
    progress
        Called with the stage in words and the share of the whole that is done.

    Returns
    -------
    UnitScores
        A value for each score, group and list.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model of two layers with four heads in two KV groups:

    >>> from pathlib import Path
    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> filler = tokenizer(Path("book.txt").read_text())["input_ids"]
    >>> lists = softgap.linearize.recall_sequences(model, tokenizer, 2, pairs=3, filler=filler, distance=40)
    >>> scores = softgap.linearize.recall_scores(model, lists, "window:w=8,sinks=2", names=["source_attention"])
    >>> len(scores.units), scores.mean("source_attention").shape
    (4, (4,))
    """
    check_measurable(model)
    if recall_lists.first is None:
        raise ValueInputError("these sequences ask nothing, so recall cannot be scored on them; use recall_sequences")
    for name in (names := as_items(names)):
        if name not in RECALL_SCORES:
            raise unknown_name("score", name, tuple(RECALL_SCORES))
    chosen, part = _units(model, units), substitute(mechanism, model)
    asked = replace(recall_lists, scored=recall_lists.first)
    values, passes = {}, {}
    for number, name in enumerate(names):
        told = partial_progress(progress, number / len(names), (number + 1) / len(names))
        if name == "ablation":
            values[name] = impact_of_units(model, recall_lists, part, units=chosen, progress=told).change["loss"]
            passes[name] = _ablation_passes(model, chosen)
        elif name == "gate":
            gates = learn_gates(model, recall_lists, part, units=chosen, steps=steps, seed=seed, progress=told)
            values[name], passes[name] = gates.mean(axis=0)[:, None], 4.0 * steps / len(recall_lists)
        elif name == "fisher":
            _, curvature = unit_scores(model, asked, [part], chosen, samples=samples, seed=seed, progress=told)
            values[name], passes[name] = curvature[0], 3.0 + 2.0 * samples
        else:
            measure = _unrotation_of(model) if name == "unrotation" else _WATCHED[name]
            values[name], passes[name] = _observed(model, recall_lists, chosen, measure, told), 1.0
    return UnitScores(tuple(chosen), values, passes)


def _units(model: Model, units: Sequence[Unit] | None) -> list[Unit]:
    chosen = units_of(model, "groups") if units is None else [tuple(unit) for unit in units]
    for unit in chosen:
        if not unit or len({layer for layer, _ in unit}) > 1:
            raise ValueInputError(f"a unit must be heads of one layer, got {unit}; use the KV groups (units=None)")
    return chosen


@dataclass(frozen=True, eq=False)
class UnitImpact:
    """What each unit is worth alone, on the tokens that count (the first tokens of the answers, where there are any).

    Attributes
    ----------
    original
        ``loss`` (-log p of the right token) and ``accuracy`` of the unswapped model, per text.
    change
        By swapping one unit, ``[unit, text]``: the rise in ``loss``, the change in ``accuracy``, and the ``kl``
        divergence from the original model.
    """

    units: tuple[Unit, ...]
    original: Mapping[str, Float[np.ndarray, " text"]]
    change: Mapping[str, Float[np.ndarray, "unit text"]]


QUANTITIES = ("loss", "kl", "accuracy")


def impact_of_units(
    model: Model,
    sequences: Sequences,
    mechanism: str | Mechanism | Substitute,
    *,
    units: Sequence[Unit] | None = None,
    progress: Progress = silent,
) -> UnitImpact:
    """Swap every unit alone and measure what the model loses.

    Layers below the swapped one are computed once for each text, and units of one layer run as copies in a batch.

    Parameters
    ----------
    sequences
        Texts, or recall lists.
    mechanism
        What units become.
    units
        Heads of one layer that go together; None for all KV groups.
    """
    check_measurable(model)
    chosen, sweep = _units(model, units), _UnitSweep(model, substitute(mechanism, model))
    columns = []
    for number in range(len(sequences)):
        told = partial_progress(progress, number / len(sequences), (number + 1) / len(sequences))
        columns.append(sweep.over(sequences.part(slice(number, number + 1)), chosen, told))
    values = np.stack(columns, axis=-1)
    original = dict(zip(QUANTITIES, values[:, 0], strict=True))
    change = {name: x[1:] - (0 if name == "kl" else x[:1]) for name, x in zip(QUANTITIES, values, strict=True)}
    del original["kl"]
    return UnitImpact(tuple(chosen), original, change)


def _ablation_passes(model: Model, units: Sequence[Unit]) -> float:
    """Forward passes of a sweep, where layers below the swapped one are not computed again."""
    numbers = [layer.number for layer in attention_layers(model)]
    return 1.0 + sum(1 - numbers.index(unit[0][0]) / len(numbers) for unit in units)


def _counted(text: Sequences) -> Bool[Tensor, " next"]:
    return (text.scored if text.first is None else text.first)[0]


def _counted_logs(model: Model, text: Sequences, copies: int = 1) -> Iterator[Float[Tensor, "copy next vocabulary"]]:
    """Log-probabilities where the next token counts, block by block, for copies of one text."""
    counted = _counted(text)
    ids = text.ids[:, :-1].repeat(copies, 1)
    inputs = {"input_ids": ids, "use_cache": False}
    begin = int(counted.int().argmax())
    for start, logits in forward_then_logits(model, inputs, ids.shape[1], rows=ROWS, begin=begin)():
        shown = logits[:, counted[start : start + logits.shape[1]]]
        if shown.shape[1]:
            yield (shown if shown.dtype == torch.float64 else shown.float()).log_softmax(dim=-1)


class _UnitSweep:
    """Every unit swapped alone by one substitute, on one text after the other."""

    def __init__(self, model: Model, part: Substitute) -> None:
        self._model, self._substitute = model, part
        self._layers = {layer.number: layer for layer in attention_layers(model)}
        self._blocks = Blocks(model)
        self._reuse = self._blocks.is_stack
        self._reuse_checked = False

    @torch.inference_mode()
    def over(self, text: Sequences, units: Sequence[Unit], told: Progress) -> Float[np.ndarray, "quantity row"]:
        """Loss, KL and accuracy of one text: of the original (first), then with each unit swapped."""
        targets = text.ids[0, 1:][_counted(text)]
        with self._blocks.keep_outputs():
            original = list(_counted_logs(self._model, text))
        self._check(text, original)
        rows = {-1: _compare(iter(original), original, targets)}
        by_layer: dict[int, list[int]] = {}
        for number, unit in enumerate(units):
            by_layer.setdefault(unit[0][0], []).append(number)
        for done, (layer, numbers) in enumerate(by_layer.items()):
            values = self._layer(self._layers[layer], [units[i] for i in numbers], text, original, targets)
            rows |= {number: values[:, [i]] for i, number in enumerate(numbers)}
            told("swapping KV groups one at a time", (done + 1) / len(by_layer))
        return torch.cat([rows[number] for number in range(-1, len(units))], dim=1).double().cpu().numpy()

    def _layer(
        self, layer: AttentionLayer, units: Sequence[Unit], text: Sequences, original: list[Tensor], targets: Tensor
    ) -> Float[Tensor, "quantity unit"]:
        if not self._reuse:
            columns = []
            for unit in units:
                with swap(self._model, list(unit), self._substitute):
                    columns.append(_compare(_counted_logs(self._model, text), original, targets))
            return torch.cat(columns, dim=1)
        heads = sorted({head for unit in units for _, head in unit})
        side = SideBySide(swapped_layer(layer, heads, self._substitute, len(self._layers)), 1)
        step = max(1, BATCH_TOKENS // text.ids.numel())
        columns = []
        for first in range(0, len(units), step):
            side.places = [[heads.index(head) for _, head in unit] for unit in units[first : first + step]]
            copies = len(side.places)
            with self._blocks.start_at(layer, copies), replace_attention(self._model, side.output):
                columns.append(_compare(_counted_logs(self._model, text, copies), original, targets))
        return torch.cat(columns, dim=1)

    def _check(self, text: Sequences, original: list[Tensor]) -> None:
        """A model that keeps more than hidden states between its blocks is read by whole forwards."""
        if self._reuse_checked or not self._reuse:
            return
        self._reuse_checked = True
        with self._blocks.start_at(list(self._layers.values())[-1]):
            restarted = list(_counted_logs(self._model, text))
        changes = [float((a - b).nan_to_num(0.0).abs().max()) for a, b in zip(restarted, original, strict=True)]
        self._reuse = max(changes) <= TOLERANCE * max(1.0, float(original[0].nan_to_num(neginf=0.0).abs().max()))


def _compare(
    logs: Iterator[Float[Tensor, "copy next vocabulary"]], original: list[Tensor], targets: Tensor
) -> Float[Tensor, "quantity copy"]:
    """Means over the tokens that count: -log p of the right token, KL from the original, accuracy."""
    total, start = torch.zeros(()), 0
    for block, base in zip(logs, original, strict=True):
        right = targets[start : start + block.shape[1]]
        start += block.shape[1]
        chosen = block.gather(-1, right.expand(len(block), -1)[..., None])[..., 0]
        # A token that the model rules out counts as 0.
        divergence = torch.where(base > -torch.inf, base.exp() * (base - block), 0.0).sum(dim=-1)
        hits = (block.argmax(dim=-1) == right).to(chosen.dtype)
        total = total.to(chosen) + torch.stack([-chosen, divergence, hits]).sum(dim=-1)
    return total / start


def learn_gates(
    model: Model,
    recall_lists: Sequences,
    mechanism: str | Mechanism | Substitute,
    *,
    units: Sequence[Unit] | None = None,
    steps: int = GATE_STEPS,
    learning_rate: float = GATE_RATE,
    penalty: float = GATE_PENALTY,
    seed: int = 0,
    progress: Progress = silent,
) -> Float[np.ndarray, "step unit"]:
    """Learn one gate per unit between softmax (1) and its substitute (0); the gates after every step.

    All gates begin open. Adam goes down KL(p || p_g) of the answers' first tokens plus ``penalty`` times the sum of the
    gates, one list per step, so that gates close where recall does not hold them open. The model's weights do not
    change.

    Parameters
    ----------
    recall_lists
        Recall lists; taken in an order drawn anew for every round.
    mechanism
        What units become where their gate is 0.
    units
        Heads of one layer that go together; None for all KV groups.
    learning_rate
        A gate that nothing holds open closes in about 1 / ``learning_rate`` steps.
    penalty
        Nats per answer that a gate must be worth to stay open.
    """
    check_measurable(model)
    if steps < 1 or not learning_rate > 0 or not penalty >= 0:
        raise ValueInputError(
            "gates need at least 1 step, a rate above 0 and a penalty of at least 0, got "
            f"{steps}, {learning_rate:g} and {penalty:g}"
        )
    chosen = _units(model, units)
    asked = recall_lists if recall_lists.first is None else replace(recall_lists, scored=recall_lists.first)
    gates = torch.ones(len(chosen), device=input_device(model), requires_grad=True)
    mixture = _GatedUnits(model, substitute(mechanism, model), chosen, gates)
    optimiser = torch.optim.Adam([gates], lr=learning_rate)
    path = []
    for step, row in enumerate(sequence_order(len(asked), steps, np.random.default_rng(seed))):
        text = asked.part(slice(row, row + 1))
        optimiser.zero_grad()
        with freeze_weights(model):
            with torch.no_grad():
                original = log_probabilities(model, text)
            with torch.enable_grad(), replace_attention(model, mixture.output):
                logs = log_probabilities(model, text)
                divergence = torch.where(original > -torch.inf, original.exp() * (original - logs), 0.0).sum(-1).mean()
                (divergence + penalty * gates.sum()).backward()
        optimiser.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
        path.append(gates.detach().cpu().double().numpy().copy())
        progress(f"learning gates, KL {divergence.item():.3f}, {int((gates > 0.5).sum())} open", (step + 1) / steps)
    return np.stack(path)


class _GatedUnits:
    """Softmax and substitute of every unit, mixed by its gate."""

    def __init__(self, model: Model, part: Substitute, units: Sequence[Unit], gates: Float[Tensor, " unit"]) -> None:
        layers = attention_layers(model)
        numbers = {head: number for number, unit in enumerate(units) for head in unit}
        self._gates = gates
        self._parts: dict[int, tuple[SwappedLayer, Tensor]] = {}
        for layer, heads in heads_by_layer(layers, list(numbers)):
            own = torch.tensor([numbers[layer.number, head] for head in heads], device=gates.device)
            self._parts[id(layer.module)] = swapped_layer(layer, heads, part, len(layers)), own

    def output(self, call: AttentionCall) -> Float[Tensor, "batch query head value_dim"]:
        if id(call.module) not in self._parts:
            return call.output
        part, numbers = self._parts[id(call.module)]
        heads = part.heads.to(call.output.device)
        step = part.output(call, VisibleSets().of(call)) - call.output.index_select(2, heads)
        closed = (1 - self._gates[numbers]).to(step)
        return call.output.index_add(2, heads, step * closed[:, None])


Measure = Callable[[AttentionCall, AttentionLayer, Sequences], Float[Tensor, " head *width"]]


def _observed(
    model: Model, recall_lists: Sequences, units: Sequence[Unit], measure: Measure, told: Progress
) -> Float[np.ndarray, "unit list"]:
    """A number for each unit and list that one forward shows."""
    layers = {id(layer.module): layer for layer in attention_layers(model)}
    columns = []
    for number in range(len(recall_lists)):
        text = recall_lists.part(slice(number, number + 1))
        found: dict[Unit, float] = {}

        def listen(call: AttentionCall, text: Sequences = text, found: dict[Unit, float] = found) -> None:
            layer = layers[id(call.module)]
            own = [unit for unit in units if unit[0][0] == layer.number]
            if own:
                of_heads = measure(call, layer, text)
                for unit in own:
                    total = of_heads[[head for _, head in unit]].sum(dim=0)
                    # What units write is added up before its norm is taken.
                    found[unit] = float(total if total.dim() < 2 else total.norm(dim=-1).mean())

        with torch.inference_mode(), ExitStack() as stack:
            stack.enter_context(observe_attention(model, listen))
            model(text.ids[:, :-1], use_cache=False)
        columns.append([found[unit] for unit in units])
        told("watching recall", (number + 1) / len(recall_lists))
    return np.array(columns).T


def _output_norms(call: AttentionCall, layer: AttentionLayer, text: Sequences) -> Float[Tensor, "head query model_dim"]:
    """What every head adds to the layer's output, at every query."""
    output = call.output[0].float()
    weight = output_weight(layer, output.shape[-1])
    if weight is None:
        return output.transpose(0, 1)
    return torch.einsum("thd,hdm->htm", output, weight.float())


def _source_attention(call: AttentionCall, layer: AttentionLayer, text: Sequences) -> Float[Tensor, " head"]:
    """Attention of every head on the sources, mean over the questions."""
    questions = torch.nonzero(_counted(text))[:, 0].tolist()
    sources = source_places(text.ids[0].tolist(), [place + 1 for place in questions])
    total = torch.zeros(layer.heads, device=call.query.device)
    for block in softmax_rows(call, VisibleSets().of(call)):
        for query, source in zip(questions, sources, strict=True):
            if block.rows.start <= query < block.rows.stop and block.keys.start <= source < block.keys.stop:
                total += block.weights[0, :, query - block.rows.start, source - block.keys.start]
    return total / len(questions)


_WATCHED: Mapping[str, Measure] = {"output_norm": _output_norms, "source_attention": _source_attention}


def _unrotation_of(model: Model) -> Measure:
    rotations = layer_rotations(model)
    if rotations is None:
        raise UnsupportedError(
            "this model has no rotary embedding that softgap knows, so 'unrotation' has nothing to undo; choose other "
            "scores"
        )

    def measure(call: AttentionCall, layer: AttentionLayer, text: Sequences) -> Float[Tensor, " head"]:
        """How alike outputs at the questions are with and without rotary embedding, mean over the questions."""
        questions = torch.nonzero(_counted(text))[:, 0]
        back = -torch.arange(call.key.shape[2])
        rotation = rotations[layer.index]
        query, key = (rotation.turned(x.float().cpu(), back).to(x) for x in (call.query, call.key))
        values = call.value[0].repeat_interleave(layer.heads // layer.kv_heads, dim=0).float()
        without = torch.zeros(layer.heads, len(questions), values.shape[-1], device=values.device)
        for block in softmax_rows(call._replace(query=query, key=key), VisibleSets().of(call)):
            inside = (questions >= block.rows.start) & (questions < block.rows.stop)
            weights = block.weights[0, :, questions[inside] - block.rows.start].float()
            without[:, inside] += weights @ values[:, block.keys.start : block.keys.stop]
        own = call.output[0, questions].transpose(0, 1).float()
        change = (own - without).norm(dim=-1) / (own.norm(dim=-1) + without.norm(dim=-1)).clamp(min=1e-30)
        alike: Tensor = (1 - change).mean(dim=-1)
        return alike

    return measure


def source_places(ids: Sequence[int], answers: Sequence[int]) -> list[int]:
    """Where each answer stands for the first time: the earlier same token behind the longest same context.

    Examples
    --------
    Tokens 7 and 8 are keys, 1 and 2 their values; the second 8 asks for the 2 at place 3.

    >>> source_places([7, 1, 8, 2, 5, 2, 8, 2, 7, 1], [7, 9])
    [3, 1]
    """
    sources = []
    for answer in answers:
        best, longest = -1, 0
        for place in range(answer):
            if ids[place] != ids[answer]:
                continue
            length = 0
            while length < place and ids[place - 1 - length] == ids[answer - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
        if best < 0:
            raise ValueInputError(
                f"the answer at place {answer} has no source before it, so it is not recall; use recall_sequences"
            )
        sources.append(best)
    return sources
