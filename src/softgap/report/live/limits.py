"""How much one visitor may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """What is refused beyond; every refusal says its number.

    Attributes
    ----------
    request_bytes
        Of the body of one request.
    prompt_tokens, new_tokens
        Of one run.
    prompts
        That one request may send, to be compared.
    mechanisms
        That one run may be compared with, the control aside.
    queue
        Runs that may wait.
    kept
        Runs held in memory; older ones that are over are let go, and stay in the folder of studies.
    streams
        Connections that are told what happens.
    connections
        Of any kind, at the same time.
    studies
        Listed, the newest first.
    zip_bytes
        Of a study that may be downloaded.
    """

    request_bytes: int = 64 * 1024
    prompt_tokens: int = 2000
    new_tokens: int = 1000
    prompts: int = 2
    mechanisms: int = 4
    queue: int = 6
    kept: int = 12
    streams: int = 24
    connections: int = 96
    studies: int = 200
    zip_bytes: int = 2**30
