"""Exchange plans with other tools: export them as DuoAttention's pattern, list of layers or folder; import a pattern.

A pattern and a list say which KV heads or layers keep softmax. Neither holds a fitted map or an output correction, so
an export says what it loses. A folder holds the model's weights with the whole plan beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float

from softgap.attention import Mechanism, resolve
from softgap.errors import StoreError, UnsupportedError, ValueInputError
from softgap.intervene.substitute import LARGEST_WINDOW, Substitute
from softgap.intervene.swap import heads_by_layer, heads_of_group
from softgap.linearize.attached import PLAN_FILE
from softgap.linearize.baselines import window_of_equal_memory
from softgap.linearize.plan import Plan, freed_groups, plan_of
from softgap.models.loading import Model, Tokenizer, quiet_transformers
from softgap.probe.layout import AttentionLayer, attention_layers

__all__ = ["FORMATS", "Export", "ExportFormat", "export_plan", "import_pattern"]

ExportFormat = Literal["duo", "layers", "folder"]
FORMATS: tuple[str, ...] = get_args(ExportFormat)
RECORD = "softgap_export.json"
HEADS_FILE, SIZES_FILE, LAYERS_FILE = "full_attention_heads.tsv", "config.json", "full_attention_layers.json"


@dataclass(frozen=True)
class Export:
    """A plan that was exported.

    Attributes
    ----------
    folder, format
        Where it is, and as what: ``"duo"``, ``"layers"`` or ``"folder"``.
    files
        Names of the files in the folder, besides ``softgap_export.json``, which holds this record.
    lost
        What the format cannot say of the plan, in one sentence; "" where it says everything.
    """

    folder: Path
    format: str
    files: tuple[str, ...]
    lost: str

    def to_json(self) -> dict[str, Any]:
        """The record as plain data."""
        return {"folder": str(self.folder), "format": self.format, "files": list(self.files), "lost": self.lost}


def export_plan(
    model: Model,
    plan: Plan,
    folder: str | os.PathLike[str],
    *,
    format: ExportFormat = "duo",
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> Export:
    """Export a plan to a folder that other tools read.

    ``"duo"`` is DuoAttention's pattern (arXiv:2410.10819): ``full_attention_heads.tsv``, one row per layer and one
    column per KV head, is 0 where all query heads of a KV head are swapped, else 1; ``config.json`` has ``sink_size``
    and ``recent_size``. ``"layers"`` is ``full_attention_layers.json`` for layer hybrids: ``full_attention_layers``
    lists the layers with a head that keeps softmax, ``swapped_layers`` the others. ``"folder"`` is the model as
    ``save_pretrained`` writes it, with the plan and its parameters beside it: transformers loads the original model
    from it, and ``softgap.load_model`` the model under the plan.

    Parameters
    ----------
    model
        The model that the plan was found for.
    plan
        A plan from ``find_plan``, ``load_plan`` or ``import_pattern``.
    folder
        A folder that is new or empty.
    format
        ``"duo"``, ``"layers"`` or ``"folder"``.
    tokenizer
        The model's tokenizer, saved with a folder; other formats need none.
    overwrite
        Replace an earlier export in the folder. Files that softgap did not write are never replaced.

    Returns
    -------
    Export
        The files, and in ``lost`` what the format cannot say.

    Raises
    ------
    StoreError
        If the folder holds something else or cannot be written.
    UnsupportedError
        If the plan belongs to another model, or the format cannot hold it.

    Examples
    --------
    ``plan.json`` frees KV head 0 of layer 0 in the small random model in ``tiny-llama``:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> plan = softgap.linearize.load_plan("plan.json")
    >>> softgap.linearize.export_plan(model, plan, "pattern").files
    ('config.json', 'full_attention_heads.tsv')
    >>> from pathlib import Path
    >>> Path("pattern/full_attention_heads.tsv").read_text().split()
    ['0.0', '1.0', '1.0', '1.0']
    """
    if format not in FORMATS:
        raise ValueInputError(f"format must be one of {', '.join(FORMATS)}, got '{format}'")
    plan.check(model)
    target = Path(folder)
    whole = target.absolute()  # "." has no name of its own
    staging = whole.parent / f".{whole.name}.partial"
    try:
        old = _earlier_export(target, overwrite=overwrite)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        if format == "folder":
            lost = _write_folder(model, plan, tokenizer, staging)
        else:
            lost, texts = _pattern(model, plan) if format == "duo" else _layer_list(model, plan)
            for name, text in texts.items():
                (staging / name).write_text(text, encoding="utf-8")
        export = Export(target, format, tuple(sorted(path.name for path in staging.iterdir())), lost)
        record = json.dumps({**export.to_json(), "folder": "."}, indent=1) + "\n"
        (staging / RECORD).write_text(record, encoding="utf-8")
        target.mkdir(parents=True, exist_ok=True)
        for name in old - {*export.files, RECORD}:
            (target / name).unlink(missing_ok=True)
        # The record goes first: what it names is softgap's, also where the rest is interrupted.
        for name in (RECORD, *export.files):
            (staging / name).replace(target / name)
    except StoreError:  # an OSError with a sentence of its own
        raise
    except OSError as error:
        raise StoreError(f"cannot write to '{target}': {error.strerror or error}; choose another place") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return export


def _write_folder(model: Model, plan: Plan, tokenizer: Tokenizer | None, folder: Path) -> str:
    """The weights as transformers saves them, and the plan beside them; it loses nothing but a missing tokenizer."""
    with quiet_transformers(downloads=False):
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    plan.save(folder / PLAN_FILE)
    return "" if tokenizer is not None else "The folder has no tokenizer: none was given."


def _earlier_export(folder: Path, *, overwrite: bool) -> set[str]:
    """The files of an export that is replaced; refuses a place with anything else in it."""
    if not os.path.lexists(folder):
        return set()
    if not folder.is_dir():
        raise StoreError(f"'{folder}' is a file, and an export is a folder; choose another place")
    there = {path.name for path in folder.iterdir()}
    if there and not overwrite:
        raise StoreError(f"'{folder}' is not empty; choose another folder, or overwrite an earlier export")
    own: set[str] = set()
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        own = {str(name) for name in json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]} | {RECORD}
    foreign = sorted(there - own)
    if foreign:
        raise StoreError(f"'{folder}' holds '{foreign[0]}', which no export of softgap wrote; choose another folder")
    return there


def _freed(model: Model, plan: Plan) -> list[tuple[int, int]]:
    """KV heads all of whose query heads are swapped."""
    by_layer = heads_by_layer(attention_layers(model), plan.heads)
    return [(layer.number, group) for layer, heads in by_layer for group in freed_groups(layer, heads)]


def _pattern(model: Model, plan: Plan) -> tuple[str, dict[str, str]]:
    """What DuoAttention's pattern loses of a plan, and its files."""
    layers = _uniform_layers(model)
    freed = _freed(model, plan)
    if not freed:
        raise UnsupportedError(
            "DuoAttention's pattern says which whole KV heads stream, and the plan swaps none whole; search for a "
            "plan by groups"
        )
    heads = [head for group in freed for head in heads_of_group(model, *group)]
    parts = plan.substitute.swaps(heads)
    sizes, how = _window_sizes(model, [(len(own), part.mechanism) for own, part in parts])
    values = np.ones((len(layers), layers[0].kv_heads))
    rows = {layer.number: row for row, layer in enumerate(layers)}
    for layer, group in freed:
        values[rows[layer], group] = 0
    window = resolve(f"window:w={sizes[1]},sinks={sizes[0]}")
    same = all(part.mechanism.name == "window" and part.mechanism.options == window.options for _, part in parts)
    lost = []
    if not same or plan.substitute.readout is not None:
        lost.append(
            f"what the heads become ({plan.substitute.name}): they stream with {sizes[0]} sinks and {sizes[1]} recent "
            f"keys, {how}"
        )
    if len(heads) < len(plan.heads):
        partial = len(plan.heads) - len(heads)
        words = f"{partial} swapped head{'s' * (partial != 1)}"
        lost.append(f"{words} whose KV group keeps softmax in another head")
    sentence = f"The pattern loses {' and '.join(lost)}." if lost else ""
    table = "".join("\t".join(f"{value:.1f}" for value in row) + "\n" for row in values)
    document = json.dumps({"sink_size": sizes[0], "recent_size": sizes[1]}, indent=1) + "\n"
    return sentence, {HEADS_FILE: table, SIZES_FILE: document}


def _uniform_layers(model: Model) -> tuple[AttentionLayer, ...]:
    layers = attention_layers(model)
    counts = sorted({layer.kv_heads for layer in layers})
    if len(counts) > 1:
        raise UnsupportedError(
            f"DuoAttention's pattern has one number of KV heads for all layers, and this model has {counts}; use the "
            "format 'layers'"
        )
    return layers


def _window_sizes(model: Model, parts: list[tuple[int, Mechanism]]) -> tuple[tuple[int, int], str]:
    """Sinks and recent keys for all streaming heads, and where they come from."""
    windows = Counter[tuple[int, int]]()
    equal = Counter[tuple[int, int]]()
    for heads, mechanism in parts:
        if mechanism.kind in ("window", "hybrid"):
            windows[_sinks_and_window(mechanism)] += heads
        elif (window := window_of_equal_memory(model, mechanism)) is not None:
            equal[_sinks_and_window(window)] += heads
    if windows:
        return windows.most_common(1)[0][0], "the most common window of the plan"
    if equal:
        return equal.most_common(1)[0][0], "the window of equal memory"
    return _sinks_and_window(resolve("window")), "the default window, since the plan keeps nothing for them"


def _sinks_and_window(mechanism: Mechanism) -> tuple[int, int]:
    return int(mechanism.options["sinks"]), int(mechanism.options["w"])


def _layer_list(model: Model, plan: Plan) -> tuple[str, dict[str, str]]:
    """What a list of layers loses of a plan, and its file."""
    layers = attention_layers(model)
    swapped = [layer.number for layer, heads in heads_by_layer(layers, plan.heads) if len(heads) == layer.heads]
    remaining = [layer.number for layer in layers if layer.number not in swapped]
    partly = len({layer for layer, _ in plan.heads} - set(swapped))
    words = [f"what the heads become ({plan.substitute.name})"]
    if partly:
        where = "1 layer that keeps" if partly == 1 else f"{partly} layers that keep"
        words.append(f"the swapped heads of {where} softmax in another head")
    document = {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "num_hidden_layers": len(layers),
        "full_attention_layers": remaining,
        "swapped_layers": swapped,
    }
    return f"The list loses {' and '.join(words)}.", {LAYERS_FILE: json.dumps(document, indent=1) + "\n"}


def import_pattern(model: Model, folder: str | os.PathLike[str], *, threshold: float = 0.5) -> Plan:
    """Read DuoAttention's pattern as a plan.

    KV heads below the threshold become ``window:w=recent_size,sinks=sink_size``. The plan has no expected cost, because
    nothing was measured: ``softgap evaluate --plan`` measures it.

    Parameters
    ----------
    model
        The model that the pattern was found for; a pattern itself does not name it.
    folder
        Folder with ``full_attention_heads.tsv`` and ``config.json``.
    threshold
        KV heads with a smaller value stream.

    Returns
    -------
    Plan
        A plan for this model.

    Raises
    ------
    StoreError
        If a file is missing or damaged.
    UnsupportedError
        If the pattern has other layers or KV heads than the model.

    Examples
    --------
    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> plan = softgap.linearize.load_plan("plan.json")
    >>> exported = softgap.linearize.export_plan(model, plan, "pattern")
    >>> imported = softgap.linearize.import_pattern(model, "pattern")
    >>> imported.groups == plan.groups, imported.expected
    (True, {})
    """
    if not 0 < threshold <= 1:
        raise ValueInputError(f"threshold must be above 0 and at most 1, got {threshold}; 0.5 is usual")
    values, sinks, recent = _read_pattern(Path(folder))
    layers = _uniform_layers(model)
    if values.shape != (len(layers), layers[0].kv_heads):
        raise UnsupportedError(
            f"the pattern in '{folder}' is for {values.shape[0]} layers of {values.shape[1]} KV heads, and this model "
            f"has {len(layers)} of {layers[0].kv_heads}; give the model that the pattern was found for"
        )
    streaming = [
        (layer.number, int(g))
        for layer, row in zip(layers, values, strict=True)
        for g in np.flatnonzero(row < threshold)
    ]
    if not streaming:
        raise ValueInputError(
            f"no KV head of the pattern in '{folder}' is below the threshold {threshold:g}, the smallest value is "
            f"{values.min():g}; choose a larger threshold"
        )
    return plan_of(
        model,
        [head for group in streaming for head in heads_of_group(model, *group)],
        Substitute(resolve(f"window:w={recent},sinks={sinks}")),
        provenance={"imported": "DuoAttention pattern", "threshold": float(threshold)},
    )


def _read_pattern(folder: Path) -> tuple[Float[np.ndarray, "layer kv_head"], int, int]:
    """The values of a pattern, its sinks and its recent keys."""
    hint = f"give a folder with {HEADS_FILE} and {SIZES_FILE}"
    try:
        lines = (folder / HEADS_FILE).read_text(encoding="utf-8").split("\n")
        values = np.array([[float(x) for x in line.strip().split("\t")] for line in lines if line.strip()])
        sizes = json.loads((folder / SIZES_FILE).read_text(encoding="utf-8"))
        sinks, recent = sizes["sink_size"], sizes["recent_size"]
    except OSError as error:
        raise StoreError(f"cannot read a pattern from '{folder}': {error.strerror or error}; {hint}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise StoreError(f"'{folder}' holds no pattern of DuoAttention ({error}); {hint}") from error
    if values.ndim != 2 or not np.isfinite(values).all():
        raise StoreError(f"'{folder / HEADS_FILE}' must hold finite numbers, one row per layer; {hint}")
    for name, size, least in (("sink_size", sinks, 0), ("recent_size", recent, 1)):
        if type(size) is not int or not least <= size <= LARGEST_WINDOW:
            raise StoreError(
                f"{name} in '{folder / SIZES_FILE}' must be a whole number from {least} to {LARGEST_WINDOW}, got "
                f"{size!r}; correct the file"
            )
    return values.clip(0, 1), sinks, recent
