"""Keep a model under a plan: all its forwards and generations use it, until it is detached.

``apply`` runs a model under a plan for the length of a block. A model that a folder brings with its plan
(``export_plan`` with the format ``folder``) is under the plan from the start, for code that knows nothing of softgap.
Its class becomes a subclass of the same name, which enters the plan around each call and gives ``generate`` the cache
of the plan. Measurements are of the original model, so they refuse a model with a plan attached.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from softgap.errors import UnsupportedError
from softgap.intervene.swap import prepare_swap
from softgap.linearize.application import Applied, apply, under_plan
from softgap.linearize.plan import Plan, load_plan
from softgap.models import loading
from softgap.models.loading import Model, Tokenizer
from softgap.models.placement import DeviceMap, MaxMemory, input_device
from softgap.models.support import ATTACHED
from softgap.progress import Progress

__all__ = ["PLAN_FILE", "applied_plan", "attach", "attached_plan", "detach", "load_model", "plan_and_model", "plan_in"]

PLAN_FILE = "softgap_plan.json"
"""The plan in a folder with the weights of its model."""


class _Attachment:
    """The plan of a model, prepared for the device and dtype that the model has now."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.depth = 0
        self._made_for: tuple[int, torch.device, torch.dtype] | None = None
        self._parts: tuple[Any, Applied] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        # What is prepared holds the modules of this very model.
        return _Attachment(self.plan)

    @contextmanager
    def entered(self, model: Any) -> Iterator[Applied | None]:
        """The model under its plan; None where it is entered already, or while the plan is prepared."""
        if self.depth:
            yield None
            return
        self.depth += 1
        try:
            prepared, applied = self._prepare(model)
            with under_plan(model, prepared, applied):
                yield applied
        finally:
            self.depth -= 1

    def _prepare(self, model: Any) -> tuple[Any, Applied]:
        wanted = (id(model), input_device(model), model.dtype)
        if self._parts is None or self._made_for != wanted:
            plan = self.plan
            self._parts = prepare_swap(model, plan.heads, plan.substitute), Applied(model, plan.heads, plan.substitute)
            self._made_for = wanted
        return self._parts


def attach(model: Model, plan: Plan) -> None:
    """Put a model under a plan for good: every forward and ``generate`` uses it until ``detach``.

    ``generate`` gets the cache of the plan unless it is given another one or ``use_cache=False``, or follows several
    continuations at once (beam search, assisted decoding): then it keeps all keys and values. Measurements of
    softgap refuse such a model, because they are about the original one.

    Parameters
    ----------
    model
        The model that the plan was found for.
    plan
        A plan from ``find_plan``, ``load_plan`` or ``import_pattern``.

    Raises
    ------
    UnsupportedError
        If the plan belongs to another model, or the model has a plan attached.

    Examples
    --------
    ``plan.json`` is a plan that ``softgap linearize`` wrote for the small random model in ``tiny-llama``:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> softgap.linearize.attach(model, softgap.linearize.load_plan("plan.json"))
    >>> softgap.linearize.attached_plan(model).groups
    ((0, 0),)
    >>> softgap.linearize.detach(model)
    >>> softgap.linearize.attached_plan(model) is None
    True
    """
    plan.check(model)
    if attached_plan(model) is not None:
        raise UnsupportedError("the model has a plan attached already; take it off with softgap.linearize.detach")
    original = type(model)
    setattr(model, ATTACHED, _Attachment(plan))
    own = {"__call__": _call, "generate": _generate, "__doc__": original.__doc__, "__module__": original.__module__}
    model.__class__ = type(original.__name__, (original,), own)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward under the plan."""
    with getattr(self, ATTACHED).entered(self):
        return super(type(self), self).__call__(*args, **kwargs)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A generation under the plan, with its cache."""
    with getattr(self, ATTACHED).entered(self) as applied:
        if applied is not None and applied.streams and _wants_cache(self, kwargs):
            kwargs["past_key_values"] = applied.cache()
        return super(type(self), self).generate(*args, **kwargs)


def _wants_cache(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a generation uses a cache, brings none of its own, and follows one text: beams reorder a cache."""
    config = kwargs.get("generation_config") or model.generation_config

    def setting(name: str) -> Any:
        return kwargs.get(name, getattr(config, name, None))

    own = kwargs.get("past_key_values") is not None or setting("cache_implementation")
    branching = (setting("num_beams") or 1) > 1 or kwargs.get("assistant_model") or setting("prompt_lookup_num_tokens")
    return setting("use_cache") is not False and not own and not branching


@contextmanager
def applied_plan(model: Model, plan: Plan | None) -> Iterator[tuple[Plan, Applied]]:
    """Run a model under a plan while the block runs: the given one, or for None the one that is attached to it."""
    attachment: _Attachment | None = getattr(model, ATTACHED, None)
    if attachment is None:
        if plan is None:
            raise UnsupportedError(
                "plan=None takes the plan that is attached to the model, and none is; give a plan, or load a folder "
                "that 'softgap export --format folder' wrote with softgap.load_model"
            )
        with apply(model, plan) as applied:
            yield plan, applied
        return
    if plan is not None and plan is not attachment.plan:
        raise UnsupportedError(
            "a plan is attached to this model already, and another one was given; give None for it, or take the "
            "attached one off with softgap.linearize.detach"
        )
    with attachment.entered(model) as entered:
        if entered is None:
            raise UnsupportedError("the model is in use under its plan; wait until that call has ended")
        yield attachment.plan, entered


def attached_plan(model: Model) -> Plan | None:
    """The plan that is attached to a model; None where there is none."""
    attachment = getattr(model, ATTACHED, None)
    return None if attachment is None else attachment.plan


def detach(model: Model) -> None:
    """Take the plan off a model, which is then the original one; nothing happens where none is attached."""
    if attached_plan(model) is not None:
        model.__class__ = type(model).__mro__[1]
        delattr(model, ATTACHED)


def plan_in(name: str | os.PathLike[str] | None) -> Path | None:
    """The file of the plan in a folder that ``export_plan`` wrote; None where the name is no such folder."""
    if name is None or not str(name):
        return None
    file = Path(name) / PLAN_FILE
    try:
        return file if file.is_file() else None
    except OSError:
        return None


def plan_and_model(plan: Path, model: str | None) -> tuple[Path, str | None]:
    """The file of a plan and the name of its model, where a folder of ``export_plan`` may stand for both."""
    file = plan_in(plan)
    return (plan, model) if file is None else (file, str(plan) if model is None else model)


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    quantise: str | None = None,
    attn: str | None = None,
    progress: Progress | bool = True,
) -> tuple[Model, Tokenizer]:
    """Load a causal language model and its tokenizer, under the plan that its folder holds, if it holds one.

    Parameters
    ----------
    name
        None or ``"smollm2-135m"`` for the embedded model, a hub id ``"org/name"``, a folder, or a ``.gguf`` file. The
        embedded name wins over a folder of that name, which is reached as ``./smollm2-135m``; an existing folder wins
        over a hub id. A folder of ``softgap export --format folder`` holds a plan, which is attached
        (``softgap.linearize.attach``); ``softgap.models.load_model`` loads its model without the plan.
    dtype
        ``"float32"``, ``"bfloat16"``, ``"float16"``, the same as ``torch.dtype``, or ``"auto"``: what the weights are
        stored in, which is float32 for the embedded model and GGUF files.
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``, ...
    device_map
        Where accelerate puts the weights: ``"auto"`` fills accelerators, then memory, then the disk; a mapping gives
        parts of the model a device or ``"disk"``, ``""`` standing for all that is left.
    max_memory
        The most that ``"auto"`` may put on each device, as ``{0: "10GiB", "cpu": "30GiB"}``.
    quantise
        ``"int8"`` keeps the weights of linear layers as 8-bit integers with a scale per row (torchao; extra
        ``quantised``). Models that were saved quantised are loaded as they are.
    attn
        ``"sdpa"`` or ``"eager"``; None takes the default of the model type.
    progress
        Called with a stage and the fraction done while a GGUF file is converted; True draws a bar on standard error if
        that is a terminal, False is silent.

    Returns
    -------
    tuple
        The model in eval mode and its tokenizer. Their ``name_or_path`` is the name they were asked by.

    Raises
    ------
    ModelError
        If the model cannot be found or loaded.
    UnsupportedError
        If the plan in the folder is for other weights or another dtype.

    Examples
    --------
    >>> import softgap
    >>> model, tokenizer = softgap.load_model("smollm2-135m")
    >>> model.config.num_hidden_layers, model.config.num_attention_heads
    (30, 9)
    """
    loaded = loading.load_model(
        name,
        dtype=dtype,
        device=device,
        device_map=device_map,
        max_memory=max_memory,
        quantise=quantise,
        attn=attn,
        progress=progress,
    )
    file = plan_in(name)
    if file is not None:
        attach(loaded[0], load_plan(file))
    return loaded
