"""What a node says that cannot be tested with others."""

from __future__ import annotations

import pytest

from resilient.check import across
from resilient.check.across import run_pairs
from resilient.check.result import Status, passed
from tests.lives import _free_port

LOCAL = [passed("alone", "well")]


def test_without_an_address_nobody_meets() -> None:
    results, end = run_pairs(LOCAL, node=0, nodes=2, master=None, job=None)
    assert (results[0], end) == (LOCAL[0], Status.FAILED)
    assert "MASTER_ADDR" in results[1].line
    assert results[1].remedy


def test_a_node_whose_others_do_not_come_says_so_and_ends() -> None:
    results, end = run_pairs(LOCAL, node=1, nodes=2, master=f"127.0.0.1:{_free_port()}", job="a job", timeout_s=4.0)
    assert (results[0], end) == (LOCAL[0], Status.FAILED)
    assert results[1].line == "the tests in pairs did not end in 4 s"


def test_the_first_node_names_those_that_have_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "Part", lambda **fields: PART(**fields, come_s=1.0))
    results, end = run_pairs(LOCAL, node=0, nodes=3, master=f"127.0.0.1:{_free_port()}", job=None)
    assert end is Status.FAILED
    lost = [result for result in results if result.status is Status.FAILED]
    assert [(result.node, result.line) for result in lost] == [
        (f"node {node}", f"node {node} has not come in 1 s") for node in (1, 2)
    ]
    assert results[0].line == "well"


PART = across.Part


def test_a_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "MODULE", "resilient.check.nothing_of_that_name")
    results, end = run_pairs(LOCAL, node=0, nodes=2, master="127.0.0.1:1", job=None)
    assert end is Status.FAILED
    assert results[1].line.startswith("the process for the pairs ended with exit code 1: ")
    assert "nothing_of_that_name" in results[1].line
