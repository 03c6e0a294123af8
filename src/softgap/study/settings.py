"""What a study's numbers depend on beside its prompts, as plain values that can be sent to another machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.probe.provenance import live_options
from softgap.probe.temperature import checked_temperature

if TYPE_CHECKING:
    from softgap.probe.models import Loaded

__all__ = ["StudySettings"]


@dataclass(frozen=True)
class StudySettings:
    """How prompts are measured.

    Attributes
    ----------
    model, dtype, device, attn
        As :func:`softgap.load_model` takes them.
    mechanisms
        None for the defaults of the model.
    max_new_tokens, chat, seed, temperature
        Of generations; with a seed or a temperature the model samples, each batch with a seed of its own. ``chat`` is
        None for the template where there is one.
    batch_size
        Samples that are computed together.
    scoring
        How answers are judged, by name or import path; None leaves the labels of the prompts.
    keep_prompt
        Whether the prompt's own steps are stored too.
    threads
        Of torch; None takes what it is set to. On a cluster every worker uses as many.
    """

    model: str | None = None
    mechanisms: tuple[str, ...] | None = None
    max_new_tokens: int = 128
    batch_size: int = 8
    chat: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    scoring: str | None = None
    focus: bool = False
    drop_sinks: int = 0
    keep_prompt: bool = True
    dtype: str = "auto"
    device: str = "cpu"
    attn: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.mechanisms is not None:
            object.__setattr__(self, "mechanisms", as_items(self.mechanisms))
        for name in ("max_new_tokens", "batch_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueInputError(f"{name} must be at least 1, got {value}")
        if self.temperature is not None:
            checked_temperature(self.temperature)

    @property
    def sampling(self) -> dict[str, Any]:
        """What a generation is told about sampling."""
        if self.seed is None and self.temperature is None:
            return {"do_sample": False}
        return {"do_sample": True, **({} if self.temperature is None else {"temperature": self.temperature})}

    @property
    def recorded(self) -> dict[str, Any]:
        """What a measurement is told."""
        if self.mechanisms is None:
            raise ValueInputError("the mechanisms of a study must be settled before it is measured, got None")
        return {"mechanisms": self.mechanisms, "focus": self.focus, "drop_sinks": self.drop_sinks}

    def load(self) -> Loaded:
        """The model and its tokenizer."""
        from softgap.probe import load_model

        return load_model(self.model, dtype=self.dtype, device=self.device, attn=self.attn)

    def options(self, loaded: Loaded) -> dict[str, Any]:
        """For the manifest: all that the data depend on."""
        own = live_options(
            loaded[0],
            max_new_tokens=self.max_new_tokens,
            chat=bool(self.chat),
            focus=self.focus,
            settings=self.sampling,
        )
        kept = ("batch_size", "scoring", "keep_prompt")
        return {**own, "mode": "study", **{name: value for name, value in asdict(self).items() if name in kept}}
