"""``resilient plan``: published rows, in words and as JSON; what cannot be planned is refused with what to do."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

import resilient
from resilient.cli import plan as plan_module
from resilient.report.fitting import Fitted, Measurement, fit
from resilient.report.model import GenerationTime, Ledger, Part, Parts
from tests.cli.calling import call, called

JOB = ("--gpus", "100000", "--gpus-per-node", "8", "--failures-per-1000-node-days", "2.34")
RSC_2 = (*JOB, "--stall", "5s", "--interval", "2min", "--recovery", "2min")
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_the_published_rows_come_out() -> None:
    found = called("plan", *RSC_2)
    assert found["ettr"] == pytest.approx(0.90, abs=0.01)
    assert found["mtbf_s"] / 60 == pytest.approx(49.2, abs=0.1)
    assert (found["gpus"], found["nodes"], found["interval_s"], found["ettr_half_width"]) == (100_000, 12_500, 120, 0)
    assert 120 < found["best_interval_s"] < 180
    assert found["best_ettr"] > found["ettr"]
    llama = called("plan", "--preset", "llama3", "--recovery", 0)
    assert llama["mtbf_s"] / 60 == pytest.approx(185, abs=1)
    assert llama["interval_s"] == llama["best_interval_s"]
    spares = [
        called("plan", "--gpus", nodes, "--gpus-per-node", 1, "--failures-per-1000-node-days", 1.2)["spares"]
        for nodes in (128, 256, 512, 1024)
    ]
    assert spares == [2, 2, 3, 4]


def test_a_person_is_told_the_same() -> None:
    said = call("plan", *RSC_2).stdout
    assert "100,000 GPUs on 12,500 nodes, 2.34 failures in 1,000 node-days" in said
    assert "mean time between failures  49 min 14 s" in said
    assert "share of productive time    90.2 % (ETTR), saving every 2 min" in said
    assert "best interval               2 min 49 s (90.5 %), by optimum" in said
    assert re.search(r"half the failures +94\.0 % +\+90,511", said)
    assert re.search(r"2 min 49 s +90\.5 % +·*● < best", said) or re.search(r"90\.5 % +\.*o < best", said)
    assert re.search(r"detection of a failure +0 s +default", said)


def test_a_preset_gives_what_is_not_given() -> None:
    found = called("plan", "--preset", "byterobust", "--gpus", 1024)["planned_with"]
    assert found["gpus"] == {"value": 1024, "from": "given"}
    assert found["detection_s"] == {"value": 10, "from": "preset byterobust"}
    assert found["stall_s"] == {"value": 1, "from": "default"}
    listed = call("plan", "--preset", "list").stdout
    assert "source: Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783" in listed
    assert called("plan", "--preset", "list")["presets"]["rsc-1"]["failures_per_1000_node_days"] == 6.5


def test_a_tier_on_the_nodes_is_simulated() -> None:
    tier = ("--local-interval", "1min", "--local-survives", "90%", "--local-recovery", "1min")
    job = ("--gpus", 100_000, "--preset", "llama3", "--recovery", "3min", "--upload-lag", "2min", "--detection", 10)
    two = called("plan", *job, *tier, "--interval", "5min")
    assert (two["local_interval_s"], two["interval_s"]) == (60, 300)
    assert 0 < two["ettr_half_width"] < 0.001
    assert two["ettr"] > called("plan", *job, "--interval", "5min")["ettr"] + 0.1
    assert "nodes keep their copy in" in call("plan", *job, "--local-survives", 0.9).stdout


def test_the_picture_shows_the_curve(tmp_path: Path) -> None:
    call("plan", *RSC_2, "--svg", tmp_path / "plan.svg")
    root = ET.fromstring((tmp_path / "plan.svg").read_text())
    words = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "best: 2 min 49 s, 90.5 %" in words
    assert "planned: 2 min, 90.2 %" in words
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert min(heights) not in (heights[0], heights[-1]), "the best is in between"
    assert "http" not in (tmp_path / "plan.svg").read_text().replace("http://www.w3.org/2000/svg", "")


def test_a_picture_replaces_nothing_unless_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "plan.svg"
    picture.write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(plan_module, "look", lambda *_: pytest.fail("planned before it was known where to"))
        refused = called("plan", *RSC_2, "--svg", picture, code=11)["error"]
        assert (refused["kind"], refused["hint"]) == ("destination-not-empty", "name another file, or add --overwrite")
        assert called("plan", *RSC_2, "--svg", tmp_path, code=11)["error"]["kind"] == "destination-not-empty"
        absent = called("plan", *RSC_2, "--svg", tmp_path / "no" / "plan.svg", code=2)["error"]
        assert "there is no directory" in absent["message"]
        assert "make it first" in absent["hint"]
        long = called("plan", *RSC_2, "--svg", tmp_path / f"{'x' * 300}.svg", code=2)["error"]
        assert "name another file" in long["hint"]
    assert picture.read_text() == "mine"
    call("plan", *RSC_2, "--svg", picture, "--overwrite")
    assert picture.read_text().startswith("<svg")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.svg"], "nothing else stays"


OFTEN = ("--gpus", 100_000, "--failures-per-1000-node-days", 6.5, "--stall", "10s", "--interval", "146s")


def test_the_best_interval_is_the_best_unless_a_budget_is_given() -> None:
    found = called("plan", *OFTEN)
    assert found["limited_by"] == "optimum"
    assert found["best_ettr"] > found["ettr"]
    assert (found["auto"]["limit"], found["auto"]["interval_s"]) == ("overhead budget", pytest.approx(212.2, abs=0.1))
    said = call("plan", *OFTEN).stdout
    assert "best interval               2 min 19 s (65.5 %), by optimum" in said
    assert (
        'every="auto" would take     3 min 32 s (64.8 %): it keeps within its overhead budget of 5 %; '
        "at best, saves take 6.7 % of the time" in said
    )
    assert not re.search(r"-\d", said.partition("what would help")[2])
    within = called("plan", *OFTEN, "--overhead-budget", "5%")
    assert (within["limited_by"], within["best_interval_s"], within["auto"]) == ("overhead budget", 190, None)
    assert all(each["what"] != "the best interval" for each in within["improvements"])
    assert "< best within the budget" in call("plan", *OFTEN, "--overhead-budget", "5%").stdout


def test_an_interval_with_a_tier_on_the_nodes_is_kept_or_said_to_be_rounded() -> None:
    job = ("--gpus", 1024, "--preset", "rsc-1")
    short = called("plan", *job, "--interval", "10s", "--local-survives", 0.9)
    assert (short["interval_s"], short["local_interval_s"], short["rounded_from_s"]) == (10, 10, None)
    rounded = (*job, "--interval", "90s", "--local-interval", "1min")
    assert called("plan", *rounded)["rounded_from_s"] == 90
    said = call("plan", *rounded).stdout
    assert "saving every 2 min\n" in said
    assert "1 min 30 s was asked for: it is rounded to a multiple of --local-interval 1 min" in said
    given = called("plan", *job, "--local-interval", "1min")
    assert (given["limited_by"], given["local_limited_by"], given["best_interval_s"]) == ("given", "given", 60)
    said = call("plan", *job, "--local-interval", "1min").stdout
    assert "best interval               1 min (98.2 %), as --local-interval is given" in said
    assert "the best interval to the tier on the nodes" in said
    frugal = called("plan", *job, "--local-survives", 0.9, "--overhead-budget", "0.1%")
    assert (frugal["limited_by"], frugal["local_limited_by"]) == ("overhead budget", "overhead budget")
    slow = ("--persist", "5min", "--interval", "1min", "--local-interval", "1min")
    assert "before the last one is in the store" in call("plan", *job, *slow, code=2).stderr


@pytest.mark.parametrize("rate", ["nan", "inf", "-inf", "1e-320", "1e9", "-1", "often"])
def test_rates_beyond_sense_are_refused_in_words(rate: str) -> None:
    error = called("plan", "--gpus", 8, "--failures-per-1000-node-days", rate, code=2)["error"]
    assert f"{rate!r} is not in the range of numbers from 0.001 to 1,000,000" in error["message"]
    assert "--preset list" in error["message"]
    assert error["hint"]


def test_nothing_has_units_too() -> None:
    found = called("plan", *JOB, "--stall", "0s", "--recovery", "0min", "--detection", "0.0h", "--persist", "0")
    costs = [found["planned_with"][name]["value"] for name in ("stall_s", "recovery_s", "detection_s", "persist_s")]
    assert costs == [0, 0, 0, 0]
    assert (found["limited_by"], found["best_interval_s"]) == ("shortest", 1)
    for text in ("0s", "0 min", "-1s", "nan", "1e300", "20000d"):
        assert text in called("plan", *JOB, "--interval", text, code=2)["error"]["message"]
    assert "0 parsec" in called("plan", *JOB, "--stall", "0 parsec", code=2)["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", 10), "--failures-per-1000-node-days is missing"),
        (("--preset", "llama4"), "--preset llama4: there is no such preset"),
        (("--failures-per-1000-node-days", 3), "--gpus is missing"),
        (("--preset", "llama3", "--persist", "5min", "--interval", "1min"), "before the last one is in the store"),
        (("--preset", "llama3", "--interval", "1min", "--local-interval", "2min"), "is longer than --interval 1 min"),
        (("--preset", "llama3", "--overhead-budget", "0%"), "no save costs nothing"),
        (("--preset", "llama3", "--stall", "soon"), "'--stall': 'soon' must be a duration, such as"),
        (("--preset", "llama3", "--interval", "0"), "'--interval': '0' must be a duration"),
        (("--preset", "llama3", "--local-survives", "2"), "must be a share, such as 0.9 or 90%"),
        (("--gpus", 0), "0 is not in the range"),
        (("--gpus", 8, "--failures-per-1000-node-days", 0), "is not in the range"),
        (("--gpus", 10**400, "--preset", "rsc-1"), "is not in the range"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(arguments: tuple[object, ...], message: str) -> None:
    assert message in call("plan", *arguments, code=2).stderr
    error = called("plan", *arguments, code=2)["error"]
    assert message in error["message"]
    assert error["hint"]


def fitted(**more: object) -> Fitted:
    about: dict[str, object] = {
        "gpus": 16,
        "gpus_per_node": 8,
        "failures": 3,
        "node_days": 10.0,
        "rate": 300.0,
        "rate_low": 61.9,
        "rate_high": 876.7,
        "stall": Measurement(mean_s=0.5, low_s=0.1, high_s=0.9, count=20),
        "persist": Measurement(mean_s=20.0, low_s=10.0, high_s=30.0, count=20),
        "recovery": Measurement(mean_s=90.0, low_s=60.0, high_s=120.0, count=3),
        "detection": None,
        "interval": None,
    }
    return Fitted(**{**about, **more})  # type: ignore[arg-type]


def test_a_plan_from_a_run_says_what_was_measured_and_how_sure_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_fitted", lambda _: fitted())
    found = called("plan", "--from", "runs/gpt", "--gpus", 64)
    assert found["planned_with"]["stall_s"] == {"value": 0.5, "from": "runs/gpt"}
    assert found["planned_with"]["gpus"] == {"value": 64, "from": "given"}
    assert found["planned_with"]["detection_s"]["from"] == "default"
    assert found["mtbf_s"] == pytest.approx(86_400 / (8 * 0.3))
    low, high = found["ettr_between"]
    assert low < found["ettr"] < high
    assert found["measured"]["failures"] == 3
    said = call("plan", "--from", "runs/gpt")
    assert "measured: 3 failures in 10 node-days: with 95 % confidence 61.9 to 877 in 1,000" in said.stdout
    assert re.search(r"recovery +1 min 30 s on average, 1 min to 2 min, 3 times", said.stdout)
    assert "3 failures say little about a rate" in said.stderr
    given = called("plan", "--from", "runs/gpt", "--failures-per-1000-node-days", 3)
    assert given["ettr_between"] is None


def test_a_run_that_has_not_failed_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_fitted", lambda _: fitted(failures=0, rate=None, rate_low=0.0, rate_high=368.9))
    refused = call("plan", "--from", "runs/gpt", code=2).stderr
    assert "0 failures in 10 node-days say little about a rate, no more than that it is below 369" in refused
    assert refused.count("say little") == 1
    assert called("plan", "--from", "runs/gpt", code=2)["error"]["hint"]
    assert "say little" not in call("plan", "--from", "runs/gpt", "--preset", "rsc-2").stderr
    assert called("plan", "--from", "runs/gpt", "--preset", "rsc-2")["planned_with"]["recovery_s"]["value"] == 90


def test_what_of_a_recovery_was_waiting_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = Measurement(mean_s=3.6, low_s=0.0, high_s=9.0, count=3)
    monkeypatch.setattr(plan_module, "_fitted", lambda _: fitted(idle=waited))
    said = call("plan", "--from", "runs/gpt").stdout
    assert "1 min to 2 min, 3 times; of it 3.6 s waiting to be started again" in said
    assert called("plan", "--from", "runs/gpt")["measured"]["idle"]["mean_s"] == 3.6


def test_a_run_that_keeps_no_account_is_not_planned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @resilient.train(tmp_path / "run", every=2)
    def main(run: resilient.Run) -> None:
        run.track(state={"step": 0})
        for _ in run.steps(range(4), total=4):
            pass

    main()
    assert called("plan", "--from", tmp_path / "run", "--preset", "rsc-2")["measured"]
    silent = {Part.START: 60.0}
    monkeypatch.setattr(plan_module, "fit", lambda found: fit(replace(found, generations=_spent(found, silent))))
    error = called("plan", "--from", tmp_path / "run", "--preset", "rsc-2", code=10)["error"]
    assert "this run keeps no account" in error["message"]
    assert error["hint"]


def _spent(found: Ledger, parts: Parts) -> tuple[GenerationTime, ...]:
    return tuple(replace(each, parts=parts) for each in found.generations)


def test_a_run_that_is_not_there_is_not_planned_from(tmp_path: Path) -> None:
    assert called("plan", "--from", tmp_path / "run", code=10)["error"]["hint"]


def test_a_real_run_has_an_account_to_plan_from(tmp_path: Path) -> None:
    @resilient.train(tmp_path / "run", every=2)
    def main(run: resilient.Run) -> None:
        run.track(state={"step": 0})
        for _ in run.steps(range(6), total=6):
            pass

    main()
    found = called("plan", "--from", tmp_path / "run", "--preset", "rsc-2", "--gpus", 1024)
    assert found["measured"]["failures"] == 0
    assert found["planned_with"]["stall_s"]["from"] == str(tmp_path / "run")
    assert 0 < found["ettr"] < 1


def test_help_and_the_page_teach_all_of_it() -> None:
    shown = call("plan", "--help").stdout
    assert "resilient plan --gpus 16384 --preset llama3" in shown
    options = set(re.findall(r"--[a-z][a-z0-9-]+", shown)) - {"--help", "--local"}
    page = PAGE.read_text()
    assert not [option for option in sorted(options) if f"`{option}" not in page]
    fields = called("plan", *RSC_2)
    assert not [name for name in fields if f"`{name}`" not in page]
