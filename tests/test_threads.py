"""The number of threads follows the quota of a container, and other programs' use of processors while steps run."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import make_draft, make_target

import dflash
from dflash.threads import NEIGHBORS, Neighbors, cpu_quota, describe_threads, fit_threads

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


def stat(root, processors, seconds, nice=0):
    """Write /proc/stat of processors that were used for so long each, ``nice`` of it by programs that give way."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = [f"cpu{i} {round(seconds * ticks)} {round(nice * ticks)} 0 900 5 0 0 7" for i in range(processors)]
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text("\n".join(["cpu  1 2 3 4 5 6 7 8", *used, "intr 17", ""]))


@pytest.mark.parametrize(
    ("share", "nice", "most", "fitting"),
    [(0.02, 0, 8, 8), (0.125, 0, 8, 7), (0.5, 0, 8, 4), (1, 0, 8, 1), (0.5, 0, 3, 3), (0.5, 0, 6, 4), (0, 1, 8, 8)],
)
def test_threads_leave_processors_to_other_programs(eight, tmp_path, monkeypatch, share, nice, most, fitting):
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    neighbors = Neighbors(tmp_path, period=1)
    stat(tmp_path, 8, 50)
    assert neighbors.fitting(most) == most  # nothing to compare with yet
    stat(tmp_path, 8, 50 + 10 * share, 10 * nice)
    assert neighbors.fitting(most) == fitting


def test_own_use_of_processors_is_no_neighbor(eight, tmp_path, monkeypatch):
    times, clock = iter([0.0, 40.0]), iter([100.0, 110.0])
    monkeypatch.setattr(time, "process_time", lambda: next(times))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    neighbors = Neighbors(tmp_path, period=1)
    for seconds in (50, 55):
        stat(tmp_path, 8, seconds)
        assert neighbors.fitting(8) == 8


def test_without_proc_nobody_is_seen(eight, tmp_path):
    neighbors = Neighbors(tmp_path, period=0)
    assert [neighbors.fitting(8) for _ in range(3)] == [8, 8, 8]


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_step_leaves_processors_and_its_text_is_the_same(weights, monkeypatch, set_threads):
    target, ids, seen = make_target("qwen3"), torch.arange(2, 12)[None], []
    draft = make_draft(target)
    set_threads(2)

    class Watch:
        def __call__(self, ids, logits):
            seen.append(torch.get_num_threads())
            return logits

    def answer():
        return dflash.generate(
            target, draft, ids, max_new_tokens=8, temperature=1.0, seed=3, weights=weights, logits_processor=[Watch()]
        )

    monkeypatch.setattr(NEIGHBORS, "fitting", lambda most: most)
    alone = answer()
    assert {*seen} == {2}
    seen.clear()
    monkeypatch.setattr(NEIGHBORS, "fitting", lambda most: most - 1)
    beside = answer()
    assert 1 in seen
    with ThreadPoolExecutor() as others:
        assert others.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    torch.testing.assert_close(beside, alone, rtol=0, atol=0)


def test_rejection_keeps_its_threads(monkeypatch):
    """Its text depends on the drafter's probabilities, whose bits may depend on the number of threads."""
    target, asked = make_target("qwen3"), []
    monkeypatch.setattr(NEIGHBORS, "fitting", lambda most: asked.append(most) or most)
    call = {"ids": torch.arange(2, 12)[None], "max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    dflash.generate(target, draft := make_draft(target), **call, acceptance="rejection")
    assert not asked
    dflash.generate(target, draft, **call)
    assert asked
