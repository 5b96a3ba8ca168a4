"""What the system says about memory, in a container or not."""

from __future__ import annotations

from pathlib import Path

from resilient.engine.host_memory import available_nbytes

MIB = 1 << 20


def a_system(root: Path, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       4096 kB\nMemAvailable:   2048 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(folder: Path, **files: str | int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")


def test_without_limits_it_is_what_is_free(tmp_path: Path) -> None:
    root = a_system(tmp_path, "0::/\n")
    assert available_nbytes(root=root) == 2 * MIB
    assert available_nbytes(4, root=root) == MIB // 2
    group(root / "sys/fs/cgroup", memory_max="max", memory_current=5)
    assert available_nbytes(root=root) == 2 * MIB


def test_the_tightest_of_all_groups_counts_and_the_page_cache_can_be_had_back(tmp_path: Path) -> None:
    root = a_system(tmp_path, "0::/job/rank\n")
    top = root / "sys/fs/cgroup"
    group(top / "job", memory_max=MIB, memory_current=MIB // 2, memory_stat="anon 7\ninactive_file 1024")
    group(top / "job/rank", memory_max=8 * MIB, memory_current=0)
    assert available_nbytes(root=root) == MIB // 2 + 1024


def test_groups_of_the_first_version_are_known_too(tmp_path: Path) -> None:
    root = a_system(tmp_path, "3:cpu:/a\n4:hugetlb,memory:/docker/abc\n")
    folder = root / "sys/fs/cgroup/memory"  # the container sees its own group as the root
    stat = "inactive_file 1\ntotal_inactive_file 4096"
    group(folder, memory_limit_in_bytes=MIB, memory_usage_in_bytes=8192, memory_stat=stat)
    assert available_nbytes(root=root) == MIB - 4096


def test_a_system_without_these_files_has_no_known_limit(tmp_path: Path) -> None:
    assert available_nbytes(root=tmp_path) > 1 << 50


def test_this_host_has_some_memory() -> None:
    assert MIB < available_nbytes() < 1 << 50
