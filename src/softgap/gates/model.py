"""Gates: checks that must pass before the measurements of a model can be trusted."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from softgap.attention import resolve
from softgap.attention.reference import reference_attention, reference_comparison
from softgap.errors import SoftgapError, UnsupportedError
from softgap.models.placement import input_device
from softgap.models.support import AttentionModule, attention_modules
from softgap.models.tensor_files import DEFAULT_MECHANISMS
from softgap.probe.capture import read_ids
from softgap.probe.recording import record
from softgap.probe.softmax import softmax_output
from softgap.probe.tap import AttentionCall, observe_attention, overridden_names, takes_positions
from softgap.probe.visibility import VisibleSets, seen_by_mask
from softgap.trajectories import Trajectories

__all__ = ["GATES", "THRESHOLDS", "Gate", "Subject", "non_finite_outputs"]

THRESHOLDS: dict[str, dict[torch.dtype, float]] = {
    # The same model output on both sides: what remains is float32 arithmetic of the instrument.
    "mask": {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5},
    "oracle": {torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4},
    "block": {torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4},
    # Two computations of the model's output: its own rounding counts. Parity is a relative L2.
    "parity": {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3},
    "live": {torch.float32: 1e-3, torch.bfloat16: 1.5e-1, torch.float16: 2e-2},
    "batch": {torch.float32: 1e-3, torch.bfloat16: 1.5e-1, torch.float16: 2e-2},
    # By how much the model's own log-probabilities may differ between two computations before it is to blame.
    "model": {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2},
}

# Feature maps, and an exact window that is shorter than the text: what a cache, padding or a mask could spoil for each.
GATE_MECHANISMS = (*DEFAULT_MECHANISMS, "window:w=8,sinks=2")

Verdict = Literal["pass", "fail", "model", "skip"]


@dataclass(frozen=True)
class Gate:
    """The outcome of one gate."""

    name: str
    verdict: Verdict
    measured: float | None
    threshold: float | None
    detail: str


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under examination, and the tokens it is examined with."""

    model: PreTrainedModel
    ids: tuple[int, ...]
    new_tokens: int = 12
    repeats: int = 50

    @cached_property
    def mechanisms(self) -> tuple[str, ...]:
        """What is measured: the window is left out of a model whose keys are not tokens."""
        try:
            read_ids(self.model, [list(self.ids)], mechanisms=GATE_MECHANISMS)
        except UnsupportedError:
            return DEFAULT_MECHANISMS
        return GATE_MECHANISMS

    def limit(self, name: str) -> float:
        """The threshold of this name for the model's dtype."""
        return THRESHOLDS[name].get(self.model.dtype, THRESHOLDS[name][torch.float32])

    @property
    def prompt(self) -> Tensor:
        """The tokens as a batch of one."""
        return torch.tensor([self.ids], device=input_device(self.model))

    def generate(self, ids: Tensor | None = None, **settings: Any) -> Any:
        """Generate exactly ``new_tokens`` tokens, greedily unless told otherwise."""
        prompt = self.prompt if ids is None else ids
        write: Any = self.model.generate
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": self.new_tokens,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        return write(prompt, **{**arguments, **settings})

    def record(self, ids: Tensor | None = None, *, block: int = 32, **settings: Any) -> tuple[list[Trajectories], Any]:
        """The trajectories of a recorded generation, and what it returned."""
        with record(self.model, self.mechanisms, block=block) as recording:
            result = self.generate(ids, **settings)
        return recording.trajectories(), result

    def replay(self, sequences: Tensor, n_prompt: int) -> Trajectories:
        """The same tokens, read."""
        tokens = sequences[0].tolist()
        return read_ids(self.model, [tokens[:n_prompt]], [tokens[n_prompt:]], mechanisms=self.mechanisms)[0]


def non_finite_outputs(subject: Subject) -> str:
    """Which output of the model is NaN or infinite on the subject's tokens, as a sentence; empty for none.

    Plain hooks look at the attention modules: the gates have yet to show that the tap can be trusted.
    """
    wrong: list[str] = []

    def look(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and not bool(first.isfinite().all()):
            wrong.append(name)

    def listen(entry: AttentionModule) -> Any:
        name = f"the output of '{entry.name}'"
        return entry.module.register_forward_hook(lambda module, inputs, output: look(name, output))

    handles = [listen(entry) for entry in attention_modules(subject.model)]
    try:
        with torch.inference_mode():
            logits = subject.model(subject.prompt, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    look("the logits", logits.masked_fill(logits == -np.inf, 0))  # a logit of -inf rules a token out
    if not wrong:
        return ""
    remedy = "load it in float32" if subject.model.dtype != torch.float32 else "take another copy of the model"
    return f"a model must give finite numbers, got NaN or infinity first in {wrong[0]}; {remedy}"


def non_interference(subject: Subject) -> Gate:
    """Tokens and logits are the same bits with and without the tap, greedily and sampling."""
    worst, where = 0.0, ""
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 20}
    for settings in ({}, sampling):
        outputs = []
        for recorded in (False, True):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(11)
                outputs.append(subject.record(**settings)[1] if recorded else subject.generate(**settings))
        plain, tapped_output = outputs
        same = torch.equal(plain.sequences, tapped_output.sequences)
        difference = max((_bits(a, b) for a, b in zip(plain.logits, tapped_output.logits, strict=False)), default=0.0)
        worst = max(worst, difference if same else np.inf)
        if not same:
            where = "other tokens came out; "
    return _gate_of("non-interference", worst, 0.0, f"{where}largest difference of logits, greedy and sampling")


def mask(subject: Subject) -> Gate:
    """Changing a token that earlier queries cannot see changes nothing recorded for them."""
    changed = [*subject.ids[:-1], _other_token(subject.ids[-1], subject)]
    first, second = (
        read_ids(subject.model, [ids], mechanisms=subject.mechanisms)[0] for ids in (list(subject.ids), changed)
    )
    before = slice(0, len(subject.ids) - 1)
    difference = _largest_difference(_values(first)[..., before], _values(second)[..., before])
    model_difference = _largest_difference(
        first.entropy[: len(subject.ids) - 1], second.entropy[: len(subject.ids) - 1]
    )
    return _compare_runs(
        "mask", difference, model_difference, subject, "mask", "largest change before a changed last token"
    )


def padding(subject: Subject) -> Gate:
    """Each row of a left-padded batch is recorded as if it were alone."""
    ids = list(subject.ids)
    short = ids[: max(1, len(ids) // 2)]
    hidden = len(ids) - len(short)
    batch = torch.tensor([ids, [0] * hidden + short], device=input_device(subject.model))
    attention_mask = torch.tensor([[1] * len(ids), [0] * hidden + [1] * len(short)], device=input_device(subject.model))
    rows, result = subject.record(batch, attention_mask=attention_mask)
    difference, model_difference = 0.0, 0.0
    for row, tokens in zip(rows, ([*ids], [*short]), strict=True):
        new = result.sequences[rows.index(row), len(ids) :].tolist()
        alone = read_ids(subject.model, [tokens], [new], mechanisms=subject.mechanisms)[0]
        if row.n_steps != alone.n_steps or row.positions.tolist() != alone.positions.tolist():
            return Gate("batch = single", "fail", None, subject.limit("batch"), "a padded row has other steps")
        difference = max(difference, _largest_difference(_values(row), _values(alone)))
        model_difference = max(model_difference, _score_difference(row, alone))
    if difference > subject.limit("batch"):
        model_difference = max(model_difference, _query_difference(subject, batch, attention_mask, short))
    return _compare_runs(
        "batch = single", difference, model_difference, subject, "batch", "padded rows against each row read alone"
    )


def parity(subject: Subject) -> Gate:
    """Softmax attention recomputed from the tapped tensors is the model's own output."""
    worst, where = 0.0, ""
    names = {id(entry.module): entry.name for entry in attention_modules(subject.model)}
    for call in _calls(subject):
        visible = VisibleSets().of(call)
        expected = softmax_output(call, visible)
        output = call.output.transpose(1, 2).float()
        batch, heads, n = output.shape[:3]
        valid = visible.fitted_to(batch, heads, n, call.key.shape[2]).row_valid(batch, n, output.device)
        error = ((output - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)).transpose(1, 2)[valid]
        if float(error.max()) > worst:
            worst, where = float(error.max()), names.get(id(call.module), type(call.module).__name__)
    return _gate_of("parity", worst, subject.limit("parity"), f"relative L2 of outputs, worst in {where or 'no layer'}")


def oracle(subject: Subject) -> Gate:
    """A replayed trajectory is what float64 loops over the same tensors give."""
    run = read_ids(subject.model, [list(subject.ids)], mechanisms=subject.mechanisms)[0]
    worst = 0.0
    for layer, call in enumerate(_calls(subject)):
        for index, name in enumerate(subject.mechanisms):
            expected = _reference(name, call)
            heads = expected.shape[0]
            worst = max(worst, _largest_difference(run.quantities["divergence"][index, layer, :heads], expected))
    return _gate_of("oracle", worst, subject.limit("oracle"), "largest difference from the float64 reference")


def live_replay(subject: Subject) -> Gate:
    """A generation recorded live, with its cache, is the same as its text read afterwards."""
    return _live(subject, "live = replay", "live with the dynamic cache against replay")


def static_cache(subject: Subject) -> Gate:
    """The same with a static cache, whose unfilled slots must never count."""
    try:
        return _live(subject, "static cache", "live with a static cache against replay", cache_implementation="static")
    except SoftgapError:
        raise
    except Exception as error:
        return Gate("static cache", "skip", None, None, f"the model has no static cache ({type(error).__name__})")


def block_size(subject: Subject) -> Gate:
    """How many steps are reduced together does not matter."""
    difference = 0.0
    first: Trajectories | None = None
    for block in (1, 5, 1000):
        run = subject.record(block=block)[0][0]
        first = first or run
        difference = max(difference, _largest_difference(_values(first), _values(run)))
    return _gate_of("block size", difference, subject.limit("block"), "blocks of 1, 5 and 1000 steps")


def compiled_code(subject: Subject) -> Gate:
    """No compiled code hides an attention call: the tap and a module's own hook see as many as without compilation."""
    entries = [entry.module for entry in attention_modules(subject.model)]

    def seen() -> tuple[int, int]:
        hooked: list[int] = []
        handles = [module.register_forward_hook(lambda *_: hooked.append(1)) for module in entries]
        try:
            return len(_calls(subject)), len(hooked)
        finally:
            for handle in handles:
                handle.remove()

    # A graph that was made without hooks is used with hooks too, unless something else changes.
    _calls(subject)
    counted = seen()
    eager = counted
    if "torch._dynamo" in sys.modules:  # nobody can have compiled anything without it
        with torch.compiler.set_stance("force_eager"):
            eager = seen()
    hidden = float(max(b - a for a, b in zip(counted, eager, strict=True)))
    return _gate_of("compiled code", hidden, 0.0, f"attention calls hidden by compiled code, of {eager[0]}")


def stability(subject: Subject) -> Gate:
    """Many recordings leave no tensor behind."""
    short = Subject(subject.model, subject.ids[:8], new_tokens=2)
    sizes = []
    for i in range(subject.repeats):
        short.record()
        if i in (2, subject.repeats - 1):
            gc.collect()
            sizes.append(sum(x.nbytes for x in gc.get_objects() if type(x) is Tensor))
    grown = float(sizes[-1] - sizes[0])
    return _gate_of("stability", max(0.0, grown), 0.0, f"bytes of tensors left behind by {subject.repeats} generations")


def restore(subject: Subject) -> Gate:
    """Afterwards the model and the registry are as they were found."""
    before = _state(subject.model)
    subject.record()
    try:
        with record(subject.model):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    after = _state(subject.model)
    changed = [name for name in before if before[name] != after[name]]
    return _gate_of("restore", float(len(changed)), 0.0, ", ".join(changed) or "registry, hooks, config and methods")


GATES: dict[str, Callable[[Subject], Gate]] = {
    "non-interference": non_interference,
    "mask": mask,
    "parity": parity,
    "oracle": oracle,
    "live = replay": live_replay,
    "static cache": static_cache,
    "batch = single": padding,
    "block size": block_size,
    "compiled code": compiled_code,
    "stability": stability,
    "restore": restore,
}


def _live(subject: Subject, name: str, detail: str, **settings: Any) -> Gate:
    runs, result = subject.record(**settings)
    replay = subject.replay(result.sequences, len(subject.ids))
    live = runs[0]
    if live.positions.tolist() != replay.positions.tolist() or live.token_ids.tolist() != replay.token_ids.tolist():
        return Gate(name, "fail", None, subject.limit("live"), "live and replay have other steps")
    difference = _largest_difference(_values(live), _values(replay))
    if live.prompt is not None and replay.prompt is not None:
        difference = max(difference, _largest_difference(_values(live.prompt), _values(replay.prompt)))
    return _compare_runs(name, difference, _score_difference(live, replay), subject, "live", detail)


def _query_difference(subject: Subject, batch: Tensor, attention_mask: Tensor, short: list[int]) -> float:
    """How far the first layer's queries of a padded row are from those of the row alone.

    A model that counts padding as positions rotates its queries and keys further. Softmax does not notice, a feature
    map of rotated vectors does.
    """
    queries = []
    for ids, shown in ((batch, attention_mask), (torch.tensor([short], device=batch.device), None)):
        calls: list[AttentionCall] = []
        with observe_attention(subject.model, calls.append):
            subject.generate(ids, attention_mask=torch.ones_like(ids) if shown is None else shown, max_new_tokens=1)
        queries.append(calls[0].query[-1, :, -len(short) :].float())
    return float((queries[0] - queries[1]).abs().max())


def _calls(subject: Subject) -> list[AttentionCall]:
    """Every attention call of one forward over the subject's tokens."""
    calls: list[AttentionCall] = []
    positions = torch.arange(len(subject.ids), device=input_device(subject.model))[None]
    accepted = {"position_ids": positions} if takes_positions(subject.model) else {}
    with torch.inference_mode(), observe_attention(subject.model, calls.append):
        subject.model(subject.prompt, use_cache=False, **accepted)
    return calls


def _reference(name: str, call: AttentionCall) -> np.ndarray:
    """Divergence of every head and query of a call's first sequence, by loops in float64."""
    heads, n = call.query.shape[1:3]
    n_keys = call.key.shape[2]
    if call.mask is None:
        seen = torch.ones(n, n_keys).tril().bool()[None, None] if n > 1 else torch.ones(1, 1, 1, n_keys).bool()
    else:
        seen = seen_by_mask(call.mask.cpu(), n, n_keys)
    linear = reference_attention(
        resolve(name),
        call.query.cpu(),
        call.key.cpu(),
        call.value.cpu(),
        seen.expand(call.query.shape[0], heads, n, n_keys),
        scale=call.scale,
        offset=n_keys - n,
        softcap=call.rule.softcap,
        sink_logits=None if call.rule.sink_logits is None else call.rule.sink_logits[0].float().cpu(),
    )
    model_output = call.output.transpose(1, 2).double().cpu()
    return np.array(
        [
            [reference_comparison(model_output[0, h, t].numpy(), linear[0, h, t].numpy())[0] for t in range(n)]
            for h in range(heads)
        ]
    )


def _state(model: PreTrainedModel) -> dict[str, object]:
    entries = attention_modules(model)
    return {
        "overrides": overridden_names(),
        "registry entries": [(id(e.registry), dict(e.registry._local_mapping)) for e in entries[:1]],
        "attention names": [getattr(e.module, "config", model.config)._attn_implementation for e in entries],
        "hooks": [len(model._forward_hooks), len(model._forward_pre_hooks)],
        "methods": sorted(key for key in model.__dict__ if callable(model.__dict__[key])),
    }


def _other_token(token: int, subject: Subject) -> int:
    return next(other for other in subject.ids if other != token)


def _bits(a: Tensor, b: Tensor) -> float:
    """0 where two tensors are the same bits (NaN equal to NaN), else their largest difference."""
    if torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)):
        return 0.0
    return float((a.double() - b.double()).abs().nan_to_num(nan=np.inf).max())


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference; a NaN on one side only is infinitely far."""
    if a.size == 0:
        return 0.0
    nan_mismatch = np.isnan(a) != np.isnan(b)
    return float("inf") if nan_mismatch.any() else float(np.nanmax(np.abs(a - b), initial=0.0))


def _values(run: Trajectories) -> np.ndarray:
    """All three quantities of every mechanism, layer, head and step, on the scale of a divergence.

    Cosine alone would not notice a key too many whose value is zero, as in the empty slots of a static cache.
    """
    ratios = (run.quantities[name] for name in ("relative_l2", "norm_ratio"))
    return np.stack([run.quantities["divergence"], *(x / (1 + x) for x in ratios)])


def _score_difference(a: Trajectories, b: Trajectories) -> float:
    return max(_largest_difference(a.logprob, b.logprob), _largest_difference(a.entropy, b.entropy))


def _gate_of(name: str, measured: float, threshold: float, detail: str) -> Gate:
    return Gate(name, "pass" if measured <= threshold else "fail", measured, threshold, detail)


def _compare_runs(
    name: str, difference: float, model_difference: float, subject: Subject, limit: str, detail: str
) -> Gate:
    """The verdict on two runs of the model, its own difference considered."""
    threshold = subject.limit(limit)
    if difference <= threshold:
        return Gate(name, "pass", difference, threshold, detail)
    if model_difference > subject.limit("model"):
        return Gate(
            name, "model", difference, threshold, f"{detail}; the model's own outputs differ by {model_difference:.2g}"
        )
    return Gate(name, "fail", difference, threshold, detail)
