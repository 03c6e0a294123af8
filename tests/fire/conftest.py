"""One world for all cases: it is only read, and each case proves that it left it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from support.cli_examples import loads_once
from support.fire_examples import World, build_world


@pytest.fixture(scope="session")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    sandbox = tmp_path_factory.mktemp("fire")
    build_world(sandbox)
    import matplotlib.font_manager  # noqa: F401  it keeps a list of fonts in the home that it finds first

    from softgap.cli.app import app

    with pytest.MonkeyPatch.context() as patch:
        asked = loads_once(patch)
        # Building the parser takes longer than most refusals.
        command = typer.main.get_command(app)
        patch.setattr(typer.main, "get_command", lambda _: command)
        yield World(sandbox, asked)


@pytest.fixture
def world(shared_world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world as working folder, with home, cache and temporary files inside it."""
    sandbox: Path = shared_world.sandbox
    monkeypatch.chdir(shared_world.here)
    monkeypatch.setenv("HOME", str(sandbox / "home"))
    monkeypatch.setenv("SOFTGAP_CACHE", str(sandbox / "cache"))
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(sandbox / "cache" / "calibrations"))
    monkeypatch.setattr("tempfile.tempdir", str(sandbox / "tmp"))
    return shared_world
