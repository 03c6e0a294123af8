"""Trial by fire of all commands: what is refused, in one sentence, by the tables in tests/fire/cases_*.py."""

from __future__ import annotations

import pytest

from fire import cases_labs, cases_measure, cases_study, cases_understand
from support.fire_examples import Table, World, check_refused

WITHOUT_MODEL: Table = {
    **{f"measure: {name}": case for name, case in cases_measure.WITHOUT_MODEL.items()},
    **{f"study: {name}": case for name, case in cases_study.WITHOUT_MODEL.items()},
    **{f"understand: {name}": case for name, case in cases_understand.WITHOUT_MODEL.items()},
    **{f"labs: {name}": case for name, case in cases_labs.WITHOUT_MODEL.items()},
}
WITH_MODEL: Table = {
    **{f"measure: {name}": case for name, case in cases_measure.WITH_MODEL.items()},
    **{f"study: {name}": case for name, case in cases_study.WITH_MODEL.items()},
    **{f"understand: {name}": case for name, case in cases_understand.WITH_MODEL.items()},
}


@pytest.mark.parametrize("case", WITHOUT_MODEL)
def test_refused_before_a_model_is_loaded(world: World, capsys: pytest.CaptureFixture[str], case: str) -> None:
    check_refused(world, WITHOUT_MODEL[case], capsys)


@pytest.mark.parametrize("case", WITH_MODEL)
def test_refused_with_the_model_at_hand(world: World, capsys: pytest.CaptureFixture[str], case: str) -> None:
    check_refused(world, WITH_MODEL[case], capsys, model=True)
