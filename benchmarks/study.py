"""Study throughput against plain batched generate of the same prompts, interleaved.

Run: python benchmarks/study.py [--samples 32] [--tokens 64] [--pairs 5] [--anyway]

Both sides use the same model, batches, padding and greedy search, and write as many tokens. The study side also
measures elu1 and uniform in every head, keeps the prompts' steps, and writes everything to disk. The aim is at least
0.9 of the samples per minute of plain generation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from harness import interleaved, machine, ratio, require_quiet_machine, write_section
from softgap.models.loading import Loaded
from softgap.probe.prompts import prompt_ids
from softgap.study import Planned, StudySettings, plan_study
from softgap.study.batches import measure_batch
from softgap.study.ray_engine import publish
from softgap.tasks import generate_prompts
from softgap.trajectories.folder import Folder


def plainly(planned: Planned, loaded: Loaded) -> None:
    """The same batches by generate alone."""
    model, tokenizer = loaded
    write: Any = model.generate
    for batch in planned.batches:
        rows = [prompt_ids(tokenizer, planned.prompts[i].prompt, planned.settings.chat) for i in batch.indices]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        write(ids, attention_mask=mask, max_new_tokens=planned.settings.max_new_tokens, do_sample=False, **_EXACTLY)


# Neither side may stop early: both write the same number of tokens.
_EXACTLY: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None, "temperature": None, "top_p": None, "top_k": None}


def as_study(planned: Planned, loaded: Loaded, place: Path) -> None:
    """The same batches measured and written, as the local engine does it."""
    shutil.rmtree(place, ignore_errors=True)
    folder = Folder.at(place)
    for name in ("samples", "trajectories"):
        folder.create(name)
    for batch in planned.batches:
        publish(folder, batch.number, measure_batch(loaded, planned.prompts, batch, planned.settings, planned.scorer))


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--anyway", action="store_true", help="on a busy machine too; then nothing is written")
    options = parser.parse_args()
    if not options.anyway:
        require_quiet_machine()
    settings = StudySettings(max_new_tokens=options.tokens, scoring="contains")
    loaded = settings.load()
    loaded[0].generation_config.eos_token_id = None
    planned = plan_study(generate_prompts("recall", options.samples), loaded, settings)
    with tempfile.TemporaryDirectory() as place:
        sides = [lambda: plainly(planned, loaded), lambda: as_study(planned, loaded, Path(place) / "study")]
        plain, study = interleaved(sides, pairs=options.pairs)
    speeds = [60 * options.samples / statistics.median(seconds) for seconds in (plain, study)]
    against = ratio(plain, study)
    print(f"plain {speeds[0]:.1f}, study {speeds[1]:.1f} samples a minute; study / plain {against}")
    if options.anyway:
        return
    write_section(
        "study",
        "A study against plain generation",
        f"`python benchmarks/study.py --samples {options.samples} --tokens {options.tokens} --pairs {options.pairs}` "
        f"on the embedded model; {machine()}. Both sides answer the same associative recall prompts in the same "
        f"batches of 8, greedily, with exactly {options.tokens} tokens each; the study also measures elu1 and uniform "
        "in every head, prompts included, and writes it to disk. Samples a minute are medians, the ratio is that of "
        "pairs, with its range; the aim is at least 0.9.\n\n"
        "| plain, samples a minute | study, samples a minute | study / plain |\n|---|---|---|\n"
        f"| {speeds[0]:.1f} | {speeds[1]:.1f} | {against} |",
    )


if __name__ == "__main__":
    main()
