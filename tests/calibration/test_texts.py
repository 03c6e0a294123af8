"""The text of a calibration: what the model writes beside the given text, and that it is no text to evaluate on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from softgap.calibration import texts
from softgap.calibration.conditions import DOMAINS
from softgap.calibration.texts import BEGINNINGS, Corpus, corpus_of, generate_texts, mix_generated
from support.model_examples import byte_tokenizer, tiny_llama

TOKENIZER = byte_tokenizer()
TEXT = " ".join(f"Boat {i} left the harbour with {i * i % 97} barrels." for i in range(400))


def writer(context: int = 1024) -> LlamaForCausalLM:
    return tiny_llama(0, max_position_embeddings=context)


def given(positions: int = 256) -> Corpus:
    return corpus_of(writer(), TOKENIZER, [TEXT], positions=positions)


def test_every_sequence_begins_with_the_first_token_of_the_tokenizer() -> None:
    tokenizer = byte_tokenizer(first=True)
    corpus, bare = (corpus_of(writer(), of, [TEXT], positions=256) for of in (tokenizer, TOKENIZER))
    sequences = (*corpus.fitted, *corpus.held_out, *corpus.far)
    assert {ids[0] for ids in sequences} == {tokenizer.bos_token_id}
    assert all(tokenizer.bos_token_id not in ids[1:] for ids in sequences)
    assert [len(ids) for ids in sequences] == [len(ids) for ids in (*bare.fitted, *bare.held_out, *bare.far)]
    fitted = [token for ids in corpus.fitted for token in ids[1:]]
    assert fitted == TOKENIZER(TEXT)["input_ids"][: len(fitted)]


def test_generated_text_is_added_and_the_rest_of_the_corpus_stays() -> None:
    corpus = given()
    mixed = mix_generated(writer(), TOKENIZER, corpus)
    assert replace(mixed, generated=()) == corpus
    assert len(mixed.generated) == len(BEGINNINGS)
    assert max(map(len, mixed.generated)) <= corpus.longest
    assert mixed.digest != corpus.digest
    for begin, ids in zip(BEGINNINGS, mixed.generated, strict=True):
        assert list(ids[:20]) == TOKENIZER(begin)["input_ids"][:20]


def test_the_same_seed_writes_the_same_text_and_another_seed_another() -> None:
    first, again, other = (mix_generated(writer(), TOKENIZER, given(), seed=seed).generated for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_half_as_many_new_tokens_as_are_fitted_on_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = given(512)
    new: list[int] = []
    shares: list[float] = []
    model: Any = writer()
    generate = model.generate

    def counted(ids: Tensor, **settings: Any) -> Any:
        generated = generate(ids, **settings)
        new.append(generated.shape[0] * (generated.shape[1] - ids.shape[1]))
        return generated

    monkeypatch.setattr(model, "generate", counted)
    mix_generated(model, TOKENIZER, corpus, report=shares.append)
    wanted = sum(map(len, corpus.fitted)) // 2
    assert wanted <= sum(new) < wanted + len(BEGINNINGS)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    monkeypatch.setattr(texts, "GENERATED_TOKENS", 400)
    new.clear()
    mix_generated(model, TOKENIZER, corpus)
    assert 400 <= sum(new) < 400 + len(BEGINNINGS)


def test_a_model_that_cannot_generate_leaves_the_corpus_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = writer()
    monkeypatch.setattr(model, "can_generate", lambda: False)
    assert mix_generated(model, TOKENIZER, given()) == given()


@pytest.mark.parametrize("context", [128, 300])
def test_a_short_context_shortens_the_beginnings(context: int) -> None:
    written = generate_texts(writer(context), TOKENIZER, 64)
    assert len(written) >= len(BEGINNINGS)
    assert all(text.startswith(begin[:20]) for text, begin in zip(written, BEGINNINGS, strict=False))


def test_a_tokenizer_without_padding_leaves_none_in_the_text() -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    bare = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert bare.pad_token_id is bare.eos_token_id is None
    written = generate_texts(writer(), bare, 64)
    assert all(text.startswith(begin) for text, begin in zip(written, BEGINNINGS, strict=True))


def test_no_beginning_is_from_a_text_to_evaluate_on() -> None:
    evaluated = {line.strip() for text in DOMAINS.values() for line in text.splitlines() if len(line.strip()) > 8}
    begun = {line.strip() for begin in BEGINNINGS for line in begin.splitlines()}
    # A constructor and an import are the same in all of Python.
    assert evaluated & begun == {"def __init__(self):"} & evaluated
    speakers = {line.split(":")[0] for line in DOMAINS["dialogue"].splitlines() if ":" in line}
    assert not any(begin.startswith(f"{name}:") for name in speakers for begin in BEGINNINGS)
