"""A Ceph object gateway of our own: a monitor, a disk in a sparse file, and S3 in front of it.

16 seconds to start, so one for the session, and only if a test asks for it. Everything lies in a
folder that is removed afterwards.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.packages import install
from tests.servers.processes import Children, free_port
from tests.servers.s3 import S3Server

PACKAGES = ("ceph-base", "ceph-common", "ceph-mon", "ceph-osd", "radosgw")
PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw")
START_S_MAX = 90.0
COMMAND_S_MAX = 60.0
DISK_BYTES = 16 << 30
ACCESS, SECRET = "testkey", "testsecret"

# Deleted bytes are collected at once: the default of two hours fills the disk with old parts.
CONFIG = """
[global]
fsid={fsid}
mon_host=v2:127.0.0.1:{mon_port}/0
mon_initial_members=a
public_network=127.0.0.0/8
cluster_network=127.0.0.0/8
auth_cluster_required=cephx
auth_service_required=cephx
auth_client_required=cephx
keyring={folder}/keyring
auth_allow_insecure_global_id_reclaim=false
mon_data_avail_warn=1
mon_data_avail_crit=0
osd_pool_default_size=1
osd_pool_default_min_size=1
osd_pool_default_pg_num=8
osd_crush_chooseleaf_type=0
mon_allow_pool_size_one=true
mon_warn_on_pool_no_redundancy=false
run_dir={folder}
log_file={folder}/$name.log
admin_socket={folder}/$name.asok
mon_data={folder}/mon
osd_data={folder}/osd
osd_objectstore=bluestore
bluestore_block_size={disk_bytes}
bluestore_fsck_on_mount=false
osd_memory_target=1073741824
ms_bind_ipv6=false
[client.rgw]
rgw_data={folder}
rgw_run_sync_thread=false
rgw_dns_name=localhost
rgw_max_chunk_size=4194304
rgw_gc_obj_min_wait=1
rgw_gc_processor_period=2
rgw_gc_processor_max_time=600
"""


@contextmanager
def running_ceph(*, disk_bytes: int = DISK_BYTES) -> Iterator[S3Server]:
    """Run a server; it and its folder are gone afterwards."""
    _bring_programs()
    folder = Path(tempfile.mkdtemp(prefix="hfceph"))
    children = Children(folder)
    try:
        port = _Ceph(folder, children).start(disk_bytes)
        yield S3Server(
            f"http://127.0.0.1:{port}",
            {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET},
        )
    finally:
        children.end()
        shutil.rmtree(folder, ignore_errors=True)


def _bring_programs() -> None:
    if not all(map(shutil.which, PROGRAMS)):
        install(*PACKAGES)
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        raise AssertionError(f"no {missing}: apt-get install {' '.join(PACKAGES)}")


class _Ceph:
    """The steps from an empty folder to a gateway that answers."""

    def __init__(self, folder: Path, children: Children) -> None:
        self._folder, self._children, self._port = folder, children, 0
        self._config = folder / "ceph.conf"
        self._environment = {**os.environ, "CEPH_CONF": str(self._config)}

    def start(self, disk_bytes: int) -> int:
        """Return the port of the gateway, once it answers."""
        for name in ("mon", "osd"):
            (self._folder / name).mkdir()
        fsid, mon_port = str(uuid.uuid4()), free_port()
        self._config.write_text(
            CONFIG.format(folder=self._folder, fsid=fsid, mon_port=mon_port,
                          disk_bytes=disk_bytes)
        )  # fmt: skip
        self._start_monitor(fsid, mon_port)
        self._start_disk()
        self._start_gateway()
        return self._port

    def _start_monitor(self, fsid: str, mon_port: int) -> None:
        keyring, monmap = self._folder / "keyring", self._folder / "monmap"
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.",
                  "--cap", "mon", "allow *")  # fmt: skip
        for name in ("client.admin", "client.rgw", "osd.0"):
            caps = (word for who in ("mon", "osd", "mgr") for word in ("--cap", who, "allow *"))
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *caps)
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid,
                  "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", monmap)  # fmt: skip
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._children.start("mon", "ceph-mon", "-f", "-i", "a", "-c", self._config)

    def _start_disk(self) -> None:
        disk = str(uuid.uuid4())
        # The first command waits until the monitor answers.
        self._run("ceph", "osd", "new", disk)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self._children.start("osd", "ceph-osd", "-f", "-i", "0", "-c", self._config)

    def _start_gateway(self) -> None:
        # Drawn just before it is bound: earlier, some connection may have got it meanwhile.
        self._port = free_port()
        self._children.start(
            "rgw", "radosgw", "-f", "-n", "client.rgw", "-c", self._config, "--no-mon-config",
            f"--rgw-frontends=beast endpoint=0.0.0.0:{self._port}",
        )  # fmt: skip
        self._children.wait("radosgw", self._answers, start_s_max=START_S_MAX)
        self._run("radosgw-admin", "user", "create", "--uid=t", "--display-name=t",
                  f"--access-key={ACCESS}", f"--secret={SECRET}")  # fmt: skip

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(
            list(map(str, command)), env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout.decode(errors='replace')[-2000:]}"
