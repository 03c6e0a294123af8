"""float32 against float64 at T = 8192, with a sink key of ten times the usual norm."""

from __future__ import annotations

import pytest
import torch

from softgap.attention import LinearState, Mechanism, Visible, attend, mechanisms

T = 8192
NON_NEGATIVE = [
    name
    for name, m in mechanisms().items()
    if "chunked" in m.forms and not m.signed and (m.feature_dim(64) or 0) <= 512
]
FIRST = ("elu1", "relu", "uniform", "hedgehog", "decay", "fitted")
LIMIT = 1e-4


def long_head(d: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, T, d, generator=generator) for _ in range(3))
    k[:, :, 0] *= 10
    return q, k, v


def equipped(name: str, d: int = 64, features: int = 128) -> Mechanism:
    mechanism = mechanisms()[name]
    if name not in ("fitted", "hybrid"):
        return mechanism
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(1, 1, features, d, generator=generator) * 0.2
    bias = torch.randn(1, 1, features, generator=generator)
    rate = torch.rand(1, 1, features, generator=generator) * 0.1
    return mechanism.with_parameters(
        query_weight=weight, query_bias=bias, key_weight=weight.flip(2), key_bias=bias, rate=rate
    )


def worst(found: torch.Tensor, expected: torch.Tensor, flagged: torch.Tensor) -> float:
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error[~flagged].max())


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("name", NON_NEGATIVE)
def test_chunked_form_in_float32(name: str, window: int | None) -> None:
    q, k, v = long_head()
    visible, mechanism = Visible(window=window), equipped(name)
    if mechanism.kind == "hybrid" and window is not None:
        pytest.skip("keys of a tail come and go under a window of the model: there is no chunked form")
    exact = attend(mechanism, q, k, v, visible=visible, form="chunked", dtype=torch.float64)
    found = attend(mechanism, q, k, v, visible=visible, form="chunked")
    assert worst(found.output, exact.output, found.flagged) < LIMIT
    assert torch.equal(found.flagged, exact.flagged)


@pytest.mark.parametrize("name", FIRST)
def test_streaming_in_float32(name: str) -> None:
    """Small blocks are the worst order of summation: a thousand additions to one state."""
    q, k, v = long_head(d=16)
    mechanism = equipped(name, d=16)
    exact = attend(mechanism, q, k, v, form="chunked", dtype=torch.float64)
    state = LinearState(mechanism)
    blocks = [slice(t, t + 8) for t in range(0, T, 8)]
    rows = [state.attend(q[:, :, b], k[:, :, b], v[:, :, b]) for b in blocks]
    found = torch.cat([row.output for row in rows], dim=2)
    flagged = torch.cat([row.flagged for row in rows], dim=2)
    assert worst(found, exact.output, flagged) < LIMIT


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("name", ["elu1", "hedgehog", "softmax"])
def test_quadratic_form_in_float32(name: str, window: int | None) -> None:
    q, k, v = long_head(d=16)
    visible = Visible(window=window)
    exact = attend(name, q, k, v, visible=visible, form="quadratic", dtype=torch.float64)
    found = attend(name, q, k, v, visible=visible, form="quadratic")
    assert worst(found.output, exact.output, found.flagged) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("name", ["taylor2", "polynomial"])
def test_many_features_in_float32(name: str, window: int | None) -> None:
    q, k, v = long_head()
    visible = Visible(window=window)
    exact = attend(name, q, k, v, visible=visible, form="quadratic", dtype=torch.float64)
    for form in ("chunked", "quadratic"):
        found = attend(name, q, k, v, visible=visible, form=form)
        assert worst(found.output, exact.output, found.flagged) < LIMIT
