"""``softgap doctor``: every gate, on this very model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softgap.errors import SoftgapError, unknown_name
from softgap.inputs import as_items
from softgap.probe.gates import GATES, Gate, Subject
from softgap.probe.provenance import manifest_of
from softgap.probe.support import check_measurable

__all__ = ["Diagnosis", "doctor"]

TEXT = "A map of the coast hung over the desk, and every harbour on it had been marked with a small blue pin."
TOKENS = 24


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of all gates on one model."""

    model: str
    weights: str
    dtype: str
    backend: str
    gates: tuple[Gate, ...]

    @property
    def passed(self) -> bool:
        """Whether no gate failed; ``model`` and ``skip`` are no failures of the instrument."""
        return all(gate.verdict != "fail" for gate in self.gates)

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
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Run the gates on a model.

    Parameters
    ----------
    tokenizer
        With it the gates use a sentence of ours, without it seeded tokens.
    gates
        Names of the gates to run; None for all.
    repeats
        Generations of the stability gate.
    progress
        Called with the name of each gate before it runs.
    """
    check_measurable(model)
    names = list(GATES) if gates is None else list(as_items(gates))
    for name in names:
        if name not in GATES:
            raise unknown_name("gate", name, GATES)
    subject = Subject(model, _ids(model, tokenizer), repeats=repeats)
    outcomes = []
    for name in names:
        if progress is not None:
            progress(name)
        outcomes.append(_outcome(name, subject))
    manifest = manifest_of(model, ())
    return Diagnosis(manifest.model, manifest.weights, manifest.dtype, manifest.backend, tuple(outcomes))


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
