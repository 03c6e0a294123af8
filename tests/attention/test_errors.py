"""Bad input to the attention layer: one sentence each, with the value that was given."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from softgap.attention import LinearState, Visible, attend, attention_weights, compare_outputs, mechanisms, resolve
from softgap.errors import ShapeError, SoftgapError, UnknownNameError, UnsupportedError, ValueInputError


def tensors(heads: int = 2, kv_heads: int = 1, t: int = 5, d: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, t, d, generator=generator)
    k = torch.randn(1, kv_heads, t, d, generator=generator)
    return q, k, torch.randn(1, kv_heads, t, d, generator=generator)


def spoilt(tensor: Tensor, value: float) -> Tensor:
    copy = tensor.clone()
    copy[0, 0, 1, 2] = value
    return copy


q, k, v = tensors()
hidden = torch.zeros(1, 5, dtype=torch.bool)

CASES: dict[str, tuple[Callable[[], object], type[SoftgapError], str]] = {
    "three axes": (
        lambda: attend("elu1", q[0], k, v),
        ShapeError,
        "q must be [batch, head, time, dim], got shape [2, 5, 4]",
    ),
    "k and v of other lengths": (
        lambda: attend("elu1", q, k, v[:, :, :3]),
        ShapeError,
        "k and v must agree in batch, head and time, got [1, 1, 5, 4] and [1, 1, 3, 4]",
    ),
    "q and k of other dims": (
        lambda: attend("elu1", q, k[..., :3], v),
        ShapeError,
        "q and k must agree in batch and dim, got [1, 2, 5, 4] and [1, 1, 5, 3]",
    ),
    "heads not a multiple": (
        lambda: attend("elu1", *tensors(heads=3, kv_heads=2)),
        ShapeError,
        "query heads must be a multiple of KV heads, got 3 and 2",
    ),
    "more queries than keys": (
        lambda: attend("elu1", q, k[:, :, :3], v[:, :, :3]),
        ShapeError,
        "queries at positions -2..2 need as many keys, got 3",
    ),
    "unknown mechanism": (
        lambda: attend("elu", q, k, v),
        UnknownNameError,
        "unknown mechanism 'elu'; did you mean 'relu'?",
    ),
    "nothing like it": (
        lambda: resolve("zzzz"),
        UnknownNameError,
        "unknown mechanism 'zzzz'; choose one of: constant, cosformer,",
    ),
    "nan": (lambda: attend("elu1", spoilt(q, torch.nan), k, v), ValueInputError, "q holds NaN or inf"),
    "inf": (lambda: attend("softmax", q, k, spoilt(v, torch.inf)), ValueInputError, "v holds NaN or inf"),
    "integers": (
        lambda: attend("elu1", q.long(), k, v),
        ValueInputError,
        "q must hold floating-point numbers, got torch.int64",
    ),
    "half precision arithmetic": (
        lambda: attend("elu1", q, k, v, dtype=torch.float16),
        ValueInputError,
        "dtype must be torch.float32 or torch.float64, got torch.float16",
    ),
    "negative scale": (lambda: attend("elu1", q, k, v, scale=-1.0), ValueInputError, "scale must be above 0, got -1.0"),
    "no visible key": (
        lambda: attend("elu1", q, k, v, visible=Visible(key_valid=hidden)),
        ValueInputError,
        "every sequence needs at least one visible key, got none for sequence 0",
    ),
    "no visible key under a mask": (
        lambda: attend("softmax", q, k, v, visible=Visible(mask=torch.zeros(1, 1, 5, 5, dtype=torch.bool))),
        ValueInputError,
        "every sequence needs at least one visible key",
    ),
    "a window of nothing": (lambda: Visible(window=0), ValueInputError, "window must be at least 1, got 0"),
    "a float mask": (
        lambda: Visible(key_valid=torch.ones(1, 5)),
        ValueInputError,
        "key_valid must be boolean, got torch.float32",
    ),
    "mask and window": (
        lambda: Visible(window=2, mask=torch.ones(1, 1, 5, 5, dtype=torch.bool)),
        ValueInputError,
        "a mask says everything",
    ),
    "a mask of another size": (
        lambda: attend("elu1", q, k, v, visible=Visible(mask=torch.ones(1, 1, 4, 5, dtype=torch.bool))),
        ShapeError,
        "mask must be [batch, head, query, key] = [1, 2, 5, 5], got [1, 1, 4, 5]",
    ),
    "key_valid of another size": (
        lambda: attend("elu1", q, k, v, visible=Visible(key_valid=torch.ones(1, 4, dtype=torch.bool))),
        ShapeError,
        "key_valid must be [batch, key] = [1, 5], got [1, 4]",
    ),
    "streaming softmax": (
        lambda: LinearState("softmax").attend(q, k, v),
        UnsupportedError,
        "mechanism 'softmax' has no state and cannot be streamed; use attend(..., form='quadratic')",
    ),
    "streaming more queries than keys": (
        lambda: LinearState("elu1").attend(q, k[:, :, :2], v[:, :, :2]),
        ShapeError,
        "got 5 queries for 2 keys",
    ),
    "chunked top_k": (
        lambda: attend("top_k", q, k, v, form="chunked"),
        UnsupportedError,
        "mechanism 'top_k' does not factor and has no chunked form",
    ),
    "chunked polynomial of degree 4": (
        lambda: attend("polynomial:p=4", q, k, v, form="chunked"),
        UnsupportedError,
        "mechanism 'polynomial' does not factor",
    ),
    "chunked under a mask": (
        lambda: attend("elu1", q, k, v, form="chunked", visible=Visible(mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))),
        UnsupportedError,
        "the chunked form takes a window and key_valid, not a mask",
    ),
    "unknown form": (
        lambda: attend("elu1", q, k, v, form="chunkd"),
        UnknownNameError,
        "unknown form 'chunkd'; did you mean 'chunked'?",
    ),
    "no parameters": (
        lambda: attend("fitted", q, k, v),
        UnsupportedError,
        "mechanism 'fitted' needs the parameters query_weight, query_bias, key_weight, key_bias, rate and has no",
    ),
    "no mean": (
        lambda: attend("mean_ablation", q, k, v),
        UnsupportedError,
        "'constant' needs the parameters mean and has no mean",
    ),
    "weights of a constant": (
        lambda: attention_weights("zero", q, k),
        UnsupportedError,
        "mechanism 'zero' has no weights: its output is a constant",
    ),
    "unknown option": (lambda: resolve("top_k:q=3"), UnknownNameError, "unknown option of mechanism 'top_k' 'q'"),
    "option of a mechanism without": (
        lambda: resolve("elu1:q=3"),
        ValueInputError,
        "mechanism 'elu1' has no options, got q=3.0; leave it out",
    ),
    "option that is no number": (
        lambda: resolve("top_k:k=many"),
        ValueInputError,
        "is written option=number, got 'k=many'",
    ),
    "lam of nothing": (
        lambda: resolve("decay:lam=0"),
        ValueInputError,
        "decay's lam must be above 0 and at most 1, got 0",
    ),
    "odd degree": (lambda: resolve("polynomial:p=3"), ValueInputError, "polynomial's p must be an even number, got 3"),
    "top none": (lambda: resolve("top_k:k=0"), ValueInputError, "top_k's k must be a whole number from 1 on, got 0"),
    "no features": (
        lambda: resolve("favor:features=0"),
        ValueInputError,
        "favor's features must be a whole number from 1 on, got 0",
    ),
    "beyond the context": (
        lambda: attend("cosformer:context=4", q, k, v),
        ValueInputError,
        "cosformer is defined for positions below its context M = 4, got position 4",
    ),
    "outputs of other shapes": (
        lambda: compare_outputs(q, k),
        ShapeError,
        "outputs must have one shape, got [1, 2, 5, 4] and [1, 1, 5, 4]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_clear_sentence(name: str) -> None:
    call, kind, text = CASES[name]
    with pytest.raises(kind, match=re.escape(text)) as caught:
        call()
    assert "\n" not in str(caught.value)


def fitted(rate: Tensor) -> object:
    ones = torch.ones(1, 1, 3, 4)
    mechanism = mechanisms()["fitted"].with_parameters(
        query_weight=ones, query_bias=ones[..., 0], key_weight=ones, key_bias=ones[..., 0], rate=rate
    )
    return attend(mechanism, q, k, v)


def test_rates_of_decay_are_held_to_what_the_kernel_can_do() -> None:
    with pytest.raises(ValueInputError, match="decay rates must not be negative, got -1"):
        fitted(torch.tensor([[[0.0, 0.5, -1.0]]]))
    with pytest.raises(ValueInputError, match="decay rates of one head may differ by at most 5, got a spread of 7"):
        fitted(torch.tensor([[[0.0, 0.5, 7.0]]]))


def test_parameters_are_checked_when_they_are_given() -> None:
    fitted_map = mechanisms()["constant"]
    with pytest.raises(ShapeError, match=re.escape("must begin with [layer, head], got shape [4]")):
        fitted_map.with_parameters(mean=torch.zeros(4))
    with pytest.raises(ValueInputError, match="holds NaN or inf"):
        fitted_map.with_parameters(mean=torch.full((1, 2, 4), torch.nan))
    with pytest.raises(UnknownNameError, match="'means'; did you mean 'mean'"):
        fitted_map.with_parameters(means=torch.zeros(1, 2, 4))


def test_a_padded_row_is_no_error() -> None:
    valid = torch.tensor([[False, False, True, True, True]])
    for name in ("elu1", "softmax", "inline", "identity", "first_token"):
        found = attend(name, q, k, v, visible=Visible(key_valid=valid))
        assert found.valid.tolist() == valid.tolist()
        assert (found.output[:, :, :2] == 0).all()
        assert not found.flagged[:, :, :2].any()
