"""``softgap doctor``: every gate on one model, and the state of the installation."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Literal

import psutil
import torch
from packaging.requirements import Requirement
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softgap.errors import ModelError, SoftgapError, unknown_name
from softgap.gates.model import GATES, Gate, Subject, non_finite_outputs
from softgap.inputs import as_items
from softgap.models.cache import cache_dir
from softgap.models.catalogue import EMBEDDED, PACKAGED, PackagedModel
from softgap.models.fingerprint import display_name, model_fingerprint
from softgap.models.support import check_measurable
from softgap.progress import Progress, silent

__all__ = ["Diagnosis", "InstallationCheck", "doctor", "installation"]


TEXT = "A map of the coast hung over the desk, and every harbour on it had been marked with a small blue pin."


TOKENS = 24


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of all gates on one model.

    ``non_finite`` says why no gate could run, what of the model's own is NaN or infinite; empty for a sound model.
    """

    model: str
    weights: str
    dtype: str
    backend: str
    gates: tuple[Gate, ...]
    non_finite: str = ""

    @property
    def passed(self) -> bool:
        """Whether the model's own numbers are finite and no gate failed; ``model`` and ``skip`` are no failures."""
        return not self.non_finite and all(gate.verdict != "fail" for gate in self.gates)

    def to_json(self) -> dict[str, Any]:
        """One JSON object; a number that is not finite becomes null."""
        document = {**asdict(self), "passed": self.passed}
        for gate in document["gates"]:
            for key in ("measured", "threshold"):
                if gate[key] is not None and not abs(gate[key]) < float("inf"):
                    gate[key] = None
        return document


def doctor(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    gates: Sequence[str] | None = None,
    repeats: int = 50,
    progress: Progress | None = None,
) -> Diagnosis:
    """Run the gates on a model: properties that must hold before you trust its numbers.

    Parameters
    ----------
    model
        Any causal model of transformers.
    tokenizer
        With it the gates use a sentence of ours, without it seeded tokens.
    gates
        Names of the gates to run; None for all.
    repeats
        Generations of the stability gate.
    progress
        Called with the name of each gate before it runs, and the share of gates that are done.

    Returns
    -------
    Diagnosis
        The outcome of each gate, and ``passed``.

    Raises
    ------
    UnknownNameError
        If there is no gate of that name.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> diagnosis = softgap.doctor(model, tokenizer, gates=["non-interference", "oracle"])
    >>> [(gate.name, gate.verdict) for gate in diagnosis.gates]
    [('non-interference', 'pass'), ('oracle', 'pass')]
    >>> diagnosis.passed
    True
    """
    check_measurable(model)
    names = list(GATES) if gates is None else list(as_items(gates))
    for name in names:
        if name not in GATES:
            raise unknown_name("gate", name, GATES)
    subject = Subject(model, _ids(model, tokenizer), repeats=repeats)
    report = progress or silent
    report("the model's own numbers", 0.0)
    try:
        weights, reason = model_fingerprint(model), non_finite_outputs(subject)
    except ModelError as error:
        weights, reason = "", str(error)
    outcomes = []
    for number, name in enumerate(names):
        report(f"gate {name}", number / len(names))
        unsound = Gate(name, "skip", None, None, "not run, because the model's own numbers are not finite")
        outcomes.append(unsound if reason else _outcome(name, subject))
    dtype, backend = str(model.dtype).removeprefix("torch."), str(model.config._attn_implementation)
    return Diagnosis(display_name(model), weights, dtype, backend, tuple(outcomes), reason)


def _outcome(name: str, subject: Subject) -> Gate:
    """The gate's outcome; what the instrument itself refuses is a failure with its reason."""
    try:
        with torch.inference_mode():
            return GATES[name](subject)
    except SoftgapError as error:
        return Gate(name, "fail", None, None, str(error))


def _ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    if tokenizer is not None:
        encoded: Any = tokenizer(TEXT)
        return tuple(int(token) for token in encoded["input_ids"][:TOKENS])
    # Low ids are often special tokens, high ones stand for images and sounds.
    vocabulary = min(int(model.config.get_text_config().vocab_size), 1000)
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randint(min(10, vocabulary - 2), vocabulary, (TOKENS,), generator=generator).tolist())


# A converted copy of the embedded model and some studies.
DISK_SPACE = 2e9


MEMORY = 2e9


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")


# Extras that only work on softgap itself asks for.
_NOT_FOR_USERS = ("dev",)


@dataclass(frozen=True)
class InstallationCheck:
    """One thing that softgap uses.

    Attributes
    ----------
    verdict
        ``fine``; ``absent`` for something optional that is not there; ``wrong`` where softgap will not work.
    detail
        What there is.
    remedy
        What to do about it; empty where all is well.
    """

    name: str
    verdict: Literal["fine", "absent", "wrong"]
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """As plain data."""
        return {"name": self.name, "verdict": self.verdict, "found": self.detail, "remedy": self.remedy}


def installation() -> tuple[InstallationCheck, ...]:
    """Look at everything, without loading any of it and without the network."""
    return (*_packages(), *map(_packaged, PACKAGED), _browser(), _disk_space(), _memory())


def _packages() -> Iterator[InstallationCheck]:
    """The required packages as one part, and every extra as one."""
    by_extra: dict[str, list[Requirement]] = defaultdict(list)
    for line in requires("softgap") or ():
        requirement = Requirement(line)
        by_extra[_extra(requirement)].append(requirement)
    for extra, requirements in by_extra.items():
        if extra in _NOT_FOR_USERS:
            continue
        unmet = [problem for problem in map(_problem, requirements) if problem]
        name = "required packages" if not extra else f"extra '{extra}'"
        if not unmet:
            yield InstallationCheck(
                name, "fine", ", ".join(f"{package.name} {version(package.name)}" for package in requirements)
            )
            continue
        target = f"'softgap[{extra}]'" if extra else "--upgrade softgap"
        yield InstallationCheck(name, "absent" if extra else "wrong", "; ".join(unmet), f"pip install {target}")


def _extra(requirement: Requirement) -> str:
    """The extra that a requirement belongs to, empty for none: its marker reads ``extra == "name"``."""
    marker = str(requirement.marker or "")
    return marker.split("extra == ", 1)[1].strip().split('"')[1] if "extra == " in marker else ""


def _problem(requirement: Requirement) -> str:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    return (
        ""
        if requirement.specifier.contains(installed, prereleases=True)
        else f"{requirement} wanted, {installed} found"
    )


def _packaged(model: PackagedModel) -> InstallationCheck:
    name = f"embedded model {model.name}" if model.name == EMBEDDED else f"optional model {model.name}"
    if model.copy().is_dir():
        return InstallationCheck(name, "fine", f"converted copy in {model.copy()}")
    missing = model.missing()
    several = len(model.parts) > 1
    if not missing:
        detail = f"in {'its packages' if several else 'its package'}, converted at first use"
        return InstallationCheck(name, "fine", f"{detail} ({model.size_bytes:,} bytes)")
    detail = f"neither a converted copy nor its {'packages' if several else 'package'}"
    terms = f" ({model.terms})" if model.terms else ""
    return InstallationCheck(name, "absent", detail, f"{model.install}{terms}")


def _browser() -> InstallationCheck:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is not None:
        return InstallationCheck("browser", "fine", browser)
    return InstallationCheck(
        "browser", "absent", "none on the path", "reports are files: open them on any machine with a browser"
    )


def _disk_space() -> InstallationCheck:
    place = cache_dir()
    existing_folder = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(existing_folder).free
    detail = f"{free / 1e9:.1f} GB free at {place}"
    if free >= DISK_SPACE:
        return InstallationCheck("disk", "fine", detail)
    return InstallationCheck(
        "disk", "wrong", detail, f"make {DISK_SPACE / 1e9:.0f} GB of room, or name another folder in SOFTGAP_CACHE"
    )


def _memory() -> InstallationCheck:
    free = psutil.virtual_memory().available
    detail = f"{free / 1e9:.1f} GB available, {psutil.cpu_count()} cores"
    if free >= MEMORY:
        return InstallationCheck("memory", "fine", detail)
    return InstallationCheck(
        "memory", "wrong", detail, "the embedded model takes about 1.5 GB while it runs; close other programs"
    )
