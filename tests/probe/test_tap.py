"""The model is left as it was found: after exceptions and interrupts, in nested recordings, and across threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from softgap.attention import LinearState
from softgap.errors import ModelError
from softgap.probe import Interrupted, generate, record
from softgap.probe.tap import overridden_names
from support.model_examples import byte_tokenizer, tiny_llama
from support.probe_cases import (
    MEASURED,
    SAME_MODEL,
    apart,
    difference,
    expected,
    gap,
    ids_of,
    only,
    prompt_of,
    row,
    tiny_with,
    traces,
    written,
)

IDS = ids_of(11)


@pytest.fixture
def model() -> Iterator[Any]:
    subject = tiny_with("llama")
    before = traces(subject)
    yield subject
    assert traces(subject) == before


class Interrupting(nn.Module):
    """A feed-forward layer that raises at its n-th call."""

    def __init__(self, inner: nn.Module, at: int, error: BaseException) -> None:
        super().__init__()
        self.inner, self.left, self.error = inner, at, error

    def forward(self, x: Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.inner(x)


def breaking(model: Any, at: int, error: BaseException) -> None:
    """Let the first layer's feed-forward raise at its n-th call: one layer has been seen by then, one has not."""
    model.model.layers[0].mlp = Interrupting(model.model.layers[0].mlp, at, error)


def test_after_a_recording_nothing_is_left(model: Any) -> None:
    with record(model):
        assert overridden_names() == ("sdpa",)
        assert "generate" in model.__dict__
        written(model, IDS, 3)


def test_an_exception_in_the_block_leaves_nothing(model: Any) -> None:
    def block() -> None:
        with record(model):
            written(model, IDS, 3)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        block()


def test_a_refused_model_leaves_nothing() -> None:
    refused = tiny_with("bloom", attn="eager")
    before = traces(refused)
    with pytest.raises(ModelError, match="'bloom' computes attention in code of its own"), record(refused):
        raise AssertionError("never reached")
    assert traces(refused) == before


@pytest.mark.parametrize("block", [1, 4, 32])
@pytest.mark.parametrize("at", [1, 2, 6])
def test_an_interrupted_generation_stays_readable(at: int, block: int) -> None:
    model = tiny_with("llama")
    breaking(model, at, KeyboardInterrupt())
    with record(model, ["elu1", "top_k:k=3"], block=block, focus=True) as recording:
        with pytest.raises(KeyboardInterrupt):
            written(model, IDS, 20)
        interrupted = recording.trajectories()
        tokens = written(model, IDS, 20)[0].tolist()
    if at == 1:
        assert interrupted == []
        assert only(recording.trajectories()).n_steps == 20
        return
    steps = at - 1
    run = only(interrupted)
    truth = expected(model, tokens[:-1], ["elu1", "top_k:k=3"])
    assert run.positions.tolist() == list(range(10, 10 + steps))
    # The token of every step was fed to the forward that broke, or to one before it.
    assert run.token_ids.tolist() == tokens[11 : 11 + steps]
    assert gap(run, truth, slice(10, 10 + steps)) < SAME_MODEL
    assert difference(run.focus["sparsity"], truth.focus["sparsity"][..., 10 : 10 + steps]) < SAME_MODEL
    assert difference(run.logprob, truth.logprob(tokens[11 : 11 + steps], first=10)) < SAME_MODEL
    assert prompt_of(run).n_steps == 10
    whole = recording.trajectories()[1]
    assert whole.n_steps == 20
    assert gap(whole, truth, slice(10, None)) < SAME_MODEL
    assert "generate" not in model.__dict__


@pytest.mark.parametrize("at", range(1, 10, 2))
@pytest.mark.parametrize("block", [1, 3])
def test_an_interrupt_inside_the_instrument_leaves_no_wrong_number(
    at: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_with("llama")
    tokens = written(model, IDS, 12)[0].tolist()
    compare, calls = LinearState.compare, []

    def interrupted(self: LinearState, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        result = compare(self, *args, **kwargs)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(LinearState, "compare", interrupted)
    names = ["elu1", "top_k:k=3", "uniform"]
    with record(model, names, block=block) as recording, pytest.raises(KeyboardInterrupt):
        written(model, IDS, 12)
    truth = expected(model, tokens[:-1], names)
    for run in recording.trajectories():
        assert run.token_ids.tolist() == tokens[11 : 11 + run.n_steps]
        assert gap(run, truth, slice(10, 10 + run.n_steps)) < SAME_MODEL
        assert gap(prompt_of(run), truth, slice(0, 10)) < SAME_MODEL
    if at > 5:
        assert only(recording.trajectories()).n_steps >= 1


@pytest.mark.parametrize("at", [1, 6])
def test_ctrl_c_in_generate_brings_what_was_measured(at: int) -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    whole = generate(model, tokenizer, "ten boats", 12, chat=False, eos_token_id=None)
    breaking(model, at, KeyboardInterrupt())
    with pytest.raises(Interrupted) as stop:
        generate(model, tokenizer, "ten boats", 12, chat=False, eos_token_id=None)
    if at == 1:
        assert stop.value.runs == []
        return
    run = only(stop.value.runs)
    assert run.n_steps == at - 1
    assert run.token_ids.tolist() == whole.token_ids[: at - 1].tolist()
    assert run.divergence == pytest.approx(whole.divergence[..., : at - 1], abs=SAME_MODEL)
    assert whole.completion_text.startswith(run.completion_text)


def test_rows_that_had_stopped_when_the_interrupt_came() -> None:
    model = tiny_with("llama")
    given = torch.tensor([IDS, ids_of(11, seed=1)])
    free = written(model, given, 20)[:, 11:].tolist()
    ends = next(token for token in free[0][:8] if token not in free[1])
    breaking(model, 13, KeyboardInterrupt())
    with record(model) as recording, pytest.raises(KeyboardInterrupt):
        written(model, given, 20, eos_token_id=ends)
    runs = recording.trajectories()
    assert [run.n_steps for run in runs] == [free[0].index(ends) + 1, 12]


def test_an_exception_in_the_model_ends_the_run_before_it() -> None:
    model = tiny_with("llama")
    breaking(model, 3, RuntimeError("broken"))
    with torch.no_grad(), record(model, MEASURED) as recording:
        cache = model(row(IDS)).past_key_values
        model(row([5]), past_key_values=cache)
        with pytest.raises(RuntimeError, match="broken"):
            model(row([6]), past_key_values=cache)
        model(row(IDS[:4]))
    first, second = recording.trajectories()
    assert first.token_ids.tolist() == [*IDS[1:], 5, 6]
    assert gap(first, expected(model, [*IDS, 5]), slice(None)) < SAME_MODEL
    assert gap(second, expected(model, IDS[:4]), slice(None)) < SAME_MODEL


def test_nested_recordings_of_one_model(model: Any) -> None:
    with record(model, ["elu1"]) as outer:
        written(model, IDS, 3)
        with record(model, ["taylor2", "uniform"], block=1) as inner:
            tokens = written(model, IDS, 6)[0].tolist()
        assert "generate" in model.__dict__
        written(model, IDS, 4)
    assert [run.n_steps for run in outer.trajectories()] == [3, 6, 4]
    run = only(inner.trajectories())
    truth = expected(model, tokens[:-1], ["taylor2", "uniform"])
    assert run.mechanisms == ("taylor2", "uniform")
    assert gap(run, truth, slice(10, None)) < SAME_MODEL
    assert gap(outer.trajectories()[1], expected(model, tokens[:-1], ["elu1"]), slice(10, None)) < SAME_MODEL


def test_two_models_in_two_threads_do_not_mix() -> None:
    models = [tiny_with("llama"), tiny_with("qwen2"), tiny_with("gpt2")]
    before = [traces(model) for model in models]
    alone = []
    for model in models:
        with record(model) as recording:
            written(model, IDS, 30)
        alone.append(only(recording.trajectories()))
    together: dict[int, list[Any]] = {}
    start = threading.Barrier(len(models))

    def work(index: int) -> None:
        start.wait()
        found = []
        for _ in range(3):
            with record(models[index]) as recording:
                written(models[index], IDS, 30)
            found.append(only(recording.trajectories()))
        together[index] = found

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, run in enumerate(alone):
        assert len(together[index]) == 3
        for other in together[index]:
            assert other.token_ids.tolist() == run.token_ids.tolist()
            assert apart(other, run) == 0
    assert [traces(model) for model in models] == before


def test_another_model_is_neither_recorded_nor_changed(model: Any) -> None:
    other = tiny_with("llama")
    with torch.no_grad():
        plain = other(row(IDS)).logits
        with record(model) as recording:
            inside = other(row(IDS)).logits
            written(model, IDS, 3)
            written(other, IDS, 3)
    assert torch.equal(plain, inside)
    assert only(recording.trajectories()).n_steps == 3


def test_an_override_of_the_user_is_used_and_put_back() -> None:
    calls = []
    shared = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return shared(*args, **kwargs)

    model = tiny_with("llama")
    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        with record(model):
            written(model, IDS, 3)
        assert len(calls) == 3 * 2
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
        assert ALL_ATTENTION_FUNCTIONS._local_mapping["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert overridden_names() == ()


def test_an_override_made_during_a_recording_stays() -> None:
    shared = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*args: Any, **kwargs: Any) -> Any:
        return shared(*args, **kwargs)

    try:
        with record(tiny_with("llama")):
            ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
        assert ALL_ATTENTION_FUNCTIONS._local_mapping["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert overridden_names() == ()


def test_a_generate_of_the_users_own_is_used_and_put_back() -> None:
    model = tiny_with("llama")
    calls = []
    original = model.generate

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        original(*args, **kwargs)
        return "something of its own"

    model.generate = mine
    with record(model) as recording:
        assert model.generate(row(IDS), max_new_tokens=3) == "something of its own"
    assert calls == [1]
    assert model.__dict__["generate"] is mine
    assert only(recording.trajectories()).n_steps == 3


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_the_attention_the_user_set_stays(attn: str) -> None:
    model = tiny_with("llama")
    model.set_attn_implementation(attn)
    with record(model) as recording:
        assert model.config._attn_implementation == attn
        written(model, IDS, 3)
    assert model.config._attn_implementation == attn
    assert only(recording.trajectories()).manifest.backend == attn
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == {}


def test_another_attention_inside_a_recording_is_an_error() -> None:
    model = tiny_with("llama")
    with record(model, MEASURED) as recording:
        tokens = written(model, IDS, 3)[0].tolist()
        model.set_attn_implementation("eager")
        with pytest.raises(ModelError, match="do not change the attention implementation while recording"):
            written(model, IDS, 3)
        with pytest.raises(ModelError, match="do not change the attention implementation while recording"):
            model(row(IDS))
    assert gap(only(recording.trajectories()), expected(model, tokens[:-1]), slice(10, None)) < SAME_MODEL
    assert model.config._attn_implementation == "eager"
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == {}


def test_layers_that_are_skipped_are_an_error(model: Any) -> None:
    with torch.no_grad(), record(model):
        cache = model(row(IDS)).past_key_values
        layers = model.model.layers
        model.config.num_hidden_layers = 1
        try:
            model.model.layers = nn.ModuleList(list(layers)[:1])
            with pytest.raises(ModelError, match="layers changed between two forwards"):
                model(row([5]), past_key_values=cache)
        finally:
            model.model.layers = layers
            model.config.num_hidden_layers = 2


def test_gradients_pass_through_a_recording(model: Any) -> None:
    def gradient() -> Tensor:
        model.zero_grad()
        model(row(IDS), labels=row(IDS)).loss.backward()
        found: Tensor = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
        return found

    plain = gradient()
    with record(model) as recording:
        recorded = gradient()
    assert torch.equal(plain, recorded)
    assert only(recording.trajectories()).n_steps == 11
