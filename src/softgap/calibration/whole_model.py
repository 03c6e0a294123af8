"""Calibrate a model: fit every layer, evaluate on held-out text, save; and the Calibration that results."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softgap.attention import Mechanism, resolve
from softgap.attention.memory import SINKS, equal_window
from softgap.attention.rotary import Rotation
from softgap.calibration.activations import Activations, LayerSite, gather
from softgap.calibration.conditions import evaluate_conditions
from softgap.calibration.fit import Maps, Recipe, RowPlan
from softgap.calibration.held_out import HeldOut, evaluate_held_out, held_layers, some_layers, spread_layers
from softgap.calibration.layers import FittedLayers, fit_layers, single_threaded_torch, steps_within
from softgap.calibration.memory_ladder import Division, MemoryLadder, choose_division, climb_memory
from softgap.calibration.rank_floor import Ladders, ladders
from softgap.calibration.sufficiency import LIMIT, Sufficiency, check_limit, label_heads
from softgap.calibration.texts import (
    Corpus,
    check_positions,
    context_of,
    corpus_of,
    generate_texts,
    mix_generated,
    quick_corpus,
    tokens_needed,
)
from softgap.checkpoints import Checkpoints, checkpoint_folder, last_step, one_writer
from softgap.cluster import check_engine
from softgap.deprecation import DeprecatedAttribute
from softgap.errors import StoreError, ValueInputError
from softgap.intervals import Interval
from softgap.kinds import KINDS
from softgap.models.fingerprint import library_versions, model_fingerprint, rounded_fingerprints
from softgap.models.loading import Model, Tokenizer
from softgap.models.support import check_measurable
from softgap.models.tensor_files import (
    StoredCalibration,
    calibration_path,
    digest_of,
    held_out_summary,
    load_calibration,
    save_calibration,
)
from softgap.probe.layout import layer_rotations
from softgap.progress import Progress, partial_progress, silent
from softgap.trajectories.validation import BASELINE

__all__ = ["QUICK", "REFERENCE_MECHANISMS", "Calibration", "calibrate", "calibration_tensors"]


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What ``softgap.calibrate`` found for a model.

    Attributes
    ----------
    tensors
        Parameters by ``mechanism.parameter``, each ``[layer, head, ...]``: of ``fitted``, and of the baselines
        ``constant`` and ``profile``, taken from the same text.
    metadata
        Model, fingerprint, recipe, hash of the text, versions, threads. No times: equal settings give equal bytes.
    held_out
        How far the gap is closed on text that the fit never saw.
    conditions
        The same by condition: the text of the fit, other kinds of text, with a BOS token, as a chat message, at random
        offsets.
    ladders
        From the mean of values to softmax, by output and by weights, and the rank floor.
    curve
        The share of the gap closed by number of features, by short fits in a few layers.
    sufficiency
        The cheapest kind of substitute that suffices for each head; None in files of version 0.1.
    memory_ladder
        Window, fitted map and hybrid at equal memory, by short fits in a few layers; None in files of version 0.1.

    Notes
    -----
    In a quick calibration ``conditions``, ``curve`` and the rungs of ``ladders`` are empty, and ``memory_ladder`` is
    None.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    held_out: HeldOut
    conditions: Mapping[str, Interval]
    ladders: Ladders
    curve: Mapping[str, Interval]
    sufficiency: Sufficiency | None = None
    memory_ladder: MemoryLadder | None = None

    elsewhere = DeprecatedAttribute("conditions")

    def __repr__(self) -> str:
        summary = held_out_summary(self.held_out.to_json())
        words = {
            "gap_closed": "gap closed",
            "against_profile": "of the gap that profile leaves",
            "explained": "energy explained",
            "explained_uniform": "by uniform",
            "rank_correlation": "rank correlation of the two over heads",
        }
        numbers = ", ".join(f"{words[name]} {value:.2f}" for name, value in summary.items())
        return f"Calibration({self.metadata.get('model')}: {numbers}; held-out text)"

    def mechanism(self, name: str = "fitted") -> Mechanism:
        """The mechanism of this name with its parameters, to be given wherever a mechanism is.

        Parameters
        ----------
        name
            ``"fitted"``, or a baseline that was measured on the same text: ``"constant"`` or ``"profile"``.

        Returns
        -------
        Mechanism
            With parameters for every layer and head of the model.

        Examples
        --------
        ``fitted.safetensors`` is a file that ``softgap calibrate`` wrote:

        >>> import softgap
        >>> calibration = softgap.Calibration.load("fitted.safetensors")
        >>> calibration.mechanism(), calibration.mechanism("profile")
        (Mechanism(fitted), Mechanism(profile))
        """
        return StoredCalibration(self.tensors, self.metadata, self.digest).equip(name)

    @property
    def digest(self) -> str:
        """Hash of the parameters."""
        return str(self.metadata["digest"])

    @property
    def fingerprint(self) -> str:
        """The model that it belongs to."""
        return str(self.metadata["fingerprint"])

    @property
    def quick(self) -> bool:
        """Whether it was made in a hurry: fewer steps, little text, and no more than the labels measured."""
        return bool(self.metadata.get("quick"))

    def save(self, path: str | Path | None = None) -> Path:
        """Write it to a file; without one, to the cache, where every part of softgap finds it by the model.

        Parameters
        ----------
        path
            The file; None for the cache.

        Returns
        -------
        Path
            Where it was written.

        Examples
        --------
        ``fitted.safetensors`` is a file that ``softgap calibrate`` wrote:

        >>> import softgap
        >>> softgap.Calibration.load("fitted.safetensors").save("copy.safetensors").name
        'copy.safetensors'
        """
        target = calibration_path(self.fingerprint, quick=self.quick) if path is None else Path(path).expanduser()
        save_calibration(target, self.tensors, {**self.metadata, **self.report()})
        return target

    def report(self) -> dict[str, Any]:
        """How good it is, as plain data; ``summary`` holds the few numbers that belong together.

        Returns
        -------
        dict
            ``summary``, ``held_out``, ``elsewhere`` (other conditions), ``ladders`` (the rank floor), ``curve`` (by
            number of features), ``sufficiency`` (the kind that each head needs) and ``memory_ladder`` (substitutes at
            equal memory).

        Examples
        --------
        ``fitted.safetensors`` is a file that ``softgap calibrate`` wrote:

        >>> import softgap
        >>> report = softgap.Calibration.load("fitted.safetensors").report()
        >>> list(report)
        ['summary', 'held_out', 'elsewhere', 'ladders', 'curve', 'sufficiency', 'memory_ladder']
        >>> report["summary"]["gap_closed"] <= 1
        True
        """
        return {
            "summary": held_out_summary(self.held_out.to_json()),
            "held_out": self.held_out.to_json(),
            "elsewhere": {name: share.to_json() for name, share in self.conditions.items()},
            "ladders": self.ladders.to_json(),
            "curve": {name: share.to_json() for name, share in self.curve.items()},
            **({} if self.sufficiency is None else {"sufficiency": self.sufficiency.to_json()}),
            **({} if self.memory_ladder is None else {"memory_ladder": self.memory_ladder.to_json()}),
        }

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read one from a file.

        Parameters
        ----------
        path
            A file that ``save`` or ``softgap calibrate`` wrote.

        Returns
        -------
        Calibration
            The same as was saved.

        Raises
        ------
        StoreError
            If there is no such file, or it is damaged.

        Examples
        --------
        ``fitted.safetensors`` is a file that ``softgap calibrate`` wrote:

        >>> import softgap
        >>> calibration = softgap.Calibration.load("fitted.safetensors")
        >>> sorted(calibration.report()["summary"])[:2]
        ['against_profile', 'explained']
        """
        stored = load_calibration(Path(path).expanduser())
        metadata = dict(stored.metadata)
        try:
            metadata["fingerprint"] = str(metadata["fingerprint"])
            held_out = HeldOut.from_json(metadata.pop("held_out"))
            ladders = Ladders.from_json(metadata.pop("ladders"))
            metadata.pop("summary", None)
            labels = metadata.pop("sufficiency", None)
            suffices = None if labels is None else Sufficiency.from_json(labels)
            rungs = metadata.pop("memory_ladder", None)
            memory_ladder = None if rungs is None else MemoryLadder.from_json(rungs)
            conditions, curve = (
                {key: Interval(**value) for key, value in metadata.pop(name).items()} for name in ("elsewhere", "curve")
            )
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StoreError(
                f"'{path}' was written by another version of softgap: its report lacks or garbles {error}; calibrate "
                "again"
            ) from None
        return cls(stored.tensors, metadata, held_out, conditions, ladders, curve, suffices, memory_ladder)


DISTANCES = 2048


GENERATED_POSITIONS = 2048


LADDER_TOKENS = 512


SHOWN_TOKENS = 256


# Short texts of the fit on which window and hybrid divide their memory, besides the longest one.
DIVISION_TEXTS, DIVISION_TOKENS = 4, 2048


REFERENCE_MECHANISMS = ("elu1", BASELINE)


BASELINES = ("constant", "profile")


QUICK = Recipe(steps=75, rows=RowPlan(generated=0.0))
"""The recipe of a quick calibration."""


# What features see: without and with a rotation.
VECTORS = ("after rotary embedding or without", "before and after rotary embedding")


def calibrate(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str] | None = None,
    *,
    recipe: Recipe | None = None,
    minutes: float | None = None,
    positions: int | None = None,
    limit: float = LIMIT,
    stability: bool = True,
    quick: bool = False,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    progress: Progress = silent,
) -> Calibration:
    """Fit a linear attention to each head of a model, so that ``fitted`` is a mechanism for it.

    Parameters
    ----------
    model
        Any causal model of transformers that softgap supports.
    tokenizer
        Its tokenizer.
    texts
        What to fit on; the last quarter of it is held out. None lets the model write its own.
    recipe
        Features, steps, seed and the rest of what the fit depends on.
    minutes
        Choose the number of steps so that the fit takes about this long on this machine, instead of the recipe's.
    positions
        The longest context to fit; None takes the longest that the text and the model allow, up to 8192.
    limit
        The share of the gap and of the output's energy that a substitute may leave and still suffice for a head.
    stability
        Whether to find out how many heads keep their kind on other text and at other lengths.
    quick
        Fit in 75 steps to 2,048 tokens (of the text that comes with softgap, if none is given), and measure only which
        substitute suffices for each head. The result is marked. In the cache it is used until there is a full
        calibration, which it never replaces.
    out
        Where the calibration is saved; None saves it in the cache. Finished layers are saved beside it, so that the
        same call resumes after an interruption. A full calibration in the cache removes a quick one.
    engine
        Where the layers are fitted: "local", or "ray" for the workers of a Ray cluster. Both give the same bytes.
    address
        Of the Ray cluster; None joins the one that is running, or starts one on this machine.
    progress
        Called with the stage in words and the share of the whole that is done.

    Returns
    -------
    Calibration
        The fitted parameters, and how well they do on held-out text.

    Raises
    ------
    ValueInputError
        If the text is too short.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model. Two steps are too few for a real calibration:

    >>> from pathlib import Path
    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> book = Path("book.txt").read_text()
    >>> recipe = softgap.calibration.Recipe(features=8, steps=2)
    >>> calibration = softgap.calibrate(model, tokenizer, [book], recipe=recipe, positions=128, out="new.safetensors")
    >>> run = softgap.read(model, tokenizer, "A fox went out.", mechanisms=[calibration.mechanism()])
    >>> run.mechanisms
    ('fitted',)
    """
    check_measurable(model)
    check_limit(limit)
    check_engine(engine)
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueInputError(f"minutes must be a number above 0, got {minutes:g}; leave it out for a number of steps")
    if quick and (minutes is not None or positions is not None):
        raise ValueInputError(
            f"a quick calibration has a fixed length and number of positions, got minutes {minutes} and positions "
            f"{positions}; leave them out, or leave quick out"
        )
    recipe = recipe or (QUICK if quick else Recipe())
    target = calibration_path(model_fingerprint(model), quick=quick) if out is None else Path(out).expanduser()
    task = _Task(recipe, minutes, positions, limit, stability and not quick, quick, target, engine, address)
    with one_writer(target):
        calibration = _calibrate(model, tokenizer, texts, task, progress)
    if out is None and not quick:
        calibration_path(calibration.fingerprint, quick=True).unlink(missing_ok=True)
    return calibration


@dataclass(frozen=True)
class _Task:
    """What ``calibrate`` was asked for, checked."""

    recipe: Recipe
    minutes: float | None
    positions: int | None
    limit: float
    stability: bool
    quick: bool
    target: Path
    engine: str
    address: str | None


def _corpus(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str] | None, task: _Task, progress: Progress
) -> tuple[Corpus, str]:
    """The sequences of a calibration, and where their text is from."""
    if task.quick:
        source = "that comes with softgap" if texts is None else "given"
        return quick_corpus(model, tokenizer, texts), source
    if texts is None:
        positions = task.positions or min(GENERATED_POSITIONS, context_of(model))
        check_positions(model, positions)
        written = _generate_texts(model, tokenizer, positions, task.recipe.seed, progress)
        return corpus_of(model, tokenizer, written, positions=positions), "written by the model"
    corpus = corpus_of(model, tokenizer, texts, positions=task.positions)
    if task.recipe.rows.generated:
        corpus = _mixed(model, tokenizer, corpus, task.recipe.seed, task.target, partial_progress(progress, 0, 0.08))
    return corpus, "given"


def _calibrate(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str] | None, task: _Task, progress: Progress
) -> Calibration:
    """Fit, measure and save a calibration whose settings were checked."""
    recipe, target = task.recipe, task.target
    corpus, source = _corpus(model, tokenizer, texts, task, progress)
    rotations = layer_rotations(model)
    metadata = {**_metadata(model, corpus), "text": source, "vectors": VECTORS[rotations is not None]}
    if task.quick:
        metadata["quick"] = True
    settings = {**metadata, "recipe": asdict(recipe), "minutes": task.minutes}
    layers = FittedLayers(target, settings)
    progress("the model reads", 0.08)
    with tempfile.TemporaryDirectory(prefix="softgap-calibration-") as scratch:
        gathered = gather(
            model,
            corpus.fitted,
            Path(scratch),
            sample=corpus.held_out[-1][:SHOWN_TOKENS],
            distances=min(DISTANCES, corpus.longest),
            rotations=rotations,
            generated=corpus.generated,
            report=lambda share: progress("the model reads", 0.08 + 0.12 * share),
        )
        if task.minutes is not None:
            recipe = replace(recipe, steps=layers.steps(partial(steps_within, task.minutes, gathered, recipe)))
        fit = partial(fit_layers, gathered, engine=task.engine, address=task.address)
        fitted = fit(recipe, layers, partial_progress(progress, 0.2, 0.48))
        division = _division(model, gathered, recipe, corpus, task, settings, partial_progress(progress, 0.48, 0.55))
        features, exact = division.hybrid(recipe.features, gathered.sites[0].dim, gathered.mean.shape[-1])
        tails = FittedLayers(target, {**settings, "exact": asdict(exact)}, "tail")
        tail_progress = partial_progress(progress, 0.55, 0.7)
        hybrid = fit(replace(recipe, features=features), tails, tail_progress, exact=exact)
        tensors = calibration_tensors(gathered, fitted, hybrid)
        memory_ladder = (
            None
            if task.quick
            else _memory_ladder(model, gathered, recipe, corpus, partial_progress(progress, 0.7, 0.82))
        )
    metadata |= {"recipe": asdict(recipe), "hybrid": {"w": exact.recent, "sinks": exact.sinks}}
    metadata["division"] = division.to_json()
    metadata["windows"] = [site.window for site in gathered.sites]
    metadata["digest"] = digest_of(tensors)
    calibration = _evaluate(model, tokenizer, corpus, tensors, gathered.sites, metadata, task, progress)
    if memory_ladder is not None:
        calibration = replace(calibration, curve=memory_ladder.curve, memory_ladder=memory_ladder)
    with last_step(target):
        calibration.save(target)
    return calibration


def _generate_texts(model: Model, tokenizer: Tokenizer, positions: int, seed: int, progress: Progress) -> list[str]:
    # Decoding and encoding again may give fewer tokens than were written.
    n_tokens = int(2.2 * tokens_needed(positions))
    stage = "the model writes its own text"
    return generate_texts(model, tokenizer, n_tokens, seed=seed, report=lambda share: progress(stage, share))


def _mixed(model: Model, tokenizer: Tokenizer, corpus: Corpus, seed: int, target: Path, progress: Progress) -> Corpus:
    """The corpus with generated text; a calibration that resumes finds what was written beside its target."""
    stage = "the model writes text of many kinds"
    settings = {"tokens": corpus.digest, "fingerprint": model_fingerprint(model), "versions": library_versions()}

    def write() -> dict[str, Any]:
        mixed = mix_generated(model, tokenizer, corpus, seed=seed, report=lambda share: progress(stage, share))
        return {"generated": mixed.generated}

    written = Checkpoints(checkpoint_folder(target), settings).find_or_make(["generated", seed], write)
    return replace(corpus, generated=tuple(tuple(ids) for ids in written["generated"]))


def calibration_tensors(gathered: Activations, fitted: Sequence[Maps], hybrid: Sequence[Maps]) -> dict[str, Tensor]:
    """All parameters by ``mechanism.parameter``, ``[layer, head, ...]``."""
    by_name = {
        name: [maps.parameters() for maps in layers] for name, layers in (("fitted", fitted), ("hybrid", hybrid))
    }
    return {
        **{
            f"{name}.{key}": torch.cat([layer[key] for layer in layers])
            for name, layers in by_name.items()
            for key in layers[0]
        },
        **_rotation_tensors([site.rotation for site in gathered.sites if site.rotation is not None]),
        "constant.mean": gathered.mean,
        "profile.first": gathered.first,
        "profile.by_distance": gathered.by_distance,
    }


def _rotation_tensors(rotations: Sequence[Rotation]) -> dict[str, Tensor]:
    """What undoes the rotary embedding, once for all layers where they are alike."""
    by_layer = [rotation.parameters() for rotation in rotations]
    tensors = {name: torch.cat([layer[name] for layer in by_layer]) for name in (by_layer[0] if by_layer else ())}
    alike = all(bool((x == x[:1]).all()) for x in tensors.values())
    return {f"fitted.{name}": x[:1] if alike else x for name, x in tensors.items()}


def _metadata(model: Model, corpus: Corpus) -> dict[str, Any]:
    return {
        "model": model.name_or_path or model.config.model_type,
        "fingerprint": model_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "rounded": rounded_fingerprints(model),
        "objective": "KL(softmax weights || fitted weights), sampled keys",
        "tokens": corpus.digest,
        "lengths": [len(sequence) for sequence in corpus.fitted],
        "generated_lengths": [len(sequence) for sequence in corpus.generated],
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
    }


def _evaluate(
    model: Model,
    tokenizer: Tokenizer,
    corpus: Corpus,
    tensors: dict[str, Tensor],
    sites: Sequence[LayerSite],
    metadata: dict[str, Any],
    task: _Task,
    progress: Progress,
) -> Calibration:
    seed = task.recipe.seed
    stored = StoredCalibration(tensors, metadata, str(metadata["digest"]))
    fitted, *baselines = (stored.equip(name) for name in ("fitted", *BASELINES))
    held_out = evaluate_held_out(
        model,
        corpus.held_out,
        [fitted, *REFERENCE_MECHANISMS, *baselines],
        far=corpus.far,
        first=tensors["profile.first"].numpy(),
        windows=[site.window for site in sites],
        seed=seed,
        report=lambda n: progress("reading held-out text", 0.82 + 0.05 * n / (len(corpus.held_out) + len(corpus.far))),
    )
    conditions: Mapping[str, Interval] = {}
    if not task.quick:
        conditions = evaluate_conditions(
            model,
            tokenizer,
            corpus,
            fitted,
            seed=seed,
            report=lambda share: progress("reading other text", 0.87 + 0.03 * share),
        )
    sinks = int(metadata.get("division", {}).get("sinks", SINKS))
    window = resolve(equal_window(fitted, tensors["constant.mean"].shape[-1], sinks=sinks))
    kinds = {"window": window, **{name: stored.equip(name) for name in ("constant", "profile", "fitted", "hybrid")}}
    suffices = label_heads(
        model,
        corpus.held_out,
        {name: kinds[name] for name in KINDS if name in kinds},
        far=corpus.far,
        limit=task.limit,
        stability=task.stability,
        seed=seed,
        report=lambda share: progress("measuring which substitute suffices", 0.9 + 0.04 * share),
    )
    layers = len(tensors["profile.first"])
    if task.quick:
        empty = Ladders((), (), (), 0)
        return Calibration(tensors, metadata, held_out, {}, empty, {}, replace(suffices, quick=True))
    rank_ladders = ladders(
        model,
        corpus.held_out[0][:LADDER_TOKENS],
        fitted,
        report=lambda n: progress("comparing weights", 0.94 + 0.06 * n / layers),
    )
    return Calibration(tensors, metadata, held_out, conditions, rank_ladders, {}, suffices)


def _division(
    model: Model,
    gathered: Activations,
    recipe: Recipe,
    corpus: Corpus,
    task: _Task,
    settings: Mapping[str, Any],
    progress: Progress,
) -> Division:
    """How window and hybrid divide their memory; a calibration that resumes finds it beside its target."""
    if task.quick:
        return Division()
    stage = "dividing the memory of window and hybrid"

    def choose() -> dict[str, Any]:
        progress(stage, 0.0)
        windows = [site.window for site in gathered.sites]
        # Near and far positions weigh about equally.
        texts = [*(ids[:DIVISION_TOKENS] for ids in corpus.fitted[:DIVISION_TEXTS]), max(corpus.fitted, key=len)]
        fit_text = held_layers(model, texts, spread_layers(windows))
        with single_threaded_torch() as workers:
            told = partial(progress, stage)
            return choose_division(fit_text, gathered, recipe, workers=workers, report=told).to_json()

    checkpoints = Checkpoints(checkpoint_folder(task.target), {**settings, "steps": recipe.steps})
    return Division.from_json(checkpoints.find_or_make(["division"], choose))


def _memory_ladder(
    model: Model, gathered: Activations, recipe: Recipe, corpus: Corpus, progress: Progress
) -> MemoryLadder:
    stage = "comparing substitutes at equal memory"
    progress(stage, 0.0)
    windows = [site.window for site in gathered.sites]
    held_out, fit_text = (some_layers(model, texts, windows) for texts in (corpus.held_out, corpus.fitted))
    with single_threaded_torch() as workers:
        return climb_memory(
            held_out, fit_text, gathered, recipe, workers=workers, report=lambda share: progress(stage, share)
        )
