"""Random attention problems for the tests, and the reference's answer to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from softgap.attention import Attention, Mechanism, Visible, attend, mechanisms, new_state
from softgap.attention.reference import reference_attention
from softgap.attention.rotary import Layout, Rotation

FACTORABLE = tuple(name for name, m in mechanisms().items() if "chunked" in m.forms)
ALL = tuple(mechanisms())
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """One attention problem: tensors in float64 and the visible set."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Visible

    @property
    def fitted(self) -> Visible:
        return self.visible.fitted_to(self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2])

    @property
    def seen(self) -> Tensor:
        n_queries, n_keys = self.q.shape[2], self.k.shape[2]
        rows = self.fitted.rows(0, n_queries, (0, n_keys), self.q.device)
        return rows.expand(self.q.shape[0], self.q.shape[1], -1, -1)


@st.composite
def cases(draw: st.DrawFn, *, longest: int = 300, ahead: bool = True) -> Case:
    """Odd lengths, GQA, windows around the chunk length, left and right padding, d_v != d, queries behind keys."""
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    d, d_v = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    n_keys = draw(st.one_of(st.integers(1, 8), st.integers(1, longest)))
    n_queries = draw(st.integers(1, n_keys)) if ahead and draw(st.booleans()) else n_keys
    window = draw(st.one_of(st.none(), st.integers(1, 12), st.integers(50, 140), st.integers(1, 2 * n_keys)))
    offset = draw(st.sampled_from([None, 0])) if n_queries < n_keys else None
    padding = draw(st.sampled_from(["none", "left", "right"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    first = n_keys - n_queries if offset is None else 0
    key_valid = None
    if padding != "none":
        key_valid = torch.ones(batch, n_keys, dtype=torch.bool)
        amount = draw(st.integers(0, n_keys))
        # The padded row keeps one key that some query surely sees.
        hidden = slice(0, min(amount, first)) if padding == "left" else slice(max(first + 1, n_keys - amount), n_keys)
        key_valid[0, hidden] = False
    q = torch.randn(batch, kv_heads * group, n_queries, d, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, n_keys, d, generator=generator, dtype=torch.float64)
    v = torch.randn(batch, kv_heads, n_keys, d_v, generator=generator, dtype=torch.float64)
    return Case(q, k, v, Visible(offset=offset, window=window, key_valid=key_valid))


def equipped(name: str, case: Case, *, features: int = 5, key_map_per_query_head: bool = False) -> Mechanism:
    """The mechanism of this name, with random parameters of the right shapes if it needs any."""
    mechanism = mechanisms()[name]
    generator = torch.Generator().manual_seed(7)
    batch, heads, d, d_v = case.q.shape[0], case.q.shape[1], case.q.shape[-1], case.v.shape[-1]
    key_heads = heads if key_map_per_query_head else case.k.shape[1]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if name == "constant":
        return mechanism.with_parameters(mean=random(batch, heads, d_v))
    if name == "profile":
        return mechanism.with_parameters(first=random(1, heads).abs(), by_distance=random(1, heads, 9).abs())
    if name in ("fitted", "hybrid"):
        return mechanism.with_parameters(
            query_weight=random(batch, heads, features, d),
            query_bias=random(batch, heads, features),
            key_weight=random(batch, key_heads, features, d),
            key_bias=random(batch, key_heads, features),
            rate=random(batch, key_heads, features).abs(),
        )
    return mechanism


def with_rotation(mechanism: Mechanism, rotations: Sequence[Rotation], *, rotated: bool = True) -> Mechanism:
    """A fitted map that sees vectors before rotary embedding too, or those alone; a rotation per layer."""
    generator = torch.Generator().manual_seed(8)
    wider = {}
    for name in ("query_weight", "key_weight"):
        own = mechanism.parameters[name]
        more = 0.5 * torch.randn(own.shape, generator=generator, dtype=own.dtype)
        wider[name] = torch.cat([own if rotated else torch.zeros_like(own), more], dim=-1)
    turning = [rotation.parameters() for rotation in rotations]
    return mechanism.with_parameters(**wider, **{name: torch.cat([x[name] for x in turning]) for name in turning[0]})


def rotations_of(case: Case) -> list[Rotation]:
    """A rotation for each row of the batch, in both layouts; of an odd dimension one number stays."""
    d, generator = case.q.shape[-1], torch.Generator().manual_seed(9)
    layouts: tuple[Layout, ...] = ("halves", "neighbours")
    return [
        Rotation.of_pairs(torch.rand(d // 2, generator=generator), d, layout=layout, start=d % 2)
        for layout in layouts[: len(case.q)]
    ]


def reference(mechanism: Mechanism, case: Case) -> Tensor:
    """The oracle's output."""
    scale = case.q.shape[-1] ** -0.5
    return reference_attention(
        mechanism,
        case.q,
        case.k,
        case.v,
        case.seen,
        scale=scale,
        offset=case.fitted.offset or 0,
        turned_by=_turned_by(case),
        ordinals=_ordinals(case),
    )


def _ordinals(case: Case) -> Tensor | None:
    """How many keys of its sequence come before each, padding left out."""
    shown = case.visible.key_valid if case.visible.mask is None else case.visible.mask.any(dim=2).any(dim=1)
    return None if shown is None else (shown.cumsum(dim=1) - 1).expand(len(case.q), -1)


def _turned_by(case: Case) -> Tensor:
    """Positions that count real keys only, from the origin of each row on."""
    batch, n_keys = case.k.shape[0], case.k.shape[2]
    found = torch.zeros(batch, n_keys, dtype=torch.long)
    for b in range(batch):
        position = 0 if case.visible.origin is None else int(case.visible.origin[b])
        for j in range(n_keys):
            position += 1 if case.visible.key_valid is None else int(case.visible.key_valid[b, j])
            found[b, j] = position - 1
    return found


def computed(mechanism: Mechanism, case: Case, form: str, dtype: torch.dtype = torch.float64) -> Attention:
    """The output of one of the fast forms."""
    if form != "streaming":
        return attend(mechanism, case.q, case.k, case.v, visible=case.visible, form=form, dtype=dtype)
    return streamed(mechanism, case, (1, 3, 70, 17), dtype)


def streamed(mechanism: Mechanism, case: Case, sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Attention:
    """The streaming state fed with blocks of these sizes in turn, keys ahead of the queries appended first."""
    first, stop = case.fitted.offset or 0, (case.fitted.offset or 0) + case.q.shape[2]
    valid = case.visible.key_valid
    window = case.fitted.window if mechanism.kind == "hybrid" else case.visible.window
    state = new_state(mechanism, window=window, dtype=dtype, origin=case.visible.origin)
    if first:
        state.append(case.k[:, :, :first], case.v[:, :, :first], None if valid is None else valid[:, :first])
    parts, at, turn = [], first, 0
    while at < stop:
        end = min(stop, at + sizes[turn % len(sizes)])
        block = slice(at, end)
        asked = case.q[:, :, at - first : end - first]
        part_valid = None if valid is None else valid[:, block]
        parts.append(state.attend(asked, case.k[:, :, block], case.v[:, :, block], part_valid))
        at, turn = end, turn + 1
    return Attention(
        torch.cat([part.output for part in parts], dim=2),
        torch.cat([part.valid for part in parts], dim=1),
        torch.cat([part.flagged for part in parts], dim=2),
    )


def without_cancelled(found: Attention, mechanism: Mechanism, case: Case) -> Attention:
    """The same with rows flagged where a power of the score is lost among its terms.

    A state computes (q.k)^2 as a sum of signed products. Where q and all visible keys are nearly orthogonal that sum
    is far smaller than its terms (sum_r |q_r k_r|)^2, and as many digits are gone: no form can keep them.
    """
    if not mechanism.cancels:
        return found
    k = case.k.repeat_interleave(case.q.shape[1] // case.k.shape[1], dim=1).transpose(-1, -2)
    scores, terms = ((q @ key).square() * case.seen for q, key in ((case.q, k), (case.q.abs(), k.abs())))
    cancelled = scores.sum(-1) < 1e-5 * terms.sum(-1)
    return replace(found, flagged=found.flagged | cancelled)


def worst_error(found: Attention, expected: Tensor) -> float:
    """Largest distance between found and expected rows that are not flagged, relative to the expected row."""
    norm = expected.norm(dim=-1)
    error = (found.output - expected).norm(dim=-1) / torch.where(norm == 0, 1, norm)
    return float(error.masked_fill(found.flagged, 0).max())
