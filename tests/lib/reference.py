"""The reference selection service (ai-dynamo-runtime, module dynamo.select_service) as a process beside our node.

KVP_REFERENCE names an interpreter that has it; "auto" installs it with pip into a temporary virtual environment
(about 20 s and 300 MB), which is what KVP_LONG=1 does, too. Otherwise tests that need it are skipped."""
import os
import signal
import subprocess
import sys
import tempfile

from node import call, free_port, skip, wait_for

PACKAGE, MODULE = "ai-dynamo-runtime", "dynamo.select_service"


def interpreter(folder):
    """An interpreter that has the package; ends the test as skipped where there is none."""
    asked = os.environ.get("KVP_REFERENCE") or ("auto" if os.environ.get("KVP_LONG") == "1" else "")
    if not asked:
        skip(f"set KVP_REFERENCE=auto (or KVP_LONG=1) to install {PACKAGE} with pip, or to a Python that has it")
    if asked != "auto":
        return asked
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True, text=True, timeout=120)
        subprocess.run([f"{folder}/bin/pip", "install", "-q", PACKAGE], check=True, capture_output=True, text=True,
                       timeout=300)
    except (OSError, subprocess.SubprocessError) as e:
        lines = (getattr(e, "stderr", None) or str(e)).strip().splitlines()
        skip(f"{PACKAGE} can't be installed: {lines[-1] if lines else e}")
    return f"{folder}/bin/python"


class Reference:
    """One service; leaving the context ends it."""

    def __init__(self, python, *args):
        self.port = free_port()
        self.dir = tempfile.TemporaryDirectory(prefix="kvpick-reference-")
        self.log = open(os.path.join(self.dir.name, "log"), "w+b")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVPICK_"))}
        self.proc = subprocess.Popen([python, "-m", MODULE, "--port", str(self.port), *args], env=env, stdout=self.log,
                                     stderr=self.log, cwd=self.dir.name)

    def call(self, method, path, body=None):
        return call(self.port, method, path, body)

    def healthy(self):
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def log_text(self):
        self.log.seek(0)
        return self.log.read().decode("utf-8", "replace")

    def __enter__(self):
        wait_for(lambda: self.proc.poll() is not None or self.healthy(), 60)
        if self.proc.poll() is not None or not self.healthy():
            text = self.log_text().strip().splitlines()
            self.__exit__()
            skip(f"{MODULE} does not start: {text[-1] if text else 'no output'}")
        return self

    def __exit__(self, *exc):
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGINT)
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        self.log.close()
        self.dir.cleanup()
