"""`softgap mechanisms`: the registry, and how far each mechanism is from softmax on a synthetic head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from softgap.cli.render import output

if TYPE_CHECKING:
    from softgap.attention import Mechanism
    from softgap.attention.synthetic import Measurement, SyntheticHead

__all__ = ["mechanisms_command"]

_DIM = 64
_HYBRID = "TAIL+window"
_HYBRID_FORMULA = "exp(s_j) on the first sinks, the last w and far other keys, f c_t times what TAIL gives elsewhere"


def mechanisms_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    measured: Annotated[
        bool,
        typer.Option("--measure", help="Also measure the divergence of each mechanism from softmax and from uniform."),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed of the synthetic head of --measure.")
    ] = 0,
) -> None:
    """List the attention mechanisms: formula, features, memory, forms, required parameters and paper."""
    from softgap.attention import mechanisms

    registry = mechanisms()
    head, rows = _measure(seed) if measured else (None, ())
    if as_json:
        output.write_json(_document(registry, head, rows))
        return
    console = output.console()
    console.print(_registry_table(registry))
    if head is not None:
        console.print(_measurement_table(head, rows))


def _measure(seed: int) -> tuple[SyntheticHead, tuple[Measurement, ...]]:
    from softgap.attention.synthetic import measure, synthetic_head

    head = synthetic_head(dim=_DIM, seed=seed)
    return head, measure(head)


def _document(
    registry: Mapping[str, Mechanism], head: SyntheticHead | None, rows: Sequence[Measurement]
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "dim": _DIM,
        "mechanisms": [_describe(mechanism) for mechanism in registry.values()],
        "hybrid": {"name": _HYBRID, "formula": _HYBRID_FORMULA, "example": _describe(_example())},
    }
    if head is not None:
        document["synthetic_head"] = {"length": head.length, "dim": head.dim, "seed": head.seed}
        document["measurements"] = [asdict(row) for row in rows]
    return document


def _example() -> Mechanism:
    """The hybrid that stands for all of them."""
    from softgap.attention import resolve

    return resolve("elu1+window")


def _memory(mechanism: Mechanism) -> str:
    """What it keeps per KV head, in keys with their values."""
    from softgap.attention.memory import keys_worth

    worth = keys_worth(mechanism, _DIM)
    if worth in (0, float("inf")):
        return "all keys" if worth else "nothing"
    return f"{worth:,.1f}".removesuffix(".0") + " keys"


def _describe(mechanism: Mechanism) -> dict[str, Any]:
    from softgap.attention.memory import keys_worth

    worth = keys_worth(mechanism, _DIM)
    return {
        "name": mechanism.name,
        "kind": mechanism.kind,
        "forms": list(mechanism.forms),
        "formula": mechanism.formula,
        "features": mechanism.feature_dim(_DIM),
        "keys_worth": None if worth == float("inf") else worth,
        "keeps_all_keys": worth == float("inf"),
        "signed": mechanism.signed,
        "scale": mechanism.scale,
        "options": dict(mechanism.options),
        "needs": list(mechanism.needs),
        "paper": mechanism.paper,
    }


def _registry_table(registry: Mapping[str, Mechanism]) -> Table:
    title = f"Mechanisms (features at d = {_DIM}; keeps: keys with their values per KV head, parameters apart)"
    table = Table(title=title, title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("formula", overflow="fold", ratio=3)
    table.add_column("features", justify="right")
    table.add_column("keeps", justify="right")
    for heading in ("signed", "scale", "forms"):
        table.add_column(heading)
    table.add_column("needs", overflow="fold")
    table.add_column("paper", overflow="fold", ratio=2)
    for mechanism in registry.values():
        features = mechanism.feature_dim(_DIM)
        options = ", ".join(f"{key} = {value:g}" for key, value in mechanism.options.items())
        table.add_row(
            mechanism.name,
            mechanism.kind,
            f"{mechanism.formula} ({options})" if options else mechanism.formula,
            "" if features is None else f"{features:,}",
            _memory(mechanism),
            "yes" if mechanism.signed else "",
            "" if mechanism.scale == "none" else mechanism.scale,
            "all" if len(mechanism.forms) > 1 else mechanism.forms[0],
            ", ".join(mechanism.needs),
            mechanism.paper,
        )
    example = _example()
    table.add_row(
        _HYBRID,
        "hybrid",
        f"{_HYBRID_FORMULA}; for example {example.label}",
        "",
        f"window and TAIL: {_memory(example)} with elu1",
        *("", "", "as TAIL", "as TAIL", example.paper.partition("; ")[2]),
    )
    return table


def _measurement_table(head: SyntheticHead, rows: Sequence[Measurement]) -> Table:
    title = f"Mean divergence on a synthetic head\n(causal, T = {head.length}, d = {head.dim}, seed {head.seed})"
    table = Table(title=title, title_justify="left")
    table.add_column("name", no_wrap=True)
    for heading in ("from softmax", "from uniform", "flagged queries"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.mechanism, f"{row.from_softmax:.4f}", f"{row.from_uniform:.4f}", str(row.flagged or ""))
    return table
