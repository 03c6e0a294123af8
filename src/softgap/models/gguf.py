"""GGUF files, converted once to safetensors in the user's cache; models whose GGUF file comes in packages."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from tokenizers import pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, read_gguf_metadata

from softgap.errors import ModelError
from softgap.models.cache import CopyRecord, build_copy, read_record
from softgap.models.catalogue import PackagedModel
from softgap.models.loading import quiet_transformers
from softgap.models.support import refusal
from softgap.progress import Progress

__all__ = [
    "LARGEST_CACHED",
    "convert",
    "file_hash",
    "gguf_metadata",
    "packaged_folder",
    "read_gguf",
]


LARGEST_CACHED = 2 * 1024**3


"""Files above this size are read directly each time: a float32 copy of them is eight times as large or more."""


_SAMPLE = "The capital of France is Paris.\n\tdef f(x):  return x + 1234  # naïve 日本語\n"


# llama.cpp splits off single digits before GPT-2's pattern for these vocabularies; transformers does not know them.
_SINGLE_DIGITS = frozenset({"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"})


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def convert(files: Sequence[Path], folder: Path, sha256: str, report: Progress) -> CopyRecord:
    """Convert a GGUF file, whole or in parts, to a model folder, once; several processes may ask at the same time."""

    def build(staging: Path) -> tuple[str, str, int, str]:
        with _whole_file(files, staging, report) as path:
            model, tokenizer = read_gguf(path, report)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        _require_space(staging, 4 * parameters)
        with quiet_transformers(downloads=False):
            report("saving the converted model", 0.85)
            _save(model, tokenizer, staging)
            report("verifying the converted model", 0.95)
            _verify(staging, model, tokenizer)
        return str(files[0]), sha256, parameters, transformers.__version__

    record = build_copy(folder, build, lambda: report("waiting for another process that converts this model", 0.0))
    report("converted", 1.0)
    return record


@contextlib.contextmanager
def _whole_file(files: Sequence[Path], staging: Path, report: Progress) -> Iterator[Path]:
    """The GGUF file: the only one of `files`, or a file of all their bytes that is removed at the end."""
    if len(files) == 1:
        yield files[0]
        return
    report("joining the parts", 0.0)
    _require_space(staging, sum(file.stat().st_size for file in files))
    whole = staging / files[0].with_suffix("").name
    with whole.open("wb") as joined:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, joined, 2**20)
    try:
        yield whole
    finally:
        whole.unlink()


def read_gguf(path: Path, report: Progress) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A GGUF file as a plain float32 model and its tokenizer, with no trace of quantisation left."""
    report("reading the GGUF file", 0.0)
    metadata = gguf_metadata(path)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with quiet_transformers(downloads=False), _report_tensors(report), _explain_damage(path):
        config = AutoConfig.from_pretrained(**source)
        reason = refusal(config.to_dict())
        if reason is not None:
            raise ModelError(f"cannot use the GGUF file '{path}': {reason}; give the file of a causal language model")
        report("reading the tokenizer", 0.2)
        tokenizer = _tokenizer(source, metadata, config)
        report("dequantising", 0.35)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        model, info = loaded
        plain = _plain(model)
    if info["missing_keys"]:
        first = sorted(info["missing_keys"])[0]
        raise ModelError(
            f"the GGUF file '{path}' lacks {len(info['missing_keys'])} weights of its model, the first is '{first}'; "
            "give a whole file, not one part of a split one"
        )
    return plain, tokenizer


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The file's metadata; refuses what is no GGUF file and architectures that transformers cannot read."""
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"'{path}' is no GGUF file: it does not begin with the letters GGUF; give another file")
    with _explain_damage(path):
        metadata, _ = read_gguf_metadata(str(path))
    architecture = metadata["general.architecture"]
    legacy = set(modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"}
    # The renamings transformers makes before it looks an architecture up.
    renamed = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
    known = legacy | set(GGUF_CONFIG_ARCHS) | set(renamed) | {"t5encoder"}
    if architecture not in known:
        raise ModelError(
            f"the GGUF file '{path}' has the architecture '{architecture}', which transformers "
            f"{transformers.__version__} cannot read (it reads {', '.join(sorted(known))}); load the original model "
            "by its hub id instead"
        )
    return dict(metadata)


def _tokenizer(source: dict[str, Any], metadata: dict[str, Any], config: Any) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**source)
    if metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    # transformers drops this wish of the file, and a Gemma that does not see its first token falls apart.
    if metadata.get("tokenizer.ggml.add_bos_token") and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
    return tokenizer


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model built from the plain config, since transformers saves none that came from GGUF."""
    values = model.config.to_dict()
    for trace in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(trace, None)
    config = type(model.config).from_dict(_shortest(values))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    plain: PreTrainedModel = model_class.from_pretrained(
        None, config=config, state_dict=model.state_dict(), dtype=torch.float32
    )
    plain.generation_config = model.generation_config
    return plain


def _shortest(value: Any) -> Any:
    """Numbers as they were written before GGUF rounded them to float32: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, dict):
        return {name: _shortest(entry) for name, entry in value.items()}
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        # safetensors tells a full disk only by its text.
        full = "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from None
    tokenizer.save_pretrained(folder)


def _verify(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless the saved files give back every weight, the config and the tokenizer."""
    weights = model.state_dict()
    missing = {name for name, _ in model.named_parameters()}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dict
                if not torch.equal(stored.get_tensor(name), weights[name]):
                    raise ModelError(f"the converted weight '{name}' differs from its source; convert again")
                missing.discard(name)
    tokenizer_again = AutoTokenizer.from_pretrained(folder)
    same = (
        not missing
        and AutoConfig.from_pretrained(folder).to_diff_dict() == {**model.config.to_diff_dict()}
        and tokenizer_again(_SAMPLE).input_ids == tokenizer(_SAMPLE).input_ids
        and tokenizer_again.decode(tokenizer_again(_SAMPLE).input_ids) == tokenizer.decode(tokenizer(_SAMPLE).input_ids)
        and tokenizer_again.chat_template == tokenizer.chat_template
    )
    if not same:
        raise ModelError(f"the converted model in '{folder}' does not give back its source; convert again")


def _require_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < 1.05 * size:
        raise ModelError(
            f"the converted model needs {size / 1e6:.0f} MB, '{folder.parent}' has {free / 1e6:.0f} MB free; "
            "free some space or set SOFTGAP_CACHE to a folder with room"
        )


@contextlib.contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes the readers raise into one sentence."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise ModelError(f"the GGUF file '{path}' is damaged ({reason}); download it again") from None


@contextlib.contextmanager
def _report_tensors(report: Progress) -> Iterator[None]:
    """Count the dequantised tensors of transformers' reader, which knows only a bar of its own."""

    def counted(items: Iterable[Any], *_: object, **__: object) -> Iterator[Any]:
        tensors = list(items)
        for index, tensor in enumerate(tensors):
            report("dequantising", 0.5 + 0.3 * index / len(tensors))
            yield tensor

    original_bar = modeling_gguf_pytorch_utils.tqdm
    modeling_gguf_pytorch_utils.tqdm = counted
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = original_bar


def packaged_folder(model: PackagedModel, report: Progress) -> Path:
    """The folder of the converted copy; converts the file of the packages if there is none yet."""
    folder = model.copy()
    if read_record(folder) is not None:
        return folder
    missing = model.missing()
    if missing:
        names = " and ".join(part.requirement.partition("==")[0] for part in missing)
        packages = "the package" if len(missing) == 1 else "the packages"
        terms = f" ({model.terms} apply)" if model.terms else ""
        raise ModelError(
            f"the model '{model.name}' is not here: neither a converted copy in '{folder.parent}' nor {packages} "
            f"{names} was found; install it with '{model.install}'{terms}"
        )
    report(f"checking the GGUF file{f' ({model.terms} apply)' if model.terms else ''}", 0.0)
    convert([_checked_part(model, number) for number in range(len(model.parts))], folder, model.sha256, report)
    return folder


def _checked_part(model: PackagedModel, number: int) -> Path:
    """The file of a part; refuses one that is truncated, another part, or another file."""
    part = model.parts[number]
    path = part.path()
    if path is None:
        raise ModelError(f"the package of '{part.file}' has gone; install it with '{model.install}'")
    remedy = f"install the right one with '{model.install} --force-reinstall'"
    sha256 = file_hash(path)
    if sha256 == part.sha256:
        return path
    of = "" if len(model.parts) == 1 else f"part {number + 1} of "
    swapped = [other for other, one in enumerate(model.parts) if one.sha256 == sha256]
    if swapped:
        raise ModelError(f"'{path}' must be {of}'{model.name}', got its part {swapped[0] + 1}; {remedy}")
    size = path.stat().st_size
    if size < part.size_bytes:
        raise ModelError(
            f"'{path}' is truncated: {of}'{model.name}' has {part.size_bytes:,} bytes, got {size:,}; {remedy}"
        )
    raise ModelError(
        f"'{path}' is not the file '{model.name}' stands for: the SHA-256 of {of}it must begin with "
        f"{part.sha256[:12]}, got {sha256[:12]}; {remedy}"
    )
