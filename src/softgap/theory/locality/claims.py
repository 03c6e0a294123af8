"""Verdicts of the locality lab, each read from the numbers of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from softgap.intervals import Interval
from softgap.theory.lab import Claim, Verdict
from softgap.theory.locality.ablation import Ablation, Arm
from softgap.theory.locality.dependence import MASKS, passing, t_test_p
from softgap.theory.locality.masks import MaskKind
from softgap.theory.locality.residuals import ALONE, KEYS, VALUES, WINDOW
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    from softgap.theory.locality.lab import Locality, ModelLocality

__all__ = ["claims_of_model", "claims_of_synthetic"]


_HAN = "Han et al. 2024, arXiv:2412.06590"


# Accuracies and shares that differ by less are called the same.
_SAME = 0.02


_ONE_TEXT = "one text says nothing about other texts; give a longer file with --text, so that it holds 8 texts or more"


def claims_of_synthetic(lab: Locality) -> tuple[Claim, ...]:
    """The test on planted heads, then what trained models say."""
    claims = [_planted(lab)]
    for ablation in lab.trained:
        if ablation.assignment.task == "mixed":
            claims += [_local_residual(ablation), _injectivity(ablation), _window(ablation), _kernel(ablation)]
        else:
            claims.append(_key_convolution(ablation))
    return tuple(claims)


def _planted(lab: Locality) -> Claim:
    right = [label == truth for label, truth in zip(lab.planted.labels, lab.truth, strict=True)]
    share = float(np.mean(right))
    return Claim(
        "planted heads",
        "softgap",
        "Masks of equal removed mass and of equally many keys tell local heads from heavy ones and from neither.",
        "holds" if share > 0.95 else "does not hold",
        "in place of a loss stands the change of a head's output",
        {
            "right": sum(right),
            "heads": len(right),
            **{
                f"{truth}: rise by {kind}": float(lab.planted.mean(kind)[[t == truth for t in lab.truth]].mean())
                for truth in dict.fromkeys(lab.truth)
                for kind in MASKS
            },
        },
    )


def _sign(difference: Interval) -> Verdict:
    """Whether a difference is above 0, or at most so small that it does not count."""
    if difference.low > 0:
        return "holds"
    return "does not hold" if difference.high < _SAME else "not decided"


def _split_claim(name: str, source: str, statement: str, differences: dict[str, Interval]) -> Claim:
    """The verdict on the first difference; where only some of the conditions behind it hold, they are named."""
    overall, *conditions = differences
    verdict = _sign(differences[overall])
    signs = {words: _sign(differences[words]) for words in conditions}
    condition = ""
    if {"holds", "does not hold"} <= set(signs.values()):
        verdict = "holds only when"
        condition = " or ".join(words for words, sign in signs.items() if sign == "holds")
    elif verdict == "not decided":
        condition = "the interval of the difference holds 0"
        if np.isnan(differences[overall].low):
            condition = "one seed has no interval"
    elif "not decided" in signs.values():
        condition = "not decided where " + " or ".join(words for words, sign in signs.items() if sign == "not decided")
    numbers = {
        f"{words}{key}": value
        for words, d in differences.items()
        for key, value in (("", d.value), (" at least", d.low), (" at most", d.high))
    }
    return Claim(name, source, statement, verdict, condition, numbers)


def _linear(ablation: Ablation, residual: str, injective: bool | None = None, window: int | None = None) -> list[Arm]:
    return [
        arm
        for arm in ablation.arms
        if arm.kernel != "softmax"
        and arm.residual == residual
        and injective in (None, arm.injective)
        and window in (None, arm.window)
    ]


def _local_residual(ablation: Ablation) -> Claim:
    def effect(injective: bool | None, part: str = "score") -> Interval:
        with_values = _linear(ablation, "values", injective)
        pairs = [(arm, Arm(arm.kernel, arm.injective, arm.window)) for arm in with_values]
        return ablation.difference(pairs, part)

    softmax = [arm for arm in ablation.arms if arm.kernel == "softmax" and arm.residual == "values"]
    claim = _split_claim(
        "trained local residual",
        _HAN,
        "A local residual raises the accuracy of trained linear attention.",
        {
            "all": effect(None),
            "the weights are injective": effect(True),
            "the weights are divided by their sum": effect(False),
        },
    )
    more = {
        "of the local part": effect(None, "before").value,
        "of the global part": effect(None, "recall").value,
        "of softmax": ablation.difference([(arm, Arm("softmax", False, arm.window)) for arm in softmax]).value,
    }
    return Claim(claim.name, claim.source, claim.statement, claim.verdict, claim.condition, {**claim.numbers, **more})


def _injectivity(ablation: Ablation) -> Claim:
    def effect(kernels: Sequence[str] | None) -> Interval:
        arms = [arm for residual in ("none", "values") for arm in _linear(ablation, residual, True)]
        arms = [arm for arm in arms if kernels is None or arm.kernel in kernels]
        return ablation.difference([(arm, Arm(arm.kernel, False, arm.window, arm.residual)) for arm in arms])

    return _split_claim(
        "trained injectivity",
        _HAN,
        "Injective weights raise the accuracy of trained linear attention.",
        {
            "all": effect(None),
            "the kernel is relu or relu(Ax + b)": effect(("relu", "relu_affine")),
            "the kernel may be negative": effect(("leaky_relu", "identity")),
        },
    )


def _window(ablation: Ablation) -> Claim:
    narrow = min((arm.window for arm in ablation.arms if arm.window), default=0)

    def effect(injective: bool | None) -> Interval:
        arms = [a for r in ("none", "values") for a in _linear(ablation, r, injective, 0)]
        pairs = [(arm, Arm(arm.kernel, arm.injective, narrow, arm.residual)) for arm in arms]
        return ablation.difference(pairs if narrow else [])

    return _split_claim(
        "trained window",
        _HAN,
        f"Linear attention over all keys is more accurate than over the last {narrow}.",
        {
            "all": effect(None),
            "the weights are injective": effect(True),
            "the weights are divided by their sum": effect(False),
        },
    )


def _kernel(ablation: Ablation) -> Claim:
    """The spread of injective arms with a residual over all keys, between their kernels."""
    arms = _linear(ablation, "values", True, 0)
    scores = {arm.kernel: float(np.mean(ablation.scores(arm))) for arm in arms}
    spread = max(scores.values()) - min(scores.values())
    softmax = float(np.mean(ablation.scores(Arm("softmax", False, 0, "values"))))
    return Claim(
        "trained kernel",
        _HAN,
        "With injective weights and a local residual the kernel hardly matters.",
        "holds" if spread < _SAME else "does not hold",
        "the spread of mean accuracies between kernels, without an interval",
        {"spread": spread, **scores, "softmax": softmax},
    )


def _key_convolution(ablation: Ablation) -> Claim:
    def effect(arms: Sequence[Arm], rival: str) -> Interval:
        return ablation.difference([(arm, Arm(arm.kernel, arm.injective, 0, rival)) for arm in arms])

    keys = [arm for arm in ablation.arms if arm.residual == "keys"]
    claim = _split_claim(
        "trained key convolution",
        "Su, kexue.fm, on short convolutions in linear attention",
        "Where a value must be bound to the key before it, a short convolution on the keys raises the accuracy.",
        {
            "all": effect(keys, "none"),
            **{f"the attention is {arm.label.partition(', residual')[0]}": effect([arm], "none") for arm in keys},
        },
    )
    beside = effect(keys, "values")
    more = {"against one on values": beside.value, "at least ": beside.low, "at most ": beside.high}
    scores = {arm.label: float(np.mean(ablation.scores(arm))) for arm in ablation.arms}
    return Claim(
        claim.name, claim.source, claim.statement, claim.verdict, claim.condition, {**claim.numbers, **more, **scores}
    )


def claims_of_model(lab: ModelLocality) -> tuple[Claim, ...]:
    """One claim after the other."""
    claims = [_mass(lab), _together(lab)]
    claims += [*_one_head(lab), _closes_gap(lab), _adds_to_residual(lab), *_confusion(lab), _keys_in_heads(lab)]
    return tuple(claims)


def _mass(lab: ModelLocality) -> Claim:
    place = lab.widths.index(lab.settings["width"]) if lab.settings["width"] in lab.widths else 0
    above = lab.share[:, place] - lab.even[:, place]
    verdict: Verdict = "not decided"
    condition, count = _ONE_TEXT, float("nan")
    if len(above) > 1:
        local = passing(t_test_p(above))
        count = float(local.sum())
        verdict = "holds" if local.all() else "holds only when" if local.any() else "does not hold"
        condition = f"the head is one of {int(count)} of {local.size}" if verdict == "holds only when" else ""
    return Claim(
        "local mass",
        _HAN,
        f"The last {lab.widths[place]} keys hold more of a head's mass, sink and self left out, than an even spread.",
        verdict,
        condition,
        {
            "heads": above.shape[-1],
            "heads above even": count,
            **{
                f"{words}, last {w}": float(values[:, i].mean())
                for i, w in enumerate(lab.widths)
                for words, values in (("share", lab.share), ("even", lab.even))
            },
        },
    )


def _together(lab: ModelLocality) -> Claim:
    local, far = (lab.together[kind][..., 0] for kind in ("local", "equal mass"))
    verdict: Verdict = "not decided"
    if len(local) > 1:
        rises = np.array([t_test_p(local[:, i] - far[:, i]) for i in range(len(lab.widths))])
        falls = np.array([t_test_p(far[:, i] - local[:, i]) for i in range(len(lab.widths))])
        level = 0.05 / len(lab.widths)
        verdict = "holds" if (rises < level).all() else "does not hold" if (falls < level).any() else "not decided"
    condition = "off the model's distribution: no head is ever without its last keys in all others"
    return Claim(
        "all heads at once",
        f"{_HAN}, masked one by one in images",
        "Masking the last w keys in all heads costs more than masking far keys of equal mass, for every w.",
        verdict,
        condition if len(local) > 1 else _ONE_TEXT,
        {
            "loss": float(lab.loss.mean()),
            **{
                f"{kind}, w = {w}": float(values[:, i, 0].mean())
                for kind, values in lab.together.items()
                for i, w in enumerate(lab.widths)
            },
        },
    )


def _one_head(lab: ModelLocality) -> list[Claim]:
    dependence = lab.dependence
    if dependence is None:
        return []
    labels = ", ".join(f"{dependence.count(label)} {label}" for label in ("local", "heavy", "neither"))
    rises = {f"mean rise, {kind}": float(dependence.mean(kind).mean()) for kind in MASKS}
    removed = {f"mass removed, {kind}": float(dependence.removed[:, i].mean()) for i, kind in enumerate(MASKS)}
    width = dependence.width
    statements: dict[MaskKind, str] = {
        "equal mass": f"Over heads, hiding the last {width} keys of one costs more than hiding far keys of equal mass.",
        "heaviest": f"Over heads, hiding the last {width} keys of one costs more than its {width} heaviest far keys.",
    }
    claims = []
    for kind, statement in statements.items():
        excess = lab.excess[kind]
        verdict: Verdict = "holds" if excess.low > 0 else "does not hold" if excess.high < 0 else "not decided"
        condition = f"head by head: {labels}"
        if len(dependence.rise) < 2:
            verdict, condition = "not decided", _ONE_TEXT
        numbers = {"difference": excess.value, "at least": excess.low, "at most": excess.high, **rises, **removed}
        name = "one head, equal mass" if kind == "equal mass" else "one head, equal number"
        claims.append(Claim(name, _HAN, statement, verdict, condition, numbers))
    return claims


def _closes_gap(lab: ModelLocality) -> Claim:
    numbers, verdicts = {}, {}
    for residual in lab.residuals:
        words = f"{residual.mechanism} {residual.kind}"
        if residual.kind in (VALUES, WINDOW) and residual.mechanism not in (BASELINE, "none"):
            rest = residual.of_rest
            verdicts[words] = "holds" if rest.low > 0.5 else "does not hold" if rest.high < 0.5 else "not decided"
            numbers[words] = rest.value
    verdict, condition = _summary(verdicts)
    return Claim(
        "local residual closes the gap",
        _HAN,
        f"A local residual of {lab.settings['width']} values or keys closes most of what linear attention leaves open.",
        verdict,
        condition,
        numbers,
    )


def _adds_to_residual(lab: ModelLocality) -> Claim:
    numbers, verdicts = {}, {}
    for residual in lab.residuals:
        if residual.kind in (VALUES, WINDOW) and residual.mechanism not in (BASELINE, "none"):
            words = f"{residual.mechanism} {residual.kind}"
            verdicts[words] = _sign(residual.over_uniform)
            numbers[words] = residual.over_uniform.value
    verdict, condition = _summary(verdicts)
    return Claim(
        "linear part beside a residual",
        "softgap",
        "Beside a local residual, linear attention closes more of the gap than the mean of values does.",
        verdict,
        condition,
        numbers,
    )


def _summary(verdicts: dict[str, Verdict] | dict[str, str]) -> tuple[Verdict, str]:
    """One verdict for several cases."""
    holding = [words for words, verdict in verdicts.items() if verdict == "holds"]
    if holding and len(holding) < len(verdicts):
        return "holds only when", "it is " + " or ".join(holding)
    if holding:
        return "holds", ""
    if verdicts and all(verdict == "does not hold" for verdict in verdicts.values()):
        return "does not hold", ""
    return "not decided", "some intervals hold the limit"


def _confusion(lab: ModelLocality) -> list[Claim]:
    means = {name: float(np.nanmean(rates)) for name, rates in lab.confusion.items()}
    linear = {name: interval for name, interval in lab.confused.items() if not name.startswith("inline")}
    verdict, condition = _summary({name: _more(interval) for name, interval in linear.items()})
    claims = [
        Claim(
            "confusion of linear attention",
            _HAN,
            "Linear attention confuses queries more often than softmax.",
            verdict,
            condition,
            {**means, **{f"{name} minus softmax at least": i.low for name, i in linear.items()}},
        )
    ]
    inline = lab.confused.get("inline")
    if inline is not None:
        more: Verdict = "holds" if inline.high < 0 else "does not hold" if inline.low > 0 else "not decided"
        claims.append(
            Claim(
                "confusion of InLine attention",
                _HAN,
                "Injective linear attention confuses queries no more often than softmax.",
                more,
                "" if more != "not decided" else "the interval of the difference holds 0",
                {
                    "inline": means["inline"],
                    "softmax": means["softmax"],
                    "at least": inline.low,
                    "at most": inline.high,
                },
            )
        )
    return claims


def _more(interval: Interval) -> Verdict:
    return "holds" if interval.low > 0 else "does not hold" if interval.high < 0 else "not decided"


def _keys_in_heads(lab: ModelLocality) -> Claim:
    numbers: dict[str, float] = {}
    verdicts: dict[str, Verdict] = {}
    for residual in lab.residuals:
        plain = lab.residual(residual.mechanism, ALONE)
        if residual.kind != KEYS or plain is None:
            continue
        gain = plain.divergence - residual.divergence
        verdicts[residual.mechanism] = _sign(residual.of_rest)
        if len(gain) > 1:
            numbers[f"heads helped, {residual.mechanism}"] = float(passing(t_test_p(gain)).sum())
        numbers |= {
            f"gap closed without, {residual.mechanism}": plain.gap_closed.value,
            f"with, {residual.mechanism}": residual.gap_closed.value,
        }
    verdict, condition = _summary(verdicts)
    return Claim(
        "key convolution",
        "Su, kexue.fm, on short convolutions in linear attention",
        "A short convolution on the keys brings the linear attention of heads nearer to the model's own.",
        verdict,
        condition,
        numbers,
    )
