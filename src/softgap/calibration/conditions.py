"""Measure how far a calibration closes the gap under other conditions: other kinds of text, formats and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from softgap.attention import Mechanism
from softgap.calibration.held_out import gap_closed, measure_sequence
from softgap.calibration.texts import Corpus
from softgap.intervals import Interval
from softgap.models.loading import Model, Tokenizer
from softgap.models.tokens import first_tokens
from softgap.probe.tap import takes_positions
from softgap.trajectories.validation import BASELINE

__all__ = ["DOMAINS", "evaluate_conditions"]


_PROSE = """\
The ferry to the outer islands ran twice a week, and in winter only when the ice let it. Marta had learned to read the
water from the kitchen window: a dull grey line meant that the boat would come, a bright one that it would turn back at
the lighthouse. On the morning her brother was expected there was no line at all, because fog had come in during the
night and sat on the harbour like a lid. She put on two coats and walked down anyway. The harbour master was already
there, smoking, with his back to the sea. He said that fog was a matter of opinion and that the captain was a stubborn
man. They waited. Somewhere behind the grey a bell rang, once, and then not again for so long that both of them began to
think they had made it up. When the bow finally slid out of nothing it was so close that Marta stepped back. Her brother
stood at the rail with a suitcase that she had never seen before, thinner than in his letters, and he did not wave. He
looked at the houses one after the other as if he were counting them. There had been eleven when he left. Now there were
nine, and one of the nine had no roof. She took the suitcase from him without asking, and it weighed almost nothing. On
the way up the hill he asked about the dog, the boat, the old teacher, in that order, and she answered each question
with a single word. Only at the door did he stop. He touched the new lock, then the old wood around it, and said that
everything was smaller and that he was glad of it.
"""


_DIALOGUE = """\
Anna: Have you seen the blue folder? It was on this desk ten minutes ago.
Tom: The one with the invoices? I put it in the cabinet.
Anna: Which cabinet?
Tom: The one by the window. Second drawer. Or the third, I am not sure.
Anna: It is locked.
Tom: Then ask Mr Weber, he has the key.
Anna: Mr Weber is on holiday until Monday.
Tom: Oh. That is a problem. Did you look behind the printer? Sometimes he leaves a spare key there.
Anna: Why would anyone leave a key behind a printer?
Tom: I asked him the same thing. He said nobody would ever look there.
Anna: Well, I looked. There is no key, but there is half a sandwich.
Tom: Please do not eat it.
Anna: I was not going to. Do you remember what was in the invoice from the printing house? I only need the number.
Tom: Four thousand two hundred, I think. Or four thousand and twenty. Something with a four and a two.
Anna: That is not very helpful, Tom.
Tom: I know. But listen, the printing house must have a copy. Shall I call them?
Anna: Would you? Their number is on the wall, next to the calendar.
Tom: I see it. Hello? Yes, good morning, this is Tom from the office. We seem to have locked ourselves out of our own
invoices. No, I am not joking. The one from March. Yes, I can wait.
Anna: What do they say?
Tom: They say it was four thousand two hundred, and that we have not paid it yet.
"""


_CODE = '''\
import csv
from collections import defaultdict
from dataclasses import dataclass


@dataclass
class Reading:
    station: str
    hour: int
    value: float


def load_readings(path):
    """Read a file of station readings and skip rows without a value."""
    readings = []
    with open(path, newline="") as handle:
        for row in csv.DictReader(handle):
            if row["value"] == "":
                continue
            readings.append(Reading(row["station"], int(row["hour"]), float(row["value"])))
    return readings


def mean_by_station(readings):
    totals = defaultdict(float)
    counts = defaultdict(int)
    for reading in readings:
        totals[reading.station] += reading.value
        counts[reading.station] += 1
    return {station: totals[station] / counts[station] for station in totals}


class RunningMean:
    def __init__(self, size):
        self.size = size
        self.values = []

    def add(self, value):
        self.values.append(value)
        if len(self.values) > self.size:
            self.values.pop(0)
        return sum(self.values) / len(self.values)


def main():
    readings = load_readings("readings.csv")
    for station, mean in sorted(mean_by_station(readings).items()):
        print(f"{station}: {mean:.2f}")
    smooth = RunningMean(size=5)
    for reading in readings:
        print(reading.hour, smooth.add(reading.value))


if __name__ == "__main__":
    main()
'''


_LISTS = """\
Shopping list
- 2 litres of milk
- 500 g flour
- 12 eggs
- 1 lemon
- 3 onions
- 250 g butter
- salt

Rivers by length
1. Nile, 6,650 km
2. Amazon, 6,400 km
3. Yangtze, 6,300 km
4. Mississippi, 6,275 km
5. Yenisei, 5,539 km

Questions for the interview
1. Where did you grow up?
2. Which languages do you speak?
3. What was your first job?
4. What would you change about it?
5. How do you decide what to do first in the morning?
6. Who taught you the most?
7. When did you last change your mind?

Train times
06:12 Ashford, platform 2
06:47 Milton, platform 1
07:05 Ashford, platform 2
07:31 Portside, platform 4
07:58 Milton, platform 1
08:20 Ashford, platform 3

Colours: red, green, blue, yellow, white, black, orange, violet, brown, grey.
Months: January, February, March, April, May, June, July, August, September, October, November, December.
Tools: hammer, saw, drill, pliers, chisel, level, file, wrench, clamp, tape measure.
"""


DOMAINS: Mapping[str, str] = MappingProxyType({"prose": _PROSE, "dialogue": _DIALOGUE, "code": _CODE, "lists": _LISTS})


LONGEST = 512


SEQUENCES = 2


@dataclass(frozen=True)
class _Condition:
    """Token sequences of one condition, and the position of the first token of each where it is not 0."""

    name: str
    sequences: Sequence[Sequence[int]]
    offsets: Sequence[int] = ()


def evaluate_conditions(
    model: Model,
    tokenizer: Tokenizer,
    corpus: Corpus,
    fitted: Mechanism,
    *,
    seed: int = 0,
    report: Callable[[float], None] = lambda share: None,
) -> Mapping[str, Interval]:
    """The share of the gap that the fitted map closes by condition, from position 64 on.

    ``text of the fit`` and ``held-out text`` are sequences of equal length; ``after a BOS token``, ``as a chat
    message`` and ``at random offsets`` (the first token far behind position 0) are the held-out sequences again, where
    the model allows it and they do not begin with a first token anyway; the others are texts of four kinds that come
    with softgap.
    """
    length = min(LONGEST, corpus.longest // 2)
    rng = np.random.default_rng(seed)
    readings = list(_conditions(model, tokenizer, corpus, length, rng))
    by_condition = {}
    for number, reading in enumerate(readings):
        closed = _gap_closed(model, reading, fitted, rng)
        if closed is not None:
            by_condition[reading.name] = closed
        report((number + 1) / len(readings))
    return by_condition


def _conditions(
    model: Model, tokenizer: Tokenizer, corpus: Corpus, length: int, rng: np.random.Generator
) -> Iterator[_Condition]:
    held_out = [ids[:length] for ids in corpus.held_out[:SEQUENCES]]
    yield _Condition("text of the fit", [ids[-length:] for ids in corpus.fitted[-SEQUENCES:]])
    yield _Condition("held-out text", held_out)
    first = first_tokens(tokenizer)
    if tokenizer.bos_token_id is not None and not first:
        yield _Condition("after a BOS token", [(tokenizer.bos_token_id, *ids[:-1]) for ids in held_out])
    if tokenizer.chat_template is not None:
        yield _Condition("as a chat message", [_as_message(tokenizer, ids[len(first) :])[:length] for ids in held_out])
    if takes_positions(model):
        offsets = rng.integers(1, corpus.longest - length + 1, size=len(held_out)).tolist()
        yield _Condition("at random offsets", held_out, offsets)
    for name, text in DOMAINS.items():
        yield _Condition(name, [tokenizer(text)["input_ids"][:length]])


def _as_message(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    messages = [{"role": "user", "content": str(tokenizer.decode(list(ids)))}]
    encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True)
    return list(encoded["input_ids"])


def _gap_closed(model: Model, condition: _Condition, fitted: Mechanism, rng: np.random.Generator) -> Interval | None:
    offsets = condition.offsets or [0] * len(condition.sequences)
    runs = [
        measure_sequence(model, ids, [fitted, BASELINE], offset=offset)
        for ids, offset in zip(condition.sequences, offsets, strict=True)
    ]
    fitted_divergence, uniform = ([run.select(name).divergence for run in runs] for name in ("fitted", BASELINE))
    return gap_closed(fitted_divergence, uniform, rng=rng)
