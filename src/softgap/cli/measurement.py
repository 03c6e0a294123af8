"""One study on its way from the command line to disk: everything that can be refused is refused before a model runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softgap.attention import Mechanism
    from softgap.models.loading import Loaded
    from softgap.trajectories import Manifest, StudyWriter

__all__ = ["Task", "check_mechanisms", "default_out", "with_control"]

_TRIAL_BYTES = 65536


@dataclass(frozen=True)
class Task:
    """What to measure, with which model, and where to write it.

    Attributes
    ----------
    texts
        Every text that goes into the study: prompts, then completions.
    mechanisms
        What to compare with; None until the model is known, which decides on the defaults.
    """

    texts: tuple[str, ...]
    out: str
    overwrite: bool = False
    model: str | None = None
    mechanisms: tuple[str, ...] | None = None
    dtype: str = "auto"
    device: str = "cpu"
    attn: str | None = None
    focus: bool = False
    drop_sinks: int = 0
    seed: int | None = None

    @property
    def recorded(self) -> dict[str, Any]:
        """What `softgap.generate` and `softgap.read` are told about the measurement."""
        return {"mechanisms": self._settled, "focus": self.focus, "drop_sinks": self.drop_sinks}

    @property
    def _settled(self) -> tuple[str, ...]:
        if self.mechanisms is None:
            raise AssertionError("the mechanisms are not settled yet; call for_model first")
        return self.mechanisms

    def check(self) -> None:
        """Refuse, without loading a model, unknown mechanisms and a folder that cannot take the study.

        The folder is tried by writing to it, and left as it was.
        """
        from softgap.trajectories import StudyWriter
        from softgap.trajectories.folder import Folder

        wanted = check_mechanisms(self.mechanisms)
        folder = Folder.at(self.out)
        with suppress(_Tried), StudyWriter(self.out, self._expected(wanted), overwrite=self.overwrite):
            folder.discard(folder.stage("manifest.json", lambda sink: sink.write(bytes(_TRIAL_BYTES))))
            raise _Tried

    def load(self) -> Loaded:
        """The model and its tokenizer."""
        from softgap.models import load_model

        return load_model(self.model, dtype=self.dtype, device=self.device, attn=self.attn)

    def for_model(self, loaded: Loaded) -> Task:
        """The same task with its mechanisms settled: what the user named, or the defaults for this model."""
        from softgap.models.calibrations import default_mechanisms

        return self if self.mechanisms is not None else replace(self, mechanisms=default_mechanisms(loaded[0]))

    @contextmanager
    def writer(self, loaded: Loaded, options: Mapping[str, Any]) -> Iterator[StudyWriter]:
        """The study, open for its runs, with the manifest of a measurement with this model.

        In the block transformers is quiet: what it warns of, such as a text that is too long, is refused in our words.
        """
        from softgap.models.fingerprint import manifest_of
        from softgap.models.verbosity import quiet_transformers
        from softgap.probe import Recording
        from softgap.trajectories import StudyWriter, inputs_digest

        model, _ = loaded
        manifest = manifest_of(
            model,
            Recording(model, self._settled).mechanisms,
            drop_sinks=self.drop_sinks,
            seed=self.seed,
            inputs=inputs_digest(self.texts),
            options=dict(options),
        )
        with quiet_transformers(downloads=False), StudyWriter(self.out, manifest, overwrite=self.overwrite) as writer:
            yield writer

    def stored(self) -> Manifest:
        """The manifest of the study as it was saved."""
        from softgap.trajectories import open_study

        return open_study(self.out).manifest

    def _expected(self, wanted: Sequence[Mechanism]) -> Manifest:
        """The manifest as far as it is known without a model; the rest is taken from the study that is there."""
        from softgap.trajectories import Manifest, inputs_digest, open_study
        from softgap.trajectories.folder import Folder

        folder = Folder.at(self.out)
        there = folder.kind() == "folder" and folder.kind("manifest.json") == "file"
        stored = open_study(self.out).manifest if there else Manifest()
        # A model may set options of a mechanism, so before it is loaded only the names can be compared; by default it
        # may also bring a calibration.
        names = tuple(mechanism.name for mechanism in wanted)
        accepted = (names,) if self.mechanisms is not None else (names, (*names, "fitted"))
        same = tuple(stored.mechanisms) in accepted
        return replace(
            stored,
            mechanisms=stored.mechanisms if same else {found.name: dict(found.options) for found in wanted},
            seed=self.seed,
            dropped_sinks=self.drop_sinks,
            inputs=inputs_digest(self.texts),
        )


class _Tried(Exception):
    """The folder took what was written to it; leaving a StudyWriter with an error makes it clear up."""


def check_mechanisms(names: Sequence[str] | None) -> list[Mechanism]:
    """The mechanisms by these names, the defaults for None; a name or a calibration that is none is refused."""
    from softgap.attention import resolve
    from softgap.models.calibrations import DEFAULT_MECHANISMS
    from softgap.models.tensor_files import load_calibration

    for name in names or ():
        _, sign, file = name.partition("@")
        if sign:
            load_calibration(Path(file).expanduser())
    return [resolve(name.partition("@")[0]) for name in names or DEFAULT_MECHANISMS]


def with_control(named: Sequence[str] | None) -> tuple[str, ...] | None:
    """The mechanisms a user named and the control, without which a divergence says little; None if none was named."""
    if not named:
        return None
    from softgap.trajectories.validation import BASELINE

    return tuple(named) if BASELINE in named else (*named, BASELINE)


def default_out(text: str) -> str:
    """A new folder under runs/, named by the first words of a text and the time."""
    from softgap.trajectories.folder import new_name, slug

    runs = Path("runs")
    return str(runs / new_name(runs, slug(text)))
