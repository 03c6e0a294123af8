"""Plans at a share of the KV cache: mixed and of one kind each, with the same order and bytes, on unseen text.

Run: python experiments/mixed_plans.py --fit FILE --text FILE --calibration FITTED --plans FOLDER [--budgets 0.25 0.12]

The calibration must be fitted on the text of ``--fit``, which with recall lists also scores the groups. Neither may
have seen ``--text``, which the plans are evaluated on. At every budget (a share of the model's KV cache at 8,192
tokens) the groups are allocated among all kinds and among each kind alone, by the same scores and without output
correction. ``--order`` chooses a way to combine the scores of text and recall lists. Recall is that of ``softgap
evaluate``. Finished readings lie in ``--parts``. ``--plans`` saves the plans, for ``softgap evaluate --plan``.
``experiments/recall_of_plans.py --parts PARTS/recall`` shows the same recall by distance.

Rows "..., quick order" have the same options for as many groups, in an order that takes about two minutes: the larger
rank of the curvature of one short window over a little text, and of what the ablation of each group costs recall.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch

from harness import FINDINGS, machine, write_section
from softgap.attention import resolve
from softgap.calibration import Calibration
from softgap.checkpoints import Checkpoints
from softgap.evaluation import evaluate
from softgap.intervals import Interval, interval_of
from softgap.intervene.substitute import Substitute
from softgap.intervene.swap import swap
from softgap.linearize.allocation import SOFTMAX, Allocations, Menu, calibrated_options, larger_rank
from softgap.linearize.application import apply
from softgap.linearize.candidates import Candidate
from softgap.linearize.plan import load_plan, plan_of
from softgap.linearize.recall_scores import recall_scores
from softgap.linearize.scores import unit_scores
from softgap.linearize.search import FIT_LISTS, RECALL_DISTANCES
from softgap.linearize.sequences import Sequences, cut_sequences, digest_of_sequences, recall_sequences
from softgap.models import load_model
from softgap.models.tokens import token_ids
from softgap.report.figures import new_figure, save_figure

LENGTHS = {2048: 6, 8192: 3}
SHOWN = (512, 1024, 2048, 8192)
FIT_LENGTH, FIT_TEXTS = 2048, 4
# Longer than every window, so that most answers lie outside of it.
RECALL_LENGTHS = (2048,)
FRONT_LENGTH = 2048
MIXED = "mixed"
QUICK = ", quick order"
QUICK_SWAP, QUICK_LENGTH, QUICK_TEXTS, QUICK_LISTS, QUICK_DISTANCE = "window:w=32,sinks=4", 512, 3, 2, 200
WINDOW = "window"
# A kind that costs so many times what the mixed plan costs at 2,048 tokens is not measured further.
HOPELESS = 4


def equal_sums(text: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Both scores added, those of recall scaled to the sum of the others."""
    both: np.ndarray = text + recall * text.sum() / recall.sum()
    return both


ORDERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "larger rank": larger_rank,
    "sum": equal_sums,
    "text": lambda text, recall: text,
}


def say(*words: object) -> None:
    """A line of progress."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def scored(model: Any, sequences: Sequences, menu: Menu, name: str, checkpoints: Checkpoints) -> np.ndarray:
    """Curvature of every option in every group, from text or recall lists of the fit."""

    def make() -> dict[str, Any]:
        last = [-1.0]

        def tell(stage: str, share: float) -> None:
            if share >= last[0] + 0.05:
                last[0] = share
                say(f"{stage} ({name}): {share:.0%}")

        curvature = unit_scores(model, sequences, menu.options, menu.units, progress=tell)[1].mean(axis=-1)
        return {"curvature": curvature.tolist()}

    key = ["scores", name, digest_of_sequences(sequences), *(option.name for option in menu.options)]
    return np.asarray(checkpoints.find_or_make(key, make)["curvature"])


def quick_order(model: Any, tokenizer: Any, ids: Sequence[int], checkpoints: Checkpoints) -> np.ndarray:
    """A score of every group from a few passes, and what it took."""
    text = cut_sequences(model, ids, QUICK_LENGTH, QUICK_TEXTS)
    lists = recall_sequences(model, tokenizer, QUICK_LISTS, seed=1, filler=ids, distance=QUICK_DISTANCE)
    menu = Menu.of(model, [Substitute(resolve(QUICK_SWAP))])

    def make() -> dict[str, Any]:
        begin = time.process_time()
        by_text = unit_scores(model, text, menu.options, menu.units)[1].mean(axis=-1)[0]
        by_recall = recall_scores(model, first_tokens(lists), QUICK_SWAP, names=["ablation"]).mean("ablation")
        return {"score": larger_rank(by_text, by_recall).tolist(), "seconds": time.process_time() - begin}

    found = checkpoints.find_or_make(
        ["quick order with ablation", digest_of_sequences(text), digest_of_sequences(lists)], make
    )
    say(f"quick order: {found['seconds']:.0f} CPU seconds")
    return np.asarray(found["score"])


def first_tokens(lists: Sequences) -> Sequences:
    """Recall lists of which only the first tokens of the answers count."""
    return lists if lists.first is None else replace(lists, scored=lists.first)


def reordered(allocations: Allocations, step: int, order: np.ndarray) -> Candidate:
    """The options of an allocation given to other groups: the more bytes, the larger the group's score."""
    menu, choice = allocations.menu, allocations.path[step]
    sizes = np.where(choice == SOFTMAX, menu.softmax_size, menu.sizes[choice])
    other = np.empty_like(choice)
    other[np.argsort(-order, kind="stable")] = choice[np.argsort(-sizes, kind="stable")]
    return Allocations(menu, [other]).candidate(0)


class Measurements:
    """Loss and recall under an allocation, measured once."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        fit: Sequence[int],
        ids: Sequence[int],
        checkpoints: Checkpoints,
        options: argparse.Namespace,
    ) -> None:
        self._model, self._tokenizer, self._checkpoints = model, tokenizer, checkpoints
        self._texts = {length: cut_sequences(model, ids, length, n).ids for length, n in LENGTHS.items()}
        self._contexts, self._parts, self._fit = options.contexts, options.parts, fit

    def quick(self) -> np.ndarray:
        """The quick order of the groups."""
        return quick_order(self._model, self._tokenizer, self._fit, self._checkpoints)

    def save_plan(self, chosen: Candidate, path: Path) -> Path:
        """The file of a plan that was not measured."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return plan_of(self._model, chosen.heads, chosen.plain).save(path)

    def rises(self, chosen: Candidate, length: int) -> np.ndarray:
        """Rise in loss of every text of so many tokens; a shorter one is the beginning of a longer one."""
        longer = next(n for n in LENGTHS if n >= length)
        loss = self._loss(longer, chosen.heads, chosen.plain, chosen.key) - self._loss(longer, (), None, [])
        rises: np.ndarray = loss[:, SHOWN.index(length)]
        return rises

    def _loss(self, length: int, heads: Any, plain: Any, key: Any) -> np.ndarray:
        """Mean loss of every text up to each of the lengths shown."""

        def make() -> dict[str, Any]:
            rows = []
            with torch.inference_mode(), swap(self._model, heads, plain) if heads else nullcontext():
                for text in self._texts[length]:
                    logits = self._model(text[None], use_cache=False).logits[0, :-1]
                    loss = torch.nn.functional.cross_entropy(logits, text[1:], reduction="none")
                    rows.append([float(loss[: n - 1].mean()) for n in SHOWN])
            return {"loss": rows}

        return np.asarray(self._checkpoints.find_or_make(["loss", length, LENGTHS[length], key], make)["loss"])

    def recall(self, path: Path) -> tuple[list[str], Interval | None]:
        """What ``softgap.evaluate`` says of recall under a saved plan: the change of the share of first tokens."""
        plan = load_plan(path)
        found = evaluate(
            self._model,
            self._tokenizer,
            "recall",
            under=lambda: apply(self._model, plan),
            label=path.stem,
            lengths=list(RECALL_LENGTHS),
            contexts=self._contexts,
            folder=None if self._parts is None else Path(self._parts) / "recall",
            progress=False,
        )
        cells, change = [], None
        for length in RECALL_LENGTHS:
            (row,) = found.select(task="recall", length=length, metric="first", distance=None)
            assert row.change is not None
            change = row.change
            cells.append(
                f"{row.change.value:+.3f} ({row.change.low:+.3f} to {row.change.high:+.3f}) of {row.original.value:.2f}"
            )
        return cells, change


def counts_of(allocations: Allocations, step: int) -> str:
    """How many groups become what."""
    choice = allocations.path[step]
    names = [option.mechanism.label for option in allocations.menu.options]
    counts = Counter(names[option] for option in choice if option != SOFTMAX)
    return ", ".join(f"{n} {name}" for name, n in counts.items())


@dataclass(frozen=True)
class Spot:
    """What a kind costs with so many bytes, for the picture."""

    kind: str
    kept: float
    loss: Interval
    recall: Interval | None


def draw_front(spots: Sequence[Spot], path: str) -> None:
    """Rise in loss and change of recall against the share of the cache that is kept, one line per kind."""
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    for number, kind in enumerate(dict.fromkeys(spot.kind for spot in spots)):
        own = sorted((spot for spot in spots if spot.kind == kind), key=lambda spot: spot.kept)
        style = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:")[number % 7]
        for axes, values in ((left, [(x.kept, x.loss) for x in own]), (right, [(x.kept, x.recall) for x in own])):
            shown = [(kept, value) for kept, value in values if value is not None]
            middle = [value.value for _, value in shown]
            error = np.clip([[v.value - v.low for _, v in shown], [v.high - v.value for _, v in shown]], 0, None)
            axes.errorbar(
                [100 * kept for kept, _ in shown], middle, error, fmt=style, capsize=2, markersize=4, label=kind
            )
    for axes in (left, right):
        axes.axhline(0, color="#444444", linewidth=0.8)
        axes.set(xlabel="KV cache kept at 8,192 tokens, %")
    left.set(ylabel=f"rise in loss at {FRONT_LENGTH:,} tokens, nats per token")
    right.set(ylabel=f"change in recall, contexts of {RECALL_LENGTHS[-1]:,} tokens")
    left.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def budget_rows(
    menu: Menu, scores: np.ndarray, measured: Measurements, share: float, options: Any, spots: list[Spot]
) -> list[str]:
    """One row for every kind at a budget: what it costs, and what the windows cost more."""
    window: dict[int, np.ndarray] = {}
    rows = []
    kinds = options.kinds or [WINDOW, MIXED, *(kind for kind in dict.fromkeys(menu.kinds) if kind != WINDOW)]
    for kind in kinds:
        full = kind.removesuffix(QUICK)
        allocations = menu.allocations(scores, None if full == MIXED else full, kept=options.kept)
        step = allocations.within(share * menu.original_bytes)
        if step is None:
            continue
        chosen = allocations.candidate(step) if full == kind else reordered(allocations, step, measured.quick())
        saved = measured.save_plan(
            chosen, Path(options.plans) / f"{share}-{kind}{keeping(options)}.json".replace(" ", "-")
        )
        say(f"saved {saved}")
        if options.only_plans:
            continue
        cells: list[str] = []
        rises = np.zeros(1)
        for length in SHOWN:
            if length > min(LENGTHS) and kind != WINDOW and rises.mean() > HOPELESS * window[min(LENGTHS)].mean():
                cells.append("")
                continue
            rises = measured.rises(chosen, length)
            if kind == WINDOW:
                window[length] = rises
            less = interval_of(rises - window[length], rng=np.random.default_rng(0)) if kind != WINDOW else None
            cells.append(f"{rises.mean():+.3f}{f' ({less.low:+.3f} to {less.high:+.3f})' if less else ''}")
        more, recall = ([""] * len(RECALL_LENGTHS), None) if cells[-1] == "" else measured.recall(saved)
        cells += more
        kept = allocations.nbytes(step) / menu.original_bytes
        if recall is not None:
            loss = interval_of(measured.rises(chosen, FRONT_LENGTH), rng=np.random.default_rng(0))
            spots.append(Spot(kind, kept, loss, recall))
        rows.append(f"| {share:.0%} | {kind} | {kept:.1%} | {' | '.join(cells)} | {counts_of(allocations, step)} |")
        say(rows[-1])
    return rows


def keeping(options: argparse.Namespace) -> str:
    """What a plan's name says of the groups that keep softmax."""
    return f", {options.kept} kept" if options.kept else ""


def write(rows: Sequence[str], share: float, options: argparse.Namespace) -> None:
    """The section of the findings."""
    lengths = ", ".join(f"{n} of {length:,}" for length, n in LENGTHS.items())
    command = "python experiments/mixed_plans.py --fit FILE --text FILE --calibration FITTED --plans FOLDER"
    command += f" --budgets {share}"
    own = "" if options.order == "larger rank" else f" --order {options.order}"
    command += f" --kept {options.kept}" if options.kept else ""
    if options.kinds:
        command += " --kinds " + " ".join(f'"{kind}"' if " " in kind else kind for kind in options.kinds)
    columns = " | ".join([f"{n:,} tokens" for n in SHOWN] + [f"recall, {n:,} tokens" for n in RECALL_LENGTHS])
    n_columns = len(SHOWN) + len(RECALL_LENGTHS)
    header = f"| budget | kinds | bytes | {columns} | KV groups |\n|---|---|---|{'---|' * n_columns}---|\n"
    write_section(
        f"mixed_plans-longer-{share}"
        + ("" if not own else f"-{options.order}")
        + (f"-{options.kept}" * bool(options.kept)),
        f"Plans at {share:.0%} of the KV cache, with longer windows"
        + ("" if not own else f", order by {options.order}")
        + (f", softmax in {options.kept} groups" if options.kept else ""),
        f"`{command}{own} --contexts {options.contexts}` on the embedded model, calibrated on the text of the fit with "
        f"the default recipe; {machine()}. KV groups of a budget (share of the model's KV cache at 8,192 tokens) are "
        "allocated among all kinds, or among one kind alone with no more bytes, by the Fisher curvature over "
        f"{FIT_TEXTS} sequences of {FIT_LENGTH:,} tokens and {FIT_LISTS} recall lists across "
        f"{', '.join(f'{n:,}' for n in RECALL_DISTANCES)} tokens, combined by {options.order}; no output is "
        "corrected. Rise in loss in nats per token on unseen text "
        f"({lengths} tokens; the shorter lengths are beginnings), and in parentheses the 95 % interval over texts of "
        "how much more it is than that of windows alone. Recall: change of the share of first tokens by `softgap "
        f"evaluate` under the plan with its cache, distances up to the length, at most {options.contexts} contexts of "
        "12 pairs. A kind that costs "
        f"more than {HOPELESS} times as much as the windows at {min(LENGTHS):,} tokens is not measured further.\n\n"
        + header
        + "\n".join(rows),
        page=FINDINGS,
    )


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.12])
    parser.add_argument("--order", choices=tuple(ORDERS), default="larger rank")
    parser.add_argument("--kinds", nargs="+", help="only these rows, windows first")
    parser.add_argument("--contexts", type=int, default=24)
    parser.add_argument("--parts", default=None)
    parser.add_argument("--picture", help="file for a picture of loss and recall by bytes (SVG)")
    parser.add_argument("--plans", required=True, help="folder to save the plans in")
    parser.add_argument("--only-plans", action="store_true", help="save the plans and measure nothing")
    parser.add_argument("--kept", type=int, default=0, help="groups that keep softmax, those that miss it most")
    parser.add_argument("--silent", action="store_true", help="measure only; write no section")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("smollm2-135m")
    calibration = Calibration.load(options.calibration)
    fit_ids, ids = (token_ids(tokenizer, [Path(x).read_text(encoding="utf-8")]) for x in (options.fit, options.text))
    fit = cut_sequences(model, fit_ids, FIT_LENGTH, FIT_TEXTS)
    n_sequences = FIT_LISTS // len(RECALL_DISTANCES)
    lists = recall_sequences(model, tokenizer, n_sequences, seed=1, filler=fit_ids, distance=RECALL_DISTANCES)
    lists = first_tokens(lists)
    menu = Menu.of(model, calibrated_options(model, calibration.mechanism, FIT_LENGTH // 2))
    checkpoints = Checkpoints(options.parts, {"calibration": calibration.digest, "fit": digest_of_sequences(fit)})
    by_text, by_recall = (scored(model, x, menu, name, checkpoints) for x, name in ((fit, "text"), (lists, "lists")))
    scores = ORDERS[options.order](by_text, by_recall)
    measured = Measurements(model, tokenizer, fit_ids, ids, checkpoints, options)
    spots: list[Spot] = []
    for share in options.budgets:
        rows = budget_rows(menu, scores, measured, share, options, spots)
        if not options.silent and not options.only_plans:
            write(rows, share, options)
    if options.picture:
        draw_front(spots, options.picture)


if __name__ == "__main__":
    main()
