"""Write docs/scale.md: what measuring and calibrating cost, measured on two models and extrapolated to larger ones.

Run: python docs/make/scale.py   (a quiet machine; one thread; some minutes)
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import softgap
from softgap.calibration import Recipe
from softgap.calibration.activations import gather
from softgap.calibration.fit import fit_maps
from softgap.calibration.held_out import measure_sequence
from softgap.models.loading import quiet_transformers
from softgap.probe.layout import layer_rotations
from softgap.probe.token_scores import forward_then_logits

PAGE = Path(__file__).resolve().parents[1] / "scale.md"
TOKENS, REPEATS, STEPS = 512, 5, 12
MECHANISMS = ("elu1", "uniform")
# Of an accelerator; assumptions, not measurements.
MATRIX_FLOPS, MATRIX_SHARE = 300e12, 0.4
FLOAT32_FLOPS, FLOAT32_SHARE = 60e12, 0.1
BANDWIDTH, BANDWIDTH_SHARE = 2e12, 0.5
ACCELERATOR_BYTES = 80e9
# A step of the fit launches some 200 kernels, of 10 microseconds each.
STEP_SECONDS = 2e-3
STUDY_TOKENS = 1_000_000


@dataclass(frozen=True)
class Shape:
    """What of a model decides about its cost."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocabulary: int
    tied: bool = False

    @property
    def body(self) -> int:
        """Weights of all blocks."""
        attention = 2 * self.width * self.dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def parameters(self) -> int:
        """Weights of blocks, embedding and output layer."""
        return self.body + (1 if self.tied else 2) * self.width * self.vocabulary

    def forward_flops(self, tokens: int) -> float:
        """Per token of a text of so many tokens, the output layer left out."""
        return 2 * self.body + 2 * self.layers * self.heads * self.dim * tokens

    def fit_flops(self, recipe: Recipe) -> float:
        """Of one step in one layer, gradients included: maps of rows and keys, and their products."""
        plan = recipe.rows
        rows, keys = plan.blocks * plan.rows, plan.blocks * (plan.sinks + plan.far + plan.near + plan.rows)
        maps = (rows * self.heads + keys * self.kv_heads) * 2 * self.dim * recipe.features
        products = rows * self.heads * keys // plan.blocks * (recipe.features + self.dim)
        return 3 * 2 * float(maps + products)

    @property
    def cache_bytes(self) -> int:
        """KV cache per token in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.dim

    @property
    def measured_numbers(self) -> tuple[int, int]:
        """Per token and mechanism: numbers of all queries, and of all states that they meet."""
        queries = self.layers * self.heads * self.dim
        return queries, queries * self.dim

    @property
    def stored_bytes(self) -> int:
        """Trajectories per token before compression: three quantities per mechanism and head."""
        return 4 * 3 * len(MECHANISMS) * self.layers * self.heads

    def calibration_bytes(self, features: int) -> int:
        """The maps of queries and keys, before and after rotary embedding, of the fitted map and of half a hybrid's."""
        return int(1.5 * 4 * self.layers * (self.heads + self.kv_heads) * features * (2 * self.dim + 1))

    def scratch_bytes(self, tokens: int) -> int:
        """Queries and keys of the text of a fit, while it runs."""
        return 2 * self.layers * (self.heads + self.kv_heads) * self.dim * tokens


LARGE = (
    Shape("1B", 16, 2048, 32, 8, 64, 8192, 128_256, tied=True),
    Shape("8B", 32, 4096, 32, 8, 128, 14_336, 128_256),
    Shape("70B", 80, 8192, 64, 8, 128, 28_672, 128_256),
)


@dataclass(frozen=True)
class Measured:
    """Medians over repeats, and the smallest and largest."""

    shape: Shape
    forward: tuple[float, float, float]
    added: tuple[float, float, float]
    step: tuple[float, float, float]

    @property
    def forward_rate(self) -> float:
        """FLOP/s of a forward."""
        return self.shape.forward_flops(TOKENS) * TOKENS / self.forward[0]

    @property
    def fit_rate(self) -> float:
        """FLOP/s of a step of the fit."""
        return self.shape.fit_flops(Recipe()) / self.step[0]


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, smallest and largest."""
    return statistics.median(values), min(values), max(values)


def seconds(call: Callable[[], Any]) -> float:
    """Processor seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str) -> Measured:
    """One model on this machine, on one thread."""
    model, tokenizer = softgap.load_model(name, progress=False)
    config = model.config
    shape = Shape(
        name, config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
        config.head_dim, config.intermediate_size, config.vocab_size, tied=True,
    )  # fmt: skip
    words = tokenizer("The boat left the harbour before the sun was up. " * TOKENS)["input_ids"][:TOKENS]
    inputs = {"input_ids": torch.tensor([words]), "use_cache": False}

    def forward() -> None:
        with torch.inference_mode():
            forward_then_logits(model, inputs, TOKENS)

    def read() -> None:
        measure_sequence(model, words, MECHANISMS)

    forward()
    read()
    pairs = [(seconds(forward), seconds(read)) for _ in range(REPEATS)]
    times: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, quiet_transformers(downloads=False):
        gathered = gather(
            model, [words], Path(scratch), sample=words[:64], distances=TOKENS, rotations=layer_rotations(model)
        )
        site = gathered.sites[0]
        fit_maps(
            gathered.layer(0), Recipe(steps=STEPS), scale=site.scale, window=site.window, softcap=site.softcap,
            rotation=site.rotation, report=lambda step, loss: times.append(time.process_time()),
        )  # fmt: skip
    steps = [b - a for a, b in zip(times[STEPS // 2 :], times[STEPS // 2 + 1 :], strict=False)]
    return Measured(shape, spread([a for a, _ in pairs]), spread([b - a for a, b in pairs]), spread(steps))


def bandwidth() -> float:
    """Bytes per second that one thread copies, reads and writes counted."""
    source = np.ones(50_000_000, dtype=np.float32)
    target = np.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: np.copyto(target, source)) for _ in range(REPEATS))


def cells(values: tuple[float, float, float], unit: float, form: str) -> str:
    """A median with its spread."""
    median, low, high = (format(x * unit, form) for x in values)
    return f"{median} ({low} to {high})"


def measured_tables(found: list[Measured], rate: float) -> str:
    """What was measured, and how well one model predicts the other."""
    lines = [
        "| on one thread | " + " | ".join(each.shape.name for each in found) + " |",
        "|---|" + "---|" * len(found),
    ]
    rows: list[tuple[str, Callable[[Measured], str]]] = [
        ("forward, ms per token", lambda x: cells(x.forward, 1e3 / TOKENS, ".2f")),
        ("forward, ms per token and layer", lambda x: cells(x.forward, 1e3 / TOKENS / x.shape.layers, ".3f")),
        ("forward, GFLOP per token", lambda x: f"{x.shape.forward_flops(TOKENS) / 1e9:.3f}"),
        ("forward, GFLOP/s", lambda x: f"{x.forward_rate / 1e9:.0f}"),
        ("measuring adds, ms per token", lambda x: cells(x.added, 1e3 / TOKENS, ".2f")),
        ("a step of the fit in one layer, ms", lambda x: cells(x.step, 1e3, ".1f")),
        ("a step of the fit, GFLOP", lambda x: f"{x.shape.fit_flops(Recipe()) / 1e9:.2f}"),
        ("a step of the fit, GFLOP/s", lambda x: f"{x.fit_rate / 1e9:.0f}"),
    ]
    lines += [f"| {name} | " + " | ".join(value(each) for each in found) + " |" for name, value in rows]
    text = "\n".join(lines) + f"\n\nOne thread copies {rate / 1e9:.1f} GB/s.\n"
    if len(found) > 1:
        a, b = found[:2]
        ratios = [
            f"{name} {(x / y):.2f}"
            for name, x, y in (
                ("forward", b.shape.forward_flops(TOKENS) * TOKENS / a.forward_rate, b.forward[0]),
                ("a step of the fit", b.shape.fit_flops(Recipe()) / a.fit_rate, b.step[0]),
            )
        ]
        text += (
            f"\nHow far to trust an extrapolation: the constants of {a.shape.name} predict for {b.shape.name}, as a "
            f"multiple of what was measured: {', '.join(ratios)}.\n"
        )
    return text


def added_costs(found: list[Measured]) -> tuple[float, float]:
    """Seconds of measuring per number of a query and of a state, from two models: never below 0."""
    rows = np.array([each.shape.measured_numbers for each in found], dtype=float)
    per_token = np.array([each.added[0] / TOKENS / len(MECHANISMS) for each in found])
    first, second = np.linalg.solve(rows, per_token)
    return max(0.0, float(first)), max(0.0, float(second))


def duration(value: float) -> str:
    """Seconds, minutes or hours."""
    if value < 90:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def size(value: float) -> str:
    """Bytes in the unit that fits."""
    return (
        f"{value / 1e9:.1f} GB"
        if value >= 1e9
        else f"{value / 1e6:.1f} MB"
        if value >= 1e6
        else f"{value / 1e3:.1f} kB"
    )


def extrapolated_table(costs: tuple[float, float], rate: float) -> str:
    """Counts, which are exact, and times, which rest on the assumptions."""
    recipe, positions = Recipe(), 8192
    tokens = 2 * positions
    rows: list[tuple[str, Callable[[Shape], str]]] = [
        ("parameters", lambda x: f"{x.parameters / 1e9:.1f} B"),
        ("weights in bfloat16", lambda x: size(2 * x.parameters)),
        ("KV cache per token", lambda x: size(x.cache_bytes)),
        ("trajectories per token, two mechanisms", lambda x: size(x.stored_bytes)),
        ("calibration file, 128 features", lambda x: size(x.calibration_bytes(recipe.features))),
        ("temporary files of a calibration, 16,384 tokens", lambda x: size(x.scratch_bytes(tokens))),
        ("forward, GFLOP per token and layer", lambda x: f"{x.forward_flops(2048) / x.layers / 1e9:.2f}"),
        ("a step of the fit, GFLOP per layer", lambda x: f"{x.fit_flops(recipe) / 1e9:.2f}"),
    ]
    lines = ["| counted from the shapes | " + " | ".join(x.name for x in LARGE) + " |", "|---|" + "---|" * len(LARGE)]
    lines += [f"| {name} | " + " | ".join(value(x) for x in LARGE) + " |" for name, value in rows]

    def forward(x: Shape) -> float:
        return x.forward_flops(2048) / (MATRIX_FLOPS * MATRIX_SHARE)

    def added(x: Shape) -> float:
        here = len(MECHANISMS) * sum(cost * n for cost, n in zip(costs, x.measured_numbers, strict=True))
        return here * rate / (BANDWIDTH * BANDWIDTH_SHARE)

    def fit(x: Shape, devices: int) -> float:
        flops = FLOAT32_FLOPS * FLOAT32_SHARE
        both = sum(max(STEP_SECONDS, share * x.fit_flops(recipe) / flops) for share in (1.0, 0.5))
        return -(-x.layers // devices) * recipe.steps * both

    def fits(x: Shape, value: str) -> str:
        return value if 2 * x.parameters < ACCELERATOR_BYTES else f"{value}, over several: the weights exceed one"

    def study(x: Shape, devices: int) -> float:
        held = -(-2 * x.parameters // ACCELERATOR_BYTES)
        return STUDY_TOKENS * (forward(x) + added(x)) / max(1, devices // held)

    timed: list[tuple[str, Callable[[Shape], str]]] = [
        ("forward, µs per token and layer", lambda x: f"{1e6 * forward(x) / x.layers:.2f}"),
        ("measuring adds, µs per token and layer", lambda x: f"{1e6 * added(x) / x.layers:.2f}"),
        ("1,000,000 tokens read and measured, one accelerator", lambda x: fits(x, duration(study(x, 1)))),
        ("the same, eight accelerators (`--engine ray`)", lambda x: duration(study(x, 8))),
        ("both fits of a calibration, one accelerator", lambda x: duration(fit(x, 1))),
        ("the same, eight accelerators (`--engine ray`)", lambda x: duration(fit(x, 8))),
    ]
    lines += ["", "| extrapolated | " + " | ".join(x.name for x in LARGE) + " |", "|---|" + "---|" * len(LARGE)]
    lines += [f"| {name} | " + " | ".join(value(x) for x in LARGE) + " |" for name, value in timed]
    return "\n".join(lines)


PAGE_TEXT = """\
# Scale

No number on this page was measured on an accelerator, or on a model above 0.3B parameters. The first section says how
to find out what a command costs on your machine. The second is measured on two small models, on one thread of a
processor. The third is extrapolated from it.

## Before a command starts

```bash
softgap calibrate my-model --text book.txt --dry-run
softgap linearize my-model --text book.txt --dry-run --json
```

`--dry-run` on `run`, `read`, `study`, `calibrate`, `linearize` and `evaluate` loads the model, times short pieces of
the work, prints the expected time by stage, the peak memory and the disk, and does nothing else. It runs the function
of each stage on texts of two lengths, and continues a curve a t + b t² to the texts that the command will read
(`softgap.costs`). [How close it comes](benchmarks.md#what-dry-run-expects) is measured on the embedded model for
`run`, `read` and `study`, and at a small size for `calibrate` and `evaluate`; `linearize` has not been compared yet.
Some work depends on what is found: answers that end early and intervals that narrow early cost less, and a search asks
more recall lists where they stay wide. Memory is that of the process, not of an accelerator.

## Measured

`python docs/make/scale.py`; {machine}. Texts of {tokens} tokens in float32; processor seconds; median of
{repeats} (smallest to largest); "measuring" compares with {mechanisms}; a step of the fit has 128 features.

{measured}
## Extrapolated

Sizes and FLOPs follow from the shapes (those of Llama 3). Times are FLOPs over an assumed rate: forward at
{matrix_share:.0%} of {matrix:.0f} TFLOP/s in bfloat16, the fit at {float_share:.0%} of {float:.0f} TFLOP/s in float32,
and no step of it below {step:.0f} ms. Measuring is taken to be bound by memory: a cost per number of a query and one
per number of a state, solved from the two models above, times the ratio of bandwidths, one thread's against
{band_share:.0%} of {band:.0f} TB/s. Two models give exactly these two costs, so nothing checks them. Put your own
numbers into `docs/make/scale.py`, or run `--dry-run` there.

{extrapolated}

Eight accelerators are eight workers of [a Ray cluster](howto/ray.md). Batches of a study and layers of a calibration
are independent, so they divide by eight, rounded up to whole layers. What a calibration does besides the fits runs on
one machine and does not divide. A model that does not fit into one accelerator takes several for every worker.
"""


def main() -> None:
    """Measure, extrapolate, write."""
    torch.set_num_threads(1)
    found = [measure(name) for name in ("smollm2-135m", "gemma-3-270m")]
    rate = bandwidth()
    machine = (
        f"{psutil.cpu_count()} cores, torch {torch.__version__.split('+')[0]} with 1 thread, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}"
    )
    page = PAGE_TEXT.format(
        machine=machine,
        tokens=TOKENS,
        repeats=REPEATS,
        mechanisms=" and ".join(MECHANISMS),
        measured=measured_tables(found, rate),
        matrix=MATRIX_FLOPS / 1e12,
        matrix_share=MATRIX_SHARE,
        float=FLOAT32_FLOPS / 1e12,
        float_share=FLOAT32_SHARE,
        band=BANDWIDTH / 1e12,
        band_share=BANDWIDTH_SHARE,
        extrapolated=extrapolated_table(added_costs(found), rate),
        step=1e3 * STEP_SECONDS,
    )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
