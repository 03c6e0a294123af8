"""Ordinal transition networks, their entropies, and how much patterns tell the direction of time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.signal.entropy import probabilities, reduce_blocks, shannon
from softgap.signal.kernels import link_rows
from softgap.signal.patterns import Block, Options, check_batch, reversed_patterns
from softgap.signal.results import Entropy, SeriesResult

__all__ = ["Network", "TransitionEntropy", "irreversibility", "ordinal_network", "transition_entropy"]


@dataclass(frozen=True, eq=False)
class TransitionEntropy(SeriesResult):
    """Entropies in nats of the ordinal network of each series.

    ``link`` is that of the links, ``node`` the mean entropy of the next pattern given the present one, ``links`` the
    number of steps that were counted.
    """

    link: Float[np.ndarray, "*lead"]
    node: Float[np.ndarray, "*lead"]
    links: Int[np.ndarray, "*lead"]
    windows: Int[np.ndarray, "*lead"]
    tie_rate: Float[np.ndarray, "*lead"]
    eligible: Bool[np.ndarray, "*lead"]


@dataclass(frozen=True, eq=False)
class Network:
    """The links of every series, one entry each: ``series`` is a flat index over the leading axes ``lead``."""

    series: Int[np.ndarray, " link"]
    source: Int[np.ndarray, " link"]
    target: Int[np.ndarray, " link"]
    count: Int[np.ndarray, " link"]
    lead: tuple[int, ...]
    patterns: int

    def node_entropies(self) -> Float[np.ndarray, "*lead pattern"]:
        """Entropy in nats of the next pattern given each pattern; NaN where it was never left."""
        node = self.series * self.patterns + self.source
        nodes = math.prod(self.lead) * self.patterns
        leaving = np.bincount(node, self.count, minlength=nodes)
        p = self.count / leaving[node]
        entropy = np.bincount(node, -p * np.log(p), minlength=nodes)
        return np.where(leaving > 0, entropy, np.nan).reshape((*self.lead, self.patterns))


def ordinal_network(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> Network:
    """The steps from the pattern of one window to that of the next, as links with counts.

    Pessa and Ribeiro, Phys. Rev. E 100, 042304 (2019). An excluded
    window breaks the chain. Series that are not eligible are in it too.
    """
    batch = check_batch(x, order, delay, options)
    parts = []
    for block in batch.indices():
        keys, counts, n_links = _links(block, batch.patterns)
        used = np.arange(keys.shape[1]) < n_links[:, None]
        series = np.repeat(np.arange(block.where.start, block.where.stop), n_links)
        parts.append((series, *np.divmod(keys[used], batch.patterns), counts[used]))
    empty = (np.empty(0, np.int64),) * 4
    series, source, target, count = map(np.concatenate, zip(*(parts or [empty]), strict=True))
    return Network(series, source, target, count, batch.lead, batch.patterns)


def transition_entropy(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> TransitionEntropy:
    """Link entropy and global node entropy of each series' ordinal network, in nats.

    With w_ij the share of links from i to j and w_i = sum_j w_ij: link = -sum_ij w_ij log w_ij and
    node = sum_i w_i h_i, h_i = -sum_j (w_ij / w_i) log(w_ij / w_i) (Pessa and Ribeiro 2019). So
    link = node + the entropy of w_i. White noise at delay 1 has node = log(order + 1) - 2 log 2 / (order + 1).
    """
    batch = check_batch(x, order, delay, options)
    series = len(batch.rows)
    link, node, links = np.full(series, np.nan), np.full(series, np.nan), np.empty(series, np.int64)
    windows, rate, eligible = np.empty(series, np.int64), np.empty(series), np.empty(series, bool)
    for block in batch.indices():
        keys, counts, n_links = _links(block, batch.patterns)
        for row in range(len(keys)):
            count = counts[row, : n_links[row]]
            at = block.where.start + row
            links[at] = count.sum()
            eligible[at] = block.eligible[row] and links[at] > 0
            if eligible[at]:
                source = keys[row, : n_links[row]] // batch.patterns
                leaving = np.bincount(np.unique(source, return_inverse=True)[1], count)
                link[at] = shannon(count / links[at])
                node[at] = max(link[at] - float(shannon(leaving / links[at])), 0.0)
        windows[block.where], rate[block.where] = block.windows, block.tie_rate
    return TransitionEntropy(*map(batch.restore_shape, (link, node, links, windows, rate, eligible)))


def irreversibility(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> Entropy:
    """How far the patterns of a series are from those of the same series read backwards, from 0 to 1.

    The Jensen-Shannon divergence of p and p', p'_i the frequency of pattern i read backwards, over log 2 (the
    comparison of Zanin et al., Entropy 20, 665 (2018), in a divergence that is finite where a pattern is missing).
    It is 0 for a reversible process only in the limit: compare it with noise of the same length by ``z_scores``.
    """
    batch = check_batch(x, order, delay, options)
    backwards = reversed_patterns(batch.order)

    def reduce(counts: np.ndarray) -> np.ndarray:
        p = probabilities(counts)
        return np.asarray(np.clip((shannon((p + p[:, backwards]) / 2) - shannon(p)) / math.log(2), 0, 1))

    return Entropy(*reduce_blocks(batch, batch.counts(), reduce))


def _links(block: Block, patterns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (len(block.table), max(0, block.table.shape[1] - 1))
    keys, counts, n_links = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(len(block.table), np.int64)
    link_rows(block.table, patterns, keys, counts, n_links)
    return keys, counts, n_links
