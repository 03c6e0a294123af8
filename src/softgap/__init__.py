"""softgap measures the gap between softmax and linear attention, per head and per token.

Importing this package loads nothing heavy: softgap imports the package of a public name when the name is first used.
``softgap.signal`` and ``softgap.stats`` therefore work where torch is not installed.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Literal

    from softgap import (
        analysis,
        attention,
        calibration,
        errors,
        evaluation,
        gates,
        intervene,
        linearize,
        models,
        probe,
        report,
        signal,
        stats,
        study,
        tasks,
        theory,
        trajectories,
    )
    from softgap.attention import Mechanism, compare_outputs, mechanisms, register_mechanism
    from softgap.attention.attend import attend  # by its file: the package has a module of that name too
    from softgap.calibration import Calibration, calibrate
    from softgap.errors import SoftgapError
    from softgap.evaluation import Evaluation, evaluate
    from softgap.gates import Diagnosis, doctor
    from softgap.linearize import load_model
    from softgap.probe import Recording, generate, read, record
    from softgap.trajectories import Trajectories, load, open_study

__version__ = version("softgap")

__all__ = [
    "Calibration",
    "Diagnosis",
    "Evaluation",
    "Mechanism",
    "Recording",
    "SoftgapError",
    "Trajectories",
    "__version__",
    "analysis",
    "attend",
    "attention",
    "calibrate",
    "calibration",
    "compare_outputs",
    "doctor",
    "errors",
    "evaluate",
    "evaluation",
    "gates",
    "generate",
    "intervene",
    "linearize",
    "load",
    "load_model",
    "mechanisms",
    "models",
    "open_study",
    "probe",
    "read",
    "record",
    "register_mechanism",
    "report",
    "signal",
    "stats",
    "study",
    "tasks",
    "theory",
    "trajectories",
]

_PACKAGES = (
    "analysis",
    "attention",
    "calibration",
    "errors",
    "evaluation",
    "gates",
    "intervene",
    "linearize",
    "models",
    "probe",
    "report",
    "signal",
    "stats",
    "study",
    "tasks",
    "theory",
    "trajectories",
)
_NAMES_BY_PACKAGE = {
    "attention": ("Mechanism", "attend", "compare_outputs", "mechanisms", "register_mechanism"),
    "calibration": ("Calibration", "calibrate"),
    "errors": ("SoftgapError",),
    "evaluation": ("Evaluation", "evaluate"),
    "gates": ("Diagnosis", "doctor"),
    "linearize": ("load_model",),
    "probe": ("Recording", "generate", "read", "record"),
    "trajectories": ("Trajectories", "load", "open_study"),
}
_PACKAGE_OF = {name: package for package, names in _NAMES_BY_PACKAGE.items() for name in names}

# Hidden from the type checker, which would otherwise accept any attribute of softgap.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the package that holds a public name, once (PEP 562)."""
        from importlib import import_module

        if name in _PACKAGES:
            return import_module(f"softgap.{name}")
        if name in _PACKAGE_OF:
            value = getattr(import_module(f"softgap.{_PACKAGE_OF[name]}"), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'softgap' has no attribute '{name}'")


def _print_run(run: Trajectories, map_of: Literal["kinds", "divergence", "both"]) -> None:
    """What ``Trajectories.summary`` prints: the terminal lies below the layer of trajectories."""
    from softgap.cli.render.run import print_run

    print_run(run, map_of)


def __dir__() -> list[str]:
    return sorted(__all__)
