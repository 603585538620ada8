"""Name spaces of a test's own: a network with fixed ports that nobody else has, and an empty /run."""
import os
import shutil
import subprocess
import sys

from node import skip

MARK = "KVP_TEST_SPACES"


def enter():
    """Starts the calling program again inside, or skips the test. Inside: brings up the loopback interface."""
    if os.environ.get(MARK) == "inside":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        skip("network name spaces need root, unshare and ip")
    command = ["unshare", "-n", "-m", "sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh"]
    if subprocess.run([*command, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode:
        skip("no name spaces can be made here")
    os.environ[MARK] = "inside"
    os.execvp("unshare", [*command, sys.executable, *sys.argv])
