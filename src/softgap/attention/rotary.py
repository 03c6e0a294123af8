"""Rotary embedding: apply it, and undo it.

A model turns the vector of position p to R_p x = x cos(p f) + J x sin(p f), with a frequency f per dimension (0 where
nothing is turned) and J the quarter turn: it pairs dimensions, as (-x_2, x_1). Turns add up, so R_-p undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Layout", "Rotation", "TurnTable", "with_unrotated"]

Layout = Literal["halves", "neighbours"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotary embedding of one layer: f per dimension, and the quarter turn J."""

    frequency: Float[Tensor, " dim"]
    turn: Float[Tensor, "dim dim"]

    @classmethod
    def of_pairs(
        cls,
        frequency: Float[Tensor, " pair"],
        dim: int,
        *,
        layout: Layout = "halves",
        start: int = 0,
    ) -> Rotation:
        """Pairs of dimensions from ``start`` on, turned at these frequencies; all others stay.

        In ``halves`` the partners are half of the turned part away from each other (Llama), in ``neighbours`` side by
        side (GPT-J, Cohere).
        """
        count = len(frequency)
        pair = torch.arange(count)
        first, second = (pair, pair + count) if layout == "halves" else (2 * pair, 2 * pair + 1)
        first, second = first + start, second + start
        whole, turn = torch.zeros(dim), torch.zeros(dim, dim)
        whole[first], whole[second] = frequency.cpu().float(), frequency.cpu().float()
        turn[first, second], turn[second, first] = -1.0, 1.0
        return cls(whole, turn)

    def parameters(self) -> dict[str, Float[Tensor, "layer head ..."]]:
        """What the mechanism ``fitted`` takes, for one layer."""
        return {"frequency": self.frequency[None, None], "turn": self.turn[None, None]}

    def turned(self, x: Float[Tensor, "*lead time dim"], by: Int[Tensor, " time"]) -> Float[Tensor, "*lead time dim"]:
        """Vectors moved by so many positions."""
        return _rotate(x, self.turn.to(x.dtype), *_angles(by, self.frequency, x.dtype))


class TurnTable:
    """Cosines and sines of the positions below a length, for a rotation that is undone at many of them."""

    def __init__(self, rotation: Rotation, length: int) -> None:
        self._turn = rotation.turn
        self._cos, self._sin = _angles(-torch.arange(length), rotation.frequency, rotation.turn.dtype)

    def before(
        self, x: Float[Tensor, "block *lead time dim"], at: Int[Tensor, "block time"]
    ) -> Float[Tensor, "block *lead time dim"]:
        """The vectors before rotary embedding, given their positions."""
        shape = (len(at), *[1] * (x.dim() - 3), *at.shape[1:], x.shape[-1])
        return _rotate(x, self._turn, self._cos[at].view(shape), self._sin[at].view(shape))

    def moved(
        self, x: Float[Tensor, "block *lead time dim"], by: Int[Tensor, " block"]
    ) -> Float[Tensor, "block *lead time dim"]:
        """The vectors of each block moved by so many positions."""
        shape = (len(by), *[1] * (x.dim() - 2), x.shape[-1])
        return _rotate(x, self._turn, self._cos[by].view(shape), -self._sin[by].view(shape))


def with_unrotated(
    x: Float[Tensor, "batch head time dim"],
    turned_by: Int[Tensor, "#batch *kv_heads time"],
    frequency: Float[Tensor, "#batch #head dim"],
    turn: Float[Tensor, "#batch #head dim dim"],
) -> Float[Tensor, "batch head time twice"]:
    """Vectors at positions p, and behind each R_-p x: the vector as it was before rotary embedding."""
    cos, sin = _angles_before(x, turned_by, frequency)
    if x.requires_grad or not _pairs_halves(turn):
        return torch.cat([x, _rotate(x, turn, cos, sin)], dim=-1)
    # The same as above without passes over memory for what is between.
    dim, half = x.shape[-1], x.shape[-1] // 2
    sin = sin * turn.reshape(-1, dim).sum(dim=-1)
    both = x.new_empty(*x.shape[:-1], 2 * dim)
    both[..., :dim] = x
    before = both[..., dim:]
    torch.mul(x, cos, out=before)
    before[..., :half].addcmul_(x[..., half:], sin[..., :half])
    before[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return both


def _angles_before(x: Tensor, turned_by: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines that undo the turns."""
    if turned_by.dim() == 2 and len(turned_by) > 1 and bool((turned_by == turned_by[:1]).all()):
        # Cosines cost more than the rest: rows at equal positions share them.
        turned_by = turned_by[:1]
    single = turned_by.dim() == 2 and len(turned_by) == 1 and turned_by.numel() > 0
    if single and frequency.numel() == x.shape[-1] and x.device.type == "cpu":
        low, high = int(turned_by.min()), int(turned_by.max())
        if low >= 0 and high < LONGEST_TABLE:
            # The layers of a model ask for the same ones in turn.
            key = frequency.detach().double().numpy().tobytes()
            cos, sin = _table(key, x.dtype, max(1024, 1 << high.bit_length()))
            return cos[turned_by[0]], sin[turned_by[0]]
    by = turned_by[:, None] if turned_by.dim() == 2 else turned_by
    return _angles(-by, frequency[:, :, None], x.dtype)


# Positions whose cosines are kept: 16 MB for 64 dimensions.
LONGEST_TABLE = 2**15


@lru_cache(maxsize=2)
def _table(frequency: bytes, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of -p f for the positions below a length, for frequencies given by their numbers."""
    # What is kept must serve gradients too, even if it is first asked for in inference mode.
    with torch.inference_mode(False):
        numbers = torch.frombuffer(bytearray(frequency), dtype=torch.float64)
        return _angles(-torch.arange(length), numbers, dtype)


def _angles(by: Tensor, frequency: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # In float32 an angle of 8,192 radians has lost 5e-4 of one.
    angle = by[..., None].double() * frequency.double()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, turn: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    if _pairs_halves(turn):
        # A product with J takes many times as long as moving its numbers.
        turned, sin = x.roll(half, dims=-1), sin * turn.reshape(-1, 2 * half).sum(dim=-1)
    else:
        turned = x @ turn.transpose(-1, -2)
    return torch.addcmul(x * cos, turned, sin)


def _pairs_halves(turn: Tensor) -> bool:
    """Whether J pairs every dimension with the one half of them away."""
    dim = turn.shape[-1]
    if turn.numel() != dim * dim or dim % 2:
        return False
    matrix = turn.reshape(dim, dim)
    shifted = matrix.roll(dim // 2, dims=-1)
    return bool((shifted.count_nonzero() == dim) & (shifted.diagonal().abs() == 1).all())
