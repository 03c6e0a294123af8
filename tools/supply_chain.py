"""The lock file with the hashes of every package, and the bill of materials that is written from it.

`python tools/supply_chain.py lock` writes what is installed here, with the hashes that the package index gives for
every file of each release, into `requirements/lock.txt`. It is the only command that asks the network; torch is left
out, since its builds for CPU and CUDA differ in hash, and so are the packages of NVIDIA that a CUDA build brings.
`python tools/supply_chain.py bill` writes a bill of materials in CycloneDX's JSON from the lock.
"""

from __future__ import annotations

import argparse
import json
import re
import urllib.request
import uuid
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, metadata, version
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from pip._internal.models.index import PyPI

REPOSITORY = Path(__file__).parents[1]
LOCK = REPOSITORY / "requirements" / "lock.txt"
# Installed in a folder of its own, since it makes every import of transformers speak.
APART = {"torchao": REPOSITORY / "requirements" / "quantised.txt"}
# Installed without hashes, or what runs this command.
LEFT_OUT = re.compile(r"torch|pip|softgap|triton|nvidia-.*|cuda-.*")
HEADER = {
    LOCK: "# Every package that `make` installs but torch, with the hashes of all files of its release, for pip's\n"
    "# --require-hashes. Written by `python tools/supply_chain.py lock`; CONTRIBUTING.md says how to renew it.\n",
    APART["torchao"]: "# What the tests of quantised models need; written by `python tools/supply_chain.py lock`.\n",
}


@dataclass(frozen=True)
class Pin:
    """One release, with the SHA-256 of every file that the index offers of it."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def lines(self) -> str:
        """The pin as pip reads it."""
        return " \\\n".join(
            [f"{self.name}=={self.version}", *(f"    --hash=sha256:{digest}" for digest in self.hashes)]
        )


def installed() -> dict[str, str]:
    """Name and version of what is installed here, by canonical name, without the parts that are left out."""
    pins = {str(canonicalize_name(entry.metadata["Name"])): entry.version for entry in distributions()}
    return {name: pin.partition("+")[0] for name, pin in sorted(pins.items()) if not LEFT_OUT.fullmatch(name)}


def release_hashes(name: str, pin: str) -> tuple[str, ...]:
    """The hashes of all files of a release, from pip's own index."""
    with urllib.request.urlopen(f"{PyPI.simple_url}/{name}/", timeout=60) as answer:
        page = answer.read().decode()
    links = re.findall(r'<a\b[^>]*href="[^"#]*#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)\s*</a>', page)
    ours = {digest for digest, file in links if _version_of(file, name) == pin}
    if not ours:
        raise SystemExit(f"the index has no file of {name} {pin}; install another version and lock again")
    return tuple(sorted(ours))


def _version_of(file: str, name: str) -> str:
    """The version in the name of a wheel or a source archive."""
    if file.endswith(".whl"):
        return file.split("-")[1]
    stem = re.sub(r"\.(tar\.(gz|bz2|xz)|zip)$", "", file)
    match = re.match(re.sub("-", "[-_.]+", name) + r"-(.+)$", stem, flags=re.IGNORECASE)
    return match[1] if match else ""


def read_pins(path: Path) -> list[Pin]:
    """The pins of a lock file."""
    pins = []
    for entry in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if entry and not entry.startswith("#"):
            name, _, pin = entry.split()[0].partition("==")
            pins.append(Pin(name, pin, tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))))
    return pins


def write_lock() -> None:
    """Write the lock files from what is installed here; what is installed apart keeps its version."""
    known = {pin.name: pin.version for path in APART.values() if path.exists() for pin in read_pins(path)}
    versions = {**known, **installed()}
    texts: dict[Path, list[str]] = {path: [] for path in HEADER}
    for number, (name, pin) in enumerate(sorted(versions.items()), 1):
        print(f"{number} of {len(versions)}: {name} {pin}", flush=True)
        texts[APART.get(name, LOCK)].append(Pin(name, pin, release_hashes(name, pin)).lines())
    for path, entries in texts.items():
        path.write_text(HEADER[path] + "".join(f"{entry}\n" for entry in entries), encoding="utf-8")


def licence_of(name: str) -> str:
    """What an installed package says of its licence: an expression, a classifier or a line."""
    try:
        about = metadata(name)
    except PackageNotFoundError:
        return ""
    classifiers = [line for line in about.get_all("Classifier") or () if line.startswith("License :: ")]
    named = [line.rpartition(" :: ")[2] for line in classifiers if line.count(" :: ") > 1]
    line = (about["License"] or "").strip()
    return about["License-Expression"] or ", ".join(named) or (line if "\n" not in line and len(line) < 80 else "")


def bill_of_materials(pins: list[Pin], torch_version: str) -> dict[str, Any]:
    """The packages of a lock, and torch, as a document of CycloneDX 1.6."""
    components = [_component(pin.name, pin.version, pin.hashes) for pin in [*pins, Pin("torch", torch_version, ())]]
    components.append(
        {
            **_component("d3", "5.7.0", ()),
            "purl": "pkg:npm/d3@5.7.0",
            "licenses": [{"license": {"id": "BSD-3-Clause"}}],
            "description": "carried by mpld3 and embedded in every report",
        }
    )
    own = version("softgap")
    root = {"type": "application", "bom-ref": "softgap", "name": "softgap", "version": own}
    # The same lock gives the same document: no time, and a number made of its content.
    serial = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([own, components], sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {**root, "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": components,
        "dependencies": [{"ref": "softgap", "dependsOn": [part["bom-ref"] for part in components]}],
    }


def _component(name: str, pin: str, hashes: tuple[str, ...]) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{pin}"
    part: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": pin, "purl": purl}
    licence = licence_of(name)
    if licence:
        part["licenses"] = [{"license": {"name": licence}}]
    if hashes:
        # Of every file of the release: which one is installed depends on the machine.
        part["externalReferences"] = [
            {
                "type": "distribution",
                "url": purl,
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in hashes],
            }
        ]
    return part


def torch_pin() -> str:
    """The version of torch that `make` installs."""
    line = (REPOSITORY / "requirements" / "torch.txt").read_text(encoding="utf-8").splitlines()[-1]
    return line.partition("==")[2]


def main() -> None:
    """Write the lock or the bill."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lock", help="write requirements/lock.txt from what is installed here")
    bill = commands.add_parser("bill", help="write the bill of materials")
    bill.add_argument("--out", type=Path, default=Path("softgap.cdx.json"), help="the file to write")
    given = parser.parse_args()
    if given.command == "lock":
        write_lock()
        return
    pins = [pin for path in (LOCK, *APART.values()) for pin in read_pins(path)]
    given.out.write_text(json.dumps(bill_of_materials(pins, torch_pin()), indent=2) + "\n", encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    main()
