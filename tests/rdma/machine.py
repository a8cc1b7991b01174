"""Runs a command as root in a virtual machine whose kernel has Soft-RoCE: RDMA without hardware.

``python -m tests.rdma.machine COMMAND [ARGUMENT …]`` returns the command's exit code. The kernel is
an unmodified one of Debian's backports; QEMU emulates the processor, so that it runs wherever the
tests run. The machine has two processors with memory of their own, no network, and this machine's
files under the same paths: what it writes stays in its memory. Packages and the kernel are fetched
once, by apt.
"""

from __future__ import annotations

import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tests.servers.packages import install

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast/rdma-kernel"
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "rdma": "iproute2",
}
VERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
VERBS_PACKAGES = ("python3-pyverbs", "ibverbs-providers")
SUITE = "trixie-backports"  # Soft-RoCE knows network namespaces from Linux 7 on
MIRROR = "http://deb.debian.org/debian"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "rdma_rxe", "ib_uverbs")
RUN_S_MAX = 480.0
FETCH_S_MAX = 600.0
NODE_MIB = 1536
"""Each processor is a NUMA node with so much memory."""
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # not every user has these

INIT = """#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod /modules/$module || echo "no $module"; done
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $options,ro,cache=loose host /host || poweroff -f
mount -t tmpfs -o size=50% changes /changes; mkdir /changes/new /changes/work
mount -t overlay -o lowerdir=/host,upperdir=/changes/new,workdir=/changes/work root /root
for each in proc sys dev; do mount --move /$each /root/$each; done
mkdir -p /root/dev/shm /root/dev/pts
mount -t tmpfs shm /root/dev/shm; mount -t devpts pts /root/dev/pts; mount -t tmpfs run /root/run
mkdir /root/run/netns /root/run/said
mount -t 9p -o $options,cache=none said /root/run/said || poweroff -f
exec switch_root /root /bin/bash /run/said/begin
"""

BEGIN = """exec < /dev/null > /run/said/log 2>&1
export {environment}
echo machine > /proc/sys/kernel/hostname
cd {folder}
ln -s {verbs} {packages}
ip link set lo up
{command}
echo $? > /run/said/code
sync
echo o > /proc/sysrq-trigger
sleep 60
"""


def main(command: list[str]) -> int:
    """Run the command in the machine; what it says follows when it has ended."""
    began_s = time.monotonic()
    packages()
    kernel = installed_kernel()
    with tempfile.TemporaryDirectory(prefix="hfrdma") as folder:
        said = Path(folder) / "said"
        said.mkdir()
        ready_s = time.monotonic()
        code = run(kernel, initrd(kernel, Path(folder)), said, command)
    ended_s = time.monotonic()
    print(f"== machine ready in {ready_s - began_s:.0f} s, ran {ended_s - ready_s:.0f} s")
    return code


def packages() -> None:
    """Install what is missing; say what cannot be had."""
    missing = [package for program, package in PROGRAMS.items() if not here(program)]
    if not VERBS.is_dir():
        missing += VERBS_PACKAGES
    if missing:
        try:
            install(*missing)
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace")
            sys.exit(f"RDMA is not tested: apt-get says\n{said}")
    if not all(map(here, PROGRAMS)) or not VERBS.is_dir():
        wanted = " ".join((*PROGRAMS.values(), *VERBS_PACKAGES))
        sys.exit(f"RDMA is not tested: as root, apt-get install {wanted}")


def here(program: str) -> bool:
    """Tell whether a program can be started."""
    return shutil.which(program, path=PATH) is not None


def installed_kernel() -> Path:
    """Return the folder of a kernel's modules, its image in it; fetched if it is not there."""
    if not list(CACHE.glob("*/modules.dep")):
        fetch_kernel()
    return max(CACHE.glob("*/modules.dep")).parent


def fetch_kernel() -> None:
    """Unpack the kernel of ``SUITE`` into the cache; nothing is installed on this machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        apt = Apt(folder)
        apt.ask("apt-get", "-q", "update")
        found = apt.closure("linux-image-amd64", r"linux-(?:image|binary|modules)-\d\S*")
        apt.ask("apt-get", "-q", "download", *found)
        for package in folder.glob("*.deb"):
            call("dpkg", "-x", package, folder / "tree")
        [modules] = (folder / "tree").glob("**/lib/modules/*")
        [image] = (folder / "tree").glob("**/vmlinuz*")
        image.rename(modules / "image")
        root = modules.parents[2]
        call("depmod", "-b", root, modules.name)
        if not (CACHE / modules.name).exists():
            modules.rename(CACHE / modules.name)


class Apt:
    """apt over one suite, with lists of its own in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sites = call("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages")
        mirror = next((one for one in sites.split() if one.endswith("/debian")), MIRROR)
        (folder / "lists/partial").mkdir(parents=True)
        (folder / "sources.list").write_text(f"deb [signed-by={KEYS}] {mirror} {SUITE} main\n")
        (folder / "status").touch()
        self._options = [
            word
            for option in (
                f"Dir::Etc::SourceList={folder}/sources.list",
                "Dir::Etc::SourceParts=/dev/null",
                f"Dir::State::Lists={folder}/lists",
                f"Dir::State::status={folder}/status",
                "Dir::Cache::pkgcache=",
                "Dir::Cache::srcpkgcache=",
                "APT::Sandbox::User=root",
                "APT::Update::Error-Mode=any",
                "Acquire::Retries=3",
            )
            for word in ("-o", option)
        ]

    def ask(self, program: str, *words: str) -> str:
        """Return what apt answers, in its folder."""
        return call(program, *self._options, *words, folder=self._folder)

    def closure(self, package: str, names: str) -> list[str]:
        """Return a package and those it needs, of which the names match."""
        found, new = set[str](), {package}
        while new:
            found |= new
            said = self.ask("apt-cache", "depends", "--important", *new)
            new = set(re.findall(rf"\bDepends: ({names})", said)) - found
        return sorted(found)


def initrd(kernel: Path, folder: Path) -> Path:
    """Return a root for the first seconds: busybox, modules, and ``INIT``."""
    root = folder / "root"
    for name in ("bin", "modules", "proc", "sys", "dev", "host", "changes", "root"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox", path=PATH) or "", root / "bin/busybox")
    for name in ("sh", "mount", "insmod", "mkdir", "switch_root", "poweroff", "cat", "echo"):
        (root / "bin" / name).symlink_to("busybox")
    order = modules_in_order(kernel)
    for path in order:
        data = (kernel / path).read_bytes()
        plain = lzma.decompress(data) if path.endswith(".xz") else data
        (root / "modules" / plain_name(path)).write_bytes(plain)
    (root / "modules/order").write_text("\n".join(map(plain_name, order)))
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    packed = folder / "initrd"
    call("sh", "-c", f"find . | cpio -o -H newc --quiet > {packed}", folder=root)
    return packed


def modules_in_order(kernel: Path) -> list[str]:
    """Return the files of ``MODULES`` and of what they need, each after what it needs."""
    needs = {}
    for line in (kernel / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[plain_name(path).removesuffix(".ko")] = [path, *others.split()]
    order: list[str] = []
    for module in MODULES:
        for path in reversed(needs.get(module, [])):  # built in: it has no file
            if path not in order:
                order.append(path)
    return order


def plain_name(path: str) -> str:
    """Return the file name of a module as it is when unpacked."""
    return Path(path).name.removesuffix(".xz")


def run(kernel: Path, root: Path, said: Path, command: list[str]) -> int:
    """Boot, run the command, print what it said; return its exit code."""
    environment = {
        "PATH": f"/usr/sbin:/usr/bin:/sbin:/bin:{os.environ['PATH']}",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "100",
        "HOLDFAST_TEST_RDMA": "1",
        "PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT / 'services'}",
    }
    begin = BEGIN.format(
        environment=shlex.join(f"{name}={value}" for name, value in environment.items()),
        folder=shlex.quote(str(ROOT)),
        verbs=VERBS,
        packages=shlex.quote(sysconfig.get_path("purelib")),
        command=shlex.join(command),
    )
    (said / "begin").write_text(begin)
    try:
        ended = subprocess.run(
            qemu(kernel / "image", root, said), timeout=RUN_S_MAX, check=False, cwd=said,
            stdin=subprocess.DEVNULL,
        ).returncode  # fmt: skip
        why = f"it ended with {ended}"
    except subprocess.TimeoutExpired:
        why = f"not within {RUN_S_MAX:.0f} s"
    log, code = said / "log", said / "code"
    if log.exists():
        print(log.read_text(errors="replace"), end="")
    if code.exists():
        return int(code.read_text())
    print((said / "console").read_text(errors="replace")[-4000:])
    print(f"RDMA is not tested: the command did not end in the machine: {why}")
    return 1


def qemu(image: Path, root: Path, said: Path) -> list[str]:
    """Return the command of the machine: nothing in it but processors, memory and two folders."""
    shares = {"host": ("/", ",readonly=on,multidevs=remap"), "said": (str(said), "")}
    command = [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-monitor", "none", "-serial", "file:console"),
        *("-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "qemu64"),
        *("-smp", "2", "-m", f"{2 * NODE_MIB}M", "-kernel", str(image), "-initrd", str(root)),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on"),
    ]
    for node in (0, 1):
        command += ["-object", f"memory-backend-ram,id=memory{node},size={NODE_MIB}M"]
        command += ["-numa", f"node,nodeid={node},cpus={node},memdev=memory{node}"]
    for tag, (path, more) in shares.items():
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none{more}"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return command


def call(*words: object, folder: Path = ROOT) -> str:
    """Return what a program says; it and its complaints are shown when it fails."""
    command = list(map(str, words))
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S_MAX, check=False,
        env={**os.environ, "PATH": PATH, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"RDMA is not tested: {command[0]} says\n{done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
