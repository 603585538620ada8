#!/usr/bin/env python3
"""The conversations of tests/vectors/selection_api.json against a real node, one fresh node a scenario.

Each scenario must pass whole and leave a region in which kvpickctl check finds no fault. Those that book run a second
time with three HTTP processes: every request then meets any of them. SCENARIO=id[,id] runs single ones,
HTTPD_PROCESSES=n[,n] all of them with these numbers of processes. Those that wait for a minute run with KVP_LONG=1.
Scenarios of parts that the node does not have yet are listed in LATER, with the part they need, and shown as
skipped."""
import json
import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import api_vectors
from node import Node, Tap, free_port

LATER = {
}
MINUTES = {"expiry"}
LATE_S = 0.2  # what the steps of a conversation that waits may take beside its waits


def converse(base, steps):
    """(what went wrong, whether it took too long to say anything about times)"""
    saved, live, problems, began = {}, {}, [], time.monotonic()
    for i, step in enumerate(steps, 1):
        try:
            diffs = api_vectors.run_step(base, step, saved, live)
        except Exception as exc:  # a failed step, not a failed test program
            diffs = [f"{type(exc).__name__}: {exc}"]
        problems += [f"step {i} {step.get('method', '')} {step.get('path', '')[:60]}: {d}" for d in diffs]
    waits = sum(step.get("sleep_ms", 0) / 1000 for step in steps)
    return problems, waits > 0 and time.monotonic() - began > waits + LATE_S


def run(tap, scenario, tmp, processes, tries=5):
    env = dict(scenario["env"], KVPICK_HTTPD_PROCESSES=str(processes))
    for name, text in scenario.get("files", {}).items():
        path = os.path.join(tmp, name)
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
        env = {k: path if v == f"${name}" else v for k, v in env.items()}
    # The port of the vectors may be another test's at this moment.
    node = Node(*(str(free_port()) if a == "19092" else a for a in scenario["args"]), env=env)
    want = scenario.get("expect_start", "ok") == "ok"
    try:
        node.start()
        started = True
    except RuntimeError:
        started = False
    try:
        problems = [] if started == want else [f"started: {started}, want {want}\n{node.log_text()}"]
        if not started and want is False and node.proc.returncode != 2:
            problems.append(f"exit code {node.proc.returncode}, want 2")
        if started:
            said, is_late = converse(f"http://127.0.0.1:{node.port}", scenario["steps"])
            problems += said
            if said and is_late and tries > 1:  # on a busy machine: nothing is known yet
                return run(tap, scenario, tmp, processes, tries - 1)
            code, text = node.ctl("check")
            problems += [f"kvpickctl check: exit {code}\n{text}"] if code else []
        with_all = f" ({processes} processes)" if processes > 1 else ""
        tap.ok(not problems, f"{scenario['id']}{with_all}: {scenario.get('title', '')}", "\n".join(problems[:8]))
    finally:
        code = node.stop()
        if started and code != 0:
            tap.ok(False, f"{scenario['id']}: node ends with exit code 0", f"got {code}\n{node.log_text()}")


def processes_for(scenario):
    asked = os.environ.get("HTTPD_PROCESSES")
    books = any("/reservations" in step.get("path", "") for step in scenario["steps"])
    return [int(n) for n in asked.split(",")] if asked else [1, 3] if books else [1]


def main():
    with open("tests/vectors/selection_api.json", encoding="utf-8") as f:
        scenarios = json.load(f)["scenarios"]
    later = set().union(*LATER.values())
    only = set(filter(None, os.environ.get("SCENARIO", "").split(",")))
    tap = Tap()
    unknown = later - {s["id"] for s in scenarios}
    tap.ok(not unknown, "every scenario listed as later exists", unknown)
    with tempfile.TemporaryDirectory() as tmp:
        for s in scenarios:
            need = [part for part, ids in LATER.items() if s["id"] in ids]
            if not only and need:
                tap.ok(True, f"{s['id']} # SKIP needs the {need[0]}")
            elif not only and s["id"] in MINUTES and os.environ.get("KVP_LONG") != "1":
                tap.ok(True, f"{s['id']} # SKIP takes a minute: KVP_LONG=1")
            elif not only or s["id"] in only:
                for n in processes_for(s):
                    run(tap, s, tmp, n)
    return tap.done()


sys.exit(main())
