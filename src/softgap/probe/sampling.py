"""How a generation draws its tokens: greedy or from a seed, with the global random state left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

__all__ = ["sampling_settings", "seeded", "stopping"]


def sampling_settings(seed: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with sampling on where there is a seed, and off otherwise, unless they say so themselves."""
    settings = {"do_sample": seed is not None, **settings}
    if settings["do_sample"] is False:
        # Sampling defaults of the model's own generation config would only warn here.
        settings = {"temperature": None, "top_p": None, "top_k": None, **settings}
    return settings


def stopping(stop: Callable[[], bool] | None) -> dict[str, Any]:
    """The setting that ends all rows of a generation once ``stop`` says so."""
    return {} if stop is None else {"stopping_criteria": StoppingCriteriaList([_Asked(stop)])}


class _Asked(StoppingCriteria):
    """Ends all rows of a generation once somebody says so."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Whether each row is over."""
        return torch.full((len(input_ids),), self._stop(), dtype=torch.bool, device=input_ids.device)


@contextmanager
def seeded(seed: int | None, model: PreTrainedModel) -> Iterator[None]:
    """A seed for sampling that leaves the global random state as it was."""
    if seed is None:
        yield
        return
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would seed every other device too, and nobody would put those back.
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(model.device):
                torch.cuda.manual_seed(seed)
        yield
