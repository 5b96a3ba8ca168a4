"""What moving a checkpoint to and from S3 costs the client: speed, processor time, memory.

Usage: python benchmarks/s3.py [--quick] [--mib N] [--rounds N]

Two endpoints on this machine: one that throws everything away, so that the client is what is measured, and a real
server (SeaweedFS), which is slower than any client and takes its processor time from the same cores. Every round does
everything once, each in a fresh process. Ratios are of one round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the tests' S3 server

from children import Child, ChildError  # noqa: E402
from measuring import GIB, MIB, progress, tell  # noqa: E402
from s3_transfer import KEY, SECRET  # noqa: E402

from tests.s3_server import BUCKET, running_server  # noqa: E402

BENCHMARK = "s3"
CLIENT_BOUND = (
    "put, raw obstore",
    "put, resilient",
    "put, resilient, with digests",
    "put, resilient, through s3fs",
    "get, raw obstore",
    "get, resilient",
    "get, resilient, four threads",
)
SERVER_BOUND = (
    "put, raw obstore",
    "put, resilient",
    "put, s3torchconnector",
    "put, DCP + s3fs",
    "get, raw obstore",
    "get, resilient",
)
NEEDS = {"put, s3torchconnector": "s3torchconnector"}


@contextmanager
def discarding_endpoint() -> Iterator[str]:
    command = [sys.executable, str(HERE / "null_s3.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def transfer(case: str, endpoint: str, bucket: str, mib: int) -> dict[str, float]:
    """Run a case once, in a process of its own."""
    with Child([str(HERE / "s3_transfer.py"), case, endpoint, bucket, str(mib)], {}) as child:
        child.hear("ready")
        child.go()
        child.hear("done")
        found: dict[str, float] = child.result()
        return found


def contest(on: str, cases: Sequence[str], endpoint: str, bucket: str, mib: int, rounds: int) -> None:
    """Run the cases by turns, and tell the medians."""
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(rounds + 1):  # the first warms up
        for case in cases:
            progress(f"{on}: {case}, round {turn} of {rounds}")
            try:
                result = transfer(case, endpoint, bucket, mib)
            except ChildError as error:
                print(json.dumps({"benchmark": BENCHMARK, "case": f"{on}: {case}", "error": str(error)}), flush=True)
                continue
            if turn:
                found[case].append(result)
    for case, results in found.items():
        gib = mib * MIB / GIB
        named = f"{on}: {case}"
        tell(BENCHMARK, named, "throughput", "GiB/s", [gib / each["s"] for each in results])
        tell(BENCHMARK, named, "client CPU", "s/GiB", [each["cpu_s"] / gib for each in results])
        tell(BENCHMARK, named, "extra memory", "MiB", [each["mib"] for each in results])
        raw = found[f"{case.partition(',')[0]}, raw obstore"]
        if raw is not results and len(raw) == len(results):
            ratios = [limit["s"] / each["s"] for limit, each in zip(raw, results, strict=True)]
            tell(BENCHMARK, named, "of raw obstore", "ratio", ratios)
            pooled = statistics.median(each["s"] for each in raw) / statistics.median(each["s"] for each in results)
            tell(BENCHMARK, named, "of raw obstore, medians", "ratio", [pooled])


def installed(cases: Sequence[str]) -> list[str]:
    """Return the cases that can run here; tell the others."""
    missing = [case for case in cases if case in NEEDS and importlib.util.find_spec(NEEDS[case]) is None]
    for case in missing:
        line = {"benchmark": BENCHMARK, "case": case, "error": f"{NEEDS[case]} is not installed"}
        print(json.dumps(line), flush=True)
    return [case for case in cases if case not in missing]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="256 MiB, fewer rounds")
    parser.add_argument("--mib", type=int, help="size of the object, instead (a multiple of 64)")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    mib, rounds = args.mib or (256 if args.quick else 1024), args.rounds or (3 if args.quick else 5)
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_EC2_METADATA_DISABLED="true")
    with discarding_endpoint() as endpoint:
        contest("discarding endpoint", CLIENT_BOUND, endpoint, "bench", mib, rounds)
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        contest("SeaweedFS", installed(SERVER_BOUND), server.endpoint, BUCKET, min(mib, 256), rounds)


if __name__ == "__main__":
    main()
