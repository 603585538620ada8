#!/usr/bin/env python3
"""Limits of the HTTP port over real sockets against real processes: address, number of connections, time-outs,
clients that go away at any point, graceful end. Every wait is for an event with a deadline."""
import contextlib
import json
import os
import re
import signal
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import SLOW, Node, Tap, call, free_port, tcp_timers, wait_for, worker

tap = Tap()
NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
RESET, CLOSE, HALF = "reset", "close", "half close"


def request(method, path, body=None, extra=""):
    text = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{extra}"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    return head.encode() + b"\r\n" + text


def booking(name, blocks=4):
    return request("POST", "/select_and_reserve", {
        "selection_id": name, "isl_tokens": blocks * 4, "block_hashes": list(range(1, blocks + 1)),
        "sequence_hashes": list(range(1000, 1000 + blocks))})


def dial(port, host="127.0.0.1"):
    return socket.create_connection((host, port), timeout=30 * SLOW)


def leave(s, how):
    if how == RESET:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == HALF:
        s.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while s.recv(65536):
                pass
    s.close()


def until_closed(s):
    out = b""
    with contextlib.suppress(ConnectionError):
        while True:
            part = s.recv(65536)
            if not part:
                break
            out += part
    s.close()
    return out


def status(reply):
    return int(reply.split(b" ")[1]) if reply.startswith(b"HTTP/1.1 ") else reply[:60]


def metric(node, name, port=None):
    text = call(port or node.port, "GET", "/metrics")[1]
    for line in text.splitlines():
        if line.startswith(f"kvpick_httpd_{name} ") or line.startswith(f"kvpick_httpd_{name}_total "):
            return float(line.rsplit(" ", 1)[1])
    return None


def loads(node):
    return [(r["potential_prefill_tokens"], r["potential_decode_blocks"], r["active_requests"])
            for part in node.call("GET", "/loads")[1] for r in part["loads"]]


def idle(node):
    return wait_for(lambda: set(loads(node)) == {(0, 0, 0)})


def reaches(port, host):
    try:
        with dial(port, host) as s:
            s.sendall(request("GET", "/health", extra="Connection: close\r\n"))
            return status(until_closed(s)) == 200
    except OSError:
        return False


class NodeAt(Node):
    """A node at another address than 127.0.0.1."""

    def __init__(self, host, *args, **kw):
        super().__init__(*args, "--bind", host, **kw)
        self.host = host

    def healthy(self):
        return self.proc.poll() is None and reaches(self.port, self.host)


def test_bind():
    for host, inside, outside in (("127.0.0.2", ["127.0.0.2"], ["127.0.0.1", "127.0.0.3"]),
                                  ("0.0.0.0", ["127.0.0.1", "127.0.0.2"], []),
                                  ("::1", ["::1"], ["127.0.0.1"])):
        if host == "::1" and not os.path.exists("/proc/net/if_inet6"):
            continue
        with NodeAt(host, env=NO_EVENTS) as node:
            tap.same([reaches(node.port, h) for h in inside + outside], [True] * len(inside) + [False] * len(outside),
                     f"--bind {host}: reached at {inside}, not at {outside}")


def test_ports():
    metrics = free_port()
    node = Node("--metrics-port", str(metrics), env=NO_EVENTS)
    node.args[node.args.index("--port") + 1] = "0"
    node.port = metrics
    with node:
        tap.same(call(metrics, "GET", "/metrics")[0], 200, "with port 0 the metrics port is still served")
        tap.same([call(metrics, "POST", "/select_and_reserve", {"token_ids": [1]})[0],
                  call(metrics, "GET", "/workers")[0], call(metrics, "DELETE", "/workers/1")[0]], [404] * 3,
                 "and it shows metrics only")
        pid, inodes = node.children()["kvpick-httpd"][0], set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of a connection that ends now
                inodes.update(re.findall(r"^socket:\[(\d+)", os.readlink(f"/proc/{pid}/fd/{fd}")))
        with open(f"/proc/{pid}/net/tcp", encoding="ascii") as f:
            ports = [int(w[1].split(":")[1], 16) for w in map(str.split, f.readlines()[1:])
                     if w[3] == "0A" and w[9] in inodes]
        tap.same(ports, [metrics], "no other port is open")
        tap.same(node.stop(), 0, "a node without the API ends with 0")


def test_connections(node):
    def served():
        """A connection that was answered; False while one of an earlier check may still count."""
        s = dial(node.port)
        s.sendall(request("GET", "/health"))
        if status(s.recv(4096)) == 200:
            return s
        s.close()
        return False

    conns = [wait_for(served) for _ in range(8)]
    over = [until_closed(dial(node.port)) for _ in range(3)]
    tap.same([(status(o), json.loads(o.split(b"\r\n\r\n")[1])) for o in over],
             [(503, {"error": "too many connections"})] * 3, "connections over the limit are answered 503 and closed")
    tap.ok(wait_for(lambda: set(tcp_timers(node.port, 1)) == {"02"}), "clients may vanish: the kernel asks for them",
           tcp_timers(node.port, 1))
    conns[0].sendall(request("GET", "/health"))
    tap.same(status(conns[0].recv(4096)), 200, "those within it go on")
    for s in conns:
        s.close()
    tap.ok(wait_for(lambda: reaches(node.port, "127.0.0.1")), "a place that is given up is used again")
    tap.ok(wait_for(lambda: metric(node, "connection_refused") >= 3), "refusals are counted")


def test_files():
    """More connections than the soft limit of open files allows; and fewer than wanted where the hard one is low."""
    for hard, served in ((5000, 700), (400, 400 - 128)):
        with Node(env=NO_EVENTS, before=("prlimit", f"--nofile=200:{hard}")) as node:
            conns, codes = [], []
            for _ in range(700):
                s = dial(node.port)
                conns.append(s)
                s.sendall(request("GET", "/health"))
                codes.append(status(s.recv(4096)))
            tap.same((codes.count(200), codes.count(503)), (served, 700 - served),
                     f"{hard} open files allowed: of 700 connections {served} are served, the others answered 503")
            tap.same("httpd.connections wanted=4096" in node.log_text(), hard < 1000, "a lowered limit is said once")
            for s in conns:
                s.close()


def drip(node, data, pause=0.02):
    """Sends data byte by byte and then repeats its last byte until the server answers."""
    start = time.monotonic()
    with dial(node.port) as s:
        s.settimeout(pause)
        i = 0
        while time.monotonic() - start < 20 * SLOW:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                s.send(data[min(i, len(data) - 1):][:1])
            i += 1
            try:
                got = s.recv(65536)
                return status(got), time.monotonic() - start, got
            except socket.timeout:
                pass
    return None, 0, b""


def test_timeouts(node, read_s, idle_s):
    head = b"POST /select_and_reserve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for name, data in (("headers", b"GET /health HTTP/1.1\r\nX: aaaa"),
                       ("a body", head + b'Content-Length: 5000\r\n\r\n{"token_ids": [1, 1'),
                       ("a chunked body", head + b"Transfer-Encoding: chunked\r\n\r\n4\r\n{   \r\nff\r\n11")):
        code, took, got = drip(node, data)
        tap.ok(code == 408 and took >= read_s * 0.9 and b"Connection: close" in got,
               f"{name} byte by byte: 408 and the end when the time is over, bytes do not move it", (code, took, got))
    for name, data in (("headers", b"GET /heal"), ("a body", head + b'Content-Length: 9\r\n\r\n{"a')):
        with dial(node.port) as s:
            s.sendall(data)
            tap.same(status(until_closed(s)), 408, f"{name} that ended half-way: 408")
    with dial(node.port) as s:
        tap.same(until_closed(s), b"", "a connection that sends nothing is closed without a word")
    with dial(node.port) as s:
        s.sendall(request("GET", "/health"))
        start = time.monotonic()
        got = until_closed(s)
        tap.ok(got.count(b"HTTP/1.1") == 1 and time.monotonic() - start >= idle_s * 0.9,
               "a connection is closed when it was idle for its time after a request", got)
    tap.ok(wait_for(lambda: metric(node, "request_timed_out") >= 5), "time-outs are counted",
           metric(node, "request_timed_out"))
    tap.ok(wait_for(lambda: metric(node, "connection_idle_closed") >= 2), "idle connections are counted",
           metric(node, "connection_idle_closed"))
    tap.same(set(loads(node)), {(0, 0, 0)}, "a booking whose request did not come in time does not exist")
    # a client that reads nothing: its answers are not kept for ever
    with dial(node.port) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.setblocking(False)
        metrics = request("GET", "/metrics") * 50
        end = time.monotonic() + 30 * SLOW
        gone = False
        at = 0
        while not gone and time.monotonic() < end:
            try:  # whole requests: what is none would be answered with 400, and closed
                at = (at + s.send(metrics[at:])) % len(metrics)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                gone = True
        tap.ok(gone, "a client that reads no answers is thrown out")
    tap.ok(wait_for(lambda: metric(node, "connection_stalled") >= 1), "and counted")


def test_taken():
    """A port that somebody else has ends the start; the log names the setting."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        node, text = Node("--port", str(other.getsockname()[1]), env=NO_EVENTS), "it started"
        try:
            node.start()
        except RuntimeError as e:
            text = str(e)
        node.stop()
        tap.ok("httpd.listen setting=KVPICK_PORT port=" in text and "Address already in use" in text,
               "the port is taken: the log says so and names the setting", text[-1500:])


def ids_of(node, names):
    """Which of the ids are booked: freed one by one. 404 is the only other answer allowed."""
    codes = {n: node.call("DELETE", f"/reservations/{n}")[0] for n in names}
    tap.ok(set(codes.values()) <= {200, 404}, "no id is left half booked", codes)
    return [n for n, c in codes.items() if c == 200]


def settled(node):
    """All abandoned connections are gone: only the one that asks is open."""
    return wait_for(lambda: metric(node, "connection_open") is not None and metric(node, "connection_open") <= 1)


def test_half_sent(node):
    """Cut after every few bytes, and after every byte around the end of head and body."""
    for how in (RESET, CLOSE, HALF):
        whole = booking(f"cut-{how[0]}")
        head = whole.index(b"\r\n\r\n") + 4
        cuts = sorted(set(range(0, len(whole), 7)) | set(range(head - 6, head + 3)) |
                      set(range(len(whole) - 4, len(whole))))
        for cut in cuts:
            s = dial(node.port)
            s.sendall(whole[:cut])
            leave(s, how)
        tap.same(loads(node), [(0, 0, 0)] * 2, f"{len(cuts)} places to leave by {how}: nothing is booked")
        tap.same(node.call("DELETE", f"/reservations/cut-{how[0]}")[0], 404, f"{how}: and the id is free")


@contextlib.contextmanager
def stopped(node):
    """The server does nothing meanwhile: what happens in it has happened before it sees the first byte."""
    pids = node.children()["kvpick-httpd"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_unread(node):
    """The whole request was sent; the client leaves without reading the answer."""
    before = metric(node, "reply_undelivered")
    for how in (RESET, CLOSE):
        names = [f"unread-{how[0]}{i}" for i in range(60)]
        with stopped(node):
            for n in names:
                s = dial(node.port)
                s.sendall(booking(n))
                leave(s, how)
        settled(node)
        tap.same(ids_of(node, names), [], f"left by {how} before the answer: no booking stays")
        tap.ok(idle(node), f"{how}: no load is left")
        for n in names:
            s = dial(node.port)
            s.sendall(booking(n))
            leave(s, how)
        settled(node)
        left = ids_of(node, names)
        tap.ok(idle(node), f"left by {how} somewhere around the answer: no load stays but of {len(left)} live bookings")
    s = dial(node.port)
    s.sendall(booking("patient"))
    s.shutdown(socket.SHUT_WR)
    tap.same(status(until_closed(s)), 200, "a client that ends its side and waits is answered")
    tap.same(ids_of(node, ["patient"]), ["patient"], "and keeps its booking")
    tap.ok(metric(node, "reply_undelivered") >= before + 60, "undelivered bookings are counted",
           metric(node, "reply_undelivered"))


def test_pipelined(node):
    names = [f"p{i}" for i in range(20)]
    s = dial(node.port)
    s.sendall(b"".join(booking(n) for n in names))
    got = b""
    while got.count(b'"selection_id":"p') < 20:
        part = s.recv(65536)
        if not part:
            break
        got += part
    tap.same(got.count(b"HTTP/1.1 200"), 20, "20 pipelined requests are answered")
    tap.ok(all(got.index(f'"{a}"'.encode()) < got.index(f'"{b}"'.encode()) for a, b in zip(names, names[1:])),
           "in their order")
    s.sendall(booking("p-half")[:-3])
    leave(s, RESET)
    settled(node)
    tap.same(len(ids_of(node, names + ["p-half"])), 20, "answers that were read keep their bookings")
    for how in (RESET, CLOSE):
        with stopped(node):
            s = dial(node.port)
            s.sendall(b"".join(booking(n) for n in names) + booking("p-half")[:50])
            leave(s, how)
        settled(node)
        tap.same(ids_of(node, names + ["p-half"]), [], f"pipelined and left by {how}: none stays")
    tap.ok(idle(node), "no load is left")


def test_while_written(node):
    """Answers of 40 KB that the client stops reading: it leaves while the server still writes."""
    names = [f"w{i:03}" for i in range(200)]
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect(("127.0.0.1", node.port))
    s.settimeout(0.3)
    one, at = booking("w000", 2000), 0
    data = b"".join(one.replace(b"w000", n.encode()) for n in names)
    with contextlib.suppress(socket.timeout):
        while at < len(data):
            at += s.send(data[at:])
    seen = [0, 1]
    booked = wait_for(lambda: seen.append(sum(r[2] for r in loads(node))) or seen[-1] == seen[-2] > 10 and seen[-1])
    leave(s, RESET)
    settled(node)
    left = ids_of(node, names[:booked + 10])
    tap.ok(booked and len(left) < booked / 4, f"{booked} were booked when the client left, {len(left)} stay",
           left)
    tap.same(left, names[:len(left)], "and those are the first ones")
    tap.ok(idle(node), "no load is left")


def test_commands(node):
    """A worker command goes on without its client, and its place in the ring comes back."""
    for i in range(1200):
        s = dial(node.port)
        s.sendall(request("POST", "/workers", worker(10 + i % 5)))
        leave(s, RESET if i % 2 else CLOSE)
    settled(node)
    code, record = node.call("POST", "/workers", worker(10))
    tap.ok(code == 201 and record["lifecycle"] == "schedulable", "commands are still taken after 1200 abandoned ones",
           record)
    for i in range(5):
        node.call("DELETE", f"/workers/{10 + i}")
    tap.same(sorted(w["worker_id"] for w in node.call("GET", "/workers")[1]), [1, 2], "the catalogue is whole")


PROMPT = {"token_ids": [1, 2, 3]}
DOWN = (503, "shutting down")
# What is under way when the service is told to end is answered: no new work, but looking, freeing and removing.
LATE = ((booking("late"), DOWN), (request("POST", "/select", PROMPT), DOWN),
        (request("POST", "/reservations", {"selection_id": "late", "worker_id": 1, **PROMPT}), DOWN),
        (request("POST", "/reservations", {"selection_id": "replay"}), DOWN),
        (request("POST", "/workers", worker(2)), DOWN), (request("PATCH", "/workers/1", {"taints": ["a"]}), DOWN),
        (request("GET", "/workers"), (200, '"worker_id":1')), (request("GET", "/loads"), (200, '"active_requests":2')),
        (request("GET", "/ready"), (503, '"ready":false')), (request("GET", "/health"), (200, "ok")),
        (request("POST", "/reservations/kept/prefill_complete"), (200, "ok")),
        (request("POST", "/reservations/kept/output_block", {}), (200, "ok")),
        (request("DELETE", "/reservations/kept"), (200, "ok")), (request("DELETE", "/reservations/kept"), (404, "kept")),
        (request("DELETE", "/workers/1"), (200, "unschedulable")))


def test_drain():
    with Node("--drain-timeout-ms", "20000", env=NO_EVENTS) as node:
        node.call("POST", "/workers", worker(1))
        for name in ("kept", "other"):
            node.call("POST", "/select_and_reserve", {"selection_id": name, **PROMPT})
        quiet, used = dial(node.port), dial(node.port)
        used.sendall(request("GET", "/health"))
        used.recv(4096)
        conns = [dial(node.port) for _ in LATE]
        for s, (data, _) in zip(conns, LATE):
            s.sendall(data[:-2])
        wait_for(lambda: metric(node, "connection_open") >= len(LATE) + 2)
        node.proc.send_signal(signal.SIGTERM)
        tap.same(until_closed(used), b"", "SIGTERM: an idle connection is closed at once")
        tap.ok(wait_for(lambda: not reaches(node.port, "127.0.0.1")), "nobody gets in any more")
        tap.ok(node.proc.poll() is None, "the node waits for what is under way")
        for s, (data, (code, text)) in zip(conns, LATE):
            s.sendall(data[-2:])
            got = until_closed(s)
            tap.ok(status(got) == code and text.encode() in got and b"Connection: close" in got,
                   f"{' '.join(data.decode().split()[:2])} that was under way: {code}", got)
        tap.same(until_closed(quiet), b"", "a connection that never asked is closed")
        tap.same(node.stop(), 0, "then the node ends with 0")
    with Node("--drain-timeout-ms", "300", env=NO_EVENTS) as node:
        s = dial(node.port)
        s.sendall(booking("never")[:-5])
        wait_for(lambda: metric(node, "connection_open") >= 2)
        node.proc.send_signal(signal.SIGTERM)
        tap.same(until_closed(s), b"", "an upload that does not end is cut when the drain time is over")
        tap.same(node.stop(), 0, "and the node ends with 0")


def main():
    test_bind()
    test_ports()
    test_taken()
    test_files()
    with Node(env={"KVPICK_HTTP_MAX_CONNECTIONS": "8", **NO_EVENTS}) as node:
        test_connections(node)
    with Node(env={"KVPICK_HTTP_READ_TIMEOUT_MS": "400", "KVPICK_HTTP_IDLE_TIMEOUT_MS": "700", **NO_EVENTS}) as node:
        node.call("POST", "/workers", worker(1))
        test_timeouts(node, 0.4, 0.7)
    with Node("--httpd-processes", "1", env=NO_EVENTS) as node:
        for i in (1, 2):
            node.call("POST", "/workers", worker(i))
        test_half_sent(node)
        test_unread(node)
        test_pipelined(node)
        test_while_written(node)
        test_commands(node)
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)
    test_drain()
    return tap.done()


sys.exit(main())
