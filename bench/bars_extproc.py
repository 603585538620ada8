#!/usr/bin/env python3
"""The Endpoint Picker: streams a second, time to the routing answer, processor time of a stream.

  bench/bars_extproc.py [--streams N]

A played Envoy (tests/helpers/h_envoy) drives `kvpick run` with 1 and 2 kvpick-extproc processes over TCP and Unix
sockets: a completion of 1000 token ids, and a chat of 220 KB in text-block mode at several concurrencies. Generator
and node share the machine. cpu_us: processor time of all extproc processes a stream. KVP_BUILD_DIR names the build.

  bench=extproc what=NAME transport=T processes=N in_flight=N streams_s=V p50_us=V p99_us=V cpu_us=V"""
import argparse
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "lib"))
from node import BUILD, Node, free_port, wait_for, worker

parser = argparse.ArgumentParser()
parser.add_argument("--streams", type=int, default=10000)
args = parser.parse_args()
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")


def cpu_us(pids):
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            total += sum(int(x) for x in f.read().rsplit(")", 1)[1].split()[11:13])
    return total * TICK_US


def drive(node, target, what, transport, processes, kind, size, streams, in_flight):
    pids = node.children()["kvpick-extproc"]
    before = cpu_us(pids)
    done = subprocess.run([f"{BUILD}/tests/helpers/h_envoy", target, str(streams), str(in_flight), "4", kind, str(size),
                           "whole"], capture_output=True, text=True, timeout=600, check=False)
    got = dict(x.split("=", 1) for x in done.stdout.split() if "=" in x)
    if done.returncode or got.get("routed") != str(streams):
        print(f"bars: {what} over {transport}: {done.stdout}{done.stderr}", file=sys.stderr)
        return 1
    used = (cpu_us(pids) - before) / streams
    print(f"bench=extproc what={what} transport={transport} processes={processes} in_flight={in_flight} "
          f"streams_s={got['streams_s']} p50_us={got['p50_us']} p99_us={got['p99_us']} cpu_us={used:.0f}", flush=True)
    return 0


def run(processes, folder):
    port, path = free_port(), os.path.join(folder, "epp")
    env = {"KVPICK_MODE": "both", "DYN_MODEL_NAME": "m", "DYN_EPP_TOKENIZER_PROTOCOL": "text-blocks",
           "DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_SECURE_SERVING": "false", "DYN_EPP_METRICS_PORT": "0",
           "KVPICK_EPP_HEALTH_PORT": str(free_port()), "KVPICK_EXTPROC_PROCESSES": str(processes),
           "KVPICK_EPP_LISTEN": f"127.0.0.1:{port},unix:{path}"}
    faults = 0
    with Node("--max-active-blocks", "4194304", env=env) as node:
        for i in range(1, 9):
            node.call("POST", "/workers", worker(i, model_name="m", block_size=16))
        if not wait_for(lambda: node.log_text().count(" extproc.run ") == processes and
                        node.call("GET", "/ready")[1]["schedulable_workers"] == 8, 20):
            print("bars: the node is not ready\n" + node.log_text(), file=sys.stderr)
            return 1
        tcp, local = f"127.0.0.1:{port}", f"unix:{path}" + (".0" if processes > 1 else "")
        for transport, target in (("tcp", tcp), ("unix", local))[:2 if processes == 1 else 1]:
            for in_flight in (1, 64):
                faults += drive(node, target, "tokens1000", transport, processes, "tokens", 1000,
                                args.streams // (1 if in_flight > 1 else 4), in_flight)
        for in_flight in (20, 60, 100, 150):
            faults += drive(node, tcp, "chat220k", "tcp", processes, "chat", 220000, args.streams // 10, in_flight)
        node.stop()
    return faults


def main():

    faults = 0
    for processes in (1, 2):
        with tempfile.TemporaryDirectory(prefix="kvpick-bench-") as folder:
            faults += run(processes, folder)
    return 1 if faults else 0


sys.exit(main())
