"""Limits of control groups, from the files a kernel shows."""

from __future__ import annotations

from holdfast.core.cgroup import memory_limit_bytes, memory_room_bytes

V2 = {
    "/proc/self/cgroup": "0::/a/b\n",
    "/sys/fs/cgroup/a/b/memory.max": "max\n",
    "/sys/fs/cgroup/a/memory.max": "1000\n",
    "/sys/fs/cgroup/a/memory.current": "300\n",
}
V1 = {
    "/proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/y\n0::/\n",
    "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2000\n",
    "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": "2500\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


def test_the_group_above_binds_too():
    assert memory_limit_bytes(V2.get) == 1000
    assert memory_room_bytes(V2.get) == 700


def test_version_1_has_a_hierarchy_of_its_own_and_room_is_never_negative():
    assert memory_limit_bytes(V1.get) == 2000
    assert memory_room_bytes(V1.get) == 0


def test_the_tightest_group_decides():
    tighter = {
        **V2,
        "/sys/fs/cgroup/a/b/memory.max": "400",
        "/sys/fs/cgroup/a/b/memory.current": "1",
    }

    assert memory_limit_bytes(tighter.get) == 400
    assert memory_room_bytes(tighter.get) == 399


def test_inside_a_container_the_root_group_is_read():
    files = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "64"}

    assert memory_limit_bytes(files.get) == 64


def test_no_limit_and_no_groups_are_none():
    assert memory_limit_bytes({"/proc/self/cgroup": "0::/\n"}.get) is None
    assert memory_room_bytes({}.get) is None
