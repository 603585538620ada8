#!/usr/bin/env python3
"""The HTTP face over a real node: two httpd processes share one port and one set of reservations, limits and
malformed input get the documented answers, metrics count, kvpickctl shows, nothing is left behind."""
import http.client
import json
import os
import socket
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import Node, Tap, call, wait_for, worker

tap = Tap()
NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}


def loads(node):
    return {(r["worker_id"], r["dp_rank"]): (r["potential_prefill_tokens"], r["potential_decode_blocks"],
                                             r["active_requests"])
            for part in node.call("GET", "/loads")[1] for r in part["loads"]}


def by_process(node, n=40):
    """n keep-alive connections; with SO_REUSEPORT they spread over the httpd processes."""
    conns = [http.client.HTTPConnection("127.0.0.1", node.port, timeout=20) for _ in range(n)]
    for c in conns:
        c.connect()
    return conns


def ask(conn, method, path, body=None):
    conn.request(method, path, json.dumps(body) if body is not None else None,
                 {"Content-Type": "application/json"} if body is not None else {})
    reply = conn.getresponse()
    return reply.status, json.loads(reply.read() or b"null")


def served(node):
    """Requests that each httpd process has answered, from /proc: both must have done work."""
    return node.children().get("kvpick-httpd", [])


def shared_reservations(node):
    conns = by_process(node)
    ids = []
    for i, c in enumerate(conns):
        status, sel = ask(c, "POST", "/select_and_reserve",
                          {"selection_id": f"r{i}", "token_ids": list(range(i * 8, i * 8 + 8))})
        if status == 200:
            ids.append(sel["selection_id"])
    tap.same(len(ids), len(conns), "every connection books, whichever process serves it")
    tap.same(loads(node)[(1, 0)][2] + loads(node)[(2, 0)][2], len(ids), "all bookings are one load")
    taken = [ask(c, "POST", "/select_and_reserve", {"selection_id": "r0", "token_ids": [1]})[0] for c in conns]
    tap.same(set(taken), {409}, "an id that is live is a conflict at every process")
    freed = sum(ask(conns[-1 - i], "DELETE", f"/reservations/r{i}")[0] == 200 for i in range(len(ids)))
    tap.same(freed, len(ids), "bookings are freed through other connections")
    again = {ask(c, "DELETE", "/reservations/r0")[0] for c in conns}
    tap.same(again, {404}, "a freed id is unknown at every process")
    tap.same(set(loads(node).values()), {(0, 0, 0)}, "no load is left")
    for c in conns:
        c.close()


def raw(node, data, shut=False):
    """Bytes to the port; the answer until the server closes or 5 s pass."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=20) as s:
        s.sendall(data)
        if shut:
            s.shutdown(socket.SHUT_WR)
        out = b""
        try:
            while True:
                part = s.recv(65536)
                if not part:
                    return out
                out += part
                if b"\r\n\r\n" in out and b"connection: close" not in out.lower():
                    return out
        except socket.timeout:
            return out


def bad_input(node):
    def status(data):
        got = raw(node, data)
        return int(got.split(b" ")[1]) if got.startswith(b"HTTP/1.1 ") else got

    head = b"POST /select HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    tap.same(status(b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"), 414, "a long request line is 414")
    tap.same(status(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 70000 + b"\r\n\r\n"), 431,
             "a header block over 64 KiB is 431")
    tap.same(status(head + b"Content-Length: 9000000\r\n\r\n"), 413, "a body over 8 MiB is 413")
    tap.same(status(head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"), 400,
             "length and chunked together are 400")
    tap.same(status(b"NONSENSE\r\n\r\n"), 400, "garbage is 400")
    deep = b"[" * 200 + b"]" * 200
    body = b'{"a":' + deep + b"}"
    tap.same(status(head + b"Content-Length: %d\r\n\r\n" % len(body) + body), 400, "JSON deeper than 128 is 400")
    before = loads(node)
    for name, body, want in [
            ("an id over 4096 bytes", {"selection_id": "x" * 4097, "token_ids": [1]}, 400),
            ("a model name over 1024 bytes", {"model_name": "m" * 1025, "token_ids": [1]}, 400),
            ("a token over 32 bits", {"token_ids": [2 ** 32]}, 422),
            ("a hash over 63 bits", {"block_hashes": [2 ** 63], "sequence_hashes": [1], "isl_tokens": 4}, 422),
            ("no prompt at all", {}, 400),
            ("an empty token list", {"token_ids": []}, 400)]:
        code, reply = node.call("POST", "/select_and_reserve", body)
        tap.ok(code == want and isinstance(reply.get("error"), str), f"{name} is {want} with a text", (code, reply))
    tap.same(loads(node), before, "refused requests leave no load")
    code, reply = node.call("POST", "/select_and_reserve", {"selection_id": "x" * 4096, "token_ids": [1, 2]})
    tap.same(code, 200, "an id of 4096 bytes is booked")
    tap.same(node.call("DELETE", "/reservations/" + "x" * 4096)[0], 200, "and freed by its path")
    odd = {"selection_id": "a\0b%", "token_ids": [1, 2]}
    tap.same(node.call("POST", "/select_and_reserve", odd)[0], 200, "an id may hold a NUL")
    tap.same(node.call("POST", "/select_and_reserve", odd),
             (409, {"error": "selection a\0b% is already reserved or being reserved"}), "which does not cut what is said of it")
    tap.same([node.call("DELETE", "/reservations/a%00b%25") for _ in range(2)],
             [(200, {"status": "ok"}), (404, {"error": "reservation a\0b% not found"})], "nor when it is not known")
    tap.same(node.call("POST", "/select", {"model_name": "m\0n", "routing_group": "g\0h", "token_ids": [1]}),
             (503, {"error": "no schedulable workers for model=m\0n routing_group=g\0h"}), "nor do names")
    tap.same(node.call("POST", "/reservations", {"model_name": "m\0n", "selection_id": "\0"}),
             (404, {"error": "no pending selection \0 for model=m\0n routing_group=default (expired, already used, or never "
                             "selected)"}), "nor both")


def tools(node):
    code, text = node.ctl("top", "-1")
    tap.ok(code == 0, "kvpickctl top -1 shows the node", text)
    for verb in ("workers", "resv", "slots", "errors", "gen"):
        code, text = node.ctl("--json", verb)
        try:
            json.loads(text)
            good = code == 0
        except ValueError:
            good = False
        tap.ok(good, f"kvpickctl --json {verb} is JSON", text)
    code, text = node.ctl("radix", "--stats")
    tap.ok(code == 0, "kvpickctl radix --stats", text)
    code, text = node.ctl("check")
    tap.ok(code == 0, "kvpickctl check finds no fault", text)


def metrics(node):
    code, text = node.call("GET", "/metrics")
    tap.same(code, 200, "metrics are served")
    tap.ok('kvpick_setting_info{name="KVPICK_HTTPD_PROCESSES",value="2"} 1' in text, "settings are an info series")
    tap.ok('dynamo_kvrouter_kv_cache_events_applied{event_type="stored",status="ok"} 0' in text,
           "published metric names are there")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    tap.ok(float(values.get("kvpick_any_select_booked_total", 0)) >= 41, "bookings are counted",
           values.get("kvpick_any_select_booked_total"))
    tap.ok(float(values.get("kvpick_httpd_reply_client_error_total", 0)) >= 6, "refusals are counted", text[:500])
    tap.same(values.get('kvpick_schedulable_workers{role="aggregated"}'), "2", "schedulable workers are a gauge")


def main():
    with Node("--httpd-processes", "2", env=NO_EVENTS) as node:
        tap.same(node.call("GET", "/ready")[0], 503, "not ready without a worker")
        tap.same(node.call("POST", "/select", {"token_ids": [1]})[0], 503, "no selection without a worker")
        for i in (1, 2):
            code, record = node.call("POST", "/workers", worker(i))
            tap.ok(code == 201 and record["lifecycle"] == "schedulable", f"worker {i} is schedulable", record)
        tap.same(node.call("GET", "/ready")[0], 200, "ready with workers")
        tap.ok(wait_for(lambda: len(served(node)) == 2), "two httpd processes run", served(node))
        shared_reservations(node)
        bad_input(node)
        tools(node)
        metrics(node)
        code = node.stop()
        tap.same(code, 0, "SIGTERM drains and ends with exit code 0")
    return tap.done()


sys.exit(main())
