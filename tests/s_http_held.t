#!/usr/bin/env python3
"""Memory that clients of the Selection API can take: bodies that do not come whole are bounded by a budget, nobody
without the token has a body read, and a request that waits in the queue gives its body back."""
import os
import socket
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import SLOW, Node, Tap, wait_for, worker

tap = Tap()
MIB = 1 << 20
BUDGET = 16 * MIB
HELD, REFUSED = "httpd_request_held", "httpd_request_held_refused"


def send(node, path, body, length=None, extra=""):
    s = socket.create_connection(("127.0.0.1", node.port), timeout=20)
    head = (f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{extra}"
            f"Content-Length: {length or len(body)}\r\n\r\n")
    try:
        s.sendall(head.encode() + body)
    except (BrokenPipeError, ConnectionResetError):
        pass  # it was answered before all was sent
    return s


def answer(s):
    """All that comes until the server closes."""
    out = b""
    try:
        while True:
            part = s.recv(65536)
            if not part:
                return out
            out += part
    except (ConnectionResetError, socket.timeout):
        return out


def pending(node):
    return node.call("GET", "/loads")[1][0]["pending_count"]


def rss(node):
    with open(f"/proc/{node.children()['kvpick-httpd'][0]}/status", encoding="ascii") as f:
        fields = dict(line.split(":", 1) for line in f)
    return int(fields["VmRSS"].split()[0]) * 1024 - int(fields["RssShmem"].split()[0]) * 1024


def bodies():
    body = b'{"token_ids":[' + b"1," * (3 * MIB)
    with Node("--http-max-held-bytes", str(BUDGET), env={"DYN_ROUTER_USE_KV_EVENTS": "false"}) as node:
        node.call("POST", "/workers", worker(1))
        before = rss(node)
        open_ones = [send(node, "/select", body, 8 * MIB) for _ in range(2)]
        tap.ok(wait_for(lambda: node.counted(HELD) == 2 * len(body)), "two bodies that do not come whole are held",
               node.counted(HELD))
        for i in range(8):
            s = send(node, "/select", body, 8 * MIB)
            open_ones.append(s)
            reply = answer(s)
            tap.ok(reply.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in reply,
                   f"{i + 3} are too many for the budget: 503", reply[:100])
        tap.ok(wait_for(lambda: node.counted(REFUSED) == 8), "counted", node.counted(REFUSED))
        tap.same(node.call("POST", "/select", {"token_ids": [1, 2, 3, 4]})[0], 200, "a small request finds room")
        slack = 16 if SLOW > 1 else 2  # a sanitizer keeps what was freed
        tap.ok(rss(node) - before < slack * BUDGET, "the process has not more than the budget and its slack",
               rss(node) - before)
        for s in open_ones:
            s.close()
        tap.ok(wait_for(lambda: node.counted(HELD) == 0), "clients that leave give their bytes back",
               node.counted(HELD))
        whole = body[:-1] + b"]}"
        tap.ok(answer(send(node, "/select", whole, extra="Connection: close\r\n")).startswith(b"HTTP/1.1 200 "),
               "a large request that comes whole is answered")
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)


def queued():
    body = b'{"token_ids":[' + b"1," * MIB + b"1]}"
    with Node("--http-max-held-bytes", str(BUDGET), env={
            "DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_QUEUE_THRESHOLD": "0.5"}) as node:
        node.call("POST", "/workers", worker(1, max_num_batched_tokens=16))
        first = {"selection_id": "a", "token_ids": list(range(64))}
        tap.same(node.call("POST", "/select_and_reserve", first)[0], 200, "a booking over the threshold")
        waiting = []
        for i in range(12):
            waiting.append(send(node, "/select_and_reserve", body, extra="Connection: close\r\n"))
            wait_for(lambda n=i + 1: pending(node) == n)
        tap.same(pending(node), 12, "more bodies than the budget holds wait in the queue")
        tap.ok(wait_for(lambda: node.counted(HELD) == 0), "which does not need them any more", node.counted(HELD))
        tap.same(node.counted(REFUSED), 0, "none was refused")
        for s in waiting:
            s.close()
        tap.ok(wait_for(lambda: pending(node) == 0), "they leave the queue")
        node.call("DELETE", "/reservations/a")
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)


def token():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "token")
        with open(path, "w", encoding="ascii") as f:
            f.write("the-secret")
        with Node("--api-token-file", path, env={"DYN_ROUTER_USE_KV_EVENTS": "false"}) as node:
            for extra, name in [("", "none"), ("Authorization: Bearer the-secreT\r\n", "another one"),
                                ("Expect: 100-continue\r\n", "none, asking for 100")]:
                reply = answer(send(node, "/select", b"", MIB, extra))
                tap.ok(reply.startswith(b"HTTP/1.1 401 ") and b"WWW-Authenticate: Bearer\r\n" in reply and
                       b"a valid bearer token is required" in reply, f"token {name}: 401 before the body", reply)
            reply = answer(send(node, "/select", b"", 9 * MIB))
            tap.ok(reply.startswith(b"HTTP/1.1 401 "), "also where the body would be too long", reply[:60])
            reply = answer(send(node, "/select", b"", 9 * MIB, "Authorization: Bearer the-secret\r\n"))
            tap.ok(reply.startswith(b"HTTP/1.1 413 "), "with the token that is 413", reply[:60])
            tap.same(node.counted("httpd_request_unauthorized"), 4, "counted")


bodies()
queued()
token()
sys.exit(tap.done())
