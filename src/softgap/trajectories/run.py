"""The measurements of one sequence: the Trajectories type, its labelled arrays and its display."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float, Float32, Int32

from softgap.errors import unknown_name
from softgap.trajectories import validation
from softgap.trajectories.manifest import Manifest
from softgap.trajectories.non_finite import NonFinite, count_non_finite
from softgap.trajectories.validation import QUANTITIES

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["Displayed", "Trajectories", "pieces"]


class Displayed:
    """A result that a notebook shows as a page in a frame of its own."""

    def _repr_html_(self) -> str | None:
        # The report lies below this layer, so it is asked for by name, as a user would: softgap.report.
        package: Any = sys.modules["softgap"]
        shown: str | None = package.report.notebook_html(self)
        return shown

    def __repr__(self) -> str:
        # Of a lab: what it says, not the arrays behind it.
        claims = getattr(self, "claims", ())
        return f"<{type(self).__name__}: {'; '.join(f'{claim.name}: {claim.verdict}' for claim in claims)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


PartName = Literal["prompt", "completion"]


_SAMPLE_FIELDS = ("sample_id", "prompt_text", "completion_text", "label", "n_prompt", "manifest")


@dataclass(frozen=True, eq=False, repr=False)
class Trajectories(Displayed):
    """Divergence trajectories of one sequence: every mechanism, layer, head and step.

    Attributes
    ----------
    mechanisms : tuple of str
        The first one is what ``divergence``, ``relative_l2`` and ``norm_ratio`` show.
    layers : tuple of int
        Indices of the tapped layers in the model, increasing; a hybrid model has attention in only some.
    kv_group : int32 [layer, head]
        The KV head that each query head uses.
    quantities : mapping of str to float32 [mechanism, layer, head, step]
        ``divergence``, ``relative_l2`` and ``norm_ratio`` under these names, for all mechanisms.
    positions : int32 [step]
        Position of the query.
    token_ids, tokens : int32 [step], tuple of str
        The predicted token; -1 and ``""`` where the query predicts nothing.
    logprob, entropy : float32 [step]
        Log-probability of the predicted token and entropy of its distribution; NaN where unknown.
    heads_per_layer : tuple of int
        By default every layer has all the heads. A layer with fewer is padded: NaN, and -1 in ``kv_group``.
    focus : mapping of str to float32 [layer, head, step]
        What does not depend on a mechanism, where measured: ``sparsity``, ``attention_entropy``, ``largest_weight``.
    part : "prompt" or "completion"
        Which queries these are. A text that was only read is a completion without a prompt.
    prompt : Trajectories or None
        The prompt's own queries. They take over the sample and the manifest of the run they belong to.
    sample_id, prompt_text, completion_text, label, n_prompt
        The sample: a name unique in its study, its two texts, an optional group, and the prompt's number of tokens.
    manifest : Manifest
        Where the measurement came from.

    Notes
    -----
    Arrays of the right dtype are taken over, not copied, and shown read-only.
    """

    mechanisms: tuple[str, ...]
    layers: tuple[int, ...]
    kv_group: Int32[np.ndarray, "layer head"]
    quantities: Mapping[str, Float32[np.ndarray, "mechanism layer head step"]]
    positions: Int32[np.ndarray, " step"]
    token_ids: Int32[np.ndarray, " step"]
    tokens: tuple[str, ...]
    logprob: Float32[np.ndarray, " step"]
    entropy: Float32[np.ndarray, " step"]
    heads_per_layer: tuple[int, ...] = ()
    focus: Mapping[str, Float32[np.ndarray, "layer head step"]] = field(default_factory=dict)
    part: PartName = "completion"
    prompt: Trajectories | None = None
    sample_id: str = "0"
    prompt_text: str = ""
    completion_text: str = ""
    label: str | None = None
    n_prompt: int = 0
    manifest: Manifest = field(default_factory=Manifest)

    def __post_init__(self) -> None:
        values = validation.check_fields({f.name: getattr(self, f.name) for f in fields(self)})
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.prompt is not None:
            validation.check_prompt(self, self.prompt)
            sample_fields = {name: getattr(self, name) for name in _SAMPLE_FIELDS}
            if any(getattr(self.prompt, name) != value for name, value in sample_fields.items()):
                object.__setattr__(self, "prompt", replace(self.prompt, **sample_fields))

    @property
    def divergence(self) -> Float32[np.ndarray, "layer head step"]:
        """1 - cos(softmax output, linear output), of the first mechanism."""
        return self._first("divergence")

    @property
    def relative_l2(self) -> Float32[np.ndarray, "layer head step"]:
        """|linear - softmax| / |softmax|, of the first mechanism."""
        return self._first("relative_l2")

    @property
    def norm_ratio(self) -> Float32[np.ndarray, "layer head step"]:
        """|linear| / |softmax|, of the first mechanism."""
        return self._first("norm_ratio")

    @property
    def n_steps(self) -> int:
        """Number of queries."""
        return len(self.positions)

    @property
    def n_heads(self) -> int:
        """Number of heads over all layers, padding left out."""
        return sum(self.heads_per_layer)

    @property
    def non_finite(self) -> NonFinite:
        """How many divergences and log-probabilities are not finite, prompt included; means leave these out."""
        return count_non_finite(self)

    def select(self, mechanism: str) -> Trajectories:
        """The same run with this mechanism alone; views, no copies.

        Parameters
        ----------
        mechanism
            One of ``mechanisms``.

        Returns
        -------
        Trajectories
            Its ``divergence``, ``relative_l2`` and ``norm_ratio`` are those of this mechanism.

        Raises
        ------
        UnknownNameError
            If the run does not hold this mechanism.

        Examples
        --------
        ``runs/fox`` is a folder that ``softgap run`` wrote:

        >>> import softgap
        >>> run = softgap.load("runs/fox")
        >>> run.mechanisms, run.select("uniform").mechanisms
        (('elu1', 'uniform'), ('uniform',))
        """
        if mechanism not in self.mechanisms:
            raise unknown_name("mechanism of this run", mechanism, self.mechanisms)
        index = self.mechanisms.index(mechanism)
        options = {name: value for name, value in self.manifest.mechanisms.items() if name == mechanism}
        return replace(
            self,
            mechanisms=(mechanism,),
            quantities={name: array[index : index + 1] for name, array in self.quantities.items()},
            prompt=None if self.prompt is None else self.prompt.select(mechanism),
            manifest=replace(self.manifest, mechanisms=options),
        )

    def head_means(self, quantity: str = "divergence") -> Float[np.ndarray, "layer head"]:
        """Mean over the steps of one quantity of the first mechanism, in float64; NaN steps are left out.

        A head without any number, and padding, is NaN.
        """
        if quantity not in QUANTITIES:
            raise unknown_name("quantity", quantity, QUANTITIES)
        values = self._first(quantity).astype(np.float64)
        counted = np.count_nonzero(~np.isnan(values), axis=-1)
        total = np.nansum(values, axis=-1)
        means = np.full(total.shape, np.nan)
        np.divide(total, counted, out=means, where=counted > 0)
        return means

    def equals(self, other: object) -> bool:
        """Whether all values, texts and labels are the same, NaN equal to NaN, times in the manifest aside."""
        return isinstance(other, Trajectories) and all(
            _equal_values(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    def summary(self, map_of: Literal["kinds", "divergence", "both"] = "kinds") -> None:
        """Print what ``softgap run`` prints: what suffices for each head, the text, the extreme heads, the means.

        Parameters
        ----------
        map_of
            What the map shows, as ``--map`` of the command.

        Examples
        --------
        ``runs/fox`` is a folder that ``softgap run`` wrote:

        >>> import softgap
        >>> softgap.load("runs/fox").summary()  # doctest: +ELLIPSIS
        tiny-llama · float32 · ...
        """
        # The terminal lies below this layer, so the package is asked for it.
        package: Any = sys.modules["softgap"]
        package._print_run(self, map_of)

    def to_xarray(self) -> xr.Dataset:
        """An xarray Dataset with dimensions mechanism, layer, head, step.

        Returns
        -------
        xarray.Dataset
            Every quantity as a variable; positions and tokens as coordinates of the steps.

        Examples
        --------
        ``runs/fox`` is a folder that ``softgap run`` wrote:

        >>> import softgap
        >>> data = softgap.load("runs/fox").to_xarray()
        >>> data["divergence"].dims
        ('mechanism', 'layer', 'head', 'step')
        >>> data["divergence"].mean("step").sel(mechanism="elu1").shape
        (2, 4)
        """
        return to_xarray(self)

    def to_frame(self) -> pd.DataFrame:
        """A tidy frame, one row per mechanism, layer, head and step.

        Returns
        -------
        pandas.DataFrame
            Every quantity as a column.

        Examples
        --------
        ``runs/fox`` is a folder that ``softgap run`` wrote:

        >>> import softgap
        >>> frame = softgap.load("runs/fox").to_frame()
        >>> list(frame.columns)[:5]
        ['mechanism', 'layer', 'head', 'step', 'position']
        >>> frame.groupby(["mechanism", "layer"], observed=True)["divergence"].mean().shape
        (4,)
        """
        return to_frame(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write this run as a study of one sample.

        Parameters
        ----------
        path
            A folder, or a URI that pyarrow's filesystems open.
        overwrite
            Replace the study that is there.

        Raises
        ------
        StoreError
            If there is a study already, or the folder cannot be written.

        Examples
        --------
        ``runs/fox`` is a folder that ``softgap run`` wrote:

        >>> import softgap
        >>> run = softgap.load("runs/fox")
        >>> run.select("elu1").save("runs/elu1")
        >>> softgap.load("runs/elu1").mechanisms
        ('elu1',)
        """
        from softgap.trajectories.writer import save

        save(self, path, overwrite=overwrite)

    def _first(self, quantity: str) -> Float32[np.ndarray, "layer head step"]:
        array: np.ndarray = self.quantities[quantity][0]
        return array

    def __repr__(self) -> str:
        shape = f"{len(self.layers)} layers x {self.kv_group.shape[1]} heads x {self.n_steps} steps"
        model = f", model {self.manifest.model!r}" if self.manifest.model else ""
        prompt = "" if self.prompt is None else f", prompt of {self.prompt.n_steps} steps"
        mark = "; not all numbers are finite, see non_finite" if self.non_finite else ""
        mechanisms = ", ".join(self.mechanisms)
        return f"<Trajectories {self.sample_id!r} ({self.part}): {mechanisms}; {shape}{prompt}{model}{mark}>"


def _equal_values(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, np.ndarray):
        return np.array_equal(ours, theirs, equal_nan=True)
    if isinstance(ours, Trajectories):
        return ours.equals(theirs)
    if isinstance(ours, Manifest):
        return ours.equals(theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_equal_values(ours[key], theirs[key]) for key in ours)
    return bool(ours == theirs)


def to_xarray(run: Trajectories) -> xr.Dataset:
    """The run as a Dataset.

    Dimensions and their coordinates are mechanism, layer, head and step; position, token, token_id and kv_group are
    further coordinates; logprob and entropy are variables over step. The sample and the manifest (as JSON) are in the
    attributes.
    """
    import xarray as xr

    variables: dict[str, Any] = {
        name: (("mechanism", "layer", "head", "step"), array) for name, array in run.quantities.items()
    }
    variables |= {name: (("layer", "head", "step"), array) for name, array in run.focus.items()}
    variables |= {"logprob": ("step", run.logprob), "entropy": ("step", run.entropy)}
    coordinates: dict[str, Any] = {
        "mechanism": list(run.mechanisms),
        "layer": list(run.layers),
        "head": np.arange(run.kv_group.shape[1]),
        "step": np.arange(run.n_steps),
        "position": ("step", run.positions),
        "token_id": ("step", run.token_ids),
        "token": ("step", np.array(run.tokens, dtype=object)),
        "kv_group": (("layer", "head"), run.kv_group),
    }
    attributes = {
        "sample_id": run.sample_id,
        "part": run.part,
        "prompt": run.prompt_text,
        "completion": run.completion_text,
        "n_prompt": run.n_prompt,
        "manifest": json.dumps(run.manifest.to_json()),
    }
    if run.label is not None:
        attributes["label"] = run.label
    return xr.Dataset(variables, coordinates, attributes)


def to_frame(run: Trajectories) -> pd.DataFrame:
    """The run as a tidy frame: one row per mechanism, layer, head and step, in this order; padding is left out.

    The columns of ``focus``, where measured, come last and repeat for every mechanism.
    """
    import pandas as pd

    real = np.arange(run.kv_group.shape[1]) < np.array(run.heads_per_layer)[:, None]
    layer, head = np.nonzero(real)
    times, steps, rows = len(run.mechanisms), run.n_steps, len(layer)

    def per_step(values: Any) -> np.ndarray:
        return np.tile(values, times * rows)

    def per_head(values: np.ndarray) -> np.ndarray:
        return np.tile(np.repeat(values, steps), times)

    columns = {
        "mechanism": np.repeat(np.array(run.mechanisms, dtype=object), rows * steps),
        "layer": per_head(np.array(run.layers)[layer]),
        "head": per_head(head),
        "step": per_step(np.arange(steps)),
        "position": per_step(run.positions),
        "token": per_step(np.array(run.tokens, dtype=object)),
        "logprob": per_step(run.logprob),
        "entropy": per_step(run.entropy),
    }
    columns |= {name: array[:, real].ravel() for name, array in run.quantities.items()}
    columns |= {name: np.tile(array[real].ravel(), times) for name, array in run.focus.items()}
    return pd.DataFrame(columns)


# A token that is part of a character has no text of its own.
_UNKNOWN = "�"


_LONGEST_CHARACTER = 8


def pieces(text: str, tokens: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The text cut into pieces, each with the indices of the tokens it came from.

    Decoding one token alone may lose a leading space or give half a character, so the tokens are looked up in the text,
    from its end: there the last token ends, while a text that was read begins with a token nothing predicted. Tokens
    that are not in the text (end of a turn) belong to no piece; what no token explains has an empty list.
    """
    groups: list[tuple[str, list[int]]] = []
    end, waiting = len(text), 0
    indices: list[int] = []
    for index in reversed(range(len(tokens))):
        start = _start(text, tokens[index], end, waiting)
        if start is None:
            # Behind the text's end only what a decoder leaves out.
            if groups or _UNKNOWN in tokens[index]:
                indices.insert(0, index)
                waiting += _LONGEST_CHARACTER if _UNKNOWN in tokens[index] else 0
            continue
        stop = start + len(tokens[index])
        trailing = text[stop:end]
        if trailing.strip() or (trailing and indices):
            groups.append((trailing, indices))
            trailing = ""
        groups.append((text[start:stop] + trailing, [index]))
        end, waiting, indices = start, 0, []
    if end:
        groups.append((text[:end], indices))
    return groups[::-1]


def _start(text: str, token: str, end: int, slack: int) -> int | None:
    """Where a token begins that ends at ``end``, or before spaces or up to ``slack`` characters; None if nowhere."""
    if not token or _UNKNOWN in token:
        return None
    close = len(text[:end].rstrip())
    for stop in (end, close):
        if text.endswith(token, 0, stop):
            return stop - len(token)
    if not slack:
        return None
    at = text.rfind(token, max(0, end - len(token) - slack), end)
    return None if at < 0 else at
