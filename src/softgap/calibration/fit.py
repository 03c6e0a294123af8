"""Fit the feature map of one layer: Adam on the KL divergence from the softmax weights over sampled rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from softgap.attention import ExactSet, Mechanism, add_window, resolve
from softgap.attention.rotary import Rotation, TurnTable
from softgap.deprecation import deprecated_keywords
from softgap.errors import ValueInputError

__all__ = [
    "LayerText",
    "Maps",
    "Recipe",
    "RowPlan",
    "fit_maps",
    "landmark_maps",
    "log_weights",
    "sample_rows",
    "softmax_scores",
    "weights_kl",
]


@dataclass(frozen=True, eq=False)
class LayerText:
    """Queries and keys of one layer over one text, after rotary embedding.

    Attributes
    ----------
    start
        The position of the first token, as rotary embedding counts it.
    generated
        Whether the model wrote the text, beside texts that were given.
    """

    query: Float[Tensor, "head time dim"]
    key: Float[Tensor, "kv_head time dim"]
    start: int = 0
    generated: bool = False

    @property
    def length(self) -> int:
        """Positions of the text."""
        return self.key.shape[1]


@dataclass(frozen=True)
class RowPlan:
    """How rows and keys are drawn.

    Attributes
    ----------
    blocks, rows
        Blocks per step, and consecutive rows in each.
    sinks, near, far
        First keys, keys right before the block, and keys sampled in between.
    start
        Rows before this position are never drawn: they see few keys, and any mechanism does well there.
    generated
        Share of the blocks that come from text that the model wrote from beginnings of many kinds; the others come from
        the given text. 0 leaves generated text out.
    moved
        Share of the blocks that are moved to a random offset: queries and keys are turned as if the text began there.
        Only where the rotary embedding is known, and never beyond the longest text. 0 leaves every text where it is.
    """

    blocks: int = 8
    rows: int = 8
    sinks: int = 4
    near: int = 64
    far: int = 64
    start: int = 16
    generated: float = 1 / 3
    moved: float = 0.4

    def __post_init__(self) -> None:
        if not 0 <= self.generated < 1:
            raise ValueInputError(
                f"the share of generated text must be at least 0 and below 1, got {self.generated:g}; 0 leaves it out"
            )
        if not 0 <= self.moved <= 1:
            raise ValueInputError(
                f"the share of blocks at random offsets must be from 0 to 1, got {self.moved:g}; 0 leaves them out"
            )


@dataclass(frozen=True, eq=False)
class Rows:
    """Blocks of query rows with the keys drawn for them.

    Attributes
    ----------
    query_seen, key_seen
        What features are made of: queries and keys, and behind each the same vector before rotary embedding where the
        fit knows it.
    from_middle, key_from_middle
        Positions counted from the middle of each block: decay is measured from there, so that no power of it is large.
    key_position
        Positions of the keys in their text.
    log_count
        Logarithm of the number of keys that each stands for.
    seen
        Which keys each row sees.
    """

    query: Float[Tensor, "block kv_head group row dim"]
    key: Float[Tensor, "block kv_head key dim"]
    query_seen: Float[Tensor, "block kv_head group row seen"]
    key_seen: Float[Tensor, "block kv_head key seen"]
    from_middle: Float[Tensor, "block row"]
    key_from_middle: Float[Tensor, "block key"]
    key_position: Float[Tensor, "block key"]
    log_count: Float[Tensor, "block key"]
    seen: Bool[Tensor, "block row key"]


def sample_rows(
    texts: Sequence[LayerText],
    plan: RowPlan,
    *,
    window: int | None = None,
    turns: TurnTable | None = None,
    rng: np.random.Generator,
) -> Rows:
    """Draw blocks of rows, texts in proportion to their length and places within them evenly.

    Given and generated texts share the blocks as the plan says. ``turns`` lets features see vectors before rotary
    embedding too, and the blocks that the plan moves as they would be at another offset. Scores do not depend on it.
    """
    text_indices = rng.choice(len(texts), size=plan.blocks, p=_probabilities(texts, plan.generated))
    blocks = [_block(texts[i], plan, window, rng) for i in text_indices]
    query, key, row, column, log_count = (torch.stack(part) for part in zip(*blocks, strict=True))
    distance = row[:, :, None] - column[:, None, :]
    seen = (distance >= 0) & (log_count > -torch.inf)[:, None, :]
    if window is not None:
        seen = seen & (distance < window)
    middle = row.mean(dim=1, keepdim=True)
    query_seen, key_seen = query, key
    if turns is not None:
        start = torch.tensor([texts[i].start for i in text_indices])[:, None]
        if plan.moved:
            by = _offsets(texts, text_indices, plan.moved, rng)
            query_seen, key_seen = turns.moved(query, by), turns.moved(key, by)
        query_seen = torch.cat([query_seen, turns.before(query, start + row.long())], dim=-1)
        key_seen = torch.cat([key_seen, turns.before(key, start + column.long())], dim=-1)
    return Rows(query, key, query_seen, key_seen, row - middle, column - middle, column, log_count, seen)


def _probabilities(texts: Sequence[LayerText], generated: float) -> Float[np.ndarray, " text"]:
    """How often each text is drawn: by length, and together the generated texts this share of the times."""
    lengths = np.array([text.length for text in texts], dtype=float)
    written = np.array([text.generated for text in texts])
    if written.all() or not written.any():
        return np.asarray(lengths / lengths.sum())
    shares = np.where(written, generated, 1 - generated)
    return np.asarray(shares * lengths / np.where(written, lengths[written].sum(), lengths[~written].sum()))


def _offsets(
    texts: Sequence[LayerText], drawn: Int[np.ndarray, " block"], moved: float, rng: np.random.Generator
) -> Int[Tensor, " block"]:
    """How far each block is moved: 0, or a random offset at which its text ends no later than the longest."""
    ends = np.array([text.start + text.length for text in texts])
    room = ends.max() - ends[drawn]
    return torch.from_numpy(np.where(rng.random(len(drawn)) < moved, rng.integers(0, room + 1), 0))


def _block(
    text: LayerText, plan: RowPlan, window: int | None, rng: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One block: its queries, keys, row positions, key positions and logarithms of counts.

    Far keys are drawn from those that the first row sees.
    """
    rows = min(plan.rows, text.length)
    first = int(rng.integers(min(plan.start, text.length - rows), text.length - rows + 1))
    near = np.arange(first - plan.near, first + rows)
    sinks = np.arange(plan.sinks)
    sinks = np.where(sinks < near[0], sinks, -1)
    farthest = plan.sinks if window is None else max(plan.sinks, first - window + 1)
    far, log_count = _far_keys(farthest, max(farthest, int(near[0])), plan.far, rng)
    position = np.concatenate([sinks, far, near])
    count = np.concatenate([np.zeros(len(sinks)), np.full(len(far), log_count), np.zeros(len(near))])
    count = np.where(position >= 0, count, -np.inf)
    at = torch.from_numpy(np.maximum(position, 0))
    query = text.query[:, first : first + rows]
    return (
        query.unflatten(0, (text.key.shape[0], -1)),
        text.key[:, at],
        torch.arange(first, first + rows, dtype=query.dtype),
        at.to(query.dtype),
        torch.from_numpy(count).to(query.dtype),
    )


def _far_keys(start: int, stop: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """``n`` positions out of start..stop-1, one from each of n equal strata, and the log of what each stands for.

    Where there are no more than n, all of them are taken, and the places left over are -1.
    """
    length = stop - start
    if length <= n:
        return np.concatenate([np.arange(start, stop), np.full(n - length, -1)]), 0.0
    stratum = length / n
    places = start + np.floor((np.arange(n) + rng.random(n)) * stratum).astype(int)
    return np.minimum(places, stop - 1), math.log(stratum)


Scores = Float[Tensor, "block kv_head group row key"]


# A feature that decays by exp(-1) a step sees little but its own token; the kernels are safe up to a spread of 5.
FASTEST = 1.0


@dataclass(frozen=True, eq=False)
class Maps:
    """log phi_q = W_q q + b_q per query head, log phi_k = W_k k + b_k and a decay rate per KV head, r features each.

    With a rotation q and k are followed by the same vectors before rotary embedding, and weights are twice as wide.
    Maps of a hybrid's tail have the logarithm of its factor f per query head, which counts as 0 above 0.
    """

    query_weight: Float[Tensor, "kv_head group feature seen"]
    query_bias: Float[Tensor, "kv_head group feature"]
    key_weight: Float[Tensor, "kv_head feature seen"]
    key_bias: Float[Tensor, "kv_head feature"]
    log_rate: Float[Tensor, "kv_head feature"]
    log_factor: Float[Tensor, "kv_head group"] | None = None

    @property
    def rate(self) -> Float[Tensor, "kv_head feature"]:
        """Decay per position."""
        return self.log_rate.exp().clamp(max=FASTEST)

    def parameters(self) -> dict[str, Float[Tensor, "layer head ..."]]:
        """What the mechanism ``fitted`` needs, for one layer."""
        return {
            "query_weight": self.query_weight.flatten(0, 1)[None],
            "query_bias": self.query_bias.flatten(0, 1)[None],
            "key_weight": self.key_weight[None],
            "key_bias": self.key_bias[None],
            "rate": self.rate[None],
            **({} if self.log_factor is None else {"tail_factor": self.log_factor.clamp(max=0).exp().flatten()[None]}),
        }

    def mechanism(self, rotation: Rotation | None = None, exact: ExactSet | None = None) -> Mechanism:
        """``fitted``, or the hybrid with an exact set, of one layer, given the rotation of the fit."""
        turning = {} if rotation is None else rotation.parameters()
        mechanism = resolve("fitted")
        if exact is not None:
            mechanism = add_window(mechanism, w=exact.recent, sinks=exact.sinks)
        return mechanism.with_parameters(**self.parameters(), **turning)

    def widened(self, more: int) -> Maps:
        """The same maps of vectors that are longer by so many numbers, which count for nothing yet."""
        wider = {name: functional.pad(getattr(self, name), (0, more)) for name in ("query_weight", "key_weight")}
        return replace(self, **wider)

    def tensors(self) -> dict[str, Tensor]:
        """The free numbers by name."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def log_weights(maps: Maps, rows: Rows) -> Scores:
    """log sum_r exp(log phi_q,r + log phi_k,r - a_r (t - s)): unnormalised log-weights, up to a term per row."""
    rate = maps.rate
    key = _affine(rows.key_seen, maps.key_weight, maps.key_bias)
    key = key + rate[:, None] * rows.key_from_middle[:, None, :, None]
    query = _affine(rows.query_seen, maps.query_weight, maps.query_bias)
    query = query - rate[:, None, None] * rows.from_middle[:, None, None, :, None]
    # Constants per key and per row keep the exponentials in range; the first is put back, the second cancels.
    key_top = key.detach().amax(dim=-1, keepdim=True)
    query_top = query.detach().amax(dim=-1, keepdim=True)
    product = (query - query_top).exp().flatten(2, 3) @ (key - key_top).exp().transpose(-1, -2)
    logs = product.clamp(min=torch.finfo(product.dtype).tiny).log() + key_top.transpose(-1, -2)
    return _by_row(logs, rows)


def hybrid_scores(target: Scores, tail: Scores, rows: Rows, exact: ExactSet, log_factor: Tensor) -> Scores:
    """Log-weights of a hybrid: scores on the exact set, the tail elsewhere, matched on the recent keys."""
    distance = rows.from_middle[:, :, None] - rows.key_from_middle[:, None, :]
    recent = ((distance < exact.recent) & rows.seen)[:, None, None]
    first = (rows.key_position < exact.sinks)[:, None, None, None, :]
    mass, tail_mass = (x.masked_fill(~recent, -torch.inf).logsumexp(dim=-1, keepdim=True) for x in (target, tail))
    shrunk = tail + (mass - tail_mass) + log_factor.clamp(max=0)[..., None, None]
    return torch.where(recent | first, target, shrunk)


def _hybrid_rows(plan: RowPlan, exact: ExactSet) -> RowPlan:
    """The same plan with every exact key among the keys, and rows that see others too."""
    return replace(
        plan,
        start=max(plan.start, exact.size),
        sinks=max(plan.sinks, exact.sinks),
        near=max(plan.near, exact.recent),
    )


def _affine(
    x: Float[Tensor, "block *head row seen"],
    weight: Float[Tensor, "*head feature seen"],
    bias: Float[Tensor, "*head feature"],
) -> Float[Tensor, "block *head row feature"]:
    """W x + b with the rows of all blocks side by side: one product per head is faster than one per block and head."""
    stacked = x.movedim(0, -3).flatten(-3, -2)
    mapped: Tensor = stacked @ weight.transpose(-1, -2) + bias[..., None, :]
    by_block: Tensor = mapped.unflatten(-2, (len(x), -1))
    return by_block.movedim(-3, 0)


def softmax_scores(rows: Rows, scale: float, softcap: float | None = None) -> Scores:
    """The model's own scores s q.k, capped where the model caps them."""
    scores = (rows.query.flatten(2, 3) * scale) @ rows.key.transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return _by_row(scores, rows)


def _by_row(logs: Float[Tensor, "block kv_head group_row key"], rows: Rows) -> Scores:
    blocks, kv_heads, group, count = rows.query.shape[:4]
    return logs.reshape(blocks, kv_heads, group, count, -1)


def weights_kl(target: Scores, fitted: Scores, rows: Rows) -> Float[Tensor, "block kv_head group row"]:
    """KL divergence of the fitted weights from the target weights, both as unnormalised log-weights, per row."""
    prior = rows.log_count[:, None, :].masked_fill(~rows.seen, -torch.inf)[:, None, None]
    target_logs, fitted_logs = (functional.log_softmax(logs + prior, dim=-1) for logs in (target, fitted))
    # Hidden keys are -inf on both sides; their share is 0.
    difference = (target_logs - fitted_logs).masked_fill(~rows.seen[:, None, None], 0.0)
    return (target_logs.exp() * difference).sum(dim=-1)


def landmark_maps(
    texts: Sequence[LayerText], features: int, scale: float, *, sharpness: float = 1.0, rng: np.random.Generator
) -> Maps:
    """Where the fit starts: every feature is the softmax distribution of one real query, a landmark.

    phi_k,r = exp(s q_r.k), and phi_q,r is large for queries whose distribution is near that of q_r: to second order the
    KL divergence between the two is s^2 (q - q_r)^T Sigma (q - q_r) / 2, with Sigma the covariance of the keys.
    """
    kv_heads = texts[0].key.shape[0]
    group = texts[0].query.shape[0] // kv_heads
    queries = torch.cat([text.query for text in texts], dim=1).unflatten(0, (kv_heads, group)).flatten(1, 2)
    keys = torch.cat([text.key for text in texts], dim=1)
    key_sample = keys[:, torch.from_numpy(rng.choice(keys.shape[1], size=min(2048, keys.shape[1]), replace=False))]
    at = torch.from_numpy(np.stack([rng.choice(queries.shape[1], size=features) for _ in range(kv_heads)]))
    landmark = queries[torch.arange(kv_heads)[:, None], at]
    centred = key_sample - key_sample.mean(dim=1, keepdim=True)
    covariance = centred.transpose(-1, -2) @ centred / key_sample.shape[1]
    pull = sharpness * scale**2 * landmark @ covariance
    total = torch.logsumexp(scale * landmark @ key_sample.transpose(-1, -2), dim=-1)
    query_bias = -0.5 * (pull * landmark).sum(dim=-1) - total
    rate = torch.logspace(-4, -1.5, features, dtype=keys.dtype)
    order = torch.from_numpy(np.stack([rng.permutation(features) for _ in range(kv_heads)]))
    return Maps(
        query_weight=pull[:, None].expand(-1, group, -1, -1).clone(),
        query_bias=query_bias[:, None].expand(-1, group, -1).clone(),
        key_weight=scale * landmark.clone(),
        key_bias=torch.zeros(kv_heads, features, dtype=keys.dtype),
        log_rate=rate[order].log(),
    )


WARM_UP = 20


# The dimension that the learning rate was tuned at.
TUNED_DIM = 64


FEWEST_FEATURES, MOST_FEATURES = 2, 8192


@dataclass(frozen=True)
class Recipe:
    """Everything a fit depends on besides the texts.

    Attributes
    ----------
    features
        Features per head.
    steps
        Steps of Adam.
    learning_rate
        Of the biases; weights and rates move in proportion to their own size, weights of more than 64 dimensions less.
    sharpness
        How strongly the first query maps prefer the nearest landmark.
    rows
        What each step looks at.
    seed
        Of landmarks, rows and keys; every layer has a stream of its own.
    """

    features: int = 128
    steps: int = 450
    learning_rate: float = 0.1
    sharpness: float = 1.0
    rows: RowPlan = field(default_factory=RowPlan)
    seed: int = 0

    def __post_init__(self) -> None:
        if not FEWEST_FEATURES <= self.features <= MOST_FEATURES:
            raise ValueInputError(
                f"features must be from {FEWEST_FEATURES} to {MOST_FEATURES}, got {self.features}; 128 is usual"
            )
        if self.steps < 1:
            raise ValueInputError(f"steps must be at least 1, got {self.steps}; 450 is usual")


def weight_pace(dim: int, scale: float) -> float:
    """How far a step moves the weights of a map, beside its biases.

    Weights start at scale times a query, and move in proportion to that. A step of Adam moves all of them alike, and a
    log feature sums over the dimensions, so it would move by more the more dimensions there are: beyond the dimension
    that the learning rate was tuned at, weights move by less in proportion.
    """
    return scale * min(1.0, TUNED_DIM / dim)


@deprecated_keywords(wanted="target_scores")
def fit_maps(
    texts: Sequence[LayerText],
    recipe: Recipe,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    target_scores: Callable[[Rows], Scores] | None = None,
    layer: int = 0,
    start: Maps | None = None,
    rotation: Rotation | None = None,
    exact: ExactSet | None = None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Maps:
    """The map whose weights are nearest to softmax over these texts.

    Parameters
    ----------
    texts
        Queries and keys of one layer.
    scale
        The model's scaling.
    window
        Positions a query sees, itself included; None for all.
    softcap
        Bound of the model's scores, where it has one.
    target_scores
        Unnormalised log-weights to fit; None for the model's own softmax scores.
    layer
        Chooses the layer's own random stream.
    start
        Where to begin; None begins at landmarks.
    rotation
        The layer's rotary embedding: features then see vectors before it too. None shows them as they are only.
    exact
        Sinks and recent keys that keep exact softmax: the map is then fitted as the tail of that hybrid, with a factor
        per head. None fits it to all keys.
    report
        Called with the steps done and the KL divergence of the last one.
    """
    rng = np.random.default_rng([recipe.seed, layer])
    maps = start or landmark_maps(texts, recipe.features, scale, sharpness=recipe.sharpness, rng=rng)
    turns = None
    if rotation is not None:
        turns = TurnTable(rotation, max(text.start + text.length for text in texts))
        maps = maps.widened(2 * texts[0].key.shape[-1] - maps.key_weight.shape[-1])
    row_plan = recipe.rows if exact is None else _hybrid_rows(recipe.rows, exact)
    if exact is not None:
        maps = replace(maps, log_factor=torch.zeros(maps.query_bias.shape[:2]))
    tensors = {name: tensor.requires_grad_() for name, tensor in maps.tensors().items()}
    pace = weight_pace(texts[0].key.shape[-1], scale)
    paces = {"query_weight": pace * recipe.sharpness, "key_weight": pace, "log_rate": 3.0, "log_factor": 0.3}
    rates = [recipe.learning_rate * paces.get(name, 1.0) for name in tensors]
    groups = [{"params": [tensor]} for tensor in tensors.values()]
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    for step in range(recipe.steps):
        schedule = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * schedule
        rows = sample_rows(texts, row_plan, window=window, turns=turns, rng=rng)
        target = softmax_scores(rows, scale, softcap) if target_scores is None else target_scores(rows)
        reached = log_weights(maps, rows)
        if exact is not None and maps.log_factor is not None:
            reached = hybrid_scores(target, reached, rows, exact, maps.log_factor)
        loss = weights_kl(target, reached, rows).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        report(step + 1, loss.item())
    return Maps(**{name: tensor.detach() for name, tensor in tensors.items()})
