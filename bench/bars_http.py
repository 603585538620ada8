#!/usr/bin/env python3
"""HTTP select_and_reserve: requests a second, latency and processor time, ours and beside it the reference service.

  bench/bars_http.py [--raw] [--seconds S] [--reference auto|skip|PYTHON] [--hashes N,N] [--conns N,N]

The same generator (bench/b_api) drives `kvpick run` with one httpd process and `python -m dynamo.select_service`,
one after the other, with the same workers, KV events and requests. The reference comes from the package
ai-dynamo-runtime: PYTHON names an interpreter that has it; auto installs it with pip into a temporary virtual
environment. Where that is not possible a line SKIP says why. KVP_BUILD_DIR names the build (build/release).

  bar=19 what=NAME value=V limit=>=L unit=U ok|short|not_measured reason=TEXT"""
import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "lib"))
from node import BUILD, Node, free_port, wait_for

PACKAGE = "ai-dynamo-runtime"
MODULE = "dynamo.select_service"
parser = argparse.ArgumentParser()
parser.add_argument("--raw", action="store_true")
parser.add_argument("--seconds", default="1.5")
parser.add_argument("--reference", default="auto")
parser.add_argument("--hashes", default="128,2000")
parser.add_argument("--conns", default="1,8,64")
args = parser.parse_args()


def drive(name, port, pids):
    """Rows of one run of the generator."""
    command = [f"{BUILD}/bench/b_api", "--port", port, "--name", name, "--pid", ",".join(map(str, pids)),
               "--hashes", args.hashes, "--conns", args.conns, "--seconds", args.seconds, "--half"]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    env = dict(os.environ, KVP_BENCH_COMMIT=commit.stdout.strip() or "unknown")
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, timeout=900, check=False, env=env)
    if args.raw:
        print(done.stdout, end="", flush=True)
    if done.returncode:
        print(f"bars: b_api on {name}: exit {done.returncode}", file=sys.stderr)
    rows = [dict(w.split("=", 1) for w in line.split()) for line in done.stdout.splitlines()
            if line.startswith("bench=")]
    return {(r["bench"], int(r["hashes"]), int(r["conns"])): r for r in rows}


def ours():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVPICK_"))}
    with Node("--httpd-processes", "1", "--max-reservations", "16384", "--max-active-blocks", "1048576",
              "--max-blocks", "2000000", env=env) as node:
        return drive("kvpick", node.port, node.children()["kvpick-httpd"])


def interpreter(folder):
    """An interpreter that has the reference, or (None, why not)."""
    if args.reference == "skip":
        return None, "asked to"
    if args.reference != "auto":
        return args.reference, ""
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True, text=True, timeout=120)
        subprocess.run([f"{folder}/bin/pip", "install", "-q", PACKAGE], check=True, capture_output=True, text=True,
                       timeout=300)
    except (OSError, subprocess.SubprocessError) as e:
        lines = (getattr(e, "stderr", None) or str(e)).strip().splitlines()
        return None, f"{PACKAGE} can't be installed: {lines[-1] if lines else e}"
    return f"{folder}/bin/python", ""


def healthy(port):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    return False


def reference():
    """Rows of the reference service, or ({}, why not)."""
    with tempfile.TemporaryDirectory(prefix="kvpick-reference-") as folder:
        python, why = interpreter(folder)
        if not python:
            return {}, why
        port = free_port()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVPICK_"))}
        with open(os.path.join(folder, "log"), "w+b") as log:
            proc = subprocess.Popen([python, "-m", MODULE, "--port", str(port)], env=env, stdout=log, stderr=log,
                                    cwd=folder)
            try:
                if not wait_for(lambda: proc.poll() is not None or healthy(port), 60) or proc.poll() is not None:
                    log.seek(0)
                    text = log.read().decode("utf-8", "replace").strip().splitlines()
                    return {}, f"{MODULE} does not start: {text[-1] if text else 'no output'}"
                return drive("reference", port, [proc.pid]), ""
            finally:
                proc.send_signal(signal.SIGINT)
                try:
                    proc.wait(20)
                except subprocess.TimeoutExpired:
                    proc.kill()
                    proc.wait()



def bar(what, value, limit, unit, note="", sense=">="):
    if value is None:
        print(f"bar=19 what={what} value=- limit={sense}{limit} unit={unit} not_measured reason={note or '-'}")
        return
    good = value >= limit if sense == ">=" else value <= limit
    print(f"bar=19 what={what} value={value:.4g} limit={sense}{limit} unit={unit} {'ok' if good else 'short'} "
          f"reason={note or '-'}", flush=True)


def get(rows, key, *where):
    row = rows.get(where)
    return float(row[key]) if row and re.fullmatch(r"[\d.]+", row[key]) else None


def main():
    hashes, conns = ([int(x) for x in text.split(",")] for text in (args.hashes, args.conns))
    rows = ours()
    other, why = reference()
    if not other:
        print(f"SKIP reference service: {why}", flush=True)
    name, most = "api.select_and_reserve", conns[-1]
    if 128 in hashes:
        wall = get(rows, "ops_s", name, 128, most)
        bar(f"http_select_128_conns_{most}_one_httpd_core", get(rows, "ops_cpu_s", name, 128, most), 25000, "1/s",
            f"wall={wall:.0f}/s" if wall else "")
        bar("http_select_128_p99_at_half_load", get(rows, "p99_us", "api.half", 128, most), 1000, "us", sense="<=",
            note=f"rate={get(rows, 'ops_s', 'api.half', 128, most) or 0:.0f}/s "
                 f"get_health_at_that_rate={get(rows, 'p99_us', 'api.empty_half', 128, most) or 0:.0f}_us")
    for h in hashes:
        for c in conns:
            a, b = get(rows, "ops_s", name, h, c), get(other, "ops_s", name, h, c)
            cpu = get(rows, "cpu_us_req", name, h, c), get(other, "cpu_us_req", name, h, c)
            note = (f"{a:.0f}/{b:.0f}_requests_s cpu_us={cpu[0]:.1f}/{cpu[1]:.1f} cpu_ratio={cpu[1] / cpu[0]:.2f} "
                    f"p99_us={get(rows, 'p99_us', name, h, c):.0f}/{get(other, 'p99_us', name, h, c):.0f}"
                    if a and b and all(cpu) else "no_reference")
            # The goal is set for 128 hashes; with thousands both mostly read and write digits.
            bar(f"http_select_{h}_conns_{c}_over_reference", a / b if a and b else None, 5 if h == 128 else 1, "ratio",
                note)
    return 0 if rows else 1


sys.exit(main())
