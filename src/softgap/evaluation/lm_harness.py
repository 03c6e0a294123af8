"""Tasks of lm-evaluation-harness on a loaded model, with and without a change."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softgap.checkpoints import write_whole
from softgap.errors import UnsupportedError, ValueInputError, unknown_name
from softgap.evaluation.sampling import Under
from softgap.inputs import as_items, check_count
from softgap.intervals import Interval, interval_of
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import Model, Tokenizer
from softgap.models.support import check_measurable

__all__ = ["HarnessResult", "HarnessRow", "lm_eval"]

PACKAGES = ("lm_eval", "softgap", "torch", "transformers")


@dataclass(frozen=True)
class HarnessRow:
    """One metric of one task, for the original model and for the changed one.

    Attributes
    ----------
    metric
        The harness's name of the metric and of its filter, such as ``acc,none``.
    samples
        How many documents of the task were scored.
    original, changed
        The harness's number, with an interval (95 %) over documents. Its ends are NaN where the number is no mean over
        documents. ``changed`` is None without a change.
    change
        Changed minus original, paired by document; None without a change or where the number is no mean.
    """

    task: str
    metric: str
    samples: int
    original: Interval
    changed: Interval | None = None
    change: Interval | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        intervals = {"original": self.original, "changed": self.changed, "change": self.change}
        data = {name: None if found is None else _plain(found.to_json()) for name, found in intervals.items()}
        return {"task": self.task, "metric": self.metric, "samples": self.samples, **data}


@dataclass(frozen=True)
class HarnessResult:
    """Results of lm-evaluation-harness, and where they come from.

    Attributes
    ----------
    model, fingerprint
        The name of the model, and the hash of its weights.
    label
        What the changed model is called; "" without a change.
    rows
        One per task and metric.
    original, changed
        The ``results`` of the harness itself, by task; ``changed`` is None without a change.
    provenance
        Versions of packages and of tasks, the number of threads, the settings, and a hash of the plan (``plan``) where
        the change is one.
    """

    model: str
    fingerprint: str
    label: str
    rows: tuple[HarnessRow, ...]
    original: Mapping[str, Any]
    changed: Mapping[str, Any] | None
    provenance: Mapping[str, Any]

    def select(self, **values: Any) -> tuple[HarnessRow, ...]:
        """The rows whose fields have these values."""
        return tuple(row for row in self.rows if all(getattr(row, name) == value for name, value in values.items()))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        about = {"model": self.model, "fingerprint": self.fingerprint, "label": self.label}
        results = {"original": _plain(self.original), "changed": _plain(self.changed)}
        return {**about, "rows": [row.to_json() for row in self.rows], **results, "provenance": _plain(self.provenance)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON."""
        write_whole(Path(path), json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        return Path(path)


def lm_eval(
    model: Model,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    under: Under | None = None,
    label: str | None = None,
    include_path: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    chat: bool = False,
    seed: int = 0,
) -> HarnessResult:
    """Run tasks of lm-evaluation-harness on a model, and measure what a change of it costs on them.

    The harness makes the requests and scores the answers; the model answers them as it is loaded. It needs the package
    lm-eval: ``pip install 'softgap[lm-eval]'``.

    Parameters
    ----------
    model, tokenizer
        From ``softgap.load_model``. The harness gets a copy of the tokenizer.
    tasks
        Names of tasks, groups or tags of the harness, or of tasks in ``include_path``.
    under
        A function that returns a context manager under which the model is changed, such as ``lambda:
        softgap.linearize.apply(model, plan)``. None evaluates the model alone.
    label
        A name for the change.
    include_path
        A folder with task files (YAML) of your own; paths of data files in them are relative to the working folder.
        The harness's own tasks download their data.
    num_fewshot
        Examples before each question; None takes the task's own number.
    limit
        Score only the first documents of each task, so many.
    batch_size
        Requests per forward.
    chat
        Whether to wrap requests in the tokenizer's chat template.
    seed
        Few-shot examples and resamples are drawn from it.

    Returns
    -------
    HarnessResult
        One row per task and metric, with intervals over documents, and the harness's own results.

    Raises
    ------
    UnsupportedError
        If lm-eval is not installed, or the tokenizer has no chat template where one is asked for.
    UnknownNameError
        If a task is not known.

    Examples
    --------
    ``tiny-llama`` is a small random model. The task asks for one of two words:

    >>> import json, pathlib, softgap
    >>> folder = pathlib.Path("my-tasks")
    >>> folder.mkdir()
    >>> documents = [{"prompt": "The sky is", "words": ["blue", "loud"], "right": 0}] * 3
    >>> lines = "".join(json.dumps(document) + chr(10) for document in documents)
    >>> _ = (folder / "sky.jsonl").write_text(lines)
    >>> task = {
    ...     "task": "sky", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "my-tasks/sky.jsonl"}},
    ...     "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{prompt}}",
    ...     "doc_to_choice": "{{words}}", "doc_to_target": "{{right}}",
    ... }
    >>> _ = (folder / "sky.yaml").write_text(json.dumps(task))
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> found = softgap.evaluation.lm_eval(model, tokenizer, ["sky"], include_path=folder)
    >>> row = found.select(metric="acc,none")[0]
    >>> row.task, row.samples, row.change
    ('sky', 3, None)
    """
    _require_harness()
    check_measurable(model)
    names = list(as_items(tasks))
    for name, value in (("num_fewshot", num_fewshot), ("limit", limit), ("batch_size", batch_size)):
        if value is not None:
            check_count(name, value, least=0 if name == "num_fewshot" else 1)
    if not names:
        raise ValueInputError("no task was given; name at least one")
    if chat and not getattr(tokenizer, "chat_template", None):
        raise UnsupportedError("the model's tokenizer has no chat template; leave chat out")
    settings = {"tasks": names, "num_fewshot": num_fewshot, "limit": limit, "batch_size": batch_size, "chat": chat}
    with _contained():
        manager = _task_manager(names, include_path)
        run = _Run(model, tokenizer, manager, {**settings, "seed": seed})
        original, _ = run.results(nullcontext())
        changed, digest = (None, "") if under is None else run.results(under())
    return HarnessResult(
        str(model.name_or_path or model.config.model_type),
        model_fingerprint(model),
        (label or "changed") if under else "",
        tuple(_rows(original, changed, seed)),
        original["results"],
        None if changed is None else changed["results"],
        {
            **{name: version(name) for name in PACKAGES},
            "task_versions": dict(original["versions"]),
            "threads": torch.get_num_threads(),
            **settings,
            "seed": seed,
            **({"plan": digest} if digest else {}),
        },
    )


@dataclass(frozen=True)
class _Run:
    model: Model
    tokenizer: Tokenizer
    manager: Any
    settings: Mapping[str, Any]

    def results(self, change: AbstractContextManager[Any]) -> tuple[dict[str, Any], str]:
        """What the harness returns while the model is changed, and the hash of the plan that changes it."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        # The harness sets a pad token; the user's tokenizer stays as it is.
        tokenizer = copy.deepcopy(self.tokenizer)
        with change as applied:
            found: dict[str, Any] = simple_evaluate(
                model=HFLM(pretrained=self.model, tokenizer=tokenizer, batch_size=self.settings["batch_size"]),
                tasks=list(self.settings["tasks"]),
                num_fewshot=self.settings["num_fewshot"],
                limit=self.settings["limit"],
                apply_chat_template=self.settings["chat"],
                task_manager=self.manager,
                log_samples=True,
                bootstrap_iters=0,
                # None leaves the global random state alone.
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
                fewshot_random_seed=self.settings["seed"],
            )
        return found, str(getattr(applied, "digest", ""))


def _require_harness() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "tasks of lm-evaluation-harness need the package lm-eval; install it with: pip install 'softgap[lm-eval]'"
        ) from error


def _task_manager(names: Sequence[str], include_path: str | os.PathLike[str] | None) -> Any:
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise ValueInputError(f"include_path must be a folder with task files, got '{os.fspath(include_path)}'")
    own = None if include_path is None else str(include_path)
    # Reading the harness's thousands of task files takes seconds; tasks of one's own often need none of them.
    if own is not None:
        alone = TaskManager(include_path=own, include_defaults=False)
        if set(names) <= set(alone.all_tasks):
            return alone
    manager = TaskManager(include_path=own)
    for name in names:
        if not manager.match_tasks([name]):
            raise unknown_name("task of lm-evaluation-harness", name, tuple(manager.all_tasks))
    return manager


@contextmanager
def _contained() -> Iterator[None]:
    """Restore Python's random state, which the harness and its libraries draw from, and log only errors.

    The harness warns of every model that is already loaded.
    """
    logger, state = logging.getLogger("lm_eval"), random.getstate()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        random.setstate(state)


def _rows(original: Mapping[str, Any], changed: Mapping[str, Any] | None, seed: int) -> Iterator[HarnessRow]:
    for task, samples in original["samples"].items():
        for metric in original["results"][task]:
            name, _, kind = metric.partition(",")
            if not kind or name.endswith("_stderr"):
                continue
            first = _values(samples, name, kind)
            whole = float(original["results"][task][metric])
            if changed is None:
                yield HarnessRow(task, metric, len(first), _interval(whole, first, seed))
                continue
            second = _values(changed["samples"][task], name, kind)
            other = float(changed["results"][task][metric])
            before, after = _interval(whole, first, seed), _interval(other, second, seed)
            paired = None
            if not (math.isnan(before.low) or math.isnan(after.low)):
                paired = interval_of(np.array(second) - np.array(first), rng=np.random.default_rng(seed))
            yield HarnessRow(task, metric, len(first), before, after, paired)


def _values(samples: Sequence[Mapping[str, Any]], metric: str, kind: str) -> list[float]:
    """The metric of every document, in the order of the documents; NaN where it is not a number."""
    kept = sorted((s for s in samples if s["filter"] == kind and metric in s), key=lambda sample: int(sample["doc_id"]))
    numbers = (bool, int, float, np.number)
    return [float(s[metric]) if isinstance(s[metric], numbers) else math.nan for s in kept]


def _interval(whole: float, values: Sequence[float], seed: int) -> Interval:
    """The harness's number, with an interval where it is the mean over documents."""
    if not values or not math.isclose(float(np.mean(values)), whole, rel_tol=1e-9, abs_tol=1e-12):
        return Interval(whole, math.nan, math.nan)
    return interval_of(np.array(values), rng=np.random.default_rng(seed))


def _plain(data: Any) -> Any:
    """As JSON holds it: None in the place of NaN, and text for what JSON does not know."""
    if isinstance(data, Mapping):
        return {str(name): _plain(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float | np.floating):
        return float(data) if math.isfinite(data) else None
    return data if data is None or isinstance(data, bool | int | str) else str(data)
