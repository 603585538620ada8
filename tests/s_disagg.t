#!/usr/bin/env python3
"""Prefill and decode workers behind the Endpoint Picker: what is answered, booked, freed and stripped; what happens
without a role, with a full one, with a worker that goes, with a client that leaves at any time, and with a killed
process. Then the whole way: a played proxy, the picker, the sidecar and engines of all three protocols. Loads of both
roles return to zero after each of them, and `kvpickctl check` finds nothing."""
import json
import os
import random
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import pd
import replica
from disagg import DEST, PREFILLER, Disagg, ask, uuid_of
from engine import Engine, stored
from envoy import DUPLEX, REQUEST_HEADERS, RESPONSE_BODY, RESPONSE_HEADERS, SERVED, SUBSET, body, headers, metadata
from epp import CHAT, COMPLETIONS, FULL, MODEL, SSE, Renderer, chat, prompt, respond, routed
from node import BUILD, SLOW, Tap, free_port, wait_for
from replica import Peer

tap = Tap()
RENDERER = Renderer()
LIMITED = {"max_num_batched_tokens": 16}
QUEUE = {"DYN_ROUTER_QUEUE_THRESHOLD": "1.0", "DYN_EPP_MAX_NUM_BATCHED_TOKENS": "16"}
PREFILL = [(1, "prefill", "10.0.0.21:8000"), (2, "prefill", "10.0.0.22:8000")]
EMBEDDINGS = [(":method", "POST"), (":path", "/v1/embeddings"), ("content-type", "application/json")]
DECODE = [(7, "decode", "10.0.0.7:8000"), (8, "decode", "10.0.0.8:8000")]


def idle(node, name):
    tap.ok(wait_for(lambda: not node.roles_load() and not node.ids()), f"{name}: no load and no booking is left",
           (node.roles_load(), node.ids()))


def end(node, envoy, name):
    idle(node, name)
    envoy.close()
    tap.same(node.ctl("check")[0], 0, f"{name}: kvpickctl check finds no fault")


def close(s):
    s.half_close()
    while s.reply():
        pass


def requests(node, role):
    return sum(x[2] for w, x in node.roles_load().items() if node.roles.get(w) == role)


def happy():
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors", "ext_proc.json"),
              encoding="utf-8") as f:
        golden = {v["name"]: v for v in json.load(f)["vectors"]}
    with Disagg(RENDERER, [PREFILL[0], DECODE[0], (9, "", "10.0.0.9:8000")]) as node:
        envoy = node.envoy()
        data = prompt(1, 5)
        s, head, pieces = routed(envoy, COMPLETIONS + [(PREFILLER, "127.0.0.1:9")], data)
        tap.same(head.data.hex(), golden["resp_req_headers_disaggregated"]["hex"],
                 "the answer names both workers, byte for byte as recorded")
        tap.same(head.set, {DEST: "10.0.0.7:8000", PREFILLER: "10.0.0.21:8000"}, "each once, and nothing else")
        tap.ok(PREFILLER not in head.removed, "what is set is not removed")
        tap.same(b"".join(p.piece for p in pieces), data, "the body is the client's")
        ids = [uuid_of(i) for i in node.ids()]
        tap.same([r for _, r in ids], ["decode", "prefill"], "two bookings, named after the plan and the role")
        tap.ok(ids[0][0] and ids[0][0] == ids[1][0], "of one plan", node.ids())
        tap.same(node.roles_load(), {1: (20, 5, 1), 7: (0, 5, 1)},
                 "dynamo#13731: prefill is charged tokens, decode blocks and no tokens")
        s.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b""))
        s.reply(), s.reply()
        tap.same(len(node.ids()), 2, "headers and an empty body part hand nothing off")
        s.send(body(RESPONSE_BODY, b"data: 1\n\n"))
        s.reply()
        tap.ok(wait_for(lambda: node.roles_load() == {7: (0, 5, 1)}), "the first byte frees all of the prefill booking",
               node.roles_load())
        s.send(body(RESPONSE_BODY, b"data: [DONE]\n\n", True))
        s.reply()
        idle(node, "the end frees the decode booking")
        close(s)
        tap.same((node.plan("remote"), node.plan("handoff"), node.plan("undone")), (1, 1, 0), "counted")
        # a response without a body; a stream that breaks before one; mode NONE is refused as before
        s, _, _ = routed(envoy, COMPLETIONS, data)
        s.send(headers(RESPONSE_HEADERS, [(":status", "204")], end=True))
        s.reply()
        idle(node, "a response without a body")
        close(s)
        s, _, _ = routed(envoy, COMPLETIONS, data)
        s.reset()
        idle(node, "a stream that breaks after the answer")
        s, _, _ = routed(envoy, COMPLETIONS, data)
        respond(s, (b'{"error":{"code":"invalid_epp_metadata"}}',), status="502")
        idle(node, "the sidecar refuses")
        close(s)
        # headers only: nobody prefills, nothing is booked
        s = envoy.stream(headers(REQUEST_HEADERS, [(":method", "GET"), (":path", "/v1/models"), (PREFILLER, "x:1")],
                                 end=True, config=FULL))
        head = s.reply()
        tap.same(head.set, {DEST: "10.0.0.7:8000"}, "a request without a body goes to a decode worker")
        tap.ok(PREFILLER in head.removed, "and the client's own prefill header is removed")
        tap.same(node.ids(), [], "nothing is booked")
        close(s)
        tap.ok("role_label_missing" in node.log_text(), "a worker without a role is named in the log, and gets nothing")
        end(node, envoy, "pairs")


def api():
    """The API knows workers without a role only, and takes none over that has one."""
    with Disagg(RENDERER, PREFILL + DECODE) as node:
        for wid, role in ((1, "prefill"), (7, "decode")):
            record = {"worker_id": wid, "endpoint": "http://10.0.0.99:8000", "block_size": 4, "model_name": MODEL}
            status, text = node.call("POST", "/workers", record)
            tap.same((status, text), (409, {"error": f"worker_id {wid} is registered with role {role}"}),
                     f"POST /workers with the id of a {role} worker")
            for method, data in (("PATCH", {"block_size": 8}), ("DELETE", None)):
                tap.same(node.call(method, f"/workers/{wid}", data)[0], 404, f"{method} of a {role} worker")
        tap.same(node.call("POST", "/workers", {**record, "worker_id": 50})[0], 201, "an id that is free is registered")
        tap.same(node.call("POST", "/workers", {**record, "worker_id": 50})[0], 201, "and once more")
        tap.same(node.call("DELETE", "/workers/50")[0], 200, "and deleted")
        envoy = node.envoy()
        s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 4))
        tap.ok(head.set.get(DEST) in [w[2] for w in DECODE] and head.set.get(PREFILLER) in [w[2] for w in PREFILL],
               "the workers are those that they were", head.set)
        s.reset()
        end(node, envoy, "api")


def balance():
    """Both roles are chosen on their own: many open requests spread over all four workers."""
    with Disagg(RENDERER, PREFILL + DECODE) as node:
        envoy = node.envoy()
        open_ = [routed(envoy, COMPLETIONS, prompt(100 + i, 4)) for i in range(12)]
        seen = {}
        for _, h, _ in open_:
            for key in (DEST, PREFILLER):
                seen[h.set[key]] = seen.get(h.set[key], 0) + 1
        tap.same(seen, {at: 6 for _, _, at in PREFILL + DECODE}, "each worker of each role has its half")
        tap.ok(all(at not in [h.destination for _, h, _ in open_] for _, _, at in PREFILL),
               "no prefill worker is a destination")
        for s, _, _ in open_:
            respond(s)
            close(s)
        idle(node, "twelve pairs")
        # a burst of prompts with a cached beginning does not pile up where that is cached
        common = json.loads(prompt(300, 2))["prompt"]
        burst = [routed(envoy, COMPLETIONS, json.dumps(
            {"model": MODEL, "prompt": common + json.loads(prompt(301 + i, 8))["prompt"]}).encode()) for i in range(12)]
        per = [sum(h.set[PREFILLER] == at for _, h, _ in burst) for _, _, at in PREFILL]
        tap.ok(min(per) >= 4, "dynamo#12864: a burst with a common beginning is spread over the prefill workers", per)
        for s, _, _ in burst:
            s.reset()
        idle(node, "a burst")
        # the proxy went to another decode worker: the booking of that role moves, prefill stays
        s, head, _ = routed(envoy, COMPLETIONS, prompt(400, 4))
        dest, first = head.set[DEST], head.set[PREFILLER]
        other = next(w for w in DECODE if w[2] != dest)
        s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, other[2])))
        s.reply()
        tap.ok(wait_for(lambda: node.roles_load().get(other[0]) == (0, 4, 1) and requests(node, "decode") == 1),
               "another decode worker served: its role's booking moves there, without prompt tokens", node.roles_load())
        tap.same(requests(node, "prefill"), 1, f"the prefill booking at {first} stays until the first byte")
        s.send(body(RESPONSE_BODY, b"x", True))
        s.reply()
        idle(node, "a decode worker that the proxy chose")
        close(s)
        # the HTTP API knows workers without a role only
        tap.same((node.call("GET", "/workers")[1], node.call("GET", "/loads")[1]), ([], []), "the API shows none of them")
        tap.same([node.call(m, "/workers/7", b)[0] for m, b in (("PATCH", {"max_num_batched_tokens": 1}),
                                                                ("DELETE", None))], [404, 404], "and changes none")
        # the subset: always for decode, for prefill only if it names one
        for subset, dest, first in ((["10.0.0.8:8000"], "10.0.0.8:8000", None),
                                    (["10.0.0.7", "10.0.0.22"], "10.0.0.7:8000", "10.0.0.22:8000")):
            for _ in range(3):
                s, head, _ = routed(envoy, COMPLETIONS, prompt(200, 4), more=metadata(SUBSET, subset))
                tap.same((head.set[DEST], head.set[PREFILLER] if first else None), (dest, first), f"subset {subset}")
                tap.ok(head.set[PREFILLER] in ("10.0.0.21:8000", "10.0.0.22:8000"), "and somebody prefills")
                s.reset()
        s, head, _ = routed(envoy, COMPLETIONS, prompt(200, 4), more=metadata(SUBSET, ["10.0.0.21:8000"]))
        tap.same((head.kind, head.status), ("immediate", 503), "a subset without a decode worker: 503")
        end(node, envoy, "subsets")


def roles_missing():
    for enforce in ("true", "false"):
        with Disagg(RENDERER, DECODE[:1], env={"DYN_ENFORCE_DISAGG": enforce}) as node:
            envoy = node.envoy()
            s, head, _ = routed(envoy, COMPLETIONS + [(PREFILLER, "127.0.0.1:9")], prompt(1, 5))
            if enforce == "true":
                tap.same((head.kind, head.status, head.text), ("immediate", 503, "no prefill endpoints available"),
                         "no prefill worker: 503, and the text names the role")
            else:
                tap.same(head.set, {DEST: "10.0.0.7:8000"}, "allowed to: the decode worker does both")
                tap.ok(PREFILLER in head.removed, "the client's prefill header is removed")
                tap.same(node.roles_load(), {7: (20, 5, 1)}, "dynamo#13731: and is charged the prompt")
                s.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n"))
                s.reply(), s.reply()
                tap.ok(wait_for(lambda: node.roles_load() == {7: (0, 5, 1)}), "until the first byte", node.roles_load())
                close(s)
                tap.same(node.plan("fallback"), 1, "counted as a fallback")
            node.write(PREFILL[:1])
            node.settled()
            head = ask(envoy).reply()
            tap.same((head.kind, head.status, head.text), ("immediate", 503, "no decode endpoints available"),
                     "no decode worker: 503, never a prefill worker")
            tap.same(node.ids(), [], "nothing is booked")
            node.write(PREFILL[:1] + DECODE[:1])
            node.settled()
            s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 5))
            tap.same(head.set.get(PREFILLER), "10.0.0.21:8000", "with both roles there is a pair again")
            s.reset()
            ready = {"prefill": 1, "decode": 1, "aggregated": 0}
            text = node.call("GET", "/metrics")[1]
            tap.ok(all(f'kvpick_schedulable_workers{{role="{r}"}} {n}\n' in text for r, n in ready.items()) and
                   'inference_pool_ready_pods{name="default"} 2\n' in text, "Roles: a gauge for each, and one for all", text)
            # a worker that changes its role leaves the one and joins the other
            node.write([(1, "decode", "10.0.0.21:8000"), (7, "prefill", "10.0.0.7:8000")])
            wait_for(lambda: {w["worker_id"]: w["role"] for w in node.table("workers")} == {1: "decode", 7: "prefill"})
            node.settled()
            s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 5))
            tap.same(head.set, {DEST: "10.0.0.21:8000", PREFILLER: "10.0.0.7:8000"}, "roles that change are followed")
            s.reset()
            end(node, envoy, f"roles that are missing, enforce {enforce}")


def lost(node, envoy, busy):
    """The decode worker of a request that waits for prefill goes: the plan begins anew with those that are there, once."""
    def decode_at(wid):
        node.write([(1, "prefill", "10.0.0.21:8000", LIMITED), (wid, "decode", f"10.0.0.{wid}:8000", LIMITED)])
        node.settled()

    def waiting(n):
        before = set(node.ids())
        s = ask(envoy, prompt(n, 5))
        wait_for(lambda: [i for i in set(node.ids()) - before if uuid_of(i)[1] == "decode"])
        return s, uuid_of(next(i for i in set(node.ids()) - before if uuid_of(i)[1] == "decode"))[0]
    decode_at(9)
    undone = node.plan("undone")
    first = busy(51)
    s, plan = waiting(70)
    decode_at(10)
    tap.ok(s.silent(), "a decode worker that goes while prefill is waited for: nothing is said yet")
    first.reset()
    head = s.reply()
    tap.same(head.set, {DEST: "10.0.0.10:8000", PREFILLER: "10.0.0.21:8000"},
             "Paired booking: a worker that goes before the answer: the plan begins anew")
    tap.ok(node.plan("undone") >= undone + 1, "what stood of it is freed first", node.plan("undone"))
    ids = [uuid_of(i) for i in node.ids()]
    tap.ok([r for _, r in ids] == ["decode", "prefill"] and plan not in [p for p, _ in ids],
           "the second plan has an id of its own", (plan, ids))
    tap.same(node.plan("restarted"), 1, "counted")
    s.reset()
    idle(node, "a plan that began anew")
    # lost twice: s begins anew behind another one, whose end finds its second decode worker gone, too
    first = busy(52)
    s, _ = waiting(71)
    decode_at(11)
    other, _ = waiting(72)
    first.reset()
    head = other.reply()
    tap.same(head.set, {DEST: "10.0.0.11:8000", PREFILLER: "10.0.0.21:8000"}, "who waited behind it goes first")
    tap.ok(wait_for(lambda: node.plan("restarted") == 2) and s.silent(), "the plan that began anew waits again")
    wait_for(lambda: requests(node, "decode") == 2)
    decode_at(12)
    other.reset()
    head = s.reply()
    tap.same((head.kind, head.status, head.text), ("immediate", 503, "no decode endpoints available"),
             "Paired booking: a plan that lost a worker twice is refused, though there is another one")
    tap.same((node.plan("restarted"), node.counter("pick_vanished_total")), (2, 1), "counted")


def waits():
    """A prefill role that is busy: the decode leg is booked, the request waits, and ends in every way."""
    queue = QUEUE
    pool = [(1, "prefill", "10.0.0.21:8000", LIMITED), (7, "decode", "10.0.0.7:8000", LIMITED),
            (8, "decode", "10.0.0.8:8000", LIMITED)]
    with Disagg(RENDERER, pool, env=queue) as node:
        envoy = node.envoy()

        def busy(n):
            s, head, _ = routed(envoy, COMPLETIONS, prompt(n, 5))
            tap.ok(head.set.get(PREFILLER), "one request prefills")
            return s

        first = busy(50)
        late = [ask(envoy, prompt(60 + i, 5)) for i in range(2)]
        tap.ok(wait_for(lambda: requests(node, "decode") == 3), "two more have their decode worker and wait for prefill",
               node.roles_load())
        tap.ok(all(s.silent() for s in late), "nothing of them is shown")
        first.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n"))
        tap.ok(wait_for(lambda: any(s.got.qsize() for s in late)), "the handoff of the first lets one of them go",
               (node.roles_load(), node.ids()))
        late.sort(key=lambda s: -s.got.qsize())
        head = late[0].reply()
        tap.same(head.set.get(PREFILLER), "10.0.0.21:8000", "with both workers")
        tap.ok(late[1].silent(), "the last one waits on")
        late[1].reset()
        tap.ok(wait_for(lambda: requests(node, "decode") == 2), "a client that leaves while it waits is forgotten",
               node.roles_load())
        first.reset()
        late[0].reset()
        idle(node, "who waited")
        lost(node, envoy, busy)
        end(node, envoy, "a lost decode worker")
    for enforce in ("true", "false"):
        with Disagg(RENDERER, pool, env={**queue, "KVPICK_EPP_SELECTION_DEADLINE_MS": "300",
                                         "DYN_ENFORCE_DISAGG": enforce}) as node:
            envoy = node.envoy()
            first, head, _ = routed(envoy, COMPLETIONS, prompt(50, 5))
            s = ask(envoy, prompt(60, 5))
            head = s.reply()
            if enforce == "true":
                tap.same((head.kind, head.status), ("immediate", 429), "one deadline over both legs: 429")
                tap.ok(wait_for(lambda: requests(node, "decode") == 1), "and the decode booking is undone",
                       node.roles_load())
            else:
                tap.same(PREFILLER in head.set, False, "with fallback the decode worker does both after the deadline")
                s.reset()
            first.reset()
            end(node, envoy, f"the deadline, enforce {enforce}")


def conditional():
    env = {"DYN_ROUTER_CONDITIONAL_DISAGG": "true", "DYN_ROUTER_TTL_SECS": "600"}
    pool = PREFILL[:1] + DECODE
    with Disagg(RENDERER, pool, env=env) as node:
        envoy = node.envoy()
        s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 8))
        tap.ok(head.set.get(PREFILLER), "a prompt that no decode worker holds is prefilled remotely")
        home = head.destination
        respond(s)
        close(s)

        def again():
            s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 8))
            s.reset()
            return head.set == {DEST: home}
        tap.ok(wait_for(again), "what a decode worker holds is prefilled there, and there only")
        tap.ok(node.plan("local") >= 1, "counted")
        s, head, _ = routed(envoy, COMPLETIONS, prompt(2, 8))
        tap.ok(head.set.get(PREFILLER), "another prompt goes to both")
        s.reset()
        end(node, envoy, "by overlap")
    env |= {"DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD": "0.1"}
    with Disagg(RENDERER, pool, env=env) as node:
        envoy = node.envoy()
        s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 8))
        s.reset()
        ask_again = lambda: routed(envoy, COMPLETIONS, prompt(1, 8))

        def vetoed():
            s, head, _ = ask_again()
            s.reset()
            return head.set.get(PREFILLER) and node.plan("local_vetoed") >= 1
        tap.ok(wait_for(vetoed), "behind the decode gate a worker of unknown size counts as busy: remote",
               node.plan("local_vetoed"))
        tap.same(node.plan("local"), 0, "none was local")
        end(node, envoy, "by overlap, vetoed")
    env = {"DYN_ROUTER_CONDITIONAL_DISAGG": "true", "DYN_ROUTER_CONDITIONAL_DISAGG_POLICY": "prefill_load",
           "DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD": "1.0"}
    with Disagg(RENDERER, [(1, "prefill", "10.0.0.21:8000", LIMITED)] + DECODE, env=env) as node:
        envoy = node.envoy()
        first, head, _ = routed(envoy, COMPLETIONS, prompt(1, 5))
        tap.ok(head.set.get(PREFILLER), "a calm prefill worker prefills")
        s, head, _ = routed(envoy, COMPLETIONS, prompt(2, 5))
        tap.ok(PREFILLER not in head.set, "with a busy one the decode worker does it itself")
        s.reset()
        first.reset()
        end(node, envoy, "by prefill load")


def ranks():
    two = {"data_parallel_size": 2}
    pool = [(1, "prefill", "10.0.0.21:8000", two), (7, "decode", "10.0.0.7:8000", two)]
    with Disagg(RENDERER, pool, env={"KVPICK_EPP_DP_ROUTING": "header", "KVPICK_EPP_DATA_PARALLEL_SIZE": "2"}) as node:
        envoy = node.envoy()
        streams = [routed(envoy, COMPLETIONS + [("x-prefiller-dp-rank", "9")], prompt(i, 4)) for i in range(4)]
        for key in ("x-data-parallel-rank", "x-prefiller-dp-rank"):
            tap.same(sorted(h.set[key] for _, h, _ in streams), ["0", "0", "1", "1"], f"{key}: of its own leg, balanced")
        for s, _, _ in streams:
            s.reset()
        end(node, envoy, "ranks")
    pool[1] = (7, "decode", "10.0.0.7:8000")
    with Disagg(RENDERER, pool, env={"KVPICK_EPP_DP_ROUTING": "header", "KVPICK_EPP_DATA_PARALLEL_SIZE": "2"}) as node:
        envoy = node.envoy()
        streams = [routed(envoy, COMPLETIONS, prompt(i, 4)) for i in range(4)]
        tap.same(sorted((h.set["x-data-parallel-rank"], h.set["x-prefiller-dp-rank"]) for _, h, _ in streams),
                 [("0", "0"), ("0", "0"), ("0", "1"), ("0", "1")], "the rank of one leg is never that of the other")
        for s, _, _ in streams:
            s.reset()
        end(node, envoy, "ranks of one leg")
    env = {"KVPICK_EPP_DP_ROUTING": "port", "KVPICK_EPP_DATA_PARALLEL_SIZE": "2"}
    client = [("x-data-parallel-rank", "9"), ("x-prefiller-dp-rank", "9")]
    for decode, told in (({}, [None] * 4), (two, ["0", "0", "1", "1"])):
        pool[1] = (7, "decode", "10.0.0.7:8000", decode)
        with Disagg(RENDERER, pool, env=env) as node:
            envoy = node.envoy()
            streams = [routed(envoy, COMPLETIONS + client, prompt(10 * i, 4)) for i in range(4)]
            name = f"a port for each rank, decode ranks: {len(set(told))}"
            tap.same(sorted(h.set[PREFILLER] for _, h, _ in streams), 2 * ["10.0.0.21:8000"] + 2 * ["10.0.0.21:8001"],
                     f"{name}: the prefill endpoint has its rank's")
            tap.same([h.set[DEST] for _, h, _ in streams], ["10.0.0.7:8000"] * 4,
                     f"{name}: the destination is the one port of the sidecar")
            tap.same(sorted(((h.set.get("x-data-parallel-rank")) for _, h, _ in streams), key=str),
                     sorted(told, key=str), f"{name}: a header names the rank of a decode worker that has several")
            tap.ok(all(("x-data-parallel-rank" in h.removed) != ("x-data-parallel-rank" in h.set) and
                       "x-prefiller-dp-rank" in h.removed for _, h, _ in streams),
                   f"{name}: the client's own rank headers never pass")
            for s, _, _ in streams:
                s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, "10.0.0.7:8000")))
                s.reply()
            tap.same(node.counter("booking_mismatch_total"), 0, f"{name}: who was named has served")
            s, head, _ = routed(envoy, EMBEDDINGS + client, b'{"input":"x"}')
            tap.ok(head.set[DEST] == "10.0.0.7:8000" and ("x-data-parallel-rank" in head.set) == (decode == two),
                   f"{name}: a decode worker alone, too", head)
            s.reset()
            for s, _, _ in streams:
                s.reset()
            end(node, envoy, name)


def served():
    """A proxy tells once who served. One that tells again and again moves the booking once."""
    two = {"data_parallel_size": 2}
    pool = [(1, "prefill", "10.0.0.21:8000", two)] + [(*w, two) for w in DECODE]
    with Disagg(RENDERER, pool, env={"KVPICK_EPP_DP_ROUTING": "header", "KVPICK_EPP_DATA_PARALLEL_SIZE": "2"}) as node:
        envoy = node.envoy()
        for turn in range(4):
            s, head, _ = routed(envoy, COMPLETIONS, prompt(10 * turn, 5))
            home = next(w for w in DECODE if w[2] == head.set[DEST])
            other = next(w for w in DECODE if w != home)
            first = node.ids()
            for i in range(20):
                s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, (home if i % 2 else other)[2])))
                if not s.reply():
                    break
            tap.same(i, 19, f"{turn}: twenty answers about who served are answered")
            tap.same(node.ids(), sorted([first[0] + "~1", first[1]]), f"{turn}: the first one moves the booking")
            tap.same(sorted(node.roles_load().items()), [(1, (20, 5, 1)), (other[0], (0, 5, 1))],
                     f"{turn}: to the worker that it names")
            rank = [r["dp_rank"] for r in node.table("resv") if r["selection_id"].endswith("~1")]
            tap.same(rank, [int(head.set["x-data-parallel-rank"])], f"{turn}: and to the rank that was asked for")
            s.send(body(RESPONSE_BODY, b"x", True))
            s.reply()
            close(s)
            idle(node, f"{turn}: who served")
        tap.same((node.counter("booking_moved_total"), node.counter("booking_mismatch_total")), (4, 4), "counted once each")
        end(node, envoy, "who served")


def paths():
    """Two workers share what a sidecar hands to two engines. All else is a decode worker's, prompt included."""
    pool = PREFILL[:1] + DECODE[:1]
    alone = [("/v1/embeddings", b'{"model":"m","input":"' + b"x" * 400 + b'"}', 106),
             ("/v1/responses", b'{"model":"m","input":"' + b"x" * 400 + b'"}', 106),
             ("/inference/v1/generate", b'{"token_ids":[1,2,3,4,5]}', 5), ("/generate", b'{"input_ids":[1,2,3,4,5]}', 5),
             ("/v1/audio/transcriptions", b"x" * 1000, 250), ("/v1/completions/render", prompt(1, 5), None),
             ("/v1/embeddings?to=/v1/completions", b'{"input":"x"}', None)]
    both = ["/v1/completions", "/v1/completions?a=b", "/models/m/v1/completions", "/v1/chat/completions",
            "/openai/deployments/m/chat/completions", None]
    for setting in (None, "/responses, /v1/completions"):
        env = {"KVPICK_EPP_DISAGG_PATHS": setting} if setting else {}
        name = f"paths {setting or 'by default'}"
        with Disagg(RENDERER, pool, env=env) as node:
            envoy = node.envoy()

            def to(path, data):
                at = [(":method", "POST"), ("content-type", "application/json"), (PREFILLER, "127.0.0.1:9")]
                s, head, _ = routed(envoy, at + ([(":path", path)] if path else []), data)
                return s, head
            cnt = 0
            for path, data, tok in alone:
                s, head = to(path, data)
                if setting and path == "/v1/responses":
                    tap.same(head.set, {DEST: "10.0.0.7:8000", PREFILLER: "10.0.0.21:8000"}, f"{name}: {path} is for two")
                    s.reset()
                    continue
                cnt += 1
                load = node.roles_load()
                tap.same(head.set, {DEST: "10.0.0.7:8000"}, f"{name}: {path} goes to a decode worker alone")
                tap.ok(PREFILLER in head.removed, f"{name}: {path}: the client's prefill header is removed")
                tap.same([uuid_of(i)[1] for i in node.ids()], ["decode"], f"{name}: {path}: one booking")
                tap.ok(list(load) == [7] and load[7][0] == (tok or load[7][0]) > 0,
                       f"{name}: dynamo#13731: {path}: the decode worker is charged the prompt", load)
                s.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"1"))
                s.reply(), s.reply()
                tap.ok(wait_for(lambda: [x[0] for x in node.roles_load().values()] == [0]),
                       f"{name}: {path}: until the first byte", node.roles_load())
                close(s)
                idle(node, f"{name}: {path}")
            tap.same((node.plan("decode_only"), node.plan("fallback"), node.plan("local")), (cnt, 0, 0), f"{name}: counted")
            for path in both:
                s, head = to(path, chat(1, 5) if path is None or "chat" in path else prompt(1, 5))
                pair = {DEST: "10.0.0.7:8000", PREFILLER: "10.0.0.21:8000"}
                if setting and path and not path.split("?")[0].endswith("/v1/completions"):
                    pair.pop(PREFILLER)
                tap.same(head.set, pair, f"{name}: {path}: workers: {len(pair)}")
                s.reset()
            idle(node, name)
            # nobody to prefill: they don't need him
            node.write(DECODE[:1])
            node.settled()
            wait_for(lambda: to("/v1/completions", prompt(1, 5))[1].status == 503)
            for path, data, _ in alone:
                s, head = to(path, data)
                want = (503, "no prefill endpoints available") if setting and path == "/v1/responses" else (None, "")
                tap.same((head.status or None, head.text or ""), want, f"{name}: {path} without a prefill worker")
                s.reset()
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/x"), ("DELETE", "/v1/completions")):
                s = envoy.stream(headers(REQUEST_HEADERS, [(":method", method), (":path", path), (PREFILLER, "x:1")],
                                         end=True, config=FULL))
                head = s.reply()
                tap.ok(head.set == {DEST: "10.0.0.7:8000"} and PREFILLER in head.removed,
                       f"{name}: {method} {path} without a body and without a prefill worker", head)
                close(s)
            idle(node, f"{name}, without a prefill worker")
            node.write(PREFILL[:1])
            node.settled()
            wait_for(lambda: to("/v1/completions", prompt(1, 5))[1].text == "no decode endpoints available")
            s, head = to("/v1/embeddings", b'{"input":"x"}')
            tap.same((head.status, head.text), (503, "no decode endpoints available"),
                     f"{name}: without a decode worker it is refused, never sent to one that prefills")
            end(node, envoy, name)
    # where decode workers may prefill by their own judgement the path comes first
    with Disagg(RENDERER, pool, env={"DYN_ROUTER_CONDITIONAL_DISAGG": "true"}) as node:
        envoy = node.envoy()
        s, head, _ = routed(envoy, EMBEDDINGS, b'{"input":"x"}')
        tap.same((head.set, node.plan("decode_only"), node.plan("local")), ({DEST: "10.0.0.7:8000"}, 1, 0),
                 "conditional: the path decides before the policy does")
        s.reset()
        end(node, envoy, "paths, conditional")


def domains():
    """Both workers in one transfer domain, where that is asked for; a worker without one goes with everybody."""
    def at(d):
        return {"kv_transfer_domain": d}
    pool = [(1, "prefill", "10.0.0.21:8000", at("a")), (2, "prefill", "10.0.0.22:8000", at("b")),
            (7, "decode", "10.0.0.7:8000", at("a")), (8, "decode", "10.0.0.8:8000", at("b"))]
    pairs = {"10.0.0.7:8000": "10.0.0.21:8000", "10.0.0.8:8000": "10.0.0.22:8000"}
    for how in ("required", "preferred"):
        with Disagg(RENDERER, pool, env={"KVPICK_EPP_KV_TRANSFER_ENFORCEMENT": how}) as node:
            envoy = node.envoy()
            got = [routed(envoy, COMPLETIONS, prompt(i, 4)) for i in range(8)]
            tap.same({h.set[DEST]: h.set[PREFILLER] for _, h, _ in got}, pairs, f"{how}: each pair is in one domain")
            for s, _, _ in got:
                respond(s)
                close(s)
            idle(node, how)
            node.write([pool[0], pool[3]])
            node.settled()
            s, head, _ = routed(envoy, COMPLETIONS, prompt(20, 4))
            if how == "required":
                tap.same((head.status, head.text), (503, "no prefill endpoints available"), "nobody in the domain: 503")
                idle(node, "and the decode booking is undone")
            else:
                tap.same(head.set.get(PREFILLER), "10.0.0.21:8000", "nobody in the domain: somebody else")
                s.reset()
            node.write([(1, "prefill", "10.0.0.21:8000"), pool[3]])
            node.settled()

            def anybody():
                s, head, _ = routed(envoy, COMPLETIONS, prompt(30, 4))
                s.reset()
                return head.set.get(PREFILLER) == "10.0.0.21:8000"
            tap.ok(wait_for(anybody), "a worker without a domain is in all of them")
            end(node, envoy, f"domains, {how}")


def sessions():
    """A session has a worker of each role, until its last request."""
    with Disagg(RENDERER, PREFILL + DECODE, env={"DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": "600"}) as node:
        envoy = node.envoy()
        session = COMPLETIONS + [("x-session-id", "s")]
        load = []
        s, head, _ = routed(envoy, session, prompt(1, 4))
        home = dict(head.set)
        for i in range(4):
            load.append(routed(envoy, COMPLETIONS, prompt(10 + i, 40))[0])
            t, head, _ = routed(envoy, session, prompt(20 + i, 4))
            tap.same(head.set, home, f"turn {i + 2} stays with both workers, though they are loaded")
            t.reset()
        t, head, _ = routed(envoy, [*session, ("x-dynamo-session-final", "true")], prompt(30, 4))
        tap.same(head.set, home, "its last request, too")
        respond(t)
        close(t)
        wait_for(lambda: len(node.ids()) == 10)
        t, head, _ = routed(envoy, session, prompt(31, 4))
        tap.same({k for k in home if head.set.get(k) != home[k]}, set(home), "then neither worker is the session's any more")
        t.reset()
        for x in [s, *load]:
            x.reset()
        end(node, envoy, "sessions")
    # a decode worker that prefills itself has the session, too
    env = {"DYN_ROUTER_CONDITIONAL_DISAGG": "true", "DYN_ROUTER_TTL_SECS": "600",
           "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": "600"}
    with Disagg(RENDERER, PREFILL[:1] + DECODE, env=env) as node:
        envoy = node.envoy()
        s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 8))
        home = head.destination
        s.reset()

        def local():
            wait_for(lambda: not node.ids())
            s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 8))
            s.reset()
            return head.set == {DEST: home}
        wait_for(local)
        load = [routed(envoy, at, prompt(1, 8)) for at in [session] + 6 * [COMPLETIONS]]
        tap.same([h.set for _, h, _ in load], [{DEST: home}] * 7, "the first request of a session is prefilled where it decodes")
        s, head, _ = routed(envoy, session, prompt(2, 40))
        tap.same((head.destination, head.set.get(PREFILLER)), (home, "10.0.0.21:8000"),
                 "the next one, prefilled remotely, stays with its decode worker, though that is loaded")
        s.reset()
        for x, _, _ in load:
            x.reset()
        end(node, envoy, "sessions, conditional")


def kills():
    """Sagas under way in every state while a picker process is killed, again and again."""
    rng = random.Random(int(os.environ.get("KVP_SEED", "8")))
    pool = [(i, "prefill", f"10.0.1.{i}:8000", {"max_num_batched_tokens": 64}) for i in range(1, 4)] + \
           [(i, "decode", f"10.0.2.{i}:8000", {"max_num_batched_tokens": 64}) for i in range(11, 14)]
    with Disagg(RENDERER, pool, env=QUEUE) as node:
        half = shown = killed = 0
        for turn in range(6):
            envoys = [node.envoy() for _ in range(4)]
            streams = [ask(rng.choice(envoys), prompt(1000 + 100 * turn + i, rng.randint(1, 12))) for i in range(24)]
            for s in streams:
                try:
                    got = s.got.get(timeout=0.02)
                except Exception:  # pylint: disable=broad-except
                    continue
                if got and got.kind == "request_headers":
                    shown += 1
                    half += not (got.set.get(DEST) and got.set.get(PREFILLER))
                    if rng.random() < 0.5:
                        s.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"x"))
            os.kill(rng.choice(node.pids()), signal.SIGKILL)
            killed += 1
            for s in streams:
                s.reset()
            for e in envoys:
                e.close()
            tap.ok(wait_for(lambda: not node.roles_load() and not node.ids(), 20),
                   f"kill {turn + 1}: loads of both roles return to zero", (node.roles_load(), node.ids()))
            wait_for(lambda: len(node.pids()) == 2 and
                     node.log_text().count(" extproc.run ") == 2 + killed, 20)
        tap.ok(shown > 20, f"{shown} plans were shown", shown)
        tap.same(half, 0, "none of them with one leg")
        tap.same(node.ctl("check")[0], 0, "kills: kvpickctl check finds no fault")


def sagas():
    """Ten thousand streams that end in every way, in all states, while processes are killed and workers come and go."""
    pool = [(i, "prefill", f"10.0.1.{i}:8000", {"max_num_batched_tokens": 2000}) for i in range(1, 4)] + \
           [(i, "decode", f"10.0.2.{i}:8000", {"max_num_batched_tokens": 2000}) for i in range(11, 14)]
    with Disagg(RENDERER, pool, env=QUEUE) as node:
        load = subprocess.Popen([f"{BUILD}/tests/helpers/h_envoy", f"127.0.0.1:{node.epp_port}", "10000", "100", "8",
                                 "tokens", "120", "mix", str(DUPLEX), "pairs"],
                                stdout=subprocess.PIPE, text=True)
        kills, flaps = 0, 0
        while load.poll() is None and kills < 40:
            node.write(pool if flaps % 2 else [w for w in pool if w[0] not in (2, 12)])
            flaps += 1
            pids = node.children().get("kvpick-extproc", [])
            if len(pids) == 2:
                os.kill(pids[kills % 2], signal.SIGKILL)
                kills += 1
            wait_for(lambda: load.poll() is not None or len(node.children().get("kvpick-extproc", [])) == 2, 2)
        out = load.communicate(timeout=120 * SLOW)[0]
        print("#", out.strip(), f"kills={kills} flaps={flaps} restarted={node.plan('restarted'):.0f}")
        got = dict(x.split("=", 1) for x in out.split()[:9] if "=" in x)
        tap.ok(got.get("streams") == "10000" and got.get("violations") == "0", "no plan with one leg is shown, no rule of the filter broken", out)
        tap.ok(kills > 2 and int(got["routed"]) > 1000, f"{kills} kills, {got['routed']} answers")
        node.write(pool)
        node.settled()
        idle(node, "ten thousand sagas")
        tap.same(node.ctl("check")[0], 0, "ten thousand sagas: kvpickctl check finds no fault")


def role_config():
    """What the decode leg of a pair does not look at, and what both legs have in common."""
    engines = [Engine(replay=False) for _ in range(3)]
    pool = [(*w, {"kv_events_endpoint": e.at}) for w, e in zip((PREFILL[0], *DECODE), engines)]
    with Disagg(RENDERER, pool, env={"DYN_ROUTER_USE_KV_EVENTS": "true", "DYN_ROUTER_CONDITIONAL_DISAGG": "true",
                                     "DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD": "0"}) as node:
        for e in engines:
            e.subscribed()
        engines[2].send(0, stored(5, 0, 8))
        wait_for(lambda: "kvpick_indexer_radix_blocks 8" in node.call("GET", "/metrics")[1])
        envoy = node.envoy()
        got = [routed(envoy, COMPLETIONS, prompt(5, 8)) for _ in range(4)]
        tap.same(sorted(h.destination for _, h, _ in got), ["10.0.0.7:8000"] * 2 + ["10.0.0.8:8000"] * 2,
                 "Role config: decode override: who holds the prompt is not preferred")
        tap.same({w: x for w, x in node.roles_load().items() if w != 1}, {7: (0, 16, 2), 8: (0, 16, 2)},
                 "Role config: decode override: equal prompts share no blocks, and no prompt tokens are counted")
        tap.same(node.roles_load()[1][1:], (8, 4), "Role config: prefill overrides nothing: there they share them")
        for s, _, _ in got:
            s.reset()
        end(node, envoy, "role config")
    for e in engines:
        e.close()


def no_port():
    """A worker that can't be named once it is booked, here because the port of its second rank would be 65536: as one
    that has gone, the plan begins anew, once."""
    two = {"data_parallel_size": 2}
    ports = {"KVPICK_EPP_DP_ROUTING": "port", "KVPICK_EPP_DATA_PARALLEL_SIZE": "2"}
    pairs = [(1, "prefill", "10.0.0.21:65535", two), (7, "decode", "10.0.0.7:8000")]
    chain = {"KVPICK_EPP_KV_TRANSFER_ENFORCEMENT": "preferred"}
    # undone: of the two plans of a pair one asks for prefill first, so that nothing else is booked
    for name, pool, env, first_at, text, undone in (
            ("a pair", pairs, {}, "10.0.0.21:65535", "no prefill endpoints available", 1),
            ("a chain", pairs, chain, "10.0.0.21:65535", "no prefill endpoints available", 2),
            ("fallback", pairs, {"DYN_ENFORCE_DISAGG": "false"}, "10.0.0.21:65535", None, 1),
            ("without roles", [(9, "", "10.0.0.9:65535", two)], {"DYN_EPP_TOPOLOGY_MODE": "aggregated"}, "10.0.0.9:65535",
             "no endpoints available", 0)):
        with Disagg(RENDERER, pool, env={**ports, **env}) as node:
            envoy = node.envoy()
            got, fresh = [], iter(range(10, 1000))

            def takes_first():
                got[:] = routed(envoy, COMPLETIONS, prompt(next(fresh), 8))
                if first_at in got[1].set.values():
                    return True
                got[0].reset()
                return wait_for(lambda: not node.ids()) and False
            wait_for(takes_first)  # of two idle ranks one is taken at random; what was sent to it stays
            first, head, _ = got
            tap.same(head.set.get(PREFILLER) or head.destination, first_at, f"{name}: the first rank")
            before = [node.plan("restarted"), node.counter("pick_vanished_total"), node.plan("undone")]
            s, head, _ = routed(envoy, COMPLETIONS, prompt(2, 8))
            if text:
                tap.same((head.kind, head.status, head.text), ("immediate", 503, text), f"{name}: the second one has no port")
            else:
                tap.same(head.set, {DEST: "10.0.0.7:8000"}, f"{name}: without the second one the decode worker does both")
                s.reset()
                wait_for(lambda: len(node.ids()) == 2)
            after = [node.plan("restarted"), node.counter("pick_vanished_total"), node.plan("undone")]
            tap.same([y - x for x, y in zip(before, after)], [1, 1 if text else 0, undone],
                     f"{name}: it was tried twice, and what was booked was freed")
            tap.same(sum(x[2] for w, x in node.roles_load().items() if w != 1), 1, f"{name}: only the first is booked")
            first.reset()
            end(node, envoy, f"no port, {name}")


def one_place():
    """A prefill and a decode worker that are one engine: it needs no prefill header."""
    with Disagg(RENDERER, [(1, "prefill", "10.0.0.7:8000"), DECODE[0]]) as node:
        envoy = node.envoy()
        s, head, _ = routed(envoy, COMPLETIONS + [(PREFILLER, "127.0.0.1:9")], prompt(1, 5))
        tap.same(head.set, {DEST: "10.0.0.7:8000"}, "both workers are one engine: it is the destination, and that is all")
        tap.ok(PREFILLER in head.removed, "Header injection: absent selection removes")
        tap.same(node.roles_load(), {1: (20, 5, 1), 7: (0, 5, 1)}, "both are booked")
        respond(s)
        close(s)
        idle(node, "one engine")
        tap.same((node.plan("one_place"), node.plan("remote")), (1, 0), "counted")
        end(node, envoy, "one engine")


def events():
    """With KV events: the prefill worker that holds the prompt prefills; decode workers tell nothing, and are there."""
    engines = [Engine(replay=False) for _ in range(2)]
    pool = [(i + 1, "prefill", f"10.0.0.2{i + 1}:8000", {"kv_events_endpoint": e.at}) for i, e in enumerate(engines)]
    with Disagg(RENDERER, pool + DECODE, env={"DYN_ROUTER_USE_KV_EVENTS": "true"}) as node:
        for e in engines:
            e.subscribed()
        engines[1].send(0, stored(5, 0, 8))
        envoy = node.envoy()

        def held():
            s, head, _ = routed(envoy, COMPLETIONS, prompt(5, 8))
            load = node.roles_load()
            s.reset()
            wait_for(lambda: not node.roles_load())
            return head.set[PREFILLER] == "10.0.0.22:8000" and load.get(2, (1,))[0] == 0
        tap.ok(wait_for(held), "who holds the prompt prefills, and is charged nothing for it")
        before = node.counter("pick_predicted_tokens_total")
        held()
        tap.same(node.counter("pick_predicted_tokens_total") - before, 32, "what is cached counts where it is prefilled")
        end(node, envoy, "KV events")
    # what decode workers tell decides, where they may prefill
    third = Engine(replay=False)
    pool = [(1, "prefill", "10.0.0.21:8000", {"kv_events_endpoint": third.at})] + \
           [(7 + i, "decode", f"10.0.0.{7 + i}:8000", {"kv_events_endpoint": e.at}) for i, e in enumerate(engines)]
    with Disagg(RENDERER, pool, env={"DYN_ROUTER_USE_KV_EVENTS": "true", "DYN_ROUTER_CONDITIONAL_DISAGG": "true",
                                     "DYN_ROUTER_PREDICTED_TTL_SECS": "600"}) as node:
        for e in engines + [third]:
            e.subscribed()
        engines[1].send(0, stored(5, 0, 7))
        envoy = node.envoy()

        def local():
            s, head, _ = routed(envoy, COMPLETIONS, prompt(5, 8))
            load = node.roles_load()
            s.reset()
            wait_for(lambda: not node.roles_load())
            return head.set == {DEST: "10.0.0.8:8000"} and load == {8: (4, 8, 1)}
        tap.ok(wait_for(local), "who decodes and lacks one block of eight prefills it itself, and is charged for that")
        s, head, _ = routed(envoy, COMPLETIONS, prompt(6, 8))
        tap.ok(head.set.get(PREFILLER), "what no decode worker has told of is prefilled remotely")
        s.reset()
        heads = []

        def predicted():
            wait_for(lambda: not node.roles_load())
            s, head, _ = routed(envoy, COMPLETIONS, prompt(6, 8))
            heads.append(head.set)
            load = node.roles_load()
            s.reset()
            return load.get(1, (9,))[0] == 0
        tap.ok(wait_for(predicted), "what was just sent is predicted for prefill workers")
        predicted()
        tap.ok(all(h.get(PREFILLER) for h in heads), "and not for decode workers", heads)
        tap.ok("DYN_ROUTER_PREDICTED_TTL_SECS=600 effect=" in node.log_text(),
               "Role config: predicted TTL cleared for decode only, and config still validates; the log warns")
        end(node, envoy, "KV events of decode workers")
    third.close()
    for e in engines:
        e.close()


def replicas():
    """What other replicas hear: each role on the port of its own."""
    ports = [free_port() for _ in range(3)]
    names = ("KVPICK_REPLICA_SYNC_PORT", "KVPICK_REPLICA_SYNC_PORT_PREFILL", "KVPICK_REPLICA_SYNC_PORT_DECODE")
    with Disagg(RENDERER, PREFILL[:1] + DECODE[:1], env=dict(zip(names, map(str, ports)))) as node:
        envoy = node.envoy()
        heard = {}
        for role, port in (("prefill", ports[1]), ("decode", ports[2])):
            with Peer() as ear:
                ear.listen(port)

                def some():
                    s, _, _ = routed(envoy, COMPLETIONS, prompt(1, 3))
                    s.reset()
                    wait_for(lambda: not node.ids())
                    return ear.recv(200)
                wait_for(some)
                s, _, _ = routed(envoy, COMPLETIONS, prompt(2, 3))
                plan = {uuid_of(i)[0] for i in node.ids() if uuid_of(i)[1] == role}
                s.reset()
                got = []
                while len(got) < 2:
                    frames = ear.recv(5000 * SLOW)
                    if not frames:
                        break
                    e = replica.unpack(frames[1])["event"]
                    name, of = uuid_of(e["request_id"])
                    if name in plan:  # not one of those that it was found with
                        got.append((e["data"] if isinstance(e["data"], str) else "Add", of, e["worker"]["worker_id"]))
                heard[role] = got
        tap.same(heard, {"prefill": [("Add", "prefill", 1), ("Free", "prefill", 1)],
                         "decode": [("Add", "decode", 7), ("Free", "decode", 7)]},
                 "bookings of a role go to the replicas of that role")
        end(node, envoy, "replicas")


class Way:
    """The whole way of a request: picker, then sidecar and engines, with the response shown to the picker."""

    def __init__(self, adapter, prefill, decode):
        self.p, self.d = pd.Engine(prefill), pd.Engine(decode)
        self.s = pd.Sidecar(self.d.port, adapter)

    def pool(self):
        return [(1, "prefill", f"127.0.0.1:{self.p.port}"), (7, "decode", f"127.0.0.1:{self.s.port}")]

    def break_off(self, envoy, data, how):
        """A request whose decode engine has begun to answer, and then: the client, the sidecar, or both legs go."""
        s, head, pieces = routed(envoy, CHAT, data)
        pairs = [("content-type", "application/json")] + list(head.set.items())
        begun = len(self.d.begun)
        with pd.Client(int(head.set[DEST].split(":")[1])) as c:
            c.send("POST", "/v1/chat/completions", b"".join(p.piece for p in pieces), pairs)
            wait_for(lambda: len(self.d.begun) > begun)
            s.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n"))
            if how == "sidecar killed":
                self.s.signal(signal.SIGKILL)
            c.drop()
        s.reset()

    def ask(self, envoy, data, leave=False):
        s, head, pieces = routed(envoy, CHAT, data)
        pairs = [("content-type", "application/json")] + [(k, v) for k, v in head.set.items()]
        host, port = head.set[DEST].split(":")
        with pd.Client(int(port), host=host) as c:
            if leave:
                c.send("POST", "/v1/chat/completions", b"".join(p.piece for p in pieces), pairs)
                wait_for(lambda: self.p.begun)
                c.drop()
                s.reset()
                return None
            reply = c.ask("POST", "/v1/chat/completions", b"".join(p.piece for p in pieces), pairs)
        respond(s, (reply.body,), status=str(reply.status))
        close(s)
        return reply

    def close(self):
        self.s.stop()
        self.p.close()
        self.d.close()


def broken_off():
    """Decode has begun, and its client leaves or its sidecar dies: both engines are let go, both bookings end."""
    gone = []

    def hangs(engine, req):
        req.conn.head(200, [("content-type", "text/event-stream")])
        req.conn.chunk(b"data: 1\n\n")
        if req.conn.hang():
            gone.append(req)

    way = Way("vllm_nixl", pd.vllm_prefill(), hangs)
    with Disagg(RENDERER, way.pool()) as node:
        envoy = node.envoy()
        data = json.dumps({**json.loads(chat(5, 6)), "stream": True}).encode()
        for n, how in enumerate(("client left", "sidecar killed"), 1):
            way.break_off(envoy, data, how)
            idle(node, how)
            tap.ok(wait_for(lambda n=n: len(gone) == n), f"{how}: the decode engine is let go", len(gone))
        end(node, envoy, "broken off")
    way.close()


def whole_way():
    if not os.path.exists(os.path.join(BUILD, "kvpick-sidecar")):
        return
    sgl = [pd.sglang("prefill"), pd.sglang("decode")]
    ways = {"vllm_nixl": lambda: Way("vllm_nixl", pd.vllm_prefill(), pd.vllm_decode()),
            "sglang": lambda: Way("sglang", *sgl),
            "trtllm": lambda: Way("trtllm", pd.trt_context(), pd.trt_generation)}
    for name, make in ways.items():
        way = make()
        with Disagg(RENDERER, way.pool()) as node:
            envoy = node.envoy()
            base = json.loads(chat(5, 6))
            for extra, what in (({}, "not streamed"), ({"stream": True}, "streamed"),
                                ({"messages": [{"role": "user", "content": "9 " * 100000}]}, "a prompt of 200 KB")):
                reply = way.ask(envoy, json.dumps({**base, **extra}).encode())
                tap.same(reply.status, 200, f"{name}, {what}: both engines did their part")
                idle(node, f"{name}, {what}")
            tap.ok(way.p.generated() and way.d.generated(), f"{name}: both legs were called")
            way.ask(envoy, json.dumps({**base, "n": 3}).encode())
            idle(node, f"{name}, refused by the sidecar")
            way.ask(envoy, json.dumps(base).encode(), leave=True)
            idle(node, f"{name}, the client left")
            way.p.close()
            reply = way.ask(envoy, json.dumps(base).encode())
            tap.ok(reply.status >= 500, f"{name}: a prefill engine that is gone", reply.status)
            end(node, envoy, f"{name}, without a prefill engine")
        way.close()


for part in (happy, api, balance, roles_missing, waits, conditional, ranks, served, paths, domains, sessions, role_config,
             one_place, no_port, events, replicas, kills, sagas, broken_off, whole_way):
    if len(sys.argv) < 2 or part.__name__ in sys.argv[1:]:
        part()
sys.exit(tap.done())
