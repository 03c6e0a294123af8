"""The synthetic head: reproducible, and its divergences are those of a computation by hand."""

from __future__ import annotations

import math

import pytest
import torch

from softgap.attention.synthetic import measure, synthetic_head
from softgap.errors import UnknownNameError, ValueInputError


def test_the_seed_decides_the_head_and_global_state_stays() -> None:
    before = torch.get_rng_state()
    first, again, other = synthetic_head(seed=7), synthetic_head(seed=7), synthetic_head(seed=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.query, again.query)
    assert torch.equal(first.value, again.value)
    assert not torch.equal(first.query, other.query)
    assert not torch.equal(first.query, first.key)
    assert (first.length, first.dim) == (256, 64)


def test_divergences_are_those_of_a_loop_over_queries() -> None:
    head = synthetic_head(length=19, dim=5, seed=1)
    q, k, v = (tensor[0, 0].double() for tensor in (head.query, head.key, head.value))
    expected = {"from_softmax": 0.0, "from_uniform": 0.0}
    for t in range(19):
        features = torch.where(k[: t + 1] > 0, k[: t + 1] + 1, k[: t + 1].exp())
        linear = features @ torch.where(q[t] > 0, q[t] + 1, q[t].exp())
        output = (linear / linear.sum()) @ v[: t + 1]
        softmax = torch.softmax(k[: t + 1] @ q[t] / math.sqrt(5), dim=0) @ v[: t + 1]
        for name, other in (("from_softmax", softmax), ("from_uniform", v[: t + 1].mean(dim=0))):
            expected[name] += float(1 - output @ other / output.norm() / other.norm()) / 19
    (row,) = measure(head, ["elu1"])
    assert (row.mechanism, row.flagged) == ("elu1", 0)
    assert row.from_softmax == pytest.approx(expected["from_softmax"], abs=1e-6)
    assert row.from_uniform == pytest.approx(expected["from_uniform"], abs=1e-6)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueInputError, match="length and dim must be at least 1, got length 0 and dim 4"):
        synthetic_head(length=0, dim=4)
    with pytest.raises(UnknownNameError, match="did you mean 'elu1'"):
        measure(synthetic_head(length=4, dim=4), ["elu_1"])
