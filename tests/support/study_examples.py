"""Studies on disk for the tests of comparisons: simulated with known truth, in the format of the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softgap.trajectories import Manifest, StudyWriter, Trajectories

LAYERS, HEADS = 6, 5


def simulated_study(
    folder: Path,
    means: np.ndarray,
    labels: Sequence[str | None],
    *,
    lengths: Sequence[int] | None = None,
    groups: Sequence[str] | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
    prompts: Sequence[str] | None = None,
    scatter: float = 0.1,
    seed: int = 0,
) -> Path:
    """A study whose samples have these mean divergences [sample, layer * head] around which the steps scatter."""
    rng = np.random.default_rng(seed)
    samples, units = means.shape
    asked = list(prompts) if prompts is not None else ["q"] * samples
    steps = list(lengths) if lengths is not None else [6] * samples
    shape = (LAYERS, units // LAYERS)
    kv_group = np.tile(np.arange(shape[1], dtype=np.int32) // 2, (LAYERS, 1))
    manifest = Manifest(model="simulated", mechanisms={"elu1": {}})
    with StudyWriter(folder, manifest) as writer:
        for start in range(0, samples, 50):
            runs = []
            for i in range(start, min(samples, start + 50)):
                noise = rng.standard_normal((1, *shape, steps[i])) * scatter
                values = means[i].reshape(1, *shape, 1) + noise - noise.mean(axis=-1, keepdims=True)
                values = values.astype(np.float32)
                runs.append(
                    Trajectories(
                        mechanisms=("elu1",),
                        layers=tuple(range(LAYERS)),
                        kv_group=kv_group,
                        quantities={"divergence": values, "relative_l2": values, "norm_ratio": values},
                        positions=np.arange(steps[i]),
                        token_ids=np.zeros(steps[i], int),
                        tokens=("a",) * steps[i],
                        logprob=-rng.exponential(size=steps[i]),
                        entropy=rng.exponential(size=steps[i]),
                        sample_id=f"s{i}",
                        prompt_text=asked[i],
                        completion_text="a" * steps[i],
                        label=labels[i],
                        n_prompt=3,
                    )
                )
            writer.append(runs)
    given = {**({"group": groups} if groups is not None else {}), **(fields or {})}
    lines = [{"id": f"s{i}", "prompt": asked[i], **{k: v[i] for k, v in given.items()}} for i in range(samples)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def named(labels: np.ndarray) -> list[str]:
    """True and False as words."""
    return ["wrong" if label else "right" for label in labels]
