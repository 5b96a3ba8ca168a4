"""Which rule decides, and what a user's rules may say."""

from __future__ import annotations

import re

import pytest

from resilient.policy.failures.classes import FailureClass
from resilient.policy.failures.reading import parse_rules, read
from resilient.policy.failures.rules import RULES, Role


def test_a_rule_of_the_users_comes_before_those_of_the_package() -> None:
    own = parse_rules('[[rule]]\nclass = "device-hardware"\npatterns = ["sample \\\\d+ is gone"]\nsure = false')
    line = "ValueError: sample 17 is gone"
    before, after = read([line], RULES), read([line], (*own, *RULES))
    assert before is not None
    assert after is not None
    assert (before.failure, after.failure) == (FailureClass.USER_ERROR, FailureClass.DEVICE_HARDWARE)
    assert (after.role, after.sure, after.line) == (Role.ROOT, False, line)


def test_advice_is_no_evidence() -> None:
    assert read(["For debugging consider passing CUDA_LAUNCH_BLOCKING=1 or CUDA out of memory"], RULES) is None


def test_what_no_rule_knows_is_nothing() -> None:
    assert read(["mylib.Oops: the moon is full"], RULES) is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no [[rule]]"),
        ("rule = 3", "no [[rule]]"),
        ("[[rule", "Expected"),
        ('[[rule]]\nclass = "user-error"', "rule 1 must have a class and patterns"),
        ('[[rule]]\nclass = "user-error"\npatterns = ["a"]\ncolour = "red"', "rule 1 must have"),
        ('[[rule]]\nclass = "sunspots"\npatterns = ["a"]', "sunspots"),
        ('[[rule]]\nclass = "user-error"\npatterns = ["a"]\nrole = "spectator"', "spectator"),
        ('[[rule]]\nclass = "user-error"\npatterns = "a"', "patterns must be a list"),
        ('[[rule]]\nclass = "user-error"\npatterns = ["("]', "'(' is no regular expression"),
        ('[[rule]]\nclass = "user-error"\npatterns = ["a"]\nsure = 1', "sure must be true or false"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_rule(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        parse_rules(text)


def test_every_pattern_is_one_and_names_its_source() -> None:
    for rule in RULES:
        assert rule.source
        for pattern in rule.patterns:
            re.compile(pattern)
