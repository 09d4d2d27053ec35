"""The default number of threads follows the quota of a container, and one that somebody chose stays."""

import os

import pytest
import torch

from dflash.threads import cpu_quota, describe_threads, fit_threads

INNER, V1 = "docker/abc", {"cpu.cfs_period_us": "100000\n"}
QUOTAS = {  # /proc/self/cgroup, the files of /sys/fs/cgroup, and the quota
    "v2": ("0::/", {"cpu.max": "50000 100000\n"}, 0.5),
    "v2, of an outer group": (f"0::/{INNER}", {f"{INNER}/cpu.max": "max 100000", "docker/cpu.max": "300000 100000"}, 3),
    "v2, without one": ("0::/", {"cpu.max": "max 100000\n"}, None),
    "v1": ("4:memory:/x\n3:cpu,cpuacct:/", {f"cpu/{name}": text for name, text in V1.items()}, 1.5),
    "v1, the group as its host calls it": (
        f"3:cpuacct,cpu:/{INNER}", {f"cpu,cpuacct/{name}": text for name, text in V1.items()}, 1.5,
    ),
    "v1, of an inner group": (f"1:cpu:/{INNER}", {f"cpu/{INNER}/{name}": text for name, text in V1.items()}, 1.5),
    "v1 beside v2": ("1:cpu:/\n0::/", {"unified/cpu.max": "200000 100000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    "nothing": ("", {}, None),
}  # fmt: skip


def fake(root, groups, files):
    """Write the files of a container under ``root``; a group with a period has a quota of 1.5 processors."""
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        if "period" in name:
            quota = "-1" if "unified" in str(files) else "150000"
            (root / name.replace("period", "quota")).write_text(quota)
    return root


@pytest.mark.parametrize("name", QUOTAS)
def test_the_quota_is_the_least_of_all_groups(name, tmp_path):
    groups, files, quota = QUOTAS[name]
    assert cpu_quota(fake(tmp_path, groups, files)) == quota


@pytest.fixture
def eight(monkeypatch, set_threads):
    """Eight processors, and torch's own number of threads for them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    set_threads(8)


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (2.4, 2), (3.6, 4), (9, 8)])
def test_threads_follow_the_quota(eight, tmp_path, quota, threads):
    root = fake(tmp_path, "0::/", {"cpu.max": f"{int(quota * 100000)} 100000"})
    fit_threads(root)
    assert torch.get_num_threads() == threads
    assert describe_threads(root) == f"{threads} on 8 processors, of which the container's quota is {quota:g}"
    torch.set_num_threads(8)  # by the program, later
    fit_threads(root)
    assert torch.get_num_threads() == 8


@pytest.mark.parametrize(("variable", "threads"), [("8", 8), (None, 3)])
def test_a_number_that_was_chosen_stays(eight, tmp_path, monkeypatch, variable, threads):
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(threads)
    fit_threads(fake(tmp_path, "0::/", {"cpu.max": "50000 100000"}))
    assert torch.get_num_threads() == threads
