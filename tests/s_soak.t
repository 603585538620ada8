#!/usr/bin/env python3
"""Random clients on a node of two HTTP processes: bookings, replays, duplicates, sessions, expiries, bad input,
clients that leave at any point, workers that come, change and go, KV events with gaps. No answer is out of order,
memory stays flat, and at the end nothing is left. SOAK_S seconds (10; `make soak`: 600), KVP_SEED replays the
choices."""
import json
import multiprocessing
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from clients import CHURNED, Churn, Client
from engine import Engine
from node import BUILD, SLOW, Node, Tap, wait_for, worker

tap = Tap()
SECONDS = float(os.environ.get("SOAK_S", "10"))
SEED = os.environ.get("KVP_SEED", str(time.time_ns()))
CLIENTS = 3
EXPIRY_S = 5
SWEEP_S = 60         # the node looks for expired bookings that often
LONG = SECONDS >= 300
# By how much the last quarter may be above the second: KiB or part, whichever is more. A heap's level depends on the
# largest burst so far, by some MiB in the indexer, whose maps are made anew now and then; what a request or an event
# left behind would still show: two bytes a request, fifty an event. The region has no such freedom.
SHARED, PRIVATE = ((512, 0.02), (512, 0.2)) if LONG else ((16384, 0.25), (16384, 0.25))
# (In a short run the buffers are still growing to their size: the rings of the decoder threads have 8 MiB each.)


def run_client(port, number, results, until, endpoints):
    if number == 0:
        engines = [Engine() for _ in range(2)]
        endpoints.put([e.at for e in engines])
        client = Churn(port, number, SEED, engines)
        # pubtool answers one line at a time: this client waits for it, so it is also the slowest
    else:
        engines, client = [], Client(port, number, SEED)
    client.run(until.value)
    for e in engines:
        e.close()
    results.put((client.counts, client.faults))


def memory(node):
    """{process: (private KiB, shared KiB)} and the KiB of the region in use."""
    out, region = {}, 0
    pids = {"kvpick": [node.proc.pid], **node.children()}
    for name, children in pids.items():
        for i, pid in enumerate(children):
            fields = {}
            with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as f:
                for line in f:
                    if line.startswith(("RssAnon", "RssShmem")):
                        key, value = line.split()[:2]
                        fields[key] = int(value)
            out[f"{name}[{i}]"] = (fields["RssAnon:"], fields["RssShmem:"])
    fds = f"/proc/{node.proc.pid}/fd"
    for fd in os.listdir(fds):
        if "memfd:" in os.readlink(f"{fds}/{fd}"):
            region += os.stat(f"{fds}/{fd}").st_blocks // 2
    return out, region


def objects(node):
    """KiB in use of every object in the region."""
    code, text = node.ctl("--json", "gen")
    fds, out = f"/proc/{node.proc.pid}/fd", {}
    name = max((fd for fd in os.listdir(fds) if "memfd:" in os.readlink(f"{fds}/{fd}")),
               key=lambda fd: os.stat(f"{fds}/{fd}").st_size)
    with open(f"{fds}/{name}", "rb") as f:
        for row in json.loads(text)["objects"]:
            at, end, used = row["offset"], row["offset"] + row["bytes"], 0
            while at < end:
                try:
                    at = os.lseek(f.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break
                hole = min(os.lseek(f.fileno(), at, os.SEEK_HOLE), end)
                used += max(0, hole - at)
                at = hole
            out[row["object"]] = used // 1024
    return out


def flat(samples, what, slack):
    """Medians of the second and the fourth quarter."""
    n = len(samples) // 4
    early, late = statistics.median(samples[n:2 * n]), statistics.median(samples[3 * n:])
    top = early + max(slack[0], early * slack[1])
    tap.ok(late <= top, f"{what}: {early:.0f} KiB in the second quarter, {late:.0f} in the fourth", samples)


def loads(node):
    return [tuple(r[k] for k in ("potential_prefill_tokens", "potential_decode_blocks", "active_requests"))
            for part in node.call("GET", "/loads")[1] for r in part["loads"]]


def waiting(node):
    return sum(part["pending_count"] for part in node.call("GET", "/loads")[1])


def metric(node, name):
    for line in node.call("GET", "/metrics")[1].splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    return None


def booked(node):
    code, text = node.ctl("--json", "resv", "--limit", "100000")
    if code:
        raise RuntimeError(text)
    return [r["selection_id"] for r in json.loads(text)["reservations"]]


def soak(node):
    """Runs the clients; the samples of memory, and what the clients counted and found."""
    until = multiprocessing.Value("d", time.monotonic() + SECONDS)
    results, endpoints = multiprocessing.Queue(), multiprocessing.Queue()
    clients = [multiprocessing.Process(target=run_client, args=(node.port, i, results, until, endpoints))
               for i in range(CLIENTS + 1)]
    pids = sorted(sum(node.children().values(), []))
    for c in clients:
        c.start()
    samples, parts, every = [], [], max(0.1, SECONDS / 400)
    while time.monotonic() < until.value:
        samples.append(memory(node))
        if len(parts) < 8 * (1 - (until.value - time.monotonic()) / SECONDS):
            parts.append(objects(node))
        time.sleep(every)
    counts, faults = {}, []
    for _ in clients:
        one, wrong = results.get(timeout=120 * SLOW)
        faults += wrong
        for k, n in one.items():
            counts[k] = counts.get(k, 0) + n
    for c in clients:
        c.join(60 * SLOW)
    tap.same(sorted(sum(node.children().values(), [])), pids, "no process was replaced")
    return samples, parts, counts, faults


def end(node):
    """After the clients: what they left behind goes by itself, or by expiry."""
    tap.ok(wait_for(lambda: metric(node, "kvpick_httpd_connection_open") <= 2), "connections of the clients are gone",
           metric(node, "kvpick_httpd_connection_open"))
    tap.ok(wait_for(lambda: waiting(node) == 0), "nobody waits in the queue", waiting(node))
    left = booked(node)
    if LONG:
        print(f"# {len(left)} bookings are left to expire")
        wait_for(lambda: not booked(node), (EXPIRY_S + SWEEP_S + 10) / SLOW)
    else:
        codes = {node.call("DELETE", f"/reservations/{sid}")[0] for sid in left}
        tap.ok(codes <= {200, 404}, f"{len(left)} bookings that were left can be freed", codes)
    tap.same(booked(node), [], "no booking is left")
    tap.same(set(loads(node)), {(0, 0, 0)}, "no load is left")
    code, text = node.ctl("check")
    tap.ok(code == 0, "kvpickctl check finds no fault", text)
    for w in CHURNED:
        node.call("DELETE", f"/workers/{w}")
    code, reply = node.call("POST", "/select_and_reserve", {"token_ids": [1, 2, 3], "selection_id": "last"})
    tap.ok(code == 200 and node.call("DELETE", "/reservations/last")[0] == 200, "and it serves as before", reply)


def main():
    print(f"# KVP_SEED={SEED} seconds={SECONDS:g}")
    env = {"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": str(EXPIRY_S), "DYN_ROUTER_QUEUE_THRESHOLD": "1",
           "DYN_ROUTER_SESSION_AFFINITY_MODE": "soft"}
    args = ["--httpd-processes", "2", "--max-reservations", "16384", "--selection-cache-ttl-secs", "2",
            "--selection-cache-max-entries", "1000", "--session-affinity-ttl-secs", "3", "--threads", "2"]
    fixed = [Engine(), Engine()]
    with Node(*args, env=env) as node:
        for i, model in ((1, "default"), (2, "other")):
            node.call("POST", "/workers", worker(i, fixed[i - 1].at, model_name=model, max_num_batched_tokens=2500,
                                                 total_kv_blocks=100000))
        samples, parts, counts, faults = soak(node)
        tap.same(faults, [], "every answer was one that the contract allows")
        total = sum(n for k, n in counts.items() if isinstance(k, int))
        print(f"# {total} answers, {counts.get('left', 0)} clients left on the way: {dict(sorted(counts.items(), key=str))}")
        tap.ok(total > 100 * SECONDS / SLOW / 10, "the clients were served")
        for name in samples[0][0]:
            if "asan" not in BUILD:  # which keeps what was freed
                flat([s[0][name][0] for s in samples], f"private memory of {name}", PRIVATE)
            flat([s[0][name][1] for s in samples], f"shared memory mapped by {name}", SHARED)
        flat([s[1] for s in samples], "the region", SHARED)
        for name in parts[0]:
            if parts[-1][name] > parts[len(parts) // 2][name]:
                print(f"# {name}: {[p[name] for p in parts]} KiB in use over the eighths of the time")
        end(node)
        tap.same(node.stop(), 0, "the node ends with 0")
    for e in fixed:
        e.close()
    return tap.done()


sys.exit(main())
