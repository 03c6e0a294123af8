"""What a study would cost: one batch is timed, the others are scaled by their tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from softgap.study.batches import measure_batch
from softgap.trajectories import QUANTITIES

if TYPE_CHECKING:
    from softgap.models.loading import Loaded
    from softgap.study.measurement import Planned

__all__ = ["Estimate", "estimate_study"]

# Tokens that the timed batch writes, to tell what a token costs from what reading costs.
_SHORT, _LONG = 2, 8


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes at most: answers that end early cost less, and stored numbers are compressed."""

    samples: int
    unmeasurable: int
    batches: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    bytes: int


def estimate_study(planned: Planned, loaded: Loaded) -> Estimate:
    """Time the middle batch, and scale by tokens: those that are fed at once and those that come one by one."""
    settings, batches = planned.settings, planned.batches
    middle = batches[len(batches) // 2]
    fed = sum(planned.lengths)
    live = [batch for batch in batches if not batch.replay]
    longest = min(_LONG, settings.max_new_tokens)
    shortest = min(_SHORT, longest)
    batch_tokens = sum(planned.lengths[i] for i in middle.indices)

    def seconds(new: int) -> float:
        start = time.perf_counter()
        measure_batch(loaded, planned.prompts, middle, replace(settings, max_new_tokens=new), None)
        return time.perf_counter() - start

    seconds(shortest)  # the first call of a model is slower than the others
    short = seconds(shortest)
    step = max(0.0, seconds(longest) - short) / max(1, longest - shortest) if live and longest > shortest else 0.0
    feeding = max(0.0, short - shortest * step) / max(1, batch_tokens)
    samples = sum(len(batch.indices) for batch in batches)
    new = settings.max_new_tokens * sum(len(batch.indices) for batch in live)
    config = loaded[0].config.get_text_config()
    heads = config.num_hidden_layers * config.num_attention_heads
    stored = (fed if settings.keep_prompt else 0) + new
    return Estimate(
        samples=samples,
        unmeasurable=len(planned.unmeasurable),
        batches=len(batches),
        prompt_tokens=fed,
        new_tokens=new,
        seconds=feeding * fed + step * settings.max_new_tokens * len(live),
        bytes=stored * heads * len(settings.mechanisms or ()) * len(QUANTITIES) * 4,
    )
