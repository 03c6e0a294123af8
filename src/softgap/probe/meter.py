"""Measure the distance of each substitute's output from the model's own, from attention calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from softgap.attention import (
    HybridState,
    LinearState,
    Mechanism,
    ScoreRule,
    Visible,
    attend,
    compare_heads,
    has_state,
    new_state,
    split_states,
    stacked_states,
)
from softgap.errors import UnsupportedError
from softgap.probe.softmax import focus_of, softmax_output
from softgap.probe.tap import AttentionCall

__all__ = ["LayerMeasurements", "Meter", "same_description"]


@dataclass
class PendingRun:
    """Neighbouring positions of one layer that wait to be reduced: as many as ``n``, the last ones of ``k`` and ``v``.

    Queries and outputs come call by call. Keys and values are a copy of theirs alone, or all the last call saw: the
    tensors that the cache itself holds until its next step.
    """

    q: list[Tensor]
    o: list[Tensor]
    k: Tensor
    v: Tensor
    n: int
    valid: Bool[Tensor, "batch time"] | None
    by_reference: bool = False


StackedRuns = tuple[Tensor, Tensor, Tensor, Tensor, Bool[Tensor, "batch time"] | None]


def stacked_runs(layers: Sequence[Sequence[PendingRun]]) -> StackedRuns:
    """Queries, keys, values and outputs of all positions, heads before time, and which of them are no padding.

    Layers are stacked along the batch, layer-major; they have runs of equal shapes.
    """
    q = concatenate([concatenate([q for run in runs for q in run.q], dim=2) for runs in layers], dim=0)
    k = concatenate(
        [concatenate([run.k[:, :, run.k.shape[2] - run.n :] for run in runs], dim=2) for runs in layers], dim=0
    )
    v = concatenate(
        [concatenate([run.v[:, :, run.v.shape[2] - run.n :] for run in runs], dim=2) for runs in layers], dim=0
    )
    o = concatenate([concatenate([o for run in runs for o in run.o], dim=1) for runs in layers], dim=0)
    return q, k, v, o.transpose(1, 2), _valid(layers[0], len(layers))


def _valid(runs: Sequence[PendingRun], repeat: int) -> Bool[Tensor, "batch time"] | None:
    example = next((run.valid for run in runs if run.valid is not None), None)
    if example is None:
        return None
    rows = [
        torch.ones(len(example), run.n, dtype=torch.bool, device=example.device) if run.valid is None else run.valid
        for run in runs
    ]
    return torch.cat(rows, dim=1).repeat(repeat, 1)


def concatenate(parts: list[Tensor], dim: int) -> Tensor:
    """Tensors one behind the other; a single one as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def same_description(a: Visible, b: Visible, total: int) -> bool:
    """Whether two visible sets, none of them a mask, say the same of the first ``total`` keys in the same words."""
    windows = {None if x.window is None or x.window >= total else x.window for x in (a, b)}
    valid = [None if x.key_valid is None else x.key_valid[:, :total] for x in (a, b)]
    if a.offset != b.offset or len(windows) > 1:
        return False
    return valid[0] is valid[1] is None or (
        valid[0] is not None and valid[1] is not None and torch.equal(valid[0], valid[1])
    )


# A call of more positions than this is held by reference, and not beyond its forward.
LONGEST_HELD = 8


# Long calls of several layers are reduced together up to this many numbers (float32: 2 MiB).
HELD_NUMBERS = 2**19


# Positions that are computed and compared at once: what they need stays in the cache, and is freed before the next.
POSITIONS = 512


@dataclass(frozen=True, eq=False)
class LayerMeasurements:
    """What a meter has gathered: one entry per tapped layer."""

    quantities: list[Float[Tensor, "quantity mechanism batch head time"]]
    focus: list[Float[Tensor, "quantity batch head time"]]


@dataclass
class _Layer:
    """One tapped layer: its states, what waits, and what is done (mechanisms with a state, then those without)."""

    states: list[LinearState | HybridState] | None = None
    # Which mechanisms have a state here, by number.
    stated: tuple[int, ...] = ()
    window: int | None = None
    started: bool = False
    held: list[PendingRun] = field(default_factory=list)
    with_state: list[Tensor] = field(default_factory=list)
    without: list[Tensor] = field(default_factory=list)
    focus: list[Tensor] = field(default_factory=list)
    scale: float = 1.0
    rule: ScoreRule = field(default_factory=ScoreRule)
    # Whether a state serves every mechanism over all keys, so that a step needs no look at its mask.
    plain: bool = False


class Meter:
    """Measures the calls of one batch of sequences, from their first position on.

    Parameters
    ----------
    mechanisms
        What to compare the model's output with, in the order of the results.
    block
        Steps to gather before they are reduced together; 1 reduces at once.
    focus
        Whether to measure S(a), entropy and the largest weight too.
    drop_sinks
        How many first keys of each sequence to leave out on both sides.
    base
        Positions that were in the cache before the first call: then no state can be known.
    """

    def __init__(
        self, mechanisms: Sequence[Mechanism], *, block: int, focus: bool = False, drop_sinks: int = 0, base: int = 0
    ) -> None:
        self._mechanisms = tuple(mechanisms)
        self._block = block
        self._focus = focus
        self._drop = drop_sinks
        self._known = base == 0
        self.length = base
        self.layers: list[_Layer] = []
        self._valid: Bool[Tensor, "batch time"] | None = None
        self._new_valid: Bool[Tensor, "batch time"] | None = None
        self._new = 0
        self._has_padding_mask = False
        self._by_reference = False
        self._verdicts: dict[tuple[int | None, ...], bool] = {}
        self._waiting = 0
        self._numbers = 0

    def begin_forward(self, n: int, valid: Bool[Tensor, "batch time"] | None, *, by_reference: bool = False) -> None:
        """A forward over n new positions starts.

        ``valid`` is False at padding, over the new positions or all of them; None where nobody said.
        ``by_reference`` promises that keys and values handed over are never written to again.
        """
        self._new = n
        self._by_reference = by_reference and n == 1
        self._has_padding_mask = valid is not None
        self._new_valid = None
        if valid is not None and not bool(valid.all()):
            self._new_valid = valid[:, -n:]
            # What the cache held before the first call; later on a mask may hide tokens that are no padding.
            if not self.layers and self.length and valid.shape[1] == self.length + n:
                self._valid = valid[:, :-n]

    def observe_step(self, index: int, call: AttentionCall) -> bool:
        """Note a call of one new position that sees all keys; False where it is not plainly that."""
        if call.mask is not None or not self._by_reference or self._valid is not None or self._new_valid is not None:
            return False
        layer = self.layers[index] if index < len(self.layers) else None
        if layer is None or not layer.plain or layer.states is None or call.query.requires_grad:
            return False
        if call.key.shape[2] != self.length + 1:
            return False
        run = layer.held[-1] if layer.held else None
        if run is None or not run.by_reference:
            layer.held.append(PendingRun([call.query], [call.output], call.key, call.value, 1, None, by_reference=True))
        else:
            run.q.append(call.query)
            run.o.append(call.output)
            # A cache that grows by concatenation has copied the keys that came before.
            run.k, run.v, run.n = call.key, call.value, run.n + 1
        return True

    def observe(self, index: int, call: AttentionCall, visible: Visible) -> None:
        """Take in one attention call of the layer with this index."""
        while len(self.layers) <= index:
            self.layers.append(_Layer())
        layer = self.layers[index]
        batch, heads, n, _ = call.query.shape
        shown = visible.fitted_to(batch, heads, n, call.key.shape[2])
        if index == 0 and not self._has_padding_mask:
            self._derive_valid(shown, batch, n, call.query.device)
        output = call.output.detach().transpose(1, 2)
        if self._drop:
            shown = self._without_sinks(shown, batch, call)
            output = softmax_output(call, shown)
        if self._focus:
            focus = focus_of(call, shown)
            layer.focus.append(torch.stack([focus.sparsity, focus.attention_entropy, focus.largest_weight]).cpu())
        if not layer.started:
            self._start(layer, index, call, shown)
        stated = [self._mechanisms[i] for i in layer.stated]
        others = [m for i, m in enumerate(self._mechanisms) if i not in layer.stated]
        if others:
            layer.without.append(self._direct(others, index, call, shown, output))
        if not stated:
            return
        if layer.states is None or not self._consistent(layer, shown, n):
            self._flush_layers([layer], [index])
            layer.states = None
            layer.with_state.append(self._direct(stated, index, call, shown, output))
            return
        self._follow(layer, call, shown, output)

    def end_forward(self) -> None:
        """Count the forward's positions as seen, and reduce what waits if a block is full."""
        if self._new_valid is not None or self._valid is not None:
            old = self._valid
            new = self._new_valid
            rows = len(new) if new is not None else len(old) if old is not None else 1
            device = (new if new is not None else old).device  # type: ignore[union-attr]
            ones = torch.ones(rows, max(self.length, self._new), dtype=torch.bool, device=device)
            old = ones[:, : self.length] if old is None else old
            new = ones[:, : self._new] if new is None else new
            self._valid = torch.cat([old, new], dim=1)
        self.length += self._new
        self._waiting += self._new
        long = self._new > LONGEST_HELD
        self._new, self._new_valid = 0, None
        self._verdicts.clear()
        if self._waiting >= self._block or long:
            self.flush()

    def flush(self) -> None:
        """Reduce everything that waits, layers of one shape together."""
        self._waiting, self._numbers = 0, 0
        groups: dict[object, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.held:
                q, k, v = layer.held[0].q[0], layer.held[0].k, layer.held[0].v
                # States under a window are as long as the window: stacking them would copy more than it saves.
                alone = index if layer.window is not None or layer.rule.sink_logits is not None else None
                shape = (tuple(q.shape), k.shape[1], v.shape[-1], layer.scale, layer.rule.softcap, layer.stated, alone)
                # Only layers on one device can be stacked.
                groups.setdefault((shape, q.device, *(run.n for run in layer.held)), []).append(index)
        for indices in groups.values():
            self._flush_layers([self.layers[index] for index in indices], indices)

    def close(self) -> None:
        """Reduce what waits and let the states go: no more calls will come."""
        self.flush()
        for layer in self.layers:
            layer.states = None

    def measurements(self) -> LayerMeasurements:
        """All results so far, in the order of the mechanisms."""
        self.flush()
        quantities: list[Tensor] = []
        for layer in self.layers:
            order = self._order(layer)
            parts = [concatenate(part, dim=-1) for part in (layer.with_state, layer.without) if part]
            if sum(part.shape[1] for part in parts) < len(self._mechanisms):
                return LayerMeasurements([], [])  # interrupted before the first block was reduced
            # They differ in length only where a forward was interrupted between the two.
            length = min(part.shape[-1] for part in parts)
            whole = concatenate([part[..., :length] for part in parts], dim=1)
            quantities.append(whole if order == sorted(order) else whole[:, order])
        return LayerMeasurements(quantities, [torch.cat(layer.focus, dim=-1) for layer in self.layers if layer.focus])

    def last_step(self) -> list[Float[Tensor, "quantity mechanism batch head"]]:
        """The newest position of every layer."""
        self.flush()
        return [
            torch.cat([part[-1][..., -1] for part in (layer.with_state, layer.without) if part], dim=1)[
                :, self._order(layer)
            ]
            for layer in self.layers
        ]

    @property
    def valid(self) -> Bool[Tensor, "batch time"] | None:
        """Which positions so far are no padding; None for all."""
        return self._valid

    def _order(self, layer: _Layer) -> list[int]:
        places = [*layer.stated, *(i for i in range(len(self._mechanisms)) if i not in layer.stated)]
        return [places.index(i) for i in range(len(places))]

    def _derive_valid(self, shown: Visible, batch: int, n: int, device: torch.device) -> None:
        """Read off the visible set which of the forward's new keys are padding; the first layer speaks for all."""
        if shown.mask is not None or (n == 1 and shown.key_valid is not None):
            # A query may be hidden from itself there; one that sees nothing at all is padding.
            own_rows = shown.row_valid(batch, n, device)
            self._new_valid = None if bool(own_rows.all()) else own_rows
        elif shown.key_valid is not None and shown.offset is not None:
            self._new_valid = shown.key_valid[:, shown.offset : shown.offset + n]

    def _start(self, layer: _Layer, index: int, call: AttentionCall, shown: Visible) -> None:
        layer.started = True
        layer.scale = call.scale
        announced = call.options.get("sliding_window")
        n = call.query.shape[2]
        if shown.window is not None:
            layer.window = shown.window
        elif isinstance(announced, int) and announced >= n:
            layer.window = announced
        layer.stated = tuple(
            i for i, m in enumerate(self._mechanisms) if has_state(m, call.query.shape[-1], window=layer.window)
        )
        stated = [self._mechanisms[i] for i in layer.stated]
        # Without its first tokens the softmax side is computed from the keys of each call anyway.
        if self._known and self.length == 0 and shown.mask is None and not self._drop:
            layer.rule = call.rule
            layer.states = [
                new_state(
                    m.for_layers([index]), window=layer.window, scale=call.scale, origin=shown.origin, rule=call.rule
                )
                for m in stated
            ]
        complete = len(stated) == len(self._mechanisms)
        layer.plain = complete and layer.window is None and not self._focus and not self._drop

    def _consistent(self, layer: _Layer, shown: Visible, n: int) -> bool:
        """Whether this call shows exactly the keys that the layer's states hold, and its own."""
        key = (id(shown.key_valid), shown.offset, shown.window, layer.window)
        if shown.mask is not None or shown.offset is None:
            return False
        handed, reach = shown.offset, self.length + 1 if layer.window is None else layer.window
        if shown.key_valid is None and self._valid is None and shown.window is None and n == 1:
            return handed + 1 == min(self.length + 1, reach)
        if key not in self._verdicts:
            self._verdicts[key] = self._same_keys(layer.window, shown, n)
        return self._verdicts[key]

    def _same_keys(self, window: int | None, shown: Visible, n: int) -> bool:
        handed = shown.offset or 0
        lost = self.length - handed
        if lost < 0 or (lost > 0 and (window is None or window - 1 > handed)):
            return False
        total = self.length + n
        device = shown.key_valid.device if shown.key_valid is not None else torch.device("cpu")
        expected = Visible(self.length, window, self._valid_up_to(total, device))
        if lost == 0 and same_description(expected, shown, total):
            return True
        # What is described in two ways may be the same all the same; queries x keys are never held.
        for start in range(0, n, POSITIONS):
            part = (start, min(n, start + POSITIONS))
            rows = expected.rows(*part, (lost, total), device), shown.rows(*part, (0, handed + n), device)
            if not torch.equal(*torch.broadcast_tensors(*rows)):
                return False
        return True

    def _valid_up_to(self, total: int, device: torch.device) -> Bool[Tensor, "batch time"] | None:
        if self._valid is None and self._new_valid is None:
            return None
        rows = len(self._valid if self._valid is not None else self._new_valid)  # type: ignore[arg-type]
        valid = torch.ones(rows, total, dtype=torch.bool, device=device)
        if self._valid is not None:
            valid[:, : self.length] = self._valid
        if self._new_valid is not None:
            valid[:, self.length :] = self._new_valid
        return valid

    def _follow(self, layer: _Layer, call: AttentionCall, shown: Visible, output: Tensor) -> None:
        """Append the call's new keys to the layer's states, now or with its block."""
        n, offset = call.query.shape[2], shown.offset or 0
        new = slice(offset, offset + n)
        valid = None if shown.key_valid is None else shown.key_valid[:, new]
        q, k, v = call.query.detach(), call.key.detach()[:, :, new], call.value.detach()[:, :, new]
        if n <= LONGEST_HELD:
            # A view of the cache would keep the whole of it alive, and static caches are written over.
            k, v = k.clone(), v.clone()
        layer.held.append(PendingRun([q], [output.transpose(1, 2)], k, v, n, valid))
        self._numbers += q.numel() + k.numel() + v.numel() + output.numel()
        if n > LONGEST_HELD and self._numbers >= HELD_NUMBERS:
            self.flush()

    def _flush_layers(self, layers: list[_Layer], indices: list[int]) -> None:
        """Reduce what these layers hold, stacked along the batch (layer-major)."""
        if not layers[0].held or layers[0].states is None:
            return
        batch, heads, _, _ = layers[0].held[0].q[0].shape
        stated = [self._mechanisms[i] for i in layers[0].stated]
        count, time = len(layers), sum(run.n for run in layers[0].held)
        # First of all: what is kept then lies below what is freed again.
        values = torch.empty(3, len(stated), count * batch, heads, time)
        q, k, v, o, valid = stacked_runs([layer.held for layer in layers])
        # Before the states move on: an interrupted block is lost, never counted twice.
        for layer in layers:
            layer.held.clear()
        columns = [[layer.states[i] for layer in layers if layer.states is not None] for i in range(len(stated))]
        if count == 1:
            states = [column[0] for column in columns]
        else:
            repeated = [mechanism.for_layers(indices, repeat=batch) for mechanism in stated]
            states = [stacked_states(c, m) for c, m in zip(columns, repeated, strict=True)]
        step = max(POSITIONS, layers[0].window or 0)
        for start in range(0, time, step):
            part = slice(start, start + step)
            shown = None if valid is None else valid[:, part]
            tensors = (q[:, :, part], k[:, :, part], v[:, :, part], o[:, :, part], shown)
            for i, state in enumerate(states):
                values[:, i, :, :, part] = state.compare(*tensors)
        if count > 1:
            for state, column in zip(states, columns, strict=True):
                split_states(state, column)
        for layer, share in zip(layers, values.chunk(count, dim=2), strict=True):
            layer.with_state.append(share)

    def _direct(
        self, mechanisms: list[Mechanism], index: int, call: AttentionCall, shown: Visible, output: Tensor
    ) -> Float[Tensor, "quantity mechanism batch head time"]:
        """Compare with mechanisms computed from all the keys this call hands over."""
        q, k, v = call.query.detach(), call.key.detach(), call.value.detach()
        if any(mechanism.kind in ("window", "hybrid") for mechanism in mechanisms):
            shown = self._with_ordinals(shown, call)
        values = [
            attend(
                mechanism.for_layers([index]), q, k, v, visible=shown, scale=call.scale, check=False, rule=call.rule
            ).output
            for mechanism in mechanisms
        ]
        return torch.stack([compare_heads(output, linear) for linear in values], dim=1).cpu()

    def _without_sinks(self, shown: Visible, batch: int, call: AttentionCall) -> Visible:
        """The same visible set less the first keys of each sequence."""
        n_keys, handed = call.key.shape[2], shown.offset or 0
        device = call.key.device
        valid = self._valid_up_to(self.length + call.query.shape[2], device)
        first = torch.zeros(batch, dtype=torch.long, device=device) if valid is None else valid.int().argmax(dim=1)
        position = torch.arange(n_keys, device=device) + (self.length - handed)
        beyond_sinks = position >= (first + self._drop)[:, None]
        if shown.mask is not None:
            return dataclasses.replace(shown, mask=shown.mask & beyond_sinks[:, None, None])
        real = torch.ones_like(beyond_sinks) if shown.key_valid is None else shown.key_valid
        # What is left out is no padding: positions go on as if it were there.
        lost = (real & ~beyond_sinks).sum(dim=1)
        origin = lost if shown.origin is None else shown.origin + lost
        return dataclasses.replace(shown, key_valid=beyond_sinks & real, origin=origin)

    def _with_ordinals(self, shown: Visible, call: AttentionCall) -> Visible:
        """The same visible set, with how manieth key of its sequence each key is: what is hidden now still counts."""
        n_keys, total = call.key.shape[2], self.length + call.query.shape[2]
        if shown.mask is None and shown.key_valid is None and total <= n_keys:
            return shown
        if shown.mask is not None and bool(shown.mask[..., total:].any()):
            raise UnsupportedError(
                f"'{type(call.module).__name__}' attends to keys that are not tokens, so windows and hybrids, which "
                "choose keys by their position, cannot be measured; leave them out"
            )
        valid = self._valid_up_to(total, call.key.device)
        if valid is None:
            ordinals = torch.arange(total, device=call.key.device)[None]
        else:
            ordinals = valid.to(call.key.device).cumsum(dim=1) - 1
        # A sliding cache hands over the last keys, a static one also slots that are not filled yet.
        empty = max(0, n_keys - total)
        return dataclasses.replace(
            shown, ordinals=functional.pad(ordinals[:, max(0, total - n_keys) :], (0, empty), value=total)
        )
