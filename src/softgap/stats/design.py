"""The design of a comparison: which labels are exchangeable, the cluster bootstrap, folds and the confirmation set."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from scipy.special import gammaln

from softgap.errors import ShapeError, ValueInputError, unknown_name
from softgap.inputs import check_share, refuse_string

__all__ = [
    "EXCHANGES",
    "Design",
    "Split",
    "bootstrap_weights",
    "cluster_folds",
    "confirmation_split",
    "design_of",
    "mixed_clusters",
    "percentile_interval",
    "row_exchange",
]


EXCHANGES = ("auto", "between", "within", "whole")


"""How labels are exchanged where samples come in clusters, by name; see ``design_of``."""


@dataclass(frozen=True, eq=False)
class Design:
    """The rows that are compared, sorted by block, and how their labels may be exchanged.

    Attributes
    ----------
    kind
        "samples", "between", "within" or "whole".
    labels, block
        Of each row: whether it belongs to the first group, and the block within which labels are exchanged.
    index, starts
        The samples in the order of their rows, and where each row begins: a row is the mean of its samples.
    cluster
        The cluster of each row where ``kind`` is "whole", else the row's own number.
    dropped
        Samples left out because their block holds one label only, so that nothing can be exchanged there.
    """

    kind: str
    labels: Bool[np.ndarray, " row"]
    block: Int64[np.ndarray, " row"]
    index: Int64[np.ndarray, " kept"]
    starts: Int64[np.ndarray, " row"]
    cluster: Int64[np.ndarray, " row"]
    dropped: int

    @property
    def rows(self) -> int:
        """Rows that are compared."""
        return len(self.labels)

    @property
    def blocks(self) -> int:
        """Blocks within which labels are exchanged."""
        return int(self.block[-1]) + 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the first group and of the second."""
        first = int(self.labels.sum())
        return first, self.rows - first

    @property
    def block_starts(self) -> Int64[np.ndarray, " block"]:
        """The first row of each block."""
        return np.searchsorted(self.block, np.arange(self.blocks)).astype(np.int64)

    @property
    def arrangements(self) -> float:
        """How many different permutations there are, the observed one among them; no p-value can be below 1 over it."""
        if self.kind == "whole":
            logarithm = sum(_log_orders(self.labels[rows]) for rows in self._classes())
        else:
            first = np.add.reduceat(self.labels.astype(np.float64), self.block_starts)
            size = np.bincount(self.block).astype(np.float64)
            logarithm = float((gammaln(size + 1) - gammaln(first + 1) - gammaln(size - first + 1)).sum())
        return math.exp(logarithm) if logarithm < 700 else math.inf

    def reduce(self, values: Float64[np.ndarray, "sample unit"]) -> Float64[np.ndarray, "row unit"]:
        """The rows of a table: its samples, or the means of its clusters."""
        ordered = np.asarray(values[self.index])
        if len(self.index) == self.rows:
            return ordered
        counts = np.diff(self.starts, append=len(self.index))
        return np.asarray(np.add.reduceat(ordered, self.starts, axis=0) / counts[:, None])

    def permuted_labels(self, count: int, rng: np.random.Generator) -> Float32[np.ndarray, "permutation row"]:
        """Random exchanges of the labels, 1 for the first group; every block keeps its numbers of both."""
        if self.kind == "whole":
            permuted = np.empty((count, self.rows), np.float32)
            for rows in self._classes():
                order = rng.random((count, len(rows))).argsort(axis=1)
                permuted[:, rows.ravel()] = self.labels[rows][order].reshape(count, -1)
            return permuted
        # Sorted by block plus a fraction, rows stay in their block and are shuffled inside it.
        order = (self.block + rng.random((count, self.rows))).argsort(axis=1)
        return self.labels.astype(np.float32)[order]

    def _classes(self) -> list[Int64[np.ndarray, "cluster member"]]:
        """Rows of clusters that can be exchanged as a whole: of the same block and size."""
        starts = np.flatnonzero(np.diff(self.cluster, prepend=-1))
        sizes = np.diff(starts, append=self.rows)
        kinds = np.unique(np.stack([self.block[starts], sizes]), axis=1)
        return [
            starts[(self.block[starts] == block) & (sizes == size)][:, None] + np.arange(size)
            for block, size in kinds.T.tolist()
        ]


def mixed_clusters(
    labels: Bool[np.ndarray, " sample"], clusters: Int64[np.ndarray, " sample"]
) -> Bool[np.ndarray, " cluster"]:
    """Which clusters hold both labels."""
    size, first = np.bincount(clusters), np.bincount(clusters, weights=labels)
    return np.asarray((first > 0) & (first < size))


def design_of(
    labels: Bool[np.ndarray, " sample"],
    clusters: Int64[np.ndarray, " sample"] | None,
    strata: Int64[np.ndarray, " sample"],
    exchange: str = "auto",
) -> Design:
    """The rows and blocks of a comparison.

    - Without clusters each sample is a row and each stratum a block.
    - "between", for labels that are constant within every cluster: a row is the mean of a cluster, and the labels of
      whole clusters are exchanged within their stratum.
    - "within", for labels that vary within clusters: labels are exchanged among the samples of one cluster (and
      stratum) only, so that nothing that differs between clusters can make a difference. Clusters with one label
      say nothing about it and are dropped.
    - "whole", also for labels that vary: the labels of a cluster move as a whole to another cluster of the same size.
      This asks whether labels and values are related at all, within questions or between them.
    - "auto" is "between" where labels are constant within clusters and "within" otherwise.
    """
    if exchange not in EXCHANGES:
        raise unknown_name("exchange", exchange, EXCHANGES)
    if clusters is None:
        if exchange != "auto":
            raise ValueInputError(f"exchange '{exchange}' needs clusters, got none; give them or use 'auto'")
        row, block, kind = np.arange(len(labels)), strata, "samples"
        return _sorted_design(kind, labels, block, row, row)
    mixed = mixed_clusters(labels, clusters)
    kind = exchange if exchange != "auto" else ("within" if mixed.any() else "between")
    if kind == "within":
        block = np.unique(np.stack([clusters, strata]), axis=1, return_inverse=True)[1].reshape(-1)
        return _sorted_design(kind, labels, block, np.arange(len(labels)), clusters)
    if kind == "between" and mixed.any():
        raise ValueInputError(
            f"exchange 'between' needs one label per cluster, got {int(mixed.sum())} clusters with both; "
            "use 'within' or 'whole'"
        )
    pairs = np.unique(np.stack([clusters, strata]), axis=1)
    if pairs.shape[1] > len(mixed):
        raise ValueInputError(
            f"a cluster must lie in one stratum where labels move with whole clusters, got {pairs.shape[1]} pairs of "
            f"cluster and stratum for {len(mixed)} clusters; use strata that describe clusters, or exchange 'within'"
        )
    row = clusters if kind == "between" else np.arange(len(labels))
    return _sorted_design(kind, labels, strata, row, clusters)


def _sorted_design(kind: str, labels: np.ndarray, block: np.ndarray, row: np.ndarray, cluster: np.ndarray) -> Design:
    size, first = np.bincount(block), np.bincount(block, weights=labels)
    useful = ((first > 0) & (first < size))[block]
    if not useful.any():
        where = "cluster" if kind == "within" else "stratum"
        raise ValueInputError(
            f"labels can be exchanged only where both groups meet, got no {where} with both; use coarser strata"
        )
    index = np.flatnonzero(useful)
    index = index[np.lexsort((index, row[index], cluster[index], block[index]))]
    starts = np.flatnonzero(np.diff(row[index], prepend=-1))
    leading = index[starts]
    design = Design(
        kind=kind,
        labels=labels[leading],
        block=np.unique(block[leading], return_inverse=True)[1].astype(np.int64),
        index=index,
        starts=starts,
        cluster=cluster[leading],
        dropped=len(labels) - len(index),
    )
    if min(design.sizes) < 2:
        noun = "clusters" if kind == "between" else "samples"
        raise ValueInputError(
            f"each group needs at least 2 {noun} where labels can be exchanged, got {design.sizes[0]} and "
            f"{design.sizes[1]}; add samples or use coarser strata"
        )
    return design


def row_exchange(
    labels: Bool[np.ndarray, " sample"], clusters: Int64[np.ndarray, " sample"] | None, rng: np.random.Generator
) -> Int64[np.ndarray, " sample"]:
    """A random order of the samples that keeps clusters together.

    Whole clusters change places with others of their size; where labels vary within clusters, samples also change
    places within theirs.
    """
    if clusters is None:
        return rng.permutation(len(labels)).astype(np.int64)
    shuffled = mixed_clusters(labels, clusters).any()
    by_cluster = np.lexsort((rng.random(len(labels)) if shuffled else np.arange(len(labels)), clusters))
    sizes = np.bincount(clusters)
    starts = np.cumsum(sizes) - sizes
    order = np.empty(len(labels), np.int64)
    for size in np.unique(sizes):
        members = by_cluster[starts[sizes == size][:, None] + np.arange(size)]
        order[np.sort(members, axis=1)] = members[rng.permutation(len(members))]
    return order


def _log_orders(vectors: Bool[np.ndarray, "cluster member"]) -> float:
    """Logarithm of the number of different orders of these label vectors."""
    counts = np.unique(vectors, axis=0, return_counts=True)[1]
    return float(gammaln(len(vectors) + 1) - gammaln(counts + 1).sum())


def bootstrap_weights(
    labels: Bool[np.ndarray, " sample"],
    clusters: Int64[np.ndarray, " sample"] | None,
    replicates: int,
    rng: np.random.Generator,
) -> Float64[np.ndarray, "replicate sample"]:
    """How often each sample is drawn.

    Clusters are drawn among those with the same labels in them (only the first, only the second, both), so that both
    groups are in every replicate and keep their share. Without clusters each sample is its own.
    """
    codes = np.arange(len(labels)) if clusters is None else clusters
    size, first = np.bincount(codes), np.bincount(codes, weights=labels)
    kind = np.where(first == 0, 0, np.where(first == size, 1, 2))
    times = np.empty((replicates, len(size)))
    for value in np.unique(kind):
        members = np.flatnonzero(kind == value)
        times[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), size=replicates)
    return times[:, codes]


def percentile_interval(sample: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """The middle ``level`` of replicates, along the first axis."""
    tail = (1 - level) / 2
    low, high = np.quantile(sample, [tail, 1 - tail], axis=0)
    return np.asarray(low), np.asarray(high)


@dataclass(frozen=True, eq=False)
class Split:
    """Which samples are kept back for confirmation, and the hash that fixes it."""

    confirmation: Bool[np.ndarray, " sample"]
    hash: str
    fraction: float
    salt: str


def confirmation_split(
    ids: Sequence[str], *, fraction: float = 0.3, salt: str = "softgap", clusters: Sequence[str] | None = None
) -> Split:
    """Keep back about ``fraction`` of the samples, the same ones whoever asks and in whatever order.

    A sample is kept back if SHA-256 of the salt and its id, read as a number from 0 to 1, is below ``fraction``. So a
    sample added later moves no other. With ``clusters`` their names decide, and samples of one cluster stay together.
    ``hash`` is SHA-256 of everything that the split depends on: write it down before looking.
    """
    share = check_share("fraction", fraction, 0.3)
    refuse_string("ids", ids, "one name per sample")
    refuse_string("clusters", clusters, "one name per sample")
    names = [str(name) for name in ids]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueInputError(f"sample ids must differ, got '{repeated[0]}' more than once; name every sample once")
    deciding = names if clusters is None else [str(name) for name in clusters]
    if len(deciding) != len(names):
        raise ShapeError(
            f"clusters must have one entry per sample, got {len(deciding)} for {len(names)} samples; "
            "give each sample its own entry"
        )
    confirmation = np.array([_number(salt, name) < share for name in deciding], bool)
    if not 0 < confirmation.sum() < len(names):
        raise ValueInputError(
            f"a split needs samples on both sides, got {int(confirmation.sum())} of {len(names)} for confirmation; "
            "use more samples or another fraction"
        )
    document = json.dumps([salt, share, sorted(zip(names, deciding, strict=True))], ensure_ascii=False)
    return Split(confirmation, hashlib.sha256(document.encode()).hexdigest(), share, salt)


def _number(salt: str, name: str) -> float:
    digest = hashlib.sha256(json.dumps([salt, name], ensure_ascii=False).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def cluster_folds(
    labels: Bool[np.ndarray, " sample"],
    clusters: Int64[np.ndarray, " sample"] | None,
    folds: int,
    rng: np.random.Generator,
) -> Int64[np.ndarray, " sample"]:
    """The fold of each sample.

    Clusters in random order, those with most samples first, go to the fold that is furthest behind its share of their
    labels. Every fold ends with both labels, or the folds are refused.
    """
    codes = np.arange(len(labels)) if clusters is None else clusters
    label_counts = np.stack([np.bincount(codes, weights=labels), np.bincount(codes, weights=~labels)], axis=1)
    totals = label_counts.sum(axis=0)
    fold_counts = np.zeros((folds, 2))
    fold_of = np.empty(len(label_counts), np.int64)
    shuffled = rng.permutation(len(label_counts))
    for cluster in shuffled[np.argsort(-label_counts[shuffled].sum(axis=1), kind="stable")]:
        filled = (((fold_counts + label_counts[cluster]) / totals) ** 2).sum(axis=1) - (
            (fold_counts / totals) ** 2
        ).sum(axis=1)
        fold = int(np.argmin(filled))
        fold_counts[fold] += label_counts[cluster]
        fold_of[cluster] = fold
    if (fold_counts == 0).any():
        raise ValueInputError(
            f"every fold needs samples of both groups, got {folds} folds for {int((label_counts[:, 0] > 0).sum())} and "
            f"{int((label_counts[:, 1] > 0).sum())} clusters with them; use fewer folds or more samples"
        )
    return fold_of[codes]
