#!/usr/bin/env python3
"""`make run-disagg` with each of the three protocols: a trace through a real Envoy, the Endpoint Picker, sidecars and
engines in two roles. Every request is answered, every plan names both workers, every prefill booking is handed off,
and nothing is left.

Envoy: the program that KVPICK_ENVOY names, envoy in PATH, or what tests/s_envoy.t or the demonstration has fetched
into build/envoy; without any of these the test is skipped."""
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, SLOW, Tap, skip

tap = Tap()
TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
LIMIT = 40


def find_envoy():
    for at in (os.environ.get("KVPICK_ENVOY"), shutil.which("envoy"),
               os.path.join(os.path.dirname(BUILD), "envoy", "bin", "envoy")):
        if at and os.path.exists(at):
            return os.path.abspath(at)
    return skip("no Envoy: neither KVPICK_ENVOY nor envoy in PATH nor build/envoy")


def run(envoy, protocol):
    done = subprocess.run([os.path.join(TOP, "deploy", "run-disagg.sh")], capture_output=True, text=True, check=False,
                          timeout=150 * SLOW, env={**os.environ, "KVPICK_ENVOY": envoy, "KVP_BUILD_DIR": BUILD,
                                                   "PD": protocol, "SCALE": "30", "LOAD_ARGS": f"--limit {LIMIT}"})
    out = done.stdout
    number = {k: int(v) for k, v in re.findall(r"^ *(requests finished|errors|remote|handoff|undone) +(\d+)$", out,
                                               re.M)}
    tap.same((done.returncode, number), (0, {"requests finished": LIMIT, "errors": 0, "remote": LIMIT,
                                             "handoff": LIMIT, "undone": 0}), f"{protocol}: all of it, through Envoy")
    idle = [line.split() for line in out.splitlines() if re.match(r" *\d+ +(prefill|decode) ", line)]
    tap.same([w[-4:-1] for w in idle], [["0", "0", "0"]] * 6, f"{protocol}: six workers are idle again")
    if tap.failed:
        print("#   " + (out + done.stderr).replace("\n", "\n#   "))


ENVOY = find_envoy()
for name in ("vllm", "sglang", "trtllm"):
    run(ENVOY, name)
sys.exit(tap.done())
