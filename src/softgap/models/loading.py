"""Load a model by name: a packaged model, a hub id, a local folder or a GGUF file."""

from __future__ import annotations

import contextlib
import difflib
import logging as python_logging
import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub.utils
import psutil
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from softgap.errors import ModelError
from softgap.models.cache import copy_folder, read_record
from softgap.models.catalogue import EMBEDDED, PACKAGED, packaged_model
from softgap.models.placement import (
    DeviceMap,
    MaxMemory,
    available_devices,
    bytes_of_limits,
    check_device_map,
    check_max_memory,
    complete_device_map,
    input_device,
    resolve_device,
)
from softgap.models.quantisation import check_quantise, quantising, require_library
from softgap.models.support import TAPPED_ATTENTION, refusal
from softgap.progress import Progress, bar_or_callback

__all__ = ["load_model", "quiet_transformers"]


_QUIET = threading.RLock()


@contextlib.contextmanager
def quiet_transformers(*, downloads: bool) -> Iterator[None]:
    """Silence the warnings and bars of transformers and the hub, then restore them; `downloads` keeps download bars.

    What those warnings tell (missing weights, unknown types) is checked by the caller and raised instead. The lock
    keeps two threads from restoring each other's settings.
    """
    with _QUIET:
        level = logging.get_verbosity()
        hub_level = hub_logging.get_verbosity()
        bars = logging.is_progress_bar_enabled()
        hub_bars = not huggingface_hub.utils.are_progress_bars_disabled()
        logging.set_verbosity_error()
        hub_logging.set_verbosity(hub_logging.ERROR)
        spread = python_logging.getLogger("accelerate.big_modeling")
        spread_level = spread.level
        spread.setLevel(python_logging.ERROR)
        logging.disable_progress_bar()
        if downloads and hub_bars:
            huggingface_hub.utils.enable_progress_bars()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            hub_logging.set_verbosity(hub_level)
            spread.setLevel(spread_level)
            if bars:
                logging.enable_progress_bar()
            if hub_bars:
                huggingface_hub.utils.enable_progress_bars()
            else:
                huggingface_hub.utils.disable_progress_bars()


def explain(name: str, error: Exception) -> ModelError:
    """The sentence for an error raised while the model `name` was loaded."""
    chain = list(_chain(error))
    hub = _hub_problem(name, chain)
    if hub is not None:
        return ModelError(hub)
    text = str(error).strip()
    first = text.partition("\n")[0].rstrip(".") or type(error).__name__
    if any(isinstance(link, SafetensorError) for link in chain):
        return ModelError(f"the weights of '{name}' are damaged ({first}); download or save them again")
    if "safetensors" in text and "file named" in text:
        return ModelError(
            f"'{name}' has no safetensors weights, and softgap unpickles nothing; choose a repository with "
            "model.safetensors"
        )
    if "custom code" in text or "trust_remote_code" in text:
        return ModelError(
            f"'{name}' needs code from its own repository, which softgap never runs; choose a model that transformers "
            "implements"
        )
    if "attention implementation" in text or "scaled_dot_product_attention" in text:
        return ModelError(f"'{name}' does not support this attention implementation; use attn='eager'")
    if "ignore_mismatched_sizes" in text:
        return ModelError(
            f"the weights of '{name}' do not fit its config.json; give a folder where both belong together"
        )
    if "tokenizer" in text.lower():
        return ModelError(f"'{name}' has no tokenizer that can be read; save one beside it with save_pretrained")
    if isinstance(error, ImportError):
        return ModelError(f"'{name}' needs a package that is not installed ({first}); install it")
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return ModelError(f"'{name}' does not fit into memory; use a smaller model or dtype='bfloat16'")
    # The name of a KeyError or the like is all that its bare key can be understood by.
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return ModelError(f"cannot load '{name}' ({kind}{first}); check the model's files")


def _hub_problem(name: str, chain: list[BaseException]) -> str | None:
    """The sentence for what the hub refused, or None if it was not the hub."""

    def met(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    if met(GatedRepoError):
        return (
            f"the model '{name}' is gated on the hub; accept its terms at {constants.ENDPOINT}/{name} and log in with "
            "'hf auth login'"
        )
    if met(RepositoryNotFoundError):
        return (
            f"there is no model '{name}' on the hub, or it is private; check the spelling, or log in with "
            "'hf auth login'"
        )
    if constants.HF_HUB_OFFLINE and met(LocalEntryNotFoundError, OfflineModeIsEnabled):
        return (
            f"the model '{name}' is not in the local hub cache, and the hub is off (HF_HUB_OFFLINE is set); unset it "
            "to download the model, or give a local folder"
        )
    if met(LocalEntryNotFoundError, ConnectionError, TimeoutError) or any(map(_from_client, chain)):
        return (
            f"the model '{name}' is not in the local hub cache, and the hub at {constants.ENDPOINT} cannot be reached; "
            "check the connection, or give a local folder"
        )
    if met(HfHubHTTPError) and not met(EntryNotFoundError):
        return f"the hub refused the model '{name}' ({str(chain[-1]).partition(chr(10))[0]}); try again later"
    return None


def _from_client(error: BaseException) -> bool:
    """Whether the hub's HTTP client gave up: no connection, no answer in time."""
    return type(error).__module__.startswith("httpx") and not isinstance(error, HfHubHTTPError)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it, outermost first."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


_PACKAGED = [model.name for model in PACKAGED]


_ALLOWED = f"{', '.join(map(repr, _PACKAGED))}, a hub id of the form 'org/name', a model folder or a .gguf file"


# What transformers calls them, for packages that do not import it.
Model = PreTrainedModel


Tokenizer = PreTrainedTokenizerBase


Loaded = tuple[Model, Tokenizer]


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
) -> Loaded:
    """Load a causal language model and its tokenizer, without the plan that a folder may hold.

    ``softgap.load_model`` explains the parameters, and puts the model under such a plan.
    """
    downloads = bool(progress) and sys.stderr.isatty()
    placement = _check_placement(device, device_map, max_memory)
    check_quantise(quantise)
    options = _Options(_check_dtype(dtype), _check_device(device), placement, quantise, _check_attn(attn), downloads)
    source = _resolve(EMBEDDED if name is None else os.fspath(name))
    with bar_or_callback(progress) as report:
        report(f"loading {source.name}", 0.0)
        packaged = packaged_model(source.name) if source.kind == "packaged" else None
        if packaged is not None:
            from softgap.models.gguf import packaged_folder

            return _load_pretrained(source, packaged_folder(packaged, report), options)
        if source.kind == "gguf":
            return _load_gguf(source, Path(source.name), options, report)
        return _load_pretrained(source, source.name, options)


@dataclass(frozen=True)
class _Options:
    dtype: torch.dtype | None
    device: torch.device
    placement: dict[str, Any]
    quantise: str | None
    attn: str | None
    downloads: bool


@dataclass(frozen=True)
class _Source:
    kind: Literal["packaged", "gguf", "folder", "hub"]
    name: str


def _resolve(name: str) -> _Source:
    """What kind of name this is; refuses what is none."""
    if packaged_model(name) is not None:
        return _Source("packaged", name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        _require_model_folder(path)
        return _Source("folder", str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"'{name}' is a file, and of files only .gguf can be loaded; give the folder that holds config.json"
            )
        return _Source("gguf", str(path))
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no model at '{name}': the path does not exist; allowed are {_ALLOWED}")
    if _HUB_ID.fullmatch(name):
        return _Source("hub", name)
    near = difflib.get_close_matches(name.lower(), _PACKAGED, n=1, cutoff=0.5)
    remedy = f"did you mean '{near[0]}'?" if near else "write the organisation too, as in 'openai-community/gpt2'"
    raise ModelError(f"unknown model '{name}'; allowed are {_ALLOWED}; {remedy}")


def _require_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"the folder '{folder}' holds an adapter, not a model; merge it into its base model first")
        raise ModelError(
            f"the folder '{folder}' is no model: it has no config.json; give a folder written by save_pretrained"
        )
    if (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file():
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"the folder '{folder}' has only pickled weights, and softgap unpickles nothing; save them as safetensors "
            "(save_pretrained writes those)"
        )
    raise ModelError(f"the folder '{folder}' is no model: it has no model.safetensors; give a folder with weights")


def _load_gguf(source: _Source, path: Path, options: _Options, report: Progress) -> Loaded:
    """A GGUF file by way of its converted copy; a large one directly."""
    from softgap.models.gguf import LARGEST_CACHED, convert, file_hash, gguf_metadata, read_gguf

    if path.stat().st_size > LARGEST_CACHED:
        if options.placement or options.quantise:
            raise ModelError(
                f"a GGUF file above {LARGEST_CACHED / 2**30:g} GiB is unpacked whole, without device_map and quantise, "
                f"got '{source.name}'; give the original model by its hub id or folder"
            )
        model, tokenizer = read_gguf(path, report)
        if options.attn is not None:
            model.set_attn_implementation(options.attn)
        return _finish_loading(source, _cast(model, dtype=options.dtype), tokenizer, options)
    report("checking the GGUF file", 0.0)
    sha256 = file_hash(path)
    label = next((model.name for model in PACKAGED if model.sha256 == sha256), "gguf")
    folder = copy_folder(label, sha256)
    if read_record(folder) is None:
        gguf_metadata(path)  # what is no GGUF file leaves no trace in the cache
        convert([path], folder, sha256, report)
    return _load_pretrained(source, folder, options)


def _load_pretrained(source: _Source, place: str | Path, options: _Options) -> Loaded:
    """A model folder or a hub repository, with a folder for weights that do not fit into memory."""
    with contextlib.ExitStack() as temporary:
        placement = dict(options.placement)
        if placement:
            placement["offload_folder"] = temporary.enter_context(
                tempfile.TemporaryDirectory(prefix="softgap-offload-")
            )
        model, tokenizer = _read_pretrained(source, place, options, placement)
        # Weights on disk live as long as the model does.
        weakref.finalize(model, temporary.pop_all().close)
    return _finish_loading(source, model, tokenizer, options)


def _read_pretrained(source: _Source, place: str | Path, options: _Options, placement: dict[str, Any]) -> Loaded:
    """A model and its tokenizer, checked before the weights are read."""
    with quiet_transformers(downloads=options.downloads):
        try:
            values, _ = PreTrainedConfig.get_config_dict(place)
            # Read everything else from this very commit; without one, transformers would also ask the hub's bot to
            # convert pickled weights.
            pinned: dict[str, Any] = {"trust_remote_code": False}
            if values.get("_commit_hash"):
                pinned["revision"] = values["_commit_hash"]
            if not values:
                raise ModelError(f"'{source.name}' is no model: it has no config.json; {_hint(source)}")
            _require_causal(source, values)
            require_library(source.name, values)
            _require_memory(source, place, options)
            config = AutoConfig.from_pretrained(place, **pinned)
            config._attn_implementation = options.attn
            tokenizer = AutoTokenizer.from_pretrained(place, **pinned)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place,
                config=config,
                dtype=options.dtype or "auto",
                use_safetensors=True,
                output_loading_info=True,
                **_complete(placement, config),
                **quantising(options.quantise),
                **pinned,
            )
        except ModelError:
            raise
        except Exception as error:
            raise explain(source.name, error) from None
    model, info = loaded
    _require_all_weights(source, info)
    return model, tokenizer


def _hint(source: _Source) -> str:
    if source.kind == "hub":
        return "if the repository holds GGUF files, download one and give its path"
    return "give a folder written by save_pretrained"


def _require_causal(source: _Source, values: dict[str, Any]) -> None:
    reason = refusal(values)
    if reason is not None:
        raise ModelError(
            f"cannot use '{source.name}': {reason}; choose a causal language model that transformers implements, such "
            "as a Llama, Qwen, Gemma or GPT-2"
        )


def _require_all_weights(source: _Source, info: dict[str, Any]) -> None:
    """Refuse a model part of which would be random."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"'{source.name}' lacks {len(missing)} of its weights, the first is '{missing[0]}'; give a complete causal "
            "language model, not a base model or a classifier"
        )


def _finish_loading(
    source: _Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: _Options
) -> Loaded:
    try:
        # A model that was spread, or quantised by a library that forbids it, stays where it was loaded.
        stays = options.placement or input_device(model) == options.device
        moved = (model if stays else _cast(model, device=options.device)).eval()
    except torch.OutOfMemoryError as error:
        raise explain(source.name, error) from None
    moved.config._name_or_path = moved.name_or_path = source.name
    tokenizer.name_or_path = source.name
    return moved, tokenizer


def _cast(model: Any, **target: Any) -> PreTrainedModel:
    """`model.to(**target)`, whose signature transformers hides from the type checker."""
    moved: PreTrainedModel = model.to(**target)
    return moved


def _check_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The dtype, None for "auto"."""
    if dtype == "auto":
        return None
    resolved = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in _DTYPES.values():
        raise ModelError(f"dtype must be auto, float32, bfloat16 or float16, got '{dtype}'; use float32 if unsure")
    return resolved


def _check_device(device: str | torch.device) -> torch.device:
    resolved = resolve_device(device)
    if resolved is None:
        here = ", ".join(available_devices())
        raise ModelError(f"device must be one of those here ({here}), got '{device}'; use 'cpu'")
    return resolved


def _check_placement(
    device: str | torch.device, device_map: DeviceMap | None, max_memory: MaxMemory | None
) -> dict[str, Any]:
    """What transformers is told about placement; nothing for a model that is whole on one device."""
    if device_map is not None and str(device) != "cpu":
        raise ModelError(
            f"device and device_map both say where the model goes, got '{device}' and a map; leave one of them out"
        )
    check_device_map(device_map)
    check_max_memory(max_memory, device_map)
    if device_map is None:
        return {}
    limits = {} if max_memory is None else {"max_memory": bytes_of_limits(max_memory)}
    return {"device_map": device_map if isinstance(device_map, str) else dict(device_map), **limits}


def _complete(placement: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """The placement with a place for every part of the model, by its names alone: no weight is made."""
    if not isinstance(placement.get("device_map"), dict):
        return placement
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    return {**placement, "device_map": complete_device_map(placement["device_map"], empty)}


def _require_memory(source: _Source, place: str | Path, options: _Options) -> None:
    """Refuse weights in a folder that are larger than the memory they would go to."""
    if options.placement or options.device.type != "cpu" or not Path(place).is_dir():
        return
    size = sum(file.stat().st_size for file in Path(place).glob("*.safetensors"))
    free = psutil.virtual_memory().available
    if size > free:
        raise ModelError(
            f"the weights of '{source.name}' take {size / 1e9:,.0f} GB, and {free / 1e9:,.0f} GB of memory are free; "
            "use device_map='auto', which leaves on disk what does not fit, or a smaller model"
        )


def _check_attn(attn: str | None) -> str | None:
    if attn is None or attn in TAPPED_ATTENTION:
        return attn
    allowed = " or ".join(f"'{name}'" for name in TAPPED_ATTENTION)
    raise ModelError(f"attn must be {allowed}, whose masks softgap reads, got '{attn}'; leave it out for the default")
