"""Several nodes' networks for one test: namespaces n0, n1, ... with 10.77.0.<10 + i>, joined by a bridge that has no way
out. The test runs itself again inside namespaces of its own."""
import os
import shutil
import subprocess
import sys

from node import skip

INSIDE = "KVP_TEST_INSIDE"


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def host(i):
    return f"10.77.0.{10 + i}"


def plug(i):
    """Makes namespace n<i>, its end of the cable at the bridge is port<i>."""
    ip("netns", "add", f"n{i}")
    ip("link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", f"n{i}")
    ip("link", "set", f"port{i}", "master", "br0", "up")
    ip("-n", f"n{i}", "addr", "add", f"{host(i)}/24", "dev", "eth0")
    ip("-n", f"n{i}", "link", "set", "eth0", "up")
    ip("-n", f"n{i}", "link", "set", "lo", "up")


def run(inside):
    """Ends the program: with what inside() returns, there; with the outcome of that, here; skipped where namespaces can't
    be made."""
    if os.environ.get(INSIDE):
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
        ip("link", "set", "lo", "up")
        ip("link", "add", "br0", "type", "bridge")
        ip("addr", "add", "10.77.0.1/24", "dev", "br0")
        ip("link", "set", "br0", "up")
        sys.exit(inside())
    enter = ["unshare", "--net", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    if not shutil.which("ip"):
        skip("network namespaces: no `ip` (package iproute2)")
    tried = subprocess.run([*enter, "sh", "-c", "mount -t tmpfs none /run && ip netns add try && ip link add br0 type "
                            "bridge && ip link add try0 type veth peer name try1 netns try"],
                           capture_output=True, text=True, check=False)
    if tried.returncode:
        skip(f"network namespaces: {tried.stderr.strip()}")
    sys.exit(subprocess.run([*enter, sys.executable, *sys.argv], env={**os.environ, INSIDE: "1"}, check=False).returncode)
