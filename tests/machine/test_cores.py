"""How many cores there are for a process: a container's quota counts, whatever the host has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dure
from dure.machine import cores

HERE = cores.allowed_cores()


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where control groups are mounted; this process is in none that has limits."""
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "cgroup")
    own = tmp_path / "own"
    own.write_text("0::/\n")
    monkeypatch.setattr(cores, "_OWN_GROUPS", own)
    cores.cpu_quota.cache_clear()
    yield tmp_path / "cgroup"
    cores.cpu_quota.cache_clear()


def limit(folder: Path, quota: str, period: int, version: int = 2) -> None:
    cores.cpu_quota.cache_clear()
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.parametrize("folder", ["", "cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(
    ("quota", "wanted"), [("100000", 1), ("20000", 1), ("199999", 1), ("200000", 2), ("900000", 64)]
)
def test_a_quota_bounds_the_cores_in_both_versions(
    folder: str, quota: str, wanted: int, groups: Path
) -> None:
    limit(groups / folder, quota, 100_000, version=1 if folder else 2)
    assert cores.available_cores() == min(HERE, wanted)
    assert cores.threads_per_rank(1) == min(HERE, wanted)
    assert dure.Processes().workers == max(2, min(HERE, wanted))


@pytest.mark.parametrize("quota", ["max", "-1"])
def test_where_there_is_no_quota_all_cores_count(quota: str, groups: Path) -> None:
    assert cores.available_cores() == HERE, "without control groups"
    limit(groups if quota == "max" else groups / "cpu", quota, 100_000, 2 if quota == "max" else 1)
    assert cores.available_cores() == HERE


@pytest.mark.parametrize(
    ("line", "folder", "version"),
    [
        ("0::/slice/job/step", "slice/job", 2),
        ("4:cpu,cpuacct:/docker/7f", "cpu,cpuacct/docker/7f", 1),
        ("4:cpuacct,cpu:/docker/7f", "cpu/docker", 1),
    ],
)
def test_the_limits_of_every_group_around_the_process_count(
    line: str, folder: str, version: int, groups: Path
) -> None:
    cores._OWN_GROUPS.write_text(f"12:cpuset:/other\n{line}\n")
    limit(groups / folder, "50000", 50_000, version)
    limit(groups, "800000", 100_000)
    assert cores.available_cores() == 1


def test_one_process_has_no_more_threads_than_its_quota_has_cores(groups: Path) -> None:
    torch.set_num_threads(3)
    seen = dure.Processes(1).run(lambda context: torch.get_num_threads(), print)
    assert seen == 3, "without a quota the number is the user's"
    limit(groups, "200000", 100_000)
    assert dure.Processes(1).run(lambda context: torch.get_num_threads(), print) == 2
    assert torch.get_num_threads() == 3
