"""The sentence names what takes the most, and what limits that."""

from __future__ import annotations

import pytest

from resilient.policy.bottleneck import LinkUse, Spent, bits, name_bottleneck, seconds

GBIT = 1e9 / 8


def spent(
    rank: int = 0,
    *,
    compute: float = 0.0,
    exchange: float = 0.0,
    data: float = 0.0,
    opt: float = 0.0,
    save: float = 0.0,
) -> Spent:
    return Spent(
        rank=rank,
        step_s=compute + exchange + data + opt + save,
        compute_s=compute,
        exchange_s=exchange,
        data_s=data,
        optimizer_s=opt,
        save_s=save,
    )


def link(sent_gbit: float, capable_gbit: float | None = None, name: str = "eth0", host: str = "n0") -> LinkUse:
    capable = None if capable_gbit is None else capable_gbit * GBIT
    return LinkUse(host=host, name=name, sent=sent_gbit * GBIT, received=0.0, capable=capable, loopback=name == "lo")


HALF = spent(compute=0.198, exchange=0.214)


@pytest.mark.parametrize(
    ("ranks", "links", "faults", "expected"),
    [
        (
            [HALF],
            [link(0.509, 1)],
            [],
            (
                "A step of 412 ms: 52% exchange (214 ms), 48% compute (198 ms); eth0 of n0 carries 0.98 Gbit/s of the "
                "1 Gbit/s that it can do: the network is the limit."
            ),
        ),
        (
            [HALF],
            [link(25e-9 * 1000, 10)],
            [],
            (
                "A step of 412 ms: 52% exchange (214 ms), 48% compute (198 ms); eth0 of n0 carries 48.1 kbit/s on a "
                "link of 10 Gbit/s: look at the switch, the cable, limits (tc), or for many small messages."
            ),
        ),
        ([HALF], [link(2, 10)], [], "eth0 of n0 carries 3.85 Gbit/s of the 10 Gbit/s that it can do meanwhile."),
        ([HALF], [link(0.5)], [], "eth0 of n0 carries 0.963 Gbit/s meanwhile, and does not say what it can do."),
        ([HALF], [], [], "no link of the machine carries it: it stays among the accelerators (NVLink, PCIe)."),
        (
            [HALF],
            [],
            ["the GPU at 0000:17:00.0 runs at x8 of x16"],
            "(NVLink, PCIe); the GPU at 0000:17:00.0 runs at x8 of x16.",
        ),
        (
            [HALF],
            [link(0.1, 100)],
            ["the network card at 0000:31:00.0 runs at x1 of x16"],
            "193 Mbit/s on a link of 100 Gbit/s: the network card at 0000:31:00.0 runs at x1 of x16.",
        ),
        ([HALF], [link(0.001, 10), link(3, name="lo")], [], "it stays on n0, over the loopback, at 5.78 Gbit/s"),
        # All send alike; the node whose link can do the least is the limit.
        ([HALF], [link(0.5, 10), link(0.5, 1, host="n1")], [], "eth0 of n1 carries 0.963 Gbit/s of the 1 Gbit/s"),
        (
            [spent(compute=0.8, exchange=0.2)],
            [link(0.1, 1)],
            [],
            "80% compute (800 ms), 20% exchange (200 ms); computing",
        ),
        (
            [spent(compute=0.5, data=0.5)],
            [],
            [],
            "50% data wait (500 ms), 50% compute (500 ms); the input is the limit",
        ),
        ([spent(compute=1, opt=1, exchange=0.1)], [], [], "48% optimizer (1 s), 48% compute (1 s); the optimizer"),
        ([spent(compute=1, save=1)], [], [], "50% save stall (1 s), 50% compute (1 s); saves hold it up"),
        ([spent(compute=0)], [], [], "computing is the limit"),
    ],
    ids=[
        "full",
        "throttled",
        "half used",
        "unknown",
        "accelerators",
        "accelerators on a narrow link",
        "card on a narrow link",
        "loopback",
        "two nodes",
        "compute",
        "data",
        "optimizer",
        "save",
        "nothing",
    ],
)
def test_sentences(ranks: list[Spent], links: list[LinkUse], faults: list[str], expected: str) -> None:
    found = name_bottleneck(ranks, links, faults).sentence
    assert expected in found
    assert found.startswith("A step of ")
    assert found.endswith(".")


def test_a_rank_that_all_others_wait_for_is_named_with_what_it_does_longer() -> None:
    quick = [spent(rank, compute=0.2, exchange=0.2) for rank in range(3)]
    found = name_bottleneck([*quick, spent(3, compute=0.39, exchange=0.01)], [link(0.5, 1)])
    assert found.about == "rank 3 compute"
    assert found.sentence == (
        "A step of 400 ms: rank 3 needs 390 ms of it for itself, the others 200 ms (most of the difference is "
        "compute): they wait for it in the exchange."
    )
    found = name_bottleneck([*quick, spent(3, compute=0.2, data=0.19, exchange=0.01)])
    assert found.about == "rank 3 data wait"


def test_a_rank_that_is_a_little_slower_does_not_explain_an_exchange_of_its_own() -> None:
    ranks = [spent(0, compute=0.2, exchange=0.2), spent(1, compute=0.23, exchange=0.17)]
    assert name_bottleneck(ranks, [link(0.5, 1)]).about.startswith("full eth0")
    ranks = [spent(0, compute=0.99, exchange=0.01), spent(1, compute=1.0)]
    assert name_bottleneck(ranks).about == "compute"


def test_what_it_is_about_stays_when_figures_change() -> None:
    one, other = (name_bottleneck([spent(compute=x, exchange=1.0)], [link(0.5, 1)]) for x in (1.0, 0.9))
    assert one.sentence != other.sentence
    assert one.about == other.about


def test_units() -> None:
    assert [seconds(value) for value in (90, 1.236, 0.9999, 0.412, 0.00412, 41e-6)] == [
        "90 s",
        "1.24 s",
        "1 s",
        "412 ms",
        "4.12 ms",
        "41 us",
    ]
    assert [bits(value / 8) for value in (400e9, 0.98e9, 48e3, 10)] == [
        "400 Gbit/s",
        "0.98 Gbit/s",
        "48 kbit/s",
        "10 bit/s",
    ]
