"""What every lab shares: the verdict on a claim, the texts of a model, and the default text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from softgap.errors import ValueInputError

__all__ = ["PASSAGE", "Claim", "Verdict", "equal_texts"]


Verdict = Literal["holds", "holds only when", "does not hold", "not decided"]


@dataclass(frozen=True)
class Claim:
    """One claim, as the lab found it.

    Attributes
    ----------
    name
        A word or two, stable from version to version.
    source
        Who says so: a paper with its equation, or "softgap" for what the lab adds.
    statement
        The claim in one sentence.
    verdict
        Decided by the numbers of this very run, never written down beforehand.
    condition
        For "holds only when": when. For "not decided": what is missing. Otherwise a remark, or nothing.
    numbers
        What the verdict was read from.
    """

    name: str
    source: str
    statement: str
    verdict: Verdict
    condition: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def equal_texts(token_ids: Sequence[Sequence[int]] | Sequence[int]) -> list[list[int]]:
    """Lists of token ids, all equally long; one list of ids is one text."""
    many = len(token_ids) > 0 and isinstance(token_ids[0], Sequence)
    texts: list[list[int]] = [list(ids) for ids in (token_ids if many else [token_ids])]  # type: ignore[arg-type]
    lengths = sorted({len(ids) for ids in texts})
    if len(lengths) > 1:
        raise ValueInputError(
            f"texts must have the same number of tokens, got {lengths[0]} to {lengths[-1]}; cut them to {lengths[0]}"
        )
    return texts


PASSAGE = """\
The weather station on Harrow Point was built in 1911, on the only flat rock that the winter sea does not reach. It had
one room, a stove, a bench for the instruments and a window of thick green glass. Every three hours, day and night, the
keeper read the barometer, the two thermometers and the gauge of the wind, wrote the numbers into a ruled book, and sent
them by wire to the town. In the first winter the wire broke four times. In the second it broke eleven times, and Ellen
Marsh, who had come for one season to help her uncle, learned to climb the poles and mend it herself.

"You will fall one day," said her uncle.

"Then I will fall onto snow," said Ellen, "and the wire will be whole."

She did not fall. When her uncle grew too old for the stairs she became the keeper, and she stayed for thirty-one years.
Her books are in the museum now, forty-six of them, each with the year on its back. Most pages hold nothing but figures:
pressure, temperature, wind, cloud, and again pressure, temperature, wind, cloud. But in the margins there are notes. On
the third of March 1923 she wrote: "Pressure falling since noon, 982, then 978, then 971. Boats went out all the same. I
have lit the lamp and left the door open." On the fourth: "All boats home but one." On the fifth: "The last boat is
home. Pressure rising, 989."

What makes the books worth reading today is that the same person made every entry with the same instruments in the
same place. If a series of numbers shows a slow change, one always asks whether the thing that was measured changed or
the way of measuring it. A new thermometer reads a little higher than the old one; a tree grows and shelters the
gauge; a clerk rounds to whole degrees where the clerk before him wrote down halves. At Harrow Point none of this
happened between 1917 and 1948. The mean temperature of January rose by 0.4 degrees in that time, that of July by 0.1,
and the number of storms in a year did not change at all.

To repeat her work, a visitor needs four things:

1. a barometer that has been compared with another one within the year;
2. two thermometers, one of them kept wet, out of the sun and two metres above the ground;
3. a clock, because a reading that is an hour late belongs to another series;
4. patience, of which there was more in that room than anywhere else on the coast.

The visitor should also read the last page of the last book. The hand is as steady as on the first. "Pressure 1013,
temperature 11, wind west and light, no cloud," it says. "The new machine arrived today. It reads every minute and needs
no lamp. I have set it beside mine, and for one week we shall both write down what we see, and then somebody should look
at how far apart we are." Somebody did. Over that week the machine and Ellen Marsh differed by less than a tenth of a
degree, except on the Sunday, when the machine had stopped and she had not.
"""
