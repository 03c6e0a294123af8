"""What was measured and how, in words for a newcomer."""

from __future__ import annotations

from softgap.trajectories import Manifest, Study, Trajectories

__all__ = ["about"]

_CONTROL = "uniform"


def about(study: Study, first: Trajectories, embedded: int, keys: tuple[str, ...], whole: bool) -> list[list[str]]:
    """Pairs of a heading and a sentence or two; without ``keys`` nothing is said of what a file carries."""
    manifest = study.manifest
    rows = [
        ["The model", _model(manifest, first)],
        ["The text", _text(manifest, study)],
        ["What softmax is compared with", _mechanisms(manifest, first)],
        ["What was left out", _left_out(manifest)],
        ["How it was computed", _machine(manifest)],
        ["What this file carries", _carried(len(study), embedded, keys, whole) if keys else ""],
        ["The command", manifest.command],
        ["Versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())],
        ["When", _times(manifest, study.state)],
    ]
    return [row for row in rows if row[1]]


def _model(manifest: Manifest, run: Trajectories) -> str:
    layers, heads = len(run.layers), run.n_heads
    groups = len({(layer, group) for layer, row in enumerate(run.kv_group.tolist()) for group in row if group >= 0})
    shared = (
        f" Query heads share keys and values in {groups} groups; only whole groups save memory when they go linear."
        if groups < heads
        else ""
    )
    name = manifest.model or "A model without a name"
    weights = f" (weights {manifest.weights})" if manifest.weights else ""
    return f"{name}{weights}: {layers} layers with attention, {heads} query heads in all.{shared}"


def _text(manifest: Manifest, study: Study) -> str:
    options = manifest.options
    count = "One sample" if len(study) == 1 else f"{len(study):,} samples"
    if options.get("mode") == "replay":
        how = "read as given: whoever wrote the text, the model only read it"
    elif options.get("do_sample"):
        how = f"written by the model, sampled with seed {manifest.seed}"
        how += f" at temperature {options['temperature']:g}" if "temperature" in options else ""
    elif options.get("mode") == "live":
        how = "written by the model, always taking the likeliest token"
    else:
        return f"{count}."
    chat = " The prompt was put into the model's chat template; its extra tokens are set in italics."
    return f"{count}, {how}.{chat if options.get('chat') else ''}"


def _mechanisms(manifest: Manifest, run: Trajectories) -> str:
    named = []
    for name in run.mechanisms:
        options = manifest.mechanisms.get(name, {})
        given = ", ".join(f"{key} {value}" for key, value in options.items())
        named.append(f"{name} ({given})" if given else name)
    control = (
        f" {_CONTROL} is the control: the plain mean of all visible values, which knows nothing about the query."
        if _CONTROL in run.mechanisms
        else f" The control {_CONTROL} was not measured, so nothing here can tell a rich mechanism from a poor one."
    )
    return f"{', '.join(named)}, each on the same queries, keys and values as softmax.{control}"


def _left_out(manifest: Manifest) -> str:
    n = manifest.dropped_sinks
    return f"The first {n} tokens were hidden from both sides (sink tokens)." if n else ""


def _machine(manifest: Manifest) -> str:
    threads = f" on {manifest.threads} threads" if manifest.threads else ""
    parts = [part for part in (manifest.dtype, manifest.backend) if part]
    model = f"The model ran in {' with '.join(parts)} attention{threads}; " if parts else ""
    return f"{model}softgap watched without changing the model's output, and did its own arithmetic in float32."


def _carried(samples: int, embedded: int, keys: tuple[str, ...], whole: bool) -> str:
    which = (
        "Token by token: "
        if embedded == samples
        else f"Token by token for {embedded:,} of {samples:,} samples (softgap report --sample NAME chooses others): "
    )
    rest = "" if whole else "; what is not in this list as means per head only, to keep the file small"
    return (
        f"{which}{', '.join(key.replace('/', ' from ') for key in keys)}{rest}. Values are rounded to 16 bits between "
        "the least and the greatest of each head; the exact ones are in the study."
    )


def _times(manifest: Manifest, state: str) -> str:
    if not manifest.started:
        return ""
    ended = f"finished {manifest.finished}" if manifest.finished else "not finished"
    return f"Started {manifest.started}, {ended if state == 'finished' else 'still running when this page was made'}."
