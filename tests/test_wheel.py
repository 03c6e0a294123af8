"""The wheel, installed into an environment of its own, brings the command and everything the command needs."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it would come before the wheel
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, REPOSITORY], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("softgap-*.whl")
    home = tmp_path / "home"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    own = Path(
        subprocess.check_output([python, "-c", "import sysconfig as s; print(s.get_path('purelib'))"], text=True)[:-1]
    )
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True, capture_output=True)
    # Dependencies are as large as torch, so they are borrowed; softgap itself must come from the wheel.
    borrowed = sysconfig.get_path("purelib")
    (own / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    where = "import softgap, pathlib; print(pathlib.Path(softgap.__file__).is_relative_to(r'" + str(home) + "'))"
    assert subprocess.check_output([python, "-c", where], text=True, cwd=tmp_path) == "True\n"
    shown = subprocess.run([home / "bin" / "softgap"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("softgap measures the gap")
    checked = subprocess.run(
        [home / "bin" / "softgap", "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    text = "from softgap.calibration.texts import QUICK_TEXT; print(QUICK_TEXT.stat().st_size > 10_000)"
    assert subprocess.check_output([python, "-c", text], text=True, cwd=tmp_path) == "True\n"
    page = "import softgap.report.page as p; print(p.policy_of(p.REPORT)[:7])"
    assert subprocess.check_output([python, "-c", page], text=True, cwd=tmp_path) == "default\n"
