"""What transformers and the hub raise while a model is loaded, as one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

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
from safetensors import SafetensorError

from softgap.errors import ModelError

__all__ = ["explain"]


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
