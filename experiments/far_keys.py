"""Which rule chooses far keys: KV groups of the embedded model become hybrids with far keys chosen in several ways.

Run: python experiments/far_keys.py --fit FILE --text FILE --calibration FITTED [--groups 70]

The KV groups that the Fisher curvature on the text of ``--fit`` misses least are swapped. Each keeps 4 sinks, 30 recent
keys, 32 far keys and the fitted state of the calibrated hybrid. The rules differ in the priority that a key has when it
leaves the window. The weights are computed densely, so that also a rule that knows the future can be tried. The
control is a longer window of the same memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch
from torch import Tensor

from harness import FINDINGS, machine, write_section
from softgap.attention import ExactSet, Mechanism, Visible, attention_weights
from softgap.attention.far_keys import far_rows
from softgap.calibration import Calibration
from softgap.intervals import interval_of
from softgap.intervene.substitute import Substitute
from softgap.linearize.frontier import units_of
from softgap.linearize.scores import unit_scores
from softgap.linearize.sequences import cut_sequences
from softgap.models import load_model
from softgap.models.tokens import token_ids
from softgap.probe.layout import attention_layers
from softgap.probe.tap import AttentionCall, replace_attention

LENGTH, TEXTS, FIT_TEXTS = 1024, 6, 2
FAR = 32

Priority = Callable[[Tensor, Tensor, Tensor, ExactSet], Tensor]
"""From scores [head, query, key], softmax weights, values [key, dim] and the exact set: a number per key."""


def say(*words: object) -> None:
    """A line of progress."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def _in_window(x: Tensor, exact: ExactSet) -> Tensor:
    n = x.shape[-1]
    apart = torch.arange(n)[:, None] - torch.arange(n)
    return x.masked_fill((apart < 0) | (apart >= exact.recent), -torch.inf)


def _window_weights(scores: Tensor, exact: ExactSet) -> Tensor:
    """Attention within sinks and window: what is known without the far keys."""
    n = scores.shape[-1]
    apart, first = torch.arange(n)[:, None] - torch.arange(n), torch.arange(n) < exact.sinks
    hidden = (apart < 0) | ((apart >= exact.recent) & ~first)
    return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)


def _beyond(weights: Tensor, exact: ExactSet) -> Tensor:
    n = weights.shape[-1]
    apart = torch.arange(n)[:, None] - torch.arange(n)
    return weights.masked_fill(apart < exact.recent, 0)


RULES: dict[str, Priority | None] = {
    "no far keys": None,
    "largest score": lambda s, _, v, exact: _in_window(s, exact).amax(dim=(0, 1)),
    "largest attention": lambda s, _, v, exact: _in_window(_window_weights(s, exact), exact).amax(dim=(0, 1)),
    "sum of attention": lambda s, _, v, exact: (
        _in_window(_window_weights(s, exact), exact).clamp(min=0).sum(dim=(0, 1))
    ),
    "largest score, times norm of the value": lambda s, _, v, exact: (
        _in_window(s, exact).amax(dim=(0, 1)) + v.norm(dim=-1).log()
    ),
    "norm of the value": lambda s, _, v, exact: v.norm(dim=-1),
    "knowing the future": lambda _, w, v, exact: _beyond(w, exact).amax(dim=(0, 1)),
}


class DenseHybrids:
    """KV groups as hybrids, with explicit weights."""

    def __init__(self, model: Any, hybrid: Mechanism, groups: set[tuple[int, int]], priority: Priority | None) -> None:
        self._hybrid, self._groups, self._priority = hybrid, groups, priority
        self._exact = ExactSet.of(hybrid.options)
        self._layers = {id(layer.module): layer for layer in attention_layers(model)}

    def replace(self, call: AttentionCall) -> Tensor:
        """The output of a layer, its swapped groups replaced."""
        layer, output = self._layers[id(call.module)], call.output.clone()
        size = layer.heads // layer.kv_heads
        mechanism = self._hybrid.for_layers([layer.index])
        tail = mechanism.tail_with_parameters()
        if tail is None:
            raise SystemExit("the calibration has no hybrid")
        tail_weights = attention_weights(tail, call.query, call.key, scale=call.scale)[0]
        for group in range(layer.kv_heads):
            if (layer.number, group) in self._groups:
                heads = slice(group * size, (group + 1) * size)
                scores = call.query[0, heads] @ call.key[0, group].T * call.scale
                factor = mechanism.tail_factor(scores)
                factor = factor[0, heads] if isinstance(factor, Tensor) and factor.shape[1] > 1 else factor
                weights = self._weights(scores, tail_weights[heads], call.value[0, group], factor)
                output[0, :, heads] = (weights @ call.value[0, group]).transpose(0, 1)
        return output

    def _weights(self, scores: Tensor, tail: Tensor, values: Tensor, factor: Any) -> Tensor:
        n = scores.shape[-1]
        sets = self._exact.rows(Visible(offset=0), 0, n, (0, n), scores.device)
        seen, exact, recent = (x[0, 0] for x in sets)
        exact = exact.expand(len(scores), n, n)
        if self._priority is not None:
            own = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
            priority = self._priority(scores, own, values, self._exact)
            far = far_rows(priority[None, None], ExactSet(1, 0, FAR), (seen & ~exact[0])[None, None], len(scores))[0]
            exact = exact | far
        top = scores.masked_fill(~exact, -torch.inf).amax(dim=-1, keepdim=True)
        weights = (scores - top).masked_fill(~exact, -torch.inf).exp()
        matched = (weights * recent).sum(-1, keepdim=True) / (tail * recent).sum(-1, keepdim=True).clamp(min=1e-30)
        weights = weights + factor * matched * tail * (seen & ~exact)
        normalised: Tensor = weights / weights.sum(dim=-1, keepdim=True)
        return normalised


@torch.inference_mode()
def losses(model: Any, texts: Tensor, hybrids: DenseHybrids | None) -> np.ndarray:
    """The loss of every text."""
    rows = []
    for text in texts:
        if hybrids is None:
            logits = model(text[None], use_cache=False).logits[0, :-1]
        else:
            with replace_attention(model, hybrids.replace):
                logits = model(text[None], use_cache=False).logits[0, :-1]
        rows.append(float(torch.nn.functional.cross_entropy(logits, text[1:])))
    return np.array(rows)


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--fit", "--text", "--calibration"):
        parser.add_argument(name, required=True)
    parser.add_argument("--groups", type=int, default=70)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("smollm2-135m")
    hybrid = Calibration.load(options.calibration).mechanism("hybrid")
    fit, ids = (token_ids(tokenizer, [Path(x).read_text(encoding="utf-8")]) for x in (options.fit, options.text))
    units = units_of(model, "groups")
    _, curvature = unit_scores(model, cut_sequences(model, fit, 2 * LENGTH, FIT_TEXTS), [Substitute(hybrid)], units)
    order = np.argsort(curvature[0].mean(axis=-1))
    size = len(units[0])
    groups = {(units[i][0][0], units[i][0][1] // size) for i in order[: options.groups]}
    texts = cut_sequences(model, ids, LENGTH, TEXTS).ids
    original = losses(model, texts, None)
    rises, rows = {}, []
    longer = hybrid.configure(w=hybrid.options["w"] + FAR)
    for name, priority in [*RULES.items(), (f"a window of {FAR} keys more", None)]:
        mechanism = longer if name.startswith("a window") else hybrid
        rises[name] = losses(model, texts, DenseHybrids(model, mechanism, groups, priority)) - original
        interval = interval_of(rises[name], rng=np.random.default_rng(0))
        rows.append((name, f"{interval.value:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"))
        say(*rows[-1])
    ceiling = rises["no far keys"].mean() - rises["knowing the future"].mean()
    lines = [
        f"| {name} | {cell} | {(rises['no far keys'].mean() - rises[name].mean()) / ceiling:.2f} |"
        for name, cell in rows
    ]
    recent, sinks = (int(hybrid.options[name]) for name in ("w", "sinks"))
    write_section(
        "far_keys",
        "Which rule chooses far keys",
        f"`python experiments/far_keys.py --fit FILE --text FILE --calibration FITTED --groups {options.groups}` on "
        f"the embedded model; {machine()}. {options.groups} of 90 KV groups (least Fisher curvature on the text of the "
        f"fit) become the calibrated hybrid with {sinks} sinks, {recent} recent keys and {FAR} far keys, without "
        f"output correction. Rise in loss (nats per token, 95 % over texts) on {TEXTS} unseen texts of "
        f"{LENGTH:,} tokens, and the share of what a choice that knows the future gains. A rule gives a key its "
        "priority when it leaves the window; scores and attention are those that it received there, over the queries "
        "of its KV group.\n\n"
        "| far keys by | rise in loss | share of the ceiling |\n|---|---|---|\n" + "\n".join(lines),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()
