"""A string is one item wherever a public function takes several, or it is refused; never a row of characters."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import softgap
from softgap import stats
from softgap.analysis import Preregistration
from softgap.attention import Mechanism
from softgap.attention.synthetic import measure, synthetic_head
from softgap.errors import SoftgapError
from softgap.inputs import as_items
from softgap.linearize import (
    Generation,
    Sequences,
    find_plan,
    frontier,
    head_scores,
    impact,
    recall_sequences,
    split_sequences,
)
from softgap.probe import head_anatomy, read_ids, run_anatomy
from softgap.report import Table, write_explorer
from softgap.stats import confirmation_split
from softgap.study import StudySettings, plan_study, run_study
from softgap.tasks import Prompt
from softgap.theory import position_lab
from softgap.trajectories import StudyWriter, inputs_digest
from support.linearize_cases import sharp_llama
from support.model_examples import byte_tokenizer

TEXT = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(40))
IDS = [5, 9, 4, 12, 7, 31, 8, 6]
RNG = np.random.default_rng(0)
UNTYPED: Any = softgap  # for calls that the type checker would refuse
# Made by softgap out of what it measured: nobody types these.
RESULTS = {
    "Anatomy", "ComparisonFindings", "Contrast", "Impact", "Kappa", "LabelNoise", "ModelFocus", "ModelInjectivity",
    "Study", "unknown_name", "Document", "Evaluation", "Export", "Sufficiency",
}  # fmt: skip


class _Reached(Exception):
    """The items that arrived where they are used."""


def sequences_of_strings() -> set[tuple[str, str]]:
    """Every parameter of a public function or class that takes several strings, by what its annotation says."""
    several = re.compile(
        r"(Sequence|Iterable|Collection|list|tuple|set|frozenset)\[[^\]]*\bstr\b|\bMechanisms\b"
        r"|Prompt \| Sequence\[Prompt\]"
    )
    packages = [
        *softgap._PACKAGES,
        *(f"theory.{lab}" for lab in ("focus", "injectivity", "separation", "position", "locality")),
    ]
    found = set()
    for package in packages:
        module = importlib.import_module(f"softgap.{package}")
        for name in module.__all__:
            thing = getattr(module, name)
            if name in RESULTS or not callable(thing):
                continue
            own = vars(thing).items() if inspect.isclass(thing) else ()
            methods = [(f"{name}.{key}", x) for key, x in own if inspect.isfunction(x)]
            for called, function in [(name, thing), *methods]:
                try:
                    parameters = inspect.signature(function).parameters.values()
                except (TypeError, ValueError):
                    continue
                if called.startswith("_") or "._" in called:
                    continue
                found |= {(called, p.name) for p in parameters if several.search(str(p.annotation))}
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return sharp_llama(max_position_embeddings=512).float()


def passages() -> Sequences:
    return Sequences(torch.tensor([IDS] * 4), torch.ones(4, len(IDS) - 1, dtype=torch.bool))


def same(make: Callable[[Any], Any], one: Any) -> Callable[[Any], None]:
    """One item alone gives what a list with it gives."""

    def check(model: Any) -> None:
        assert make(model)(one) == make(model)([one])

    return check


def refused(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def check(model: Any) -> None:
        with pytest.raises(SoftgapError, match=r"must be a list .*, got the (string|text) '"):
            make(model)("abc")

    return check


def named(model: Any, mechanisms: Any) -> Any:
    return [x.name for x in softgap.Recording(model, mechanisms).mechanisms]


def numbers(run: Any) -> Any:
    return run.mechanisms, run.divergence.tolist(), run.tokens


def _weights(heads: Any) -> Any:
    return [(head.mechanisms, head.weights.tolist()) for head in heads]


def _read(model: Any) -> Any:
    return softgap.read(model, byte_tokenizer(), "Boat", mechanisms=["elu1"])


def runs(found: Any) -> Any:
    return [numbers(run) for run in as_items(found)]


def words(function: Callable[[], Any]) -> str:
    """The result, or the sentence about it: a wrong name is refused by its whole name, alone as in a list."""
    try:
        return repr(function())
    except SoftgapError as error:
        return str(error)


def wrong(make: Callable[[Any], Callable[[Any], Any]]) -> Callable[[Any], None]:
    """A name that is not known is refused as a whole."""

    def check(model: Any) -> None:
        alone, listed = (words(partial(make(model), given)) for given in ("nonsuch", ["nonsuch"]))
        assert alone == listed
        assert "'nonsuch'" in alone

    return check


def arrived(package: str, name: str, call: Callable[[Any], Callable[[Any], Any]]) -> Callable[[Any], None]:
    """The function inside that uses the items is given one of them."""

    def check(model: Any) -> None:
        seen: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:

            def look(*given: Any, **settings: Any) -> Any:
                seen.append((given, settings))
                raise _Reached

            patch.setattr(importlib.import_module(f"softgap.{package}"), name, look)
            for given in ("Boat 3", ["Boat 3"]):
                with pytest.raises(_Reached):
                    call(model)(given)
        assert repr(seen[0][0]) == repr(seen[1][0])

    return check


def plans(field: str, value: str) -> Callable[[Any], None]:
    return same(lambda model: lambda given: Preregistration(**{field: given}).to_json(), value)


def mechanism(field: str) -> Callable[[Any], None]:
    made = {"name": "mine", "formula": "1", "paper": "none", "kind": "constant"}
    return same(lambda model: lambda given: getattr(Mechanism(**made, **{field: given}), field), "table")  # type: ignore[arg-type]


def ids_of(model: Any) -> Callable[[Any], Any]:
    return lambda texts: split_sequences(model, byte_tokenizer(), texts, length=32).ids.tolist()


def tokens_of(model: Any) -> Callable[[Any], Any]:
    run = softgap.read(model, byte_tokenizer(), "abcd")
    return lambda given: replace(run, tokens=given)


def mechanisms_of(model: Any) -> Callable[[Any], Any]:
    run = softgap.read(model, byte_tokenizer(), "abcd", mechanisms=["elu1"])
    return lambda given: replace(run, mechanisms=given)


def theory(name: str, parameter: str = "mechanisms", *given: Any, **settings: Any) -> Callable[[Any], None]:
    place = softgap.theory if hasattr(softgap.theory, name) else softgap.theory.separation
    function = getattr(place, name)
    return wrong(lambda model: lambda names: function(*given, **{parameter: names}, **settings))


def in_model(name: str) -> Callable[[Any], None]:
    function = getattr(softgap.theory, name)
    return wrong(lambda model: lambda names: function(model, IDS * 16, rng=RNG, mechanisms=names))


def built() -> Any:
    return importlib.import_module("softgap.theory.separation").construct(n=16, t=1, a1=0.7)


def axes() -> Any:
    return importlib.import_module("softgap.theory.separation").parse_axes("d,b")


CASES: dict[tuple[str, str], Callable[[Any], None]] = {
    ("Preregistration", "between"): lambda model: _one_group(),
    ("Preregistration", "mechanisms"): plans("mechanisms", "elu1"),
    ("Preregistration", "features"): plans("features", "mean"),
    ("Preregistration", "transforms"): plans("transforms", "diff"),
    ("Preregistration", "segments"): plans("segments", "early"),
    ("Preregistration", "match"): plans("match", "length"),
    ("Preregistration", "strata"): plans("strata", "topic"),
    ("Generation", "prompts"): refused(
        lambda model: lambda given: Generation(given, ("b",), ((1,),), (1,), 0.1, 0.1, 1, 2, 3.0)
    ),
    ("Generation", "texts"): refused(
        lambda model: lambda given: Generation(("a",), given, ((1,),), (1,), 0.1, 0.1, 1, 2, 3.0)
    ),
    ("Mechanism", "needs"): mechanism("needs"),
    ("Mechanism", "accepts"): mechanism("accepts"),
    ("Prompt", "reference"): same(lambda model: lambda given: Prompt("0", "Capital?", reference=given), "Paris"),
    ("Recording", "mechanisms"): same(lambda model: lambda given: named(model, given), "elu1"),
    ("StudySettings", "mechanisms"): same(lambda model: lambda given: StudySettings(mechanisms=given), "elu1"),
    ("StudyWriter.adopt", "ids"): refused(lambda model: lambda given: StudyWriter.adopt(None, 0, given)),  # type: ignore[arg-type]
    ("Table", "columns"): same(lambda model: lambda given: Table(given, (("a",),)), "loss"),
    ("Trajectories", "mechanisms"): refused(mechanisms_of),
    ("Trajectories", "tokens"): refused(tokens_of),
    ("calibrate", "texts"): arrived(
        "calibration.texts", "_fit_sequences", lambda model: lambda given: _calibrated(model, given)
    ),
    ("confirmation_split", "clusters"): refused(
        lambda model: lambda given: confirmation_split(["1", "2", "3"], clusters=given)
    ),
    ("confirmation_split", "ids"): refused(lambda model: confirmation_split),
    ("doctor", "gates"): wrong(lambda model: lambda given: softgap.doctor(model, gates=given)),
    ("evaluate", "questions"): refused(
        lambda model: lambda given: softgap.evaluate(model, byte_tokenizer(), [], questions=given)
    ),
    ("evaluate", "tasks"): wrong(
        lambda model: lambda given: softgap.evaluate(model, byte_tokenizer(), given, lengths=[128], contexts=1)
    ),
    ("evaluate", "texts"): same(
        lambda model: (
            lambda given: softgap.evaluate(model, byte_tokenizer(), "loss", texts=given, lengths=[128], contexts=1).rows
        ),
        TEXT,
    ),
    ("explorer", "samples"): wrong(lambda model: lambda given: _explored(given)),
    ("find_plan", "mechanism"): wrong(
        lambda model: lambda given: find_plan(model, byte_tokenizer(), [TEXT], given, budget=1, length=64, recalls=0)
    ),
    ("find_plan", "texts"): arrived(
        "linearize.search", "head_scores", lambda model: lambda given: _planned(model, given)
    ),
    ("focus_in_model", "mechanisms"): in_model("focus_in_model"),
    ("focus_lab", "mechanisms"): theory("focus_lab", rng=RNG),
    ("frontier", "orders"): wrong(
        lambda model: lambda given: frontier(model, passages(), passages(), None, "elu1", orders=given)
    ),
    ("generate", "mechanisms"): same(
        lambda model: lambda given: numbers(softgap.generate(model, byte_tokenizer(), "Boat", 2, mechanisms=given)),
        "elu1",
    ),
    ("generate", "prompt"): same(
        lambda model: lambda given: runs(UNTYPED.generate(model, byte_tokenizer(), given, 2)), "Boat"
    ),
    ("head_scores", "names"): wrong(lambda model: lambda given: head_scores(model, passages(), "elu1", names=given)),
    ("head_anatomy", "mechanisms"): same(
        lambda model: lambda given: _weights(head_anatomy(model, IDS, "0.0", given)), "elu1"
    ),
    ("impact", "baselines"): wrong(
        lambda model: lambda given: impact(model, byte_tokenizer(), [TEXT], length=64, baselines=given)
    ),
    ("impact", "texts"): arrived(
        "linearize.impact", "impact_on", lambda model: lambda given: impact(model, byte_tokenizer(), _as(given, TEXT))
    ),
    ("injectivity_in_model", "mechanisms"): in_model("injectivity_in_model"),
    ("injectivity_lab", "mechanisms"): theory("injectivity_lab", rng=RNG),
    ("inputs_digest", "texts"): same(lambda model: inputs_digest, "a text"),
    ("evaluate_held_out", "mechanisms"): same(
        lambda model: lambda given: words(lambda: softgap.calibration.evaluate_held_out(model, [IDS], given)), "fitted"
    ),
    ("split_sequences", "texts"): same(ids_of, TEXT),
    ("locality_in_model", "mechanisms"): in_model("locality_in_model"),
    ("locality_lab", "tasks"): wrong(
        lambda model: lambda given: UNTYPED.theory.locality_lab(rng=np.random.default_rng(0), train=True, tasks=given)
    ),
    ("lm_eval", "tasks"): wrong(
        lambda model: lambda given: softgap.evaluation.lm_eval(model, byte_tokenizer(), given, limit=1)
    ),
    ("phase_maps", "names"): wrong(
        lambda model: lambda given: UNTYPED.theory.separation.phase_maps(given, *axes(), {}, 2, rng=RNG)
    ),
    ("position_in_model", "mechanisms"): in_model("position_in_model"),
    ("position_lab", "mechanisms"): same(
        lambda model: lambda given: _settled(position_lab(rng=np.random.default_rng(0), heads=8, mechanisms=given)),
        "elu1",
    ),
    ("probe_outputs", "names"): wrong(
        lambda model: lambda given: softgap.theory.separation.probe_outputs(given, built(), 8, rng=RNG)
    ),
    ("read", "completion"): same(
        lambda model: lambda given: runs(UNTYPED.read(model, byte_tokenizer(), _as(given, "Boat"), given)), " left"
    ),
    ("read", "mechanisms"): same(
        lambda model: lambda given: numbers(softgap.read(model, byte_tokenizer(), "Boat", mechanisms=given)), "elu1"
    ),
    ("read", "text"): same(lambda model: lambda given: runs(UNTYPED.read(model, byte_tokenizer(), given)), "Boat"),
    ("run_anatomy", "mechanisms"): same(
        lambda model: lambda given: _weights(run_anatomy(model, byte_tokenizer(), _read(model), "0.0", given)), "elu1"
    ),
    ("read_ids", "mechanisms"): same(
        lambda model: lambda given: numbers(read_ids(model, [IDS], mechanisms=given)[0]), "elu1"
    ),
    ("recall_scores", "names"): wrong(
        lambda model: (
            lambda given: softgap.linearize.recall_scores(
                model, recall_sequences(model, byte_tokenizer(), 1, pairs=2), "window:w=2,sinks=1", names=given
            )
        )
    ),
    ("record", "mechanisms"): same(lambda model: lambda given: _recorded(model, given), "elu1"),
    ("separation_lab", "mapped"): theory("separation_lab", "mapped", {"n": 16, "t": 1, "a1": 0.7}, rng=RNG, draws=2),
    ("separation_lab", "mechanisms"): theory("separation_lab", "mechanisms", rng=RNG),
    ("train_all", "mechanisms"): theory("train_all"),
    ("train_all", "tasks"): theory("train_all", "tasks"),
    ("trials", "names"): wrong(
        lambda model: lambda given: softgap.theory.separation.trials(given, built(), 2, rng=RNG)
    ),
    ("verdict", "joint"): same(lambda model: _judged_under, "confirmation"),
    ("write_explorer", "heads"): wrong(lambda model: lambda given: _explored((), heads=given)),
    ("write_explorer", "samples"): wrong(lambda model: lambda given: _explored(given)),
}


def _as(given: Any, text: str) -> Any:
    return text if isinstance(given, str) else [text]


def _one_group() -> None:
    with pytest.raises(SoftgapError, match=r"between must name two groups, got \['right'\]"):
        Preregistration(between="right")  # type: ignore[arg-type]


def _judged_under(joint: Any) -> Any:
    """Separated by the joint control alone: the two comparisons find different units."""
    labels = np.arange(200) < 100
    tables = [np.random.default_rng(seed).standard_normal((200, 4)) for seed in (0, 1)]
    for unit, table in enumerate(tables):
        table[labels, unit] += 2
    first, again = (stats.compare_table(x, labels, permutations=99, rng=np.random.default_rng(2)) for x in tables)
    return stats.verdict(first, margin=1.0, controls={"confirmation": again}, joint=joint).outcome


def _calibrated(model: Any, given: Any) -> Any:
    return softgap.calibrate(model, byte_tokenizer(), _as(given, TEXT * 4))


def _planned(model: Any, given: Any) -> Any:
    return find_plan(model, byte_tokenizer(), _as(given, TEXT), "elu1", budget=1, length=64, recalls=0)


def _recorded(model: Any, given: Any) -> Any:
    with softgap.record(model, given) as recording:
        model(torch.tensor([IDS]))
    return numbers(recording.trajectories()[0])


def _settled(found: Any) -> Any:
    return repr(found.settings), repr(found.trends)


def _explored(samples: Any, **settings: Any) -> Any:
    import tempfile
    from pathlib import Path

    from support.trajectory_examples import example_run

    with tempfile.TemporaryDirectory() as folder:
        example_run().save(Path(folder) / "study")
        return words(lambda: write_explorer(Path(folder) / "study", samples=samples, **settings)).replace(folder, "")


@pytest.mark.parametrize(("function", "parameter"), sorted(CASES))
def test_a_string_is_one_item(model: Any, function: str, parameter: str) -> None:
    CASES[function, parameter](model)


def test_every_public_argument_that_takes_several_strings_is_here() -> None:
    assert sequences_of_strings() == set(CASES)


def test_prompts_of_a_study_are_prompts() -> None:
    for call in (lambda: run_study("abc", "out"), lambda: plan_study("abc", (None, None), StudySettings())):  # type: ignore[arg-type]
        with pytest.raises(SoftgapError, match=r"prompts must be a list with softgap\.tasks\.Prompt obj"):
            call()


def test_a_synthetic_head_is_measured_by_one_name() -> None:
    assert measure(synthetic_head(length=8, dim=4), "elu1") == measure(synthetic_head(length=8, dim=4), ["elu1"])


@pytest.mark.parametrize(
    ("given", "items"),
    [("elu1", ("elu1",)), (["a", "b"], ("a", "b")), ((), ()), (3, (3,)), (iter("ab"), ("a", "b")), (b"ab", (b"ab",))],
)
def test_items(given: Any, items: Any) -> None:
    assert as_items(given) == items
