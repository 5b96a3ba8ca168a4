"""Whether the next save is compressed: what was measured while the last ones were written, for the policy to decide."""

from __future__ import annotations

import math
from typing import Final

from resilient.clock import Clock
from resilient.format.codec import encode
from resilient.policy.compression import AUTO_LEVEL, Trial, choose_level, parse_compress
from resilient.writer.messages import Open
from resilient.writer.outline import Outline
from resilient.writer.packing import Pieces

_CORES: Final = 1  # the others are the training's
_TRIED_NBYTES: Final = 16 << 20
_TRIED_PIECES: Final = 16
_TRIED_EVERY: Final = 16  # saves: what a state is like changes slowly
_LEAST_NBYTES: Final = 8 << 20
"""Of less, the time is that of requests, and says nothing of how many bytes a second a store takes."""

_LEAST_SHARE: Final = 0.001
"""Of the time of an upload is the store's, whatever the threads of this process wait for meanwhile."""

_WISHFUL: Final = Trial(ratio=4.0, bytes_per_s=float(4 << 30))
"""Better than any state: where even this would not pay, none is tried."""


class Compressing:
    """Chooses the level for one save after another."""

    def __init__(self, opened: Open, *, clock: Clock) -> None:
        self._compress = parse_compress(opened.compress)
        self._limit = math.inf if opened.max_bandwidth is None else opened.max_bandwidth
        self._clock = clock
        self._bytes_per_s: float | None = None
        self._trial: Trial | None = None
        self._tried: tuple[int, int] | None = None  # which structure, how many saves ago
        self._saves = 0

    def level(self, outline: Outline, payload: memoryview, pieces: Pieces) -> int | None:
        """Return the level to encode these pieces with; None to store them as they are."""
        self._saves += 1
        if self._choose(_WISHFUL) is None or self._compress.mode == "zstd":
            return self._choose(None)
        if self._tried is None or self._tried[0] != outline.number or self._saves - self._tried[1] >= _TRIED_EVERY:
            self._trial = self._try(outline, payload, pieces)
            self._tried = (outline.number, self._saves)
        return self._choose(self._trial)

    def sent(self, nbytes: int, duration_s: float, *, waited_s: float = 0.0) -> None:
        """Take note of how long the store took for so many bytes, ``waited_s`` of it waiting for a processor.

        That is not the store's time. Where training leaves no processor idle, to count it made every disk look slower
        than the codec, which then took ten times the processor time that writing the bytes as they are takes.
        """
        if nbytes >= _LEAST_NBYTES and duration_s > 0:
            own_s = max(duration_s - waited_s, _LEAST_SHARE * duration_s)
            # A bounded upload may be quick, if what it has to wait for is only the next one.
            self._bytes_per_s = min(nbytes / own_s, self._limit)

    def _choose(self, trial: Trial | None) -> int | None:
        return choose_level(self._compress, store_bytes_per_s=self._bytes_per_s, trial=trial, cores=_CORES)

    def _try(self, outline: Outline, payload: memoryview, pieces: Pieces) -> Trial | None:
        """Encode some pieces from all over the state."""
        raw_nbytes = stored_nbytes = 0
        started_s = self._clock.monotonic()
        for piece in pieces[:: max(1, len(pieces) // _TRIED_PIECES)].tolist():
            raw = outline.raw(payload, piece)
            short = encode(raw, int(outline.itemsize[piece]), AUTO_LEVEL)
            raw_nbytes += raw.nbytes
            stored_nbytes += raw.nbytes if short is None else len(short)
            if raw_nbytes >= _TRIED_NBYTES:
                break
        duration_s = self._clock.monotonic() - started_s
        if not stored_nbytes or duration_s <= 0:
            return None
        return Trial(ratio=raw_nbytes / stored_nbytes, bytes_per_s=raw_nbytes / duration_s)
