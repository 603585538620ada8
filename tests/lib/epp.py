"""A node with the Endpoint Picker for tests: two kvpick-extproc processes, a simulated renderer, and requests as a
proxy shows them."""
import http.server
import json
import re
import tempfile
import threading

from engine import tokens
from envoy import DUPLEX, REQUEST_BODY, REQUEST_HEADERS, RESPONSE_BODY, RESPONSE_HEADERS, Envoy, body, headers
from node import Node, free_port, wait_for

MODEL = "m"
FULL = (DUPLEX, DUPLEX)
CHAT = [(":method", "POST"), (":path", "/v1/chat/completions"), ("content-type", "application/json")]
COMPLETIONS = [(":method", "POST"), (":path", "/v1/completions"), ("content-type", "application/json")]
SSE = [(":status", "200"), ("content-type", "text/event-stream")]


class Renderer:
    """A tokenizer service: the prompt's text is the list of its token ids. hold() makes it wait."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.dir = tempfile.TemporaryDirectory(prefix="kvpick-test-")
        self.waiting = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                data = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.waiting += 1
                outer.gate.wait(60)
                outer.waiting -= 1
                text = data["messages"][0]["content"]
                ids = [int(x) for x in text.split() if x.isdigit()] or [1, 2, 3, 4]
                out = json.dumps({"request_id": "r", "token_ids": ids}).encode()
                try:
                    self.send_response(200)
                    self.send_header("content-length", str(len(out)))
                    self.end_headers()
                    self.wfile.write(out)
                except OSError:
                    pass

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 512

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that give up are part of the test
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Epp(Node):
    def __init__(self, renderer, *args, env=None):
        self.epp_port, self.health_port = free_port(), free_port()
        settings = {"KVPICK_MODE": "both", "DYN_MODEL_NAME": MODEL, "DYN_EPP_METRICS_PORT": "0",
                    "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render", "DYN_EPP_TOKENIZER_SERVICE_URL": renderer.url,
                    "DYN_SECURE_SERVING": "false", "KVPICK_EPP_PORT": str(self.epp_port),
                    "KVPICK_EPP_HEALTH_PORT": str(self.health_port), "KVPICK_RESTART_BACKOFF_MAX_MS": "100"}
        settings.update(env or {})
        super().__init__(*args, env=settings)

    def start(self):
        super().start()
        if not wait_for(lambda: len(re.findall(r"\bextproc\.run\b", self.log_text())) == 2, 20):
            raise RuntimeError("the extproc processes do not run\n" + self.log_text())
        return self

    def envoy(self):
        return Envoy(f"127.0.0.1:{self.epp_port}")

    def load(self):
        """{worker: (prefill tokens, blocks, requests)} of everything that is not idle."""
        return {r["worker_id"]: (r["potential_prefill_tokens"], r["potential_decode_blocks"],
                                 r["active_requests"])
                for part in self.call("GET", "/loads")[1] for r in part["loads"] if r["active_requests"]}

    def counter(self, name):
        text = self.call("GET", "/metrics")[1]
        return sum(float(line.split()[-1]) for line in text.splitlines()
                   if line.startswith(f"kvpick_extproc_{name} "))


def prompt(first, blocks):
    return json.dumps({"model": MODEL, "prompt": tokens(first, blocks)}).encode()


def chat(first, blocks):
    text = " ".join(str(t) for t in tokens(first, blocks))
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode()


def routed(envoy, path, data, config=FULL, more=b""):
    """Sends a request; (stream, headers answer, body answers)."""
    s = envoy.stream(headers(REQUEST_HEADERS, path, config=config, more=more))
    s.send(body(REQUEST_BODY, data, True))
    head = s.reply()
    pieces = []
    while head and head.kind == "request_headers" and not (pieces and pieces[-1].end):
        pieces.append(s.reply())
    return s, head, pieces


def respond(s, chunks=(b"data: 1\n\n", b"data: [DONE]\n\n"), status="200"):
    s.send(headers(RESPONSE_HEADERS, [(":status", status), *SSE[1:]]))
    got = [s.reply()]
    for i, c in enumerate(chunks):
        s.send(body(RESPONSE_BODY, c, i + 1 == len(chunks)))
        got.append(s.reply())
    return got


def schedulable(node):
    return node.call("GET", "/ready")[1]["schedulable_workers"]
