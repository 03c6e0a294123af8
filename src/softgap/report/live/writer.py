"""The model of a server: one generation after the other, told step by step."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from softgap.analysis.headline import gap_sums
from softgap.attention import Mechanism, mechanisms, resolve
from softgap.errors import SoftgapError, ValueInputError
from softgap.models.fingerprint import manifest_of
from softgap.models.loading import Loaded, quiet_transformers
from softgap.models.tensor_files import default_mechanisms
from softgap.probe import Step, read_ids, run_anatomy
from softgap.probe.capture import check_lengths
from softgap.probe.prompts import prompt_ids
from softgap.probe.recording import prepare_mechanism
from softgap.report.anatomy import anatomy_json
from softgap.report.columns import calibration_kinds, study_calibration
from softgap.report.kinds import kinds_of_page
from softgap.report.live.requests import Limits, RunRequest
from softgap.report.payload import about, dynamics, opening_of
from softgap.report.samples import array_keys, array_of, part_pieces, pieces_of, round_values
from softgap.study import Observer, StudySettings, measure
from softgap.tasks import Prompt
from softgap.trajectories import QUANTITIES, Manifest, Study, Trajectories, open_study
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    from softgap.calibration.sufficiency import Sufficiency

__all__ = ["SAMPLE", "Tell", "Writer", "Written"]

SAMPLE = "0"
"""The one sample of the study that a run becomes."""

# Told with the name of an event and its plain values.
Tell = Callable[[str, Mapping[str, Any]], None]
# Seconds that a look into a head waits for another one, or for the last steps of a run.
_PATIENCE = 2.0
# Hybrids that a visitor is offered beside the registered mechanisms, where the model has their parameters.
_HYBRIDS = ("elu1+window", "fitted+window")


@dataclass(frozen=True)
class Written:
    """A run that has ended.

    Attributes
    ----------
    steps
        Tokens that were written.
    saved
        Whether it is a study in the folder.
    at_end
        What the page is told at the end; asked with whether there is time for all of it.
    """

    steps: int
    saved: bool
    at_end: Callable[[bool], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Writer:
    """A loaded model, what is known of its heads, and what they can be compared with.

    Attributes
    ----------
    layout
        A reading of two tokens: which layers and heads there are.
    mechanisms
        That can be computed for this model.
    defaults
        Those of them that are measured unless a visitor asks for others.
    calibrated
        Those of them whose parameters come from the calibration.
    sufficiency
        What the calibration says of the kinds of heads; None where there is none.
    """

    model: Any
    tokenizer: Any
    layout: Trajectories
    mechanisms: tuple[str, ...]
    defaults: tuple[str, ...]
    calibrated: tuple[str, ...] = ()
    sufficiency: Sufficiency | None = None
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _computing: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, loaded: Loaded) -> Writer:
        """Look at a model once."""
        model, tokenizer = loaded
        defaults = default_mechanisms(model)
        names = [name for name in (*mechanisms(), *_HYBRIDS, *defaults) if name not in ("softmax", BASELINE)]
        prepared = {name: _prepared(name, model) for name in names}
        ready = {resolve(name).label: mechanism for name, mechanism in prepared.items() if mechanism is not None}
        measured = [name for name in defaults if name == BASELINE or name in ready]
        layout = read_ids(model, [prompt_ids(tokenizer, "a b", chat=False)], mechanisms=measured)[0]
        path = study_calibration(layout.manifest)
        return cls(
            model,
            tokenizer,
            layout,
            tuple(ready),
            tuple(name for name in defaults if name != BASELINE),
            tuple(label for label, mechanism in ready.items() if mechanism.origin),
            None if path is None else calibration_kinds(path),
        )

    def kinds(self, names: Sequence[str]) -> dict[str, Any] | None:
        """The kinds of heads for the page of a run with these mechanisms, if one of them is calibrated."""
        return kinds_of_page(self.layout, self.sufficiency) if set(names) & set(self.calibrated) else None

    @property
    def name(self) -> str:
        """Of the model."""
        return str(self.model.name_or_path)

    def check(self, request: RunRequest, limits: Limits) -> None:
        """Refuse a prompt that is too long, for the server or for the model's context."""
        # A tokenizer must not be asked twice at the same time.
        with self._reading:
            ids = prompt_ids(self.tokenizer, request.prompt, None)
        if len(ids) > limits.prompt_tokens:
            raise ValueInputError(
                f"a prompt may have at most {limits.prompt_tokens:,} tokens here, got {len(ids):,}; shorten it, or use "
                "`softgap run`"
            )
        check_lengths(self.model, [ids], request.max_new_tokens)

    def write(self, request: RunRequest, out: Path, tell: Tell, stop: Callable[[], bool]) -> Written:
        """Generate and save: ``begin`` is told once, ``step`` for every token, with the numbers of the saved run."""
        settings = StudySettings(
            mechanisms=request.mechanisms,
            max_new_tokens=request.max_new_tokens,
            seed=None if request.temperature is None else request.seed,
            temperature=request.temperature,
        )
        runs: list[Trajectories] = []
        with self._computing:
            measure(
                [Prompt(SAMPLE, request.prompt)],
                str(out),
                settings,
                mode="live",
                loaded=(self.model, self.tokenizer),
                # A visitor sees every study in the folder: it must not be there before it can be read.
                reserve=False,
                observer=Observer(on_step=_Listener(request, self.tokenizer, tell), stop=stop, on_run=runs.append),
            )
        return Written(runs[0].n_steps, saved=True, at_end=lambda whole: _findings(runs[0], out, whole))

    def anatomy(self, study: Study, sample_id: str, head: str) -> list[dict[str, Any]]:
        """The keys that a head attends to in a saved sample, as a page takes them; the text is read once more."""
        manifest = study.manifest
        stored = [entry for entry in study.anatomy(sample_id) if entry.name == head]
        if stored:
            return anatomy_json(stored, lambda packed: packed.text)
        if manifest.weights != self.layout.manifest.weights:
            raise ValueInputError(
                f"this server runs {self.name}, but the study was measured with {manifest.model or 'another model'}; "
                "start softgap serve with that model to look into its heads"
            )
        # A run that is being measured would take the forward for one of its own.
        if not self._computing.acquire(timeout=_PATIENCE):
            raise ValueInputError("the model is writing; look into heads when no run is active")
        try:
            with quiet_transformers(downloads=False):
                heads = run_anatomy(
                    self.model, self.tokenizer, study.sample(sample_id), head, self._same_mechanisms(manifest)
                )
        finally:
            self._computing.release()
        return anatomy_json(heads, lambda packed: packed.text)

    def _same_mechanisms(self, manifest: Manifest) -> list[Mechanism]:
        """The mechanisms of a study as this model has them; those of another calibration are left out."""
        prepared = {name: _prepared(name, self.model) for name in manifest.mechanisms}
        ours = manifest_of(self.model, [mechanism for mechanism in prepared.values() if mechanism is not None])
        return [
            mechanism
            for name, mechanism in prepared.items()
            if mechanism is not None and ours.mechanisms[mechanism.label] == manifest.mechanisms[name]
        ]


def _findings(measured: Trajectories, out: Path, whole: bool) -> dict[str, Any]:
    """What can be said of a run when it has ended."""
    study = open_study(out)
    values: dict[str, Any] = {"dynamics": dynamics(study, measured.mechanisms)} if whole else {}
    values["about"] = about(study, measured, 1, (), whole=True)
    sentences = opening_of([gap_sums(measured)], measured, measured.non_finite)
    values["headline"], values["heldOut"] = sentences.title, sentences.rest
    return values


class _Listener:
    """Makes events of steps; holds what it has to know from one to the next."""

    def __init__(self, request: RunRequest, tokenizer: Any, tell: Tell) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._tell = tell
        self._ids: list[int] = []
        self._tokens: list[str] = []
        self._pieces: list[list[Any]] = []
        self._keys: tuple[str, ...] = ()
        self._real: np.ndarray = np.zeros(0)
        self._offset = self._position = 0

    def __call__(self, step: Step) -> None:
        if step.index == 0:
            self._begin(step.so_far()[0])
        self._ids.append(int(step.token_ids[0]))
        self._tokens.append(str(self._tokenizer.decode(self._ids[-1:])))
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        pieces = part_pieces(text, self._tokens, self._offset)
        # A token may complete a character or show a space that the ones before hid: from there on the text is new.
        same = next((i for i, pair in enumerate(zip(pieces, self._pieces, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(pieces), len(self._pieces)) if same is None else same
        self._pieces = pieces
        values = [_of_step(step, key, self._request.mechanisms)[self._real] for key in self._keys]
        self._tell(
            "step",
            {
                "step": self._offset + step.index,
                "token": self._tokens[-1],
                "position": self._position + step.index,
                "logprob": round_values(step.logprob)[0],
                "entropy": round_values(step.entropy)[0],
                "from": same,
                "pieces": pieces[same:],
                "values": _encode(np.stack(values)),
            },
        )

    def _begin(self, run: Trajectories) -> None:
        run = replace(run, prompt_text=self._request.prompt)
        self._keys = array_keys(run)
        self._real = run.kv_group >= 0
        prompt = run.prompt
        self._offset = 0 if prompt is None else prompt.n_steps
        self._position = int(run.positions[0])
        scores = (
            {} if prompt is None else {"logprob": round_values(prompt.logprob), "entropy": round_values(prompt.entropy)}
        )
        arrays = {} if prompt is None else {key: _encode(array_of(prompt, key)[self._real]) for key in self._keys}
        self._tell(
            "begin",
            {
                "promptSteps": self._offset,
                "promptTokens": run.n_prompt,
                "steps": self._offset + self._request.max_new_tokens,
                "pieces": pieces_of(run)["prompt"],
                "tokens": [] if prompt is None else list(prompt.tokens),
                "positions": [] if prompt is None else prompt.positions.tolist(),
                "arrays": arrays,
                **{"logprob": [], "entropy": [], **scores},
            },
        )


def _of_step(step: Step, key: str, names: Sequence[str]) -> np.ndarray:
    quantity, _, mechanism = key.partition("/")
    values: np.ndarray = step.quantities[QUANTITIES.index(quantity), names.index(mechanism), :, 0]
    return values


def _encode(values: np.ndarray) -> str:
    """Exactly as measured: float32, little-endian, in base64."""
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode("ascii")


def _prepared(name: str, model: Any) -> Mechanism | None:
    """A mechanism with its parameters; None where the model has none for it."""
    try:
        return prepare_mechanism(name, model)
    except SoftgapError:
        return None
