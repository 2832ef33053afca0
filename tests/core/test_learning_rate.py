from __future__ import annotations

import pytest

from egeria_core.learning_rate import TenfoldDrop, WarmRestart, parse_rule


def test_rules_go_by_name_or_as_objects() -> None:
    assert isinstance(parse_rule("tenfold_drop"), TenfoldDrop)
    assert isinstance(parse_rule("warm_restart"), WarmRestart)
    rule = WarmRestart(3.0)
    assert parse_rule(rule) is rule
    with pytest.raises(ValueError, match="tenfold_drop, warm_restart"):
        parse_rule("never")


def test_a_group_without_a_rate_has_no_drop() -> None:
    rule = TenfoldDrop()
    rule.should_unfreeze(1, (0.1, 0.0), 0)
    assert not rule.should_unfreeze(2, (0.05, 0.0), 1)
    assert rule.should_unfreeze(3, (0.01, 0.5), 1)


@pytest.mark.parametrize(("make", "value"), [(TenfoldDrop, 1.0), (WarmRestart, 1.0)])
def test_options_out_of_range_are_refused(make: type, value: float) -> None:
    with pytest.raises(ValueError, match=r"must"):
        make(value)
