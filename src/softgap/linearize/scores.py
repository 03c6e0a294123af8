"""Score how costly the swap of each head will be, and measure how well a score ranks heads by that cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional

from softgap.attention import Mechanism, compare_outputs
from softgap.cluster import Workers, workers_of
from softgap.deprecation import deprecated_keywords
from softgap.errors import ValueInputError, unknown_name
from softgap.inputs import as_items
from softgap.intervals import Interval
from softgap.intervene.substitute import Head, Substitute, SwappedLayer, substitute, swapped_layer
from softgap.intervene.swap import heads_by_layer
from softgap.linearize.sequences import Sequences
from softgap.models.loading import Model
from softgap.models.placement import freeze_weights, input_device
from softgap.models.support import check_measurable
from softgap.probe.layout import attention_layers, output_weight
from softgap.probe.softmax import head_shapes
from softgap.probe.tap import AttentionCall, observe_attention, replace_attention
from softgap.probe.visibility import VisibleSets
from softgap.progress import Progress, silent

__all__ = [
    "SCORES",
    "Ranking",
    "Scores",
    "add_recall_scores",
    "head_scores",
    "rank_agreement",
    "split_half",
    "unit_scores",
]


SHAPES: Mapping[str, str] = {
    "focus": "1 - S(a): 0 for the mean of values, near 1 for a single key",
    "logit_variance": "variance of the scores over the visible keys, mean over queries",
    "block_rank": "effective rank of the weights of the second half of the queries on the first half of the keys",
}


SAMPLES = 4


STEPS = 4


SCORES: Mapping[str, str] = {
    "divergence": "mean of 1 - cos(o, l)",
    "relative_l2": "mean of |l - o| / |o|",
    "output_l2": "root mean square of |W_O (l - o)|, what the layer's output changes by",
    "gradient": "slope of the loss along the swap",
    "fisher": "half the Fisher curvature along the swap",
    "gradient+fisher": "slope plus half the Fisher curvature",
    "integrated": "slope, averaged over the way from no head swapped to all",
    "integrated+fisher": "the same plus half the Fisher curvature",
    **SHAPES,
}


"""What each score is. All are such that a larger one means a costlier swap."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of heads, per text; the mean over texts is what ranks them.

    Attributes
    ----------
    values
        By name, ``[head, text]``.
    passes
        What each of them cost in forward passes over the text, a backward pass counted as two.
    """

    heads: tuple[Head, ...]
    values: Mapping[str, Float[np.ndarray, "head text"]]
    passes: Mapping[str, float] = field(default_factory=dict)

    def mean(self, name: str) -> Float[np.ndarray, " head"]:
        """A score of every head."""
        if name not in self.values:
            raise unknown_name("score", name, tuple(self.values))
        means: np.ndarray = self.values[name].mean(axis=-1)
        return means


@deprecated_keywords(asked="recall_lists", read="sequences")
def head_scores(
    model: Model,
    sequences: Sequences,
    mechanism: str | Mechanism | Substitute,
    *,
    recall_lists: Sequences | None = None,
    names: Sequence[str] = tuple(SCORES),
    heads: Sequence[Head] | None = None,
    swapped: Sequence[Head] = (),
    samples: int = SAMPLES,
    steps: int = STEPS,
    seed: int = 0,
    engine: str | Workers = "local",
    address: str | None = None,
    progress: Progress = silent,
) -> Scores:
    """Score every head for a swap by a mechanism; larger means costlier.

    Parameters
    ----------
    model
        Any causal model of transformers that softgap supports.
    sequences
        Sequences; slopes and curvatures are those of the loss of the next tokens that count.
    mechanism
        What heads would become, by name, or as a ``Mechanism`` or ``Substitute``.
    recall_lists
        Recall lists whose scores are added, scaled so that over all heads they weigh as much as those of the text:
        heads that text hardly misses may carry all of recall.
    names
        Which scores; see ``SCORES``.
    heads
        Which heads; None for all that are not swapped.
    swapped
        Heads that are swapped already, so that the scores are those of further swaps. On the way back of the gradient
        such a head counts as softmax (its step is a constant), which spares the derivative of the mechanism.
    samples
        Draws of labels for the Fisher curvature.
    steps
        Points on the way for integrated gradients.
    seed
        Random seed of the drawn labels.
    engine
        "local", or "ray" to score each sequence as a task of a Ray cluster, whose workers load the model by its name.
        Both give the same numbers.
    address
        Of the Ray cluster; None joins the one that is running, or starts one on this machine.
    progress
        Called with the stage in words and the share of the whole that is done.

    Returns
    -------
    Scores
        A value for each score, sequence and head; ``mean`` is over sequences.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model of two layers with four heads:

    >>> from pathlib import Path
    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> book = Path("book.txt").read_text()
    >>> sequences = softgap.linearize.split_sequences(model, tokenizer, [book], length=64, tokens=512)
    >>> scores = softgap.linearize.head_scores(model, sequences, "elu1", names=["gradient+fisher"])
    >>> scores.heads[:3]
    ((0, 0), (0, 1), (0, 2))
    >>> scores.mean("gradient+fisher").shape
    (8,)
    """
    check_measurable(model)
    names = as_items(names)
    _check_score_options(names, samples, steps)
    layers = attention_layers(model)
    swapped_heads = {tuple(head) for head in swapped}
    all_heads = [(layer.number, head) for layer in layers if not layer.shared for head in range(layer.heads)]
    by_layer = heads_by_layer(
        layers, [head for head in all_heads if head not in swapped_heads] if heads is None else heads
    )
    chosen = tuple((layer.number, head) for layer, layer_heads in by_layer for head in layer_heads)
    scored = _HeadScores(model, substitute(mechanism, model), chosen, tuple(swapped), names, samples, steps, seed)
    with workers_of(model, engine, address) as workers:
        values = scored.over(sequences, workers, progress)
        if recall_lists is not None:
            recall = {name: x.mean(axis=-1) for name, x in scored.over(recall_lists, workers, silent).items()}
            values = {name: add_recall_scores(values[name], recall[name]) for name in names}
    return Scores(
        chosen,
        values,
        {name: _passes(name, samples, steps) for name in names},
    )


@dataclass(frozen=True, eq=False)
class _HeadScores:
    """Heads that are scored, what they would become, and how."""

    model: Model
    substitute: Substitute
    heads: Sequence[Head]
    swapped: Sequence[Head]
    names: Sequence[str]
    samples: int
    steps: int
    seed: int

    def over(
        self, sequences: Sequences, workers: Workers | None, progress: Progress
    ) -> dict[str, Float[np.ndarray, "head text"]]:
        """The scores on every sequence, each computed alone."""
        how = (self.substitute, self.heads, self.swapped, self.names, self.samples, self.steps)
        tasks = [(*how, text, seed) for text, seed in _each_sequence(sequences, self.seed)]

        def tell(done: int) -> None:
            progress("scoring heads", done / len(tasks))

        columns = _compute_each(_score_sequence, self.model, tasks, workers, tell)
        return {name: torch.stack([column[name] for column in columns], -1).double().numpy() for name in self.names}


def _each_sequence(sequences: Sequences, seed: int) -> list[tuple[Sequences, int]]:
    """Every sequence with the seed of its labels, so that they depend on no other sequence."""
    seeds = [int(np.random.SeedSequence([seed, number]).generate_state(1)[0]) for number in range(len(sequences))]
    return [(sequences.part(slice(number, number + 1)), own) for number, own in enumerate(seeds)]


def _compute_each(
    function: Callable[..., Any],
    model: Model,
    tasks: Sequence[tuple[Any, ...]],
    workers: Workers | None,
    report: Callable[[int], None],
) -> list[Any]:
    """``function(model, *task)`` of every sequence, here or on workers."""
    if workers is not None:
        return workers.map(function, tasks, name="sequence", report=report)
    results = []
    for number, task in enumerate(tasks):
        results.append(function(model, *task))
        report(number + 1)
    return results


def _check_score_options(names: Sequence[str], samples: int, steps: int) -> None:
    for name in names:
        if name not in SCORES:
            raise unknown_name("score", name, tuple(SCORES))
    if samples < 1 or steps < 1:
        raise ValueInputError(f"samples and steps must be at least 1, got {samples} and {steps}")


def add_recall_scores(
    text: Float[np.ndarray, "head text"], recall: Float[np.ndarray, " head"]
) -> Float[np.ndarray, "head text"]:
    """Scores by text with those by recall lists added, both with the same sum of sizes over the heads."""
    total = float(np.abs(recall).sum())
    scale = float(np.abs(text.mean(axis=-1)).sum()) / total if total > 0 else 0.0
    combined: np.ndarray = text + scale * recall[:, None]
    return combined


def unit_scores(
    model: Model,
    sequences: Sequences,
    substitutes: Sequence[Substitute],
    units: Sequence[Sequence[Head]],
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> tuple[Float[np.ndarray, "substitute unit text"], Float[np.ndarray, "substitute unit text"]]:
    """Slope of the loss and half its Fisher curvature along the swap of whole units, for several substitutes.

    All come from the same passes: the gradient at a head serves every substitute, only the step along it differs. A
    unit's gate moves all of its heads, so that the slopes of its heads are added before they are squared:

        curvature(u) = E_y (sum_{h in u} dlog p(y)/dg_h)^2 / 2 per token,      y drawn from the model.

    Parameters
    ----------
    substitutes
        What units may become.
    units
        Heads that go together.
    workers
        Of a cluster, to score each sequence as a task; None scores them here. Both give the same numbers.
    """
    tasks = [(substitutes, units, samples, text, own) for text, own in _each_sequence(sequences, seed)]

    def tell(done: int) -> None:
        progress("scoring KV groups", done / len(tasks))

    slope, half_curvature = np.stack(_compute_each(_score_units, model, tasks, workers, tell), axis=-1)
    return slope, half_curvature


def _score_units(
    model: Model,
    substitutes: Sequence[Substitute],
    units: Sequence[Sequence[Head]],
    samples: int,
    text: Sequences,
    seed: int,
) -> Float[np.ndarray, "2 substitute unit"]:
    """Slope and half the curvature on one sequence, per token."""
    layers = attention_layers(model)
    by_layer = heads_by_layer(layers, [head for unit in units for head in unit])
    options = [
        [swapped_layer(layer, layer_heads, part, len(layers)) for layer, layer_heads in by_layer]
        for part in substitutes
    ]
    places = {head: i for i, head in enumerate((x.number, h) for x, layer_heads in by_layer for h in layer_heads)}
    members = torch.zeros(len(places), len(units))
    for number, unit in enumerate(units):
        members[[places[layer, head] for layer, head in unit], number] = 1
    generator = torch.Generator(device=input_device(model)).manual_seed(seed)
    with _Gates(model, options, ()) as gates:
        logits = gates.logits(text)

        def unit_slopes(labels: Int[Tensor, " next"]) -> Float[Tensor, "substitute unit"]:
            slopes = gates.slopes(_loss(logits, labels)).cpu()
            return slopes @ members.to(slopes.dtype)

        slopes = unit_slopes(text.ids[0, 1:][text.scored[0]])
        probability = logits.detach().float().softmax(dim=-1)
        curvature = torch.zeros_like(slopes)
        for _ in range(samples):
            labels = torch.multinomial(probability, 1, generator=generator)[:, 0]
            curvature += unit_slopes(labels).square() / (2 * samples)
    scores: np.ndarray = torch.stack([slopes, curvature]).double().numpy() / text.tokens
    return scores


def _passes(name: str, samples: int, steps: int) -> float:
    """Forward passes that a score costs on its own."""
    slopes = {"gradient": 2, "fisher": 2 * samples, "gradient+fisher": 2 + 2 * samples}
    if name.startswith("integrated"):
        return 3 * steps + (1 + 2 * samples if name.endswith("fisher") else 0)
    return 1 + slopes.get(name, 0)


def _score_sequence(
    model: Model,
    head_substitute: Substitute,
    heads: Sequence[Head],
    swapped: Sequence[Head],
    wanted: Sequence[str],
    samples: int,
    steps: int,
    text: Sequences,
    seed: int,
) -> dict[str, Float[Tensor, " head"]]:
    """All scores on one sequence."""
    layers = attention_layers(model)
    parts, swapped_parts = (
        [swapped_layer(layer, own, head_substitute, len(layers)) for layer, own in selection]
        for selection in (heads_by_layer(layers, heads), heads_by_layer(layers, swapped) if swapped else [])
    )
    names, generator = set(wanted), torch.Generator(device=input_device(model)).manual_seed(seed)
    scores: dict[str, Tensor] = {}
    ids, next_ids, n = text.ids, text.ids[0, 1:][text.scored[0]], text.tokens
    if names & {"gradient", "fisher", "gradient+fisher", "integrated+fisher"}:
        with _Gates(model, [parts], swapped_parts) as gates:
            logits = gates.logits(text)
            slopes = gates.slopes(_loss(logits, next_ids))[0]
            curvature = torch.zeros_like(slopes)
            if names & {"fisher", "gradient+fisher", "integrated+fisher"}:
                probability = logits.detach().float().softmax(dim=-1)
                for _ in range(samples):
                    labels = torch.multinomial(probability, 1, generator=generator)[:, 0]
                    curvature += gates.slopes(_loss(logits, labels))[0].square() / samples
        # Means over tokens; the curvature of a sum of T independent terms is T times that of one.
        scores |= {"gradient": slopes / n, "fisher": curvature / (2 * n)}
        scores["gradient+fisher"] = scores["gradient"] + scores["fisher"]
    if names & {"integrated", "integrated+fisher"}:
        integrated = torch.zeros(sum(len(part.heads) for part in parts), device=input_device(model))
        for step in range(steps):
            with _Gates(model, [parts], swapped_parts, (step + 0.5) / steps) as gates:
                integrated = integrated + gates.slopes(_loss(gates.logits(text), next_ids))[0] / (steps * n)
        scores["integrated"] = integrated
        if "fisher" in scores:
            scores["integrated+fisher"] = integrated + scores["fisher"]
    if names - set(scores):
        scores |= _forward_scores(model, ids, parts, swapped_parts, shapes=bool(names & set(SHAPES)))
    return {name: values.detach().cpu() for name, values in scores.items() if name in names}


def _loss(logits: Float[Tensor, "next vocabulary"], next_ids: Int[Tensor, " next"]) -> Float[Tensor, ""]:
    return functional.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(), next_ids, reduction="sum"
    )


class _Gates:
    """A forward whose slopes along the swap of every head can be asked for, with all gates at one place.

    ``options`` are the layers once for every substitute, all with the same heads; away from place 0 there is one.
    """

    def __init__(
        self,
        model: Model,
        options: Sequence[Sequence[SwappedLayer]],
        swapped_parts: Sequence[SwappedLayer],
        place: float = 0.0,
    ) -> None:
        self._model, self._place = model, place
        self._parts = {id(parts[0].layer.module): parts for parts in zip(*options, strict=True)}
        self._swapped_parts = {id(part.layer.module): part for part in swapped_parts}
        self._order = list(self._parts)
        self._outputs: dict[int, Tensor] = {}
        self._steps: dict[int, list[Tensor]] = {}

    def __enter__(self) -> _Gates:
        # Weights need no gradients: the embeddings are where the way back begins.
        with ExitStack() as stack:
            stack.enter_context(freeze_weights(self._model))
            stack.enter_context(replace_attention(self._model, self._gated))
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()
        self._outputs.clear()
        self._steps.clear()

    def logits(self, text: Sequences) -> Float[Tensor, "next vocabulary"]:
        """Logits of the next tokens that count."""
        counted = text.scored[0]
        with torch.enable_grad():
            logits: Tensor = self._model(text.ids[:, :-1], use_cache=False).logits[0]
            return logits if bool(counted.all()) else logits[counted]

    def slopes(self, loss: Float[Tensor, ""]) -> Float[Tensor, "option head"]:
        """dL/dg of every head, in the order of the parts, for every substitute."""
        outputs = [self._outputs[module] for module in self._order]
        gradients = torch.autograd.grad(loss, outputs, retain_graph=True)
        slopes = []
        for module, gradient in zip(self._order, gradients, strict=True):
            at_heads = _as_float(gradient.index_select(2, self._parts[module][0].heads.to(gradient.device)))
            # Sums over tokens, and then squared: more than half precision holds.
            slopes.append(torch.stack([(at_heads * _as_float(x)).sum(dim=(0, 1, 3)) for x in self._steps[module]]))
        # One number a head, from layers that may be on several devices.
        slopes = [x.to(loss.device) for x in slopes]
        return torch.cat(slopes, dim=-1)

    def _gated(self, call: AttentionCall) -> Tensor:
        output = _step_towards(call, self._swapped_parts.get(id(call.module)))[0]
        parts = self._parts.get(id(call.module))
        if parts is None:
            return output
        moved = [_step_towards(call._replace(output=output), part, self._place) for part in parts]
        output = moved[0][0] if self._place else output
        if not output.requires_grad:
            output = output.detach().requires_grad_(True)
        self._outputs[id(call.module)], self._steps[id(call.module)] = output, [step for _, step in moved]
        return output


def _as_float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _step_towards(call: AttentionCall, part: SwappedLayer | None, place: float = 1.0) -> tuple[Tensor, Tensor]:
    """The output with the heads of a part moved towards their substitute by a constant step, and the whole step."""
    if part is None:
        return call.output, call.output[:, :, :0]
    heads = part.heads.to(call.output.device)
    with torch.no_grad():
        step = part.output(call, VisibleSets().of(call)) - call.output.index_select(2, heads)
    return call.output.index_add(2, heads, step, alpha=place), step


def _forward_scores(
    model: Model,
    ids: Int[Tensor, "1 time"],
    parts: Sequence[SwappedLayer],
    swapped_parts: Sequence[SwappedLayer],
    *,
    shapes: bool,
) -> dict[str, Float[Tensor, " head"]]:
    """Scores that only look at what a forward without gradients shows."""
    part_of_module = {id(part.layer.module): part for part in parts}
    rows: dict[int, dict[str, Tensor]] = {}

    def listen(call: AttentionCall) -> None:
        part = part_of_module.get(id(call.module))
        if part is None:
            return
        heads = part.heads.to(call.output.device)
        o, l = call.output.index_select(2, heads), part.output(call, VisibleSets().of(call))  # noqa: E741
        comparison = compare_outputs(o, l)
        weight = output_weight(part.layer, call.output.shape[-1])
        step = (l - o).float()
        if weight is not None:
            step = torch.einsum("bthd,hdm->bthm", step, weight[heads].float())
        rows[id(call.module)] = {
            "divergence": comparison.divergence.mean(dim=(0, 1)),
            "relative_l2": comparison.relative_l2.nan_to_num(0.0).mean(dim=(0, 1)),
            "output_l2": step.square().sum(dim=-1).mean(dim=(0, 1)).sqrt(),
            **({name: x[heads.to(x.device)] for name, x in head_shapes(call).items()} if shapes else {}),
        }

    below = {id(part.layer.module): part for part in swapped_parts}

    def swapped(call: AttentionCall) -> Tensor:
        return _step_towards(call, below.get(id(call.module)))[0]

    with torch.inference_mode(), replace_attention(model, swapped), observe_attention(model, listen):
        model(ids[:, :-1], use_cache=False)
    columns = [rows[id(part.layer.module)] for part in parts]
    return {name: torch.cat([column[name].cpu() for column in columns]) for name in columns[0]}


SPLITS = 100


RESAMPLES = 999


@dataclass(frozen=True)
class Ranking:
    """Spearman's correlation of a score with measured costs.

    Attributes
    ----------
    correlation
        With its middle 95 % over resampled heads. Texts stay: drawing them anew would add their noise once more, and
        what it does is what the ceiling says.
    half
        Correlation of the costs measured on two halves of the texts, mean over random splits.
    ceiling
        What the true costs would reach: sqrt(2 half / (1 + half)); 0 where the halves do not agree at all.
    disattenuated
        correlation / ceiling; NaN where there is no ceiling.
    """

    correlation: Interval
    half: float
    ceiling: float
    disattenuated: float


def rank_agreement(
    score: Float[np.ndarray, " head"], costs: Float[np.ndarray, "head text"], *, rng: np.random.Generator
) -> Ranking:
    """How well a score, taken elsewhere, ranks the costs measured on these texts."""
    measured = costs.mean(axis=-1)
    draws = rng.integers(len(score), size=(RESAMPLES, len(score)))
    low, high = np.nanquantile([_spearman(score[rows], measured[rows]) for rows in draws], [0.025, 0.975])
    value = _spearman(score, measured)
    half, ceiling = split_half(costs, rng=rng)
    corrected = value / ceiling if ceiling > 0 else float("nan")
    return Ranking(Interval(value, float(low), float(high)), half, ceiling, corrected)


def split_half(costs: Float[np.ndarray, "head text"], *, rng: np.random.Generator) -> tuple[float, float]:
    """Mean correlation of two halves of the texts over random splits, and the ceiling that follows."""
    texts = costs.shape[1]
    if texts < 2:
        return float("nan"), 0.0
    correlations = []
    for _ in range(SPLITS):
        order = rng.permutation(texts)
        first, second = order[: texts // 2], order[texts // 2 :]
        correlations.append(_spearman(costs[:, first].mean(axis=-1), costs[:, second].mean(axis=-1)))
    half = float(np.mean(correlations))
    return half, float(np.sqrt(2 * half / (1 + half))) if half > 0 else 0.0


def _spearman(a: Float[np.ndarray, " head"], b: Float[np.ndarray, " head"]) -> float:
    x, y = rankdata(a), rankdata(b)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
