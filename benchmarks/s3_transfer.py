"""One way to move bytes to or from an S3 endpoint, once, in a process of its own: the program that `s3.py` starts.

Usage: python benchmarks/s3_transfer.py CASE ENDPOINT BUCKET MIB

Buffers are touched and connections made before the clock runs. The result is seconds, processor seconds of this
process, and the MiB that it grew by at its peak.
"""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import xxhash
from children import done, ready_steady
from measuring import MIB

BUFFER = 64 * MIB
REQUEST = 16 * MIB
CHUNK = 4 * MIB
KEY, SECRET = "owner-key", "owner-secret"

Work = Callable[[], object]


def buffers(nbytes: int) -> list[memoryview]:
    pattern = os.urandom(MIB)
    return [memoryview(bytearray(pattern * (BUFFER // MIB))) for _ in range(nbytes // BUFFER)]


def our_store(endpoint: str, bucket: str, client: str = "obstore") -> Any:
    from resilient.store.open import open_store

    options = {"endpoint_url": endpoint, "key": KEY, "secret": SECRET, "client": client}
    return open_store(f"s3://{bucket}/{secrets.token_hex(4)}", storage_options=options)


def raw_store(endpoint: str, bucket: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        bucket,
        prefix=secrets.token_hex(4),
        config={
            "endpoint": endpoint,
            "region": "us-east-1",
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "unsigned_payload": True,
            "checksum_algorithm": "CRC64NVME",
        },
        client_options={"allow_http": True, "timeout": timedelta(seconds=90)},
    )


def put_ours(endpoint: str, bucket: str, nbytes: int, *, client: str = "obstore", digests: bool = False) -> Work:
    store, content = our_store(endpoint, bucket, client), buffers(nbytes)
    store.put("warm", [content[0][:MIB]])

    def digest_all() -> None:
        for buffer in content:
            for start in range(0, BUFFER, CHUNK):
                xxhash.xxh3_128_digest(buffer[start : start + CHUNK])

    def work() -> None:
        with ThreadPoolExecutor(1) as beside:  # as the writer does it
            digesting = beside.submit(digest_all if digests else lambda: None)
            store.put(f"object-{nbytes}", content)
            digesting.result()

    return work


def put_raw(endpoint: str, bucket: str, nbytes: int) -> Work:
    store, content = raw_store(endpoint, bucket), buffers(nbytes)
    store.put("warm", content[0][:MIB])
    return lambda: store.put(f"object-{nbytes}", iter(content), chunk_size=REQUEST, max_concurrency=4)


def get_ours(endpoint: str, bucket: str, nbytes: int, *, threads: int = 1) -> Work:
    store, into = our_store(endpoint, bucket), one_buffer(nbytes)
    store.put(f"object-{nbytes}", buffers(nbytes))
    store.read_into(f"object-{nbytes}", 0, into[:MIB])
    if threads == 1:
        return lambda: store.read_into(f"object-{nbytes}", 0, into)

    def read(start: int) -> None:
        store.read_into(f"object-{nbytes}", start, into[start : start + REQUEST])

    return lambda: in_threads(read, nbytes, threads)


def get_raw(endpoint: str, bucket: str, nbytes: int) -> Work:
    store, into = raw_store(endpoint, bucket), one_buffer(nbytes)
    store.put(f"object-{nbytes}", iter(buffers(nbytes)), chunk_size=REQUEST, max_concurrency=4)
    store.get_range(f"object-{nbytes}", start=0, length=MIB)

    def read(start: int) -> None:
        into[start : start + REQUEST] = store.get_range(f"object-{nbytes}", start=start, length=REQUEST)

    return lambda: in_threads(read, nbytes, 4)


def one_buffer(nbytes: int) -> memoryview:
    return memoryview(bytearray(os.urandom(MIB) * (nbytes // MIB)))


def in_threads(read: Callable[[int], None], nbytes: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, nbytes, REQUEST)))


def put_s3torchconnector(endpoint: str, bucket: str, nbytes: int) -> Work:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    connector = S3Checkpoint("us-east-1", endpoint, S3ClientConfig(force_path_style=True))
    prefix, content = f"s3://{bucket}/{secrets.token_hex(4)}", buffers(nbytes)
    with connector.writer(f"{prefix}/warm") as writer:
        writer.write(bytes(MIB))

    def work() -> None:
        with connector.writer(f"{prefix}/object-{nbytes}") as writer:
            for buffer in content:
                writer.write(buffer)

    return work


def put_dcp(endpoint: str, bucket: str, nbytes: int) -> Work:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_filesystem

    state = {f"w{index}": torch.frombuffer(each, dtype=torch.uint8) for index, each in enumerate(buffers(nbytes))}
    options = {"endpoint_url": endpoint, "key": KEY, "secret": SECRET}
    url = f"s3://{bucket}/{secrets.token_hex(4)}"

    def save(items: dict[str, torch.Tensor], name: str) -> None:
        writer = fsspec_filesystem.FsspecWriter(f"{url}/{name}", **options)
        dcp.save(items, storage_writer=writer, no_dist=True)

    save({"w": torch.zeros(1)}, "warm")
    return lambda: save(state, "object")


CASES: dict[str, Callable[[str, str, int], Work]] = {
    "put, raw obstore": put_raw,
    "put, resilient": put_ours,
    "put, resilient, with digests": lambda *where: put_ours(*where, digests=True),
    "put, resilient, through s3fs": lambda *where: put_ours(*where, client="fsspec"),
    "put, s3torchconnector": put_s3torchconnector,
    "put, DCP + s3fs": put_dcp,
    "get, raw obstore": get_raw,
    "get, resilient": get_ours,
    "get, resilient, four threads": lambda *where: get_ours(*where, threads=4),
}


def memory_mib(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    case, endpoint, bucket, mib = sys.argv[1:]
    work = CASES[case](endpoint, bucket, int(mib) * MIB)
    ready_steady()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before_mib, before_cpu_s, begin_s = memory_mib("VmRSS"), cpu_s(), time.perf_counter()
    work()
    result = {"s": time.perf_counter() - begin_s, "cpu_s": cpu_s() - before_cpu_s}
    done()
    print(json.dumps(result | {"mib": memory_mib("VmHWM") - before_mib}))


if __name__ == "__main__":
    main()
