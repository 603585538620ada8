#!/usr/bin/env python3
"""Selection policies over real nodes: each role runs its own, in states where the two would choose differently; both
faces, every way to be chosen, a request that waited; what shows which policy runs; a name that is none. What each
policy would choose is computed from the node's loads by models written apart. The vectors are what the model says."""
import json
import os
import subprocess
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import least_work
from disagg import DEST, PREFILLER, Disagg
from engine import tokens
from envoy import SUBSET, metadata
from epp import COMPLETIONS, MODEL, Renderer, routed
from node import BUILD, Node, Tap, wait_for, worker

tap = Tap()
BLOCK = 4
NAMES = ("reference", "least_work")
PREFILL = {1: "10.0.0.21:8000", 2: "10.0.0.22:8000"}
DECODE = {7: "10.0.0.7:8000", 8: "10.0.0.8:8000"}
LONG, OTHER, HOLD = 1000, 100, 5  # blocks


def choices(role, isl, loads, live):
    """{policy: the worker it takes}. loads: {worker: (prefill tokens, blocks, requests)}; live: {worker: blocks of the
    prompt that are part of a live one}. Nothing is cached; nothing that may be cached meanwhile changes an answer."""
    total = isl // BLOCK
    ranks = [{"additional": total - live[w], "active_prefill_tokens": p, "active_blocks": b, "active_requests": n}
             for w, (p, b, n) in loads.items()]
    computes = role != "decode"
    q = {"role": role, "block_size": BLOCK, "isl_tokens": isl, "sequence_blocks": total, "track": computes,
         "weights": {"overlap_score_credit": int(computes)}}
    work = [c for _, c in least_work.costs(q, ranks)]
    out = []
    for cached in (0, 1):  # what is live may have become known as cached
        blocks = [(r["active_prefill_tokens"] + isl) / BLOCK * computes - cached * computes * live[w] +
                  r["active_blocks"] + r["additional"] for w, r in zip(loads, ranks)]
        out.append(list(loads)[blocks.index(min(blocks))])
    if out[0] != out[1]:
        raise AssertionError(f"{role}: the state is undecided")
    return {"reference": out[0], "least_work": list(loads)[work.index(min(work))]}


def text(first, blocks):
    return json.dumps({"model": MODEL, "prompt": tokens(first, blocks)}).encode()


def differ(by_policy, name):
    return tap.ok(len(set(by_policy.values())) == 2, f"{name}: the policies choose differently", by_policy)


def roles():
    """A pair of roles under all four settings: two long prompts live at one worker of each role, four short ones at
    that prefill worker and at the other decode worker; then the first long one again, a block longer."""
    renderer = Renderer()
    pool = [(w, "prefill", at) for w, at in PREFILL.items()] + [(w, "decode", at) for w, at in DECODE.items()]
    for prefill in NAMES:
        for decode in NAMES:
            base = {"KVPICK_SELECTION_POLICY": "least_work"} if prefill == decode == "least_work" else {
                "DYN_ROUTER_PREFILL_POLICY": prefill, "DYN_ROUTER_DECODE_POLICY": decode}
            name = f"prefill {prefill}, decode {decode}"
            with Disagg(renderer, pool, env=base) as node:
                envoy = node.envoy()
                open_ = []
                for first, blocks, at in ((1, 100, 7), (1001, 100, 7), *((2000 + i, 1, 8) for i in range(4))):
                    hint = metadata(SUBSET, [DECODE[at], PREFILL[1]])
                    open_.append(routed(envoy, COMPLETIONS, text(first, blocks), more=hint)[0])
                load = {w: node.roles_load().get(w, (0, 0, 0)) for w in (*PREFILL, *DECODE)}
                tap.same(load, {1: (816, 204, 6), 2: (0, 0, 0), 7: (0, 200, 2), 8: (0, 4, 4)}, f"{name}: the state")
                want = {"prefill": choices("prefill", 404, {w: load[w] for w in PREFILL}, {1: 100, 2: 0}),
                        "decode": choices("decode", 404, {w: load[w] for w in DECODE}, {7: 0, 8: 0})}
                for role, by_policy in want.items():
                    differ(by_policy, role)
                s, head, _ = routed(envoy, COMPLETIONS, text(1, 101))
                tap.same((head.set.get(PREFILLER), head.set.get(DEST)),
                         (PREFILL[want["prefill"][prefill]], DECODE[want["decode"][decode]]), f"{name}: each has its own")
                shown = {p["role"]: p["selection_policy"] for p in node.call("GET", "/status")[1]["partitions"]}
                tap.same(shown, {"prefill": prefill, "decode": decode}, f"{name}: /status says so")
                page = node.call("GET", "/metrics")[1]
                tap.ok(all(f'kvpick_selection_policy_info{{role="{r}",policy="{p}"}} 1\n' in page
                           for r, p in (("prefill", prefill), ("decode", decode))), f"{name}: and /metrics")
                for s in (*open_, s):
                    s.reset()
                tap.ok(wait_for(lambda: not node.roles_load() and not node.ids()), f"{name}: nothing is left")
                envoy.close()
                tap.same(node.ctl("check")[0], 0, f"{name}: kvpickctl check finds no fault")


def explicit(node, sid, wid, first, blocks):
    status = node.call("POST", "/reservations", {
        "selection_id": sid, "worker_id": wid, "dp_rank": 0, "token_ids": tokens(first, blocks),
        "effective_prefill_tokens": blocks * BLOCK})[0]
    if status != 201:
        raise RuntimeError(f"reservation {sid}: {status}")


def loads(node):
    return {r["worker_id"]: (r["potential_prefill_tokens"], r["potential_decode_blocks"], r["active_requests"])
            for part in node.call("GET", "/loads")[1] for r in part["loads"]}


def free(node, *ids):
    return [node.call("DELETE", f"/reservations/{i}")[0] for i in ids]


def api(policy):
    """Every way to be chosen over HTTP."""
    ask = {"token_ids": tokens(1, LONG + 1)}
    with Node(env={"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_WORKER_SELECTION_POLICY": policy}) as node:
        for w in (1, 2):
            node.call("POST", "/workers", worker(w))
        explicit(node, "x", 1, 1, LONG)
        explicit(node, "z", 1, 5001, OTHER)
        by_policy = choices("aggregated", (LONG + 1) * BLOCK, loads(node), {1: LONG, 2: 0})
        differ(by_policy, f"{policy}, API")
        want = by_policy[policy]
        tap.same(node.call("POST", "/select", ask)[1]["worker_id"], want, f"{policy}: a selection")
        tap.same(node.call("POST", "/select", {**ask, "advisory": True})[1]["worker_id"], want,
                 f"{policy}: an advisory one")
        node.call("POST", "/select", {**ask, "selection_id": "later"})
        status, got = node.call("POST", "/reservations", {"selection_id": "later"})
        tap.same((status, loads(node)[want][2] - (want == 1) * 2), (201, 1), f"{policy}: a selection that is replayed")
        free(node, "later")
        tap.same(node.call("POST", "/select_and_reserve", {**ask, "selection_id": "r"})[1]["worker_id"], want,
                 f"{policy}: a booking")
        other = 3 - want
        tap.same(node.call("POST", "/select", {**ask, "allowed_worker_ids": [other]})[1]["worker_id"], other,
                 f"{policy}: eligibility comes first")
        tap.same(free(node, "x", "z", "r"), [200] * 3, f"{policy}: all is freed")
        tap.same(set(loads(node).values()), {(0, 0, 0)}, f"{policy}: no load is left")
        tap.same(node.ctl("check")[0], 0, f"{policy}: kvpickctl check finds no fault")


def queued(policy):
    """Both ranks are busy, so it waits; it is chosen for when the second one is not any more."""
    env = {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_QUEUE_THRESHOLD": "1.0", "KVPICK_SELECTION_POLICY": policy}
    with Node(env=env) as node:
        for w in (1, 2):
            node.call("POST", "/workers", worker(w, max_num_batched_tokens=16))
        explicit(node, "x", 1, 1, LONG)
        explicit(node, "z", 1, 5001, OTHER)
        explicit(node, "h", 2, 7001, HOLD)
        got = []
        ask = {"selection_id": "w", "token_ids": tokens(1, LONG + 1)}
        thread = threading.Thread(target=lambda: got.append(node.call("POST", "/select_and_reserve", ask)))
        thread.start()
        tap.ok(wait_for(lambda: node.call("GET", "/status")[1]["partitions"][0]["waiting_requests"] == 1),
               f"{policy}: it waits")
        node.call("POST", "/reservations/h/prefill_complete")
        before = {1: (4400, 1100, 2), 2: (0, HOLD, 1)}
        by_policy = choices("aggregated", (LONG + 1) * BLOCK, before, {1: LONG, 2: 0})
        differ(by_policy, f"{policy}, queue")
        thread.join(30)
        tap.same([(status, a.get("worker_id")) for status, a in got], [(200, by_policy[policy])],
                 f"{policy}: it goes where the policy chooses")
        free(node, "x", "z", "h", "w")
        tap.same(node.ctl("check")[0], 0, f"{policy}: kvpickctl check finds no fault")


def refused():
    for name in ("KVPICK_SELECTION_POLICY", "DYN_ROUTER_WORKER_SELECTION_POLICY", "DYN_ROUTER_PREFILL_POLICY",
                 "DYN_ROUTER_DECODE_POLICY"):
        done = subprocess.run([f"{BUILD}/kvpick", "run"], env={"PATH": os.environ["PATH"], name: "most_work"},
                              capture_output=True, text=True, timeout=60)
        tap.ok(done.returncode == 2 and name in done.stderr and "least_work" in done.stderr,
               f"{name}=most_work ends the start, and the words that it may be are named", done.stderr)


def vectors():
    with open(least_work.VECTORS, encoding="utf-8") as f:
        tap.ok(f.read() == least_work.text(), "least_work.json is what tests/lib/least_work.py says (--write renews it)")


def main():
    vectors()
    refused()
    roles()
    for policy in NAMES:
        api(policy)
        queued(policy)
    return tap.done()


sys.exit(main())
