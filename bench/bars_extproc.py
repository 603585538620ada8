#!/usr/bin/env python3
"""The Endpoint Picker: streams a second, time to the routing answer, processor time of a stream and its parts.

  bench/bars_extproc.py [--streams N]

A played Envoy (tests/helpers/h_envoy) drives `kvpick run` with 1 and 2 kvpick-extproc processes over TCP and Unix
sockets: a completion of 1000 token ids (6 messages each way), a chat of 220 KB in 14 messages of 16 KB as text blocks,
and the same with a tokenizer service that returns 55,000 ids (tests/helpers/h_tokenizer, an answer made beforehand).
Generator, service and node share the machine; so what counts is cpu_us, the processor time of all extproc processes a
stream, and its inverse, the streams a second that a core can take. KVP_BUILD_DIR names the build.

  bench=extproc what=NAME transport=T processes=N in_flight=N streams_s=V p50_us=V p99_us=V cpu_us=V per_core_s=V
    json_us=V hash_us=V select_us=V book_us=V transport_us=V indexer_us=V generator_us=V
  bar=17 what=NAME value=V limit=>=L unit=U ok|short reason=TEXT

The five parts are those of every 16th stream (counters extproc.timed.*); transport is what is left of cpu_us: gRPC,
sockets, messages, body copies, the tokenizer's connection. Beside that, a stream: indexer_us of kvpick-indexer, which
records what bookings will have cached, and generator_us of h_envoy."""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "lib"))
from node import BUILD, Node, free_port, wait_for, worker

parser = argparse.ArgumentParser()
parser.add_argument("--streams", type=int, default=5000, help="of a run; three runs a case")
args = parser.parse_args()
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")
REPEATS = 3
PARTS = ("json", "hash", "select", "book")
HELPERS = f"{BUILD}/tests/helpers"
rows = {}


def cpu_us(pids):
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            total += sum(int(x) for x in f.read().rsplit(")", 1)[1].split()[11:13])
    return total * TICK_US


def counters(node):
    """{name: value} of kvpick_extproc_*."""
    lines = [line.rsplit(" ", 1) for line in node.call("GET", "/metrics")[1].splitlines()
             if line.startswith("kvpick_extproc_")]
    return {name.split("{")[0][len("kvpick_extproc_"):]: float(value) for name, value in lines}


def generate(targets, streams, in_flight, prompt):
    """The generators' results, one for each target, and their processor time in microseconds."""
    n = len(targets)
    procs = [subprocess.Popen([f"{HELPERS}/h_envoy", t, str(streams // n), str(max(in_flight // n, 1)), "8",
                               *map(str, prompt), "whole"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for t in targets]
    got, used = [], 0
    for p in procs:
        text = p.stdout.read()
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
        used += (usage.ru_utime + usage.ru_stime) * 1e6
        row = dict(x.split("=", 1) for x in text.split() if "=" in x)
        if p.returncode or row.get("routed") != str(streams // n):
            raise RuntimeError(f"h_envoy: {text}")
        got.append(row)
    return got, used


def measure(node, targets, prompt, streams, in_flight):
    children = node.children()
    pids, indexer = children["kvpick-extproc"], children["kvpick-indexer"]
    before, before_indexer, counted = cpu_us(pids), cpu_us(indexer), counters(node)
    got, generator = generate(targets, streams, in_flight, prompt)
    used = (cpu_us(pids) - before) / streams
    diff = {k: v - counted.get(k, 0) for k, v in counters(node).items()}
    timed = max(diff["timed_streams_total"], 1)
    row = {"streams_s": sum(float(g["streams_s"]) for g in got), "p50_us": max(float(g["p50_us"]) for g in got),
           "p99_us": max(float(g["p99_us"]) for g in got), "cpu_us": used, "per_core_s": 1e6 / used}
    row.update((f"{p}_us", diff[f"timed_{p}_seconds_total"] / timed * 1e6) for p in PARTS)
    row["transport_us"] = used - sum(row[f"{p}_us"] for p in PARTS)
    row["indexer_us"] = (cpu_us(indexer) - before_indexer) / streams
    row["generator_us"] = generator / streams
    return row


def drive(node, targets, what, transport, processes, prompt, streams, in_flight):
    """The median, value by value, of REPEATS runs behind one that makes connections and warms memory."""
    generate(targets, max(streams // 5, 4 * in_flight), in_flight, prompt)
    runs = [measure(node, targets, prompt, streams, in_flight) for _ in range(REPEATS)]
    row = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    rows[what, transport, processes, in_flight] = row
    print(f"bench=extproc what={what} transport={transport} processes={processes} in_flight={in_flight} "
          + " ".join(f"{k}={v:.1f}" if v < 100 else f"{k}={v:.0f}" for k, v in row.items()), flush=True)


def run(processes, folder, tokenizer):
    """One node: every case of it. tokenizer: the address of a service, or None for text blocks."""
    port, path = free_port(), os.path.join(folder, "epp")
    env = {"KVPICK_MODE": "both", "DYN_MODEL_NAME": "m", "DYN_EPP_TOKENIZER_PROTOCOL": "text-blocks",
           "DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_SECURE_SERVING": "false", "DYN_EPP_METRICS_PORT": "0",
           "KVPICK_EPP_HEALTH_PORT": str(free_port()), "KVPICK_EXTPROC_PROCESSES": str(processes),
           "KVPICK_EPP_LISTEN": f"127.0.0.1:{port},unix:{path}"}
    if tokenizer:
        env.update(DYN_EPP_TOKENIZER_PROTOCOL="vllm-render", DYN_EPP_TOKENIZER_SERVICE_URL=tokenizer)
    with Node("--max-active-blocks", "4194304", env=env) as node:
        for i in range(1, 9):
            node.call("POST", "/workers", worker(i, model_name="m", block_size=16))
        if not wait_for(lambda: node.log_text().count(" extproc.run ") == processes and
                        node.call("GET", "/ready")[1]["schedulable_workers"] == 8, 20):
            raise RuntimeError("the node is not ready\n" + node.log_text())
        tcp = [f"127.0.0.1:{port}"]
        local = [f"unix:{path}.{i}" for i in range(processes)] if processes > 1 else [f"unix:{path}"]
        n, chat = args.streams, ("chat", 220000)
        if tokenizer:
            for in_flight in (20, 60, 100, 150) if processes == 1 else (60,):
                drive(node, tcp, "render55k", "tcp", processes, chat, n // 10, in_flight)
        else:
            for transport, targets in (("tcp", tcp), ("unix", local)):
                for in_flight in (1, 64):
                    drive(node, targets, "tokens1000", transport, processes, ("tokens", 1000),
                          n if in_flight > 1 else n // 6, in_flight)
            for in_flight in (20, 60, 100, 150) if processes == 1 else (60, 150):
                drive(node, tcp, "chat220k", "tcp", processes, chat, n // 6, in_flight)
        node.stop()


def bar(what, value, limit, unit, reason, sense=">="):
    good = value >= limit if sense == ">=" else value <= limit
    print(f"bar=17 what={what} value={value:.4g} limit={sense}{limit} unit={unit} {'ok' if good else 'short'} "
          f"reason={reason}", flush=True)


def bars():
    for transport, limit in (("tcp", 8000), ("unix", 12000)):
        r = rows["tokens1000", transport, 1, 64]
        bar(f"ext_proc_small_{transport}_streams_s_per_core", r["per_core_s"], limit, "1/s",
            f"inverse_of_cpu_us={r['cpu_us']:.1f}, measured_with_the_generator_beside_it={r['streams_s']:.0f}/s")
    r = rows["chat220k", "tcp", 1, 150]
    both = (f"cpu_us={r['cpu_us']:.0f}+{r['indexer_us']:.0f}_of_the_indexer+{r['generator_us']:.0f}_of_the_generator, "
            f"which_two_free_cores_would_do_{2e6 / (r['cpu_us'] + r['indexer_us'] + r['generator_us']):.0f}/s_of")
    bar("ext_proc_220k_text_150_requests_s", r["streams_s"], 1500, "1/s", both)
    bar("ext_proc_220k_text_150_p50", r["p50_us"] / 1e3, 100, "ms", "published_1.1_s", "<=")
    bar("ext_proc_220k_text_150_p99", r["p99_us"] / 1e3, 150, "ms", "-", "<=")
    r = rows["render55k", "tcp", 1, 60]
    bar("ext_proc_220k_render_55k_ids_requests_s_per_core", r["per_core_s"], 400, "1/s",
        f"inverse_of_cpu_us={r['cpu_us']:.0f}, measured={r['streams_s']:.0f}/s")
    for what, in_flight in (("tokens1000", 64), ("chat220k", 60)):
        one, two = rows[what, "tcp", 1, in_flight], rows[what, "tcp", 2, in_flight]
        bar(f"ext_proc_two_processes_over_one_{what}", 2 * two["per_core_s"] / one["per_core_s"], 1.8, "ratio",
            "by_processor_time_a_stream; on_two_cores_with_the_generator_"
            f"{one['streams_s']:.0f}/s_and_{two['streams_s']:.0f}/s")
    for what, transport in (("tokens1000", "tcp"), ("chat220k", "tcp")):
        r = rows[what, transport, 1, 64 if what == "tokens1000" else 60]
        print(f"# {what}: " + ", ".join(f"{p} {100 * r[p + '_us'] / r['cpu_us']:.0f} %" for p in
                                        ("transport", *PARTS)) + " of the processor time", flush=True)


def main():
    model = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="ascii")
             if line.startswith("model name")]
    print(f"# {model[0] if model else '?'}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the run",
          flush=True)
    with tempfile.TemporaryDirectory(prefix="kvpick-bench-") as folder:
        at = f"{folder}/tokenizer"
        service = subprocess.Popen([f"{HELPERS}/h_tokenizer", f"at=unix:{at}", "ids=55000"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)
        try:
            service.stdout.readline()
            for processes in (1, 2):
                run(processes, folder, None)
                run(processes, folder, f"http://unix:{at}")
        except RuntimeError as e:
            print(f"bars: {e}", file=sys.stderr)
            return 1
        finally:
            service.stdin.close()
            service.wait(10)
    bars()
    return 0


sys.exit(main())
