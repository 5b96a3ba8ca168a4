"""Ranks agree through a key-value store, with deadlines that name who was waited for."""

from __future__ import annotations

import pytest

from resilient.engine.peers import Peers
from resilient.errors import CorruptError, ErrorKind, PeerError, StoreError
from tests.engine.rank_threads import on_ranks


def test_what_rank_0_makes_is_what_all_get() -> None:
    assert on_ranks(4, lambda peers: peers.share("t", lambda: b"from %d" % peers.rank, 5)) == [b"from 0"] * 4


def test_an_error_of_rank_0_is_raised_on_all_as_it_is() -> None:
    def fail() -> bytes:
        raise StoreError("no", kind=ErrorKind.UNREACHABLE, hint="cable", retryable=True)

    for error in on_ranks(3, lambda peers: peers.share("t", fail, 5)):
        assert isinstance(error, StoreError)
        assert (str(error), error.kind, error.hint, error.retryable) == ("no", ErrorKind.UNREACHABLE, "cable", True)


def test_all_hear_what_each_rank_said() -> None:
    assert on_ranks(3, lambda peers: peers.gather("t", bytes([peers.rank]), 5)) == [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.field_report("BR-057")
def test_a_silent_rank_is_named_on_all_others() -> None:
    def work(peers: Peers) -> object:
        return None if peers.rank == 1 else peers.gather("t", b"", 0.2)

    results = on_ranks(3, work)
    for rank in (0, 2):
        error = results[rank]
        assert isinstance(error, PeerError)
        assert error.kind == ErrorKind.PEER_TIMEOUT
        assert "rank 1" in str(error)


def test_one_process_needs_nobody() -> None:
    peers = Peers.current()
    assert (peers.rank, peers.world_size) == (0, 1)
    assert peers.gather("t", b"x", 1) == [b"x"]
    with pytest.raises(CorruptError, match="bad"):
        peers.share("u", _corrupt, 1)


def _corrupt() -> bytes:
    raise CorruptError("bad", kind=ErrorKind.BAD_DIGEST)
