"""What it costs to measure prompts and texts: run, read and study."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from softgap.costs.probe import LONG, SHORT, Cost, Probe
from softgap.models.loading import Loaded
from softgap.study.batches import Batch, measure_batch
from softgap.study.measurement import Planned
from softgap.trajectories import QUANTITIES

__all__ = ["measurement_cost"]

# Tokens that a generation writes, to tell what a token costs from what reading costs; several blocks of steps.
_FEW_NEW, _SOME_NEW = 4, 68


def measurement_cost(planned: Planned, loaded: Loaded, probe: Probe) -> Cost:
    """What it costs to measure planned prompts: texts that are fed at once, and tokens that come one by one."""
    settings = planned.settings
    reading = writing = 0.0
    for replay in (False, True):
        batches = [batch for batch in planned.batches if batch.replay == replay]
        if not batches:
            continue
        middle = batches[len(batches) // 2]
        longest = max(planned.lengths[i] for batch in batches for i in batch.indices)
        new = 0 if replay else min(_FEW_NEW, settings.max_new_tokens)

        def measured(n: int, middle: Batch = middle, new: int = new) -> None:
            _measure_beginnings(planned, loaded, middle, n, max(1, new))

        measured(SHORT)  # the first call of a model is slower than the others
        own = max(planned.lengths[i] for i in middle.indices)
        lengths = [own] if own <= LONG else [SHORT, LONG]
        feeding = probe.curve(measured, lengths, longest + (0 if replay else settings.max_new_tokens))
        step = 0.0
        if not replay and settings.max_new_tokens > _FEW_NEW:
            some = min(_SOME_NEW, settings.max_new_tokens)
            _, seconds, _ = probe.call(partial(measured, lengths[0], new=some))
            step = max(0.0, seconds - feeding.at(lengths[0])) / (some - new)
        for batch in batches:
            share = len(batch.indices) / len(middle.indices)
            seconds = feeding.at(max(planned.lengths[i] for i in batch.indices))
            reading += share * max(0.0, seconds - new * step)
            # Half of a step does not depend on how many write together, about: the weights are read once.
            writing += step * settings.max_new_tokens * (0.5 + 0.5 * share)
    fed = sum(planned.lengths)
    written = settings.max_new_tokens * sum(len(batch.indices) for batch in planned.batches if not batch.replay)
    config = loaded[0].config.get_text_config()
    stored = (fed if settings.keep_prompt else 0) + written
    numbers = config.num_hidden_layers * config.num_attention_heads * len(settings.mechanisms or ()) * len(QUANTITIES)
    return Cost(
        command="measure",
        stages={"loading": probe.loading, "reading": reading, **({"writing": writing} if written else {})},
        memory_bytes=probe.memory,
        disk_bytes=4 * stored * numbers,
        counts={
            "samples": sum(len(batch.indices) for batch in planned.batches),
            "unmeasurable": len(planned.unmeasurable),
            "batches": len(planned.batches),
            "prompt_tokens": fed,
            "new_tokens": written,
        },
        probe_seconds=probe.seconds,
        note="answers that end early cost less" if written else "",
    )


def _measure_beginnings(planned: Planned, loaded: Loaded, batch: Batch, tokens: int, new: int) -> None:
    """Measure the first ``tokens`` tokens, about, of the prompts of a batch."""
    prompts = list(planned.prompts)
    for i in batch.indices:
        prompt = prompts[i]
        share = min(1.0, tokens / max(1, planned.lengths[i]))
        if share < 1:
            completion = prompt.completion
            prompts[i] = replace(
                prompt,
                prompt=prompt.prompt[: max(1, int(share * len(prompt.prompt)))],
                completion=None if completion is None else completion[: max(1, int(share * len(completion)))],
            )
    measure_batch(loaded, prompts, batch, replace(planned.settings, max_new_tokens=new), None, strict=True)
