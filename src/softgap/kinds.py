"""The kinds of substitutes that heads may need: their order, the sentence that counts them, and how they are stored.

Kinds go from cheap to dear. A manifest stores the kind of each head as one letter, in one string per layer:
``{"0": "wwhS", "1": "fwww"}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from softgap.intervals import Interval

__all__ = [
    "COLOURS",
    "KINDS",
    "LETTERS",
    "MAP_TITLE",
    "NOT_CALIBRATED",
    "QUICK_CALIBRATION",
    "UNKNOWN_KINDS",
    "UNMEASURED",
    "Labels",
    "counts_from_numbers",
    "kinds_sentence",
    "letters_of_kinds",
    "numbers_of_counts",
    "stored_kinds",
]

Labels = tuple[tuple[str | None, ...], ...]
"""The kind of each head, ``[layer][head]``; None where it is unknown."""

KINDS = ("constant", "profile", "window", "fitted", "hybrid", "softmax")
LETTERS = {"constant": "c", "profile": "p", "window": "w", "fitted": "f", "hybrid": "h", "softmax": "S"}
# Light to dark, one for each kind.
COLOURS = {
    "constant": "#e8e8e8",
    "profile": "#b7d7ea",
    "window": "#6baed6",
    "fitted": "#74c476",
    "hybrid": "#fd8d3c",
    "softmax": "#a50f15",
}
_WORDS = {
    "constant": "only a constant",
    "profile": "a positional profile",
    "window": "a window",
    "fitted": "a fitted map",
    "hybrid": "a hybrid",
}
_MEMORY = "window_keys"
MAP_TITLE = "The cheapest substitute that suffices, by head (rows) and layer (columns)"
NOT_CALIBRATED = (
    "Not calibrated: these numbers show how concentrated each head is. Run `softgap calibrate` (for the embedded model "
    "about 12 minutes, with --quick about one) to see which heads need softmax."
)
"""What a view opens with where the model has no calibration."""
UNMEASURED = (
    "Measured without a calibrated mechanism: these numbers show how concentrated each head is. Measure with fitted "
    "among the mechanisms (the default once `softgap calibrate` has run) to see which heads need softmax."
)
UNKNOWN_KINDS = (
    "Which substitute suffices for each head is not known: the calibration in use does not say. Run "
    "`softgap calibrate` again."
)
"""The sentence in place of a map of kinds where a fitted map was measured."""
QUICK_CALIBRATION = (
    "These labels come from a quick calibration: in the embedded model three in ten differ from those of a full one, "
    "which `softgap calibrate` makes."
)


def kinds_sentence(counts: Mapping[str, Interval], worth: float | None = None) -> str:
    """How many heads need which kind.

    Parameters
    ----------
    counts
        Heads by kind; those that need softmax must be among them.
    worth
        The memory of the window, in keys with their values.

    Examples
    --------
    >>> from softgap.intervals import Interval
    >>> kinds_sentence({"window": Interval(5, 4, 6), "softmax": Interval(3, 3, 3)})
    'Of 8 heads, 5 (4 to 6) need a window; 3 need softmax.'
    """
    needs = [(_count(counts[kind]), words) for kind, words in _WORDS.items() if kind in counts]
    listed = ", ".join(f"{count} {'need ' if i == 0 else ''}{words}" for i, (count, words) in enumerate(needs))
    heads = sum(round(count.value) for count in counts.values())
    memory = "" if worth is None else f" Window, fitted map and hybrid keep as much as {worth:.0f} keys per KV head."
    return f"Of {heads} heads, {listed}; {_count(counts['softmax'])} need softmax.{memory}"


def _count(count: Interval) -> str:
    low, high = round(count.low), round(count.high)
    return f"{count.value:.0f}" if low == high else f"{count.value:.0f} ({low} to {high})"


def numbers_of_counts(counts: Mapping[str, Interval], worth: float | None) -> dict[str, float]:
    """The same as plain numbers by name, as a manifest stores them."""
    numbers = {} if worth is None else {_MEMORY: worth}
    for kind, count in counts.items():
        numbers |= {f"need_{kind}": count.value, f"need_{kind}_low": count.low, f"need_{kind}_high": count.high}
    return numbers


def counts_from_numbers(numbers: Mapping[str, float]) -> tuple[dict[str, Interval], float | None]:
    """What ``numbers_of_counts`` wrote; no counts where there are none."""
    counts = {}
    for kind in KINDS:
        names = (f"need_{kind}", f"need_{kind}_low", f"need_{kind}_high")
        if all(isinstance(numbers.get(name), int | float) for name in names):
            counts[kind] = Interval(*(float(numbers[name]) for name in names))
    worth = numbers.get(_MEMORY)
    return counts if "softmax" in counts else {}, float(worth) if isinstance(worth, int | float) else None


def letters_of_kinds(labels: Sequence[Sequence[str]]) -> list[str]:
    """The kinds of all heads as one string of letters per layer."""
    return ["".join(LETTERS.get(kind, "?") for kind in row) for row in labels]


def stored_kinds(held_out: object, layers: Sequence[int], heads_per_layer: Sequence[int]) -> Labels | None:
    """The kinds of the heads of some layers.

    Parameters
    ----------
    held_out
        What a manifest stores of the calibration in use; ``kinds`` holds a string of letters by the number of a layer.
    layers, heads_per_layer
        Numbers of the layers, and how many heads each has.

    Returns
    -------
    Labels or None
        None where the kind of no head is known, as in manifests of earlier versions.

    Examples
    --------
    >>> stored_kinds({"kinds": {"0": "wf", "2": "Sh"}}, layers=(2, 3), heads_per_layer=(2, 1))
    (('softmax', 'hybrid'), (None,))
    """
    letters = held_out.get("kinds") if isinstance(held_out, Mapping) else None
    if not isinstance(letters, Mapping):
        return None
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    rows = (str(letters.get(str(layer), "")) for layer in layers)
    labels = tuple(
        tuple(kinds.get(letter) for letter in f"{row:<{heads}}"[:heads])
        for row, heads in zip(rows, heads_per_layer, strict=True)
    )
    return labels if any(kind is not None for row in labels for kind in row) else None
