"""Sidecar tests: engines that speak the prefill/decode protocols strictly and fail on demand, the sidecar as a
process, a client that sees every byte. Python's standard library only."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time

from node import BUILD, SLOW, free_port, wait_for

VERSION = "0.5.19"


class Refused(Exception):
    """What a real engine answers with 400."""


class Request:
    def __init__(self, method, path, headers, body, conn):
        self.method, self.path, self.headers, self.body, self.conn = method, path, headers, body, conn
        self.when = time.monotonic()

    def header(self, name):
        got = [v for k, v in self.headers if k.lower() == name]
        return got[0] if got else None

    def json(self):
        return json.loads(self.body)


class Conn:
    """One connection of an engine; the script of the engine writes through it."""

    def __init__(self, sock, engine):
        self.sock, self.engine, self.buf, self.gone = sock, engine, b"", threading.Event()
        self.is_head = False  # the request's answer has no body

    def fill(self):
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError
        self.buf += data

    def line(self):
        while b"\r\n" not in self.buf:
            self.fill()
        text, self.buf = self.buf.split(b"\r\n", 1)
        return text.decode("latin-1")

    def take(self, n):
        parts, have = [self.buf], len(self.buf)
        while have < n:
            self.buf = b""
            self.fill()
            parts.append(self.buf)
            have += len(self.buf)
        data = b"".join(parts)
        data, self.buf = data[:n], data[n:]
        return data

    def request(self):
        method, path, version = self.line().split(" ")
        assert version == "HTTP/1.1", version
        self.is_head = method == "HEAD"
        headers = []
        while True:
            text = self.line()
            if not text:
                break
            headers.append(tuple(text.split(": ", 1)))
        req = Request(method, path, headers, b"", self)
        if req.header("content-length") is not None:
            assert req.header("transfer-encoding") is None
            self.engine.begun.append(req)
            req.body = self.take(int(req.header("content-length")))
        elif req.header("transfer-encoding") == "chunked":
            self.engine.begun.append(req)
            while True:
                size = int(self.line(), 16)
                req.body += self.take(size)
                assert self.take(2) == b"\r\n"
                if not size:
                    break
        else:
            self.engine.begun.append(req)
        return req

    def send(self, data):
        self.sock.sendall(data)

    def head(self, status, headers=(), length=None, reason="Fine"):
        text = f"HTTP/1.1 {status} {reason}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers)
        if length is None:
            text += "Transfer-Encoding: chunked\r\n"
        else:
            text += f"Content-Length: {length}\r\n"
        self.send((text + "\r\n").encode("latin-1"))

    def chunk(self, data):
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def last(self):
        self.send(b"0\r\n\r\n")

    def reply(self, status, body, headers=None, reason="Fine"):
        """A whole answer; dict and list as JSON."""
        if not isinstance(body, (bytes, str)):
            body, headers = json.dumps(body), headers or {"content-type": "application/json"}
        body = body.encode() if isinstance(body, str) else body
        self.head(status, (headers or {}).items(), len(body), reason)
        if not self.is_head:
            self.send(body)

    def events(self, text, cut=None):
        """An event stream, in pieces of cut bytes."""
        data = text.encode() if isinstance(text, str) else text
        self.head(200, [("content-type", "text/event-stream")])
        for at in range(0, len(data), cut or len(data)):
            self.chunk(data[at : at + (cut or len(data))])
        self.last()

    def reset(self):
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionError

    def hang(self, seconds=30.0):
        """Waits for the other side to close: True if it did."""
        self.sock.settimeout(seconds)
        try:
            while True:
                if not self.sock.recv(65536):
                    return True
        except (socket.timeout, TimeoutError):
            return False
        except OSError:
            return True


class Engine:
    """script(engine, request) answers through request.conn; what it returns is ignored. Requests are kept in
    order of arrival, `ended` counts connections that the sidecar closed while a script waited."""

    def __init__(self, script, host="127.0.0.1", port=0, tls=None):
        self.script, self.host, self.tls = script, host, tls
        self.requests, self.begun, self.errors, self.ended = [], [], [], 0
        self.open = 0
        self.accepted = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.socket(family)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind((host, port))
        self.listener.listen(1024)
        self.port = self.listener.getsockname()[1]
        self.authority = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.conns = set()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.conns.add(sock)
            self.open += 1
            self.accepted += 1
            threading.Thread(target=self.serve, args=(sock,), daemon=True).start()

    def serve(self, sock):
        try:
            if self.tls:
                plain, sock = sock, self.tls.wrap_socket(sock, server_side=True)
                self.conns.discard(plain)
                self.conns.add(sock)
            conn = Conn(sock, self)
            while True:
                req = conn.request()
                self.requests.append(req)
                self.script(self, req)
        except (ConnectionError, OSError):
            pass
        except Exception as e:  # pylint: disable=broad-except
            self.errors.append(repr(e))
        finally:
            sock.close()
            self.conns.discard(sock)
            self.open -= 1

    def calls(self, path):
        return [r for r in self.requests if r.path.split("?")[0] == path]

    def generated(self):
        return [r for r in self.requests if r.path.startswith("/v1/")]

    def close(self):
        try:
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed before
        self.listener.close()
        self.hang_up()

    def hang_up(self):
        """Closes every connection, as far as the other side has not."""
        for sock in list(self.conns):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def certificate(folder):
    """Self-signed, for 127.0.0.1 and localhost; None without the openssl program."""
    made = [os.path.join(folder, f) for f in ("engine.crt", "engine.key")]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=engine",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-out",
        made[0],
        "-keyout",
        made[1],
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return made


# ---- engines that refuse what the real ones refuse ----


def refuse(cond, why):
    if cond:
        raise Refused(why)


def vllm_check(body):
    refuse(
        body.get("stream_options") is not None and not body.get("stream"),
        "Stream options can only be defined when `stream=True`.",
    )
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    refuse(limit is not None and limit < 1, "max_tokens must be at least 1")
    refuse(limit is not None and (body.get("min_tokens") or 0) > limit, "min_tokens must be <= max_tokens")


HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[412, 413], [88]],
    "remote_engine_id": "pf-1",
    "remote_request_id": "chatcmpl-7",
    "remote_host": "127.0.0.1",
    "remote_port": 5610,
    "tp_size": 1,
    "remote_num_tokens": 61,
    "remote_blocks_expiry_time": 1.5,
    "transfer_mode": "pull",
}


def vllm_prefill(handoff=HANDOFF, extra=None):
    def script(engine, req):
        body = req.json()
        try:
            vllm_check(body)
            kv = body.get("kv_transfer_params") or {}
            refuse(not kv.get("do_remote_decode") or kv.get("do_remote_prefill"), "not a producer's request")
            refuse(body.get("max_completion_tokens", body.get("max_tokens")) != 1, "more than one token")
            refuse(body.get("stream"), "prefill must not stream")
            refuse(req.header("accept-encoding"), "compression asked for")
        except Refused as e:
            req.conn.reply(400, {"error": {"message": str(e)}})
            return
        req.conn.reply(
            200,
            {
                "id": "chatcmpl-7",
                "object": "chat.completion",
                "model": body.get("model"),
                "choices": [
                    {"index": 0, "message": {"role": "assistant", "content": "Secret"}, "finish_reason": "length"}
                ],
                "kv_transfer_params": handoff,
                **(extra or {}),
            },
        )

    return script


def answer(req, n=3):
    """What a decode engine says, streamed or not."""
    body = req.json()
    if not body.get("stream"):
        req.conn.reply(
            200,
            {
                "id": "d",
                "object": "chat.completion",
                "choices": [{"index": 0, "message": {"role": "assistant", "content": "Blue"}, "finish_reason": "stop"}],
            },
        )
        return
    parts = [
        {"id": "d", "choices": [{"index": 0, "delta": {"content": f"t{i}"}, "finish_reason": None}]} for i in range(n)
    ]
    parts.append({"id": "d", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        parts.append({"id": "d", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": n}})
    req.conn.events("".join(f"data: {json.dumps(p)}\n\n" for p in parts) + "data: [DONE]\n\n", 37)


def vllm_decode(handoff=HANDOFF):
    def script(engine, req):
        body = req.json()
        try:
            vllm_check(body)
            refuse(body.get("kv_transfer_params") not in (None, handoff), "handoff changed")
        except Refused as e:
            req.conn.reply(400, {"error": {"message": str(e)}})
            return
        answer(req)

    return script


def sglang(mode, partner=None, script=None, version=VERSION, port=8998, expected=8998):
    """Strict: refuses a request without its tuple. partner: the other engine, waited for as the real pair
    does; script(engine, request) answers the inference call instead."""

    def run(engine, req):
        path = req.path.split("?")[0]
        if path == "/server_info":
            engine_info = {"version": version, "disaggregation_mode": mode}
            if port is not None:
                engine_info["disaggregation_bootstrap_port"] = port
            req.conn.reply(200, engine_info)
            return
        if path == "/abort_request":
            req.conn.reply(200, "")
            return
        body = req.json()
        room, rid = body.get("bootstrap_room"), body.get("rid")
        if (
            type(room) is not int
            or not 0 <= room < 2**63
            or not re.fullmatch("[0-9a-f]{32}", str(rid))
            or body.get("bootstrap_port") != expected
            or "[" in body.get("bootstrap_host", "[")
        ):
            req.conn.reply(400, {"object": "error", "message": "bad bootstrap tuple", "code": 400})
            return
        if partner:
            other = partner()
            if not wait_for(lambda: [r for r in other.generated() if r.json().get("bootstrap_room") == room], 5):
                req.conn.reply(500, {"object": "error", "message": "nobody in the room", "code": 500})
                return
        (script or (lambda e, q: answer(q)))(engine, req)

    return run


IDS = [1, 733, 16289, 28793, 5156]


def trt_context(finish="not_finished", nested=False, change=None):
    def script(engine, req):
        body = req.json()
        d = body.get("disaggregated_params") or {}
        known = {
            "model",
            "messages",
            "prompt",
            "max_tokens",
            "temperature",
            "stream",
            "disaggregated_params",
            "tools",
            "n",
            "best_of",
            "use_beam_search",
            "seed",
        }
        if (
            d.get("request_type") != "context_only"
            or set(d) != {"request_type", "disagg_request_id"}
            or not 2**40 <= d["disagg_request_id"] < 2**63
            or body.get("stream")
            or set(body) - known
        ):
            req.conn.reply(400, {"message": f"refused {sorted(set(body) - known)}"})
            return
        i = d["disagg_request_id"]
        chat = "chat" in req.path
        choice = {
            "index": 0,
            "finish_reason": finish,
            "disaggregated_params": {
                "request_type": "context_only",
                "first_gen_tokens": [9181],
                "ctx_request_id": i,
                "encoded_opaque_state": "AAECAwQ=",
                "draft_tokens": None,
                "disagg_request_id": i,
                "ctx_dp_rank": 0,
                "ctx_info_endpoint": "tcp://10.42.3.17:41000",
                "later": [i],
            },
        }
        choice.update({"message": {"role": "assistant", "content": "Ray"}} if chat else {"text": "Ray"})
        reply = {
            "id": "c1",
            "created": 5,
            "object": "chat.completion",
            "model": "m",
            "choices": [choice],
            "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
            "prompt_token_ids": [IDS] if nested else IDS,
        }
        if change:
            change(reply)
        req.conn.reply(200, reply)

    return script


def trt_generation(engine, req):
    body = req.json()
    d = body.get("disaggregated_params") or {}
    ids = body.get("prompt_token_ids") if "chat" in req.path else body.get("prompt")
    if (
        d.get("request_type") != "generation_only"
        or ids not in (IDS, [IDS])
        or d.get("ctx_request_id") != d.get("disagg_request_id")
        or d.get("later") != [d["ctx_request_id"]]
        or d.get("ctx_usage", {}).get("prompt_tokens") != 5
    ):
        req.conn.reply(400, {"message": "bad generation request"})
        return
    answer(req)


# ---- the sidecar ----


class Sidecar:
    before = []  # put before the command

    def __init__(self, decode_port, adapter=None, wait=True, **env):
        """A port may be taken between its choice and the sidecar's start: then others are tried."""
        for _ in range(5):
            self.start(decode_port, adapter, env)
            if not wait or wait_for(lambda: self.proc.poll() is not None or self.up(), 10) and self.up():
                return
            self.proc.kill()
            self.proc.wait()
            self.reader.join(5)
            if b"Address already in use" not in self.log:
                break
        raise RuntimeError(f"the sidecar does not start: {self.log.decode()}")

    def start(self, decode_port, adapter, env):
        self.port, self.metrics = free_port(), free_port()
        e = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVPICK_"))}
        e.update(
            {
                "DYN_SIDECAR_PORT": str(self.port),
                "DYN_DECODE_ENGINE_PORT": str(decode_port),
                "KVPICK_SIDECAR_METRICS_PORT": str(self.metrics),
                "KVPICK_SIDECAR_BIND": "127.0.0.1",
            }
        )
        if adapter:
            e["DYN_SIDECAR_PD_ADAPTER"] = adapter
        e.update({k: str(v) for k, v in env.items()})
        self.proc = subprocess.Popen(
            [*self.before, os.path.join(BUILD, "kvpick-sidecar")],
            env=e,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        self.log = b""
        self.reader = threading.Thread(target=self.read_log, daemon=True)
        self.reader.start()

    def read_log(self):
        for line in self.proc.stderr:
            self.log += line

    def up(self):
        try:
            with Client(self.port) as c:
                return c.ask("GET", "/health").status == 200
        except OSError:
            return False

    def metric(self, name):
        with Client(self.metrics) as c:
            text = c.ask("GET", "/metrics").body.decode()
        got = re.search(rf"^dynamo_pd_sidecar_{re.escape(name)} (\S+)$", text, re.M)
        return float(got.group(1)) if got else None

    def rss_kb(self):
        with open(f"/proc/{self.proc.pid}/status", encoding="ascii") as f:
            return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))

    def signal(self, sig=signal.SIGTERM):
        self.proc.send_signal(sig)

    def wait(self, seconds=20.0):
        code = self.proc.wait(seconds * SLOW)
        self.reader.join(5)  # all of its log
        return code

    def stop(self):
        if self.proc.poll() is None:
            self.signal()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.proc.kill()
            return self.proc.wait()


class Reply:
    def __init__(self, status, headers, body, ended, raw_chunks):
        self.status, self.headers, self.body, self.ended, self.chunks = status, headers, body, ended, raw_chunks

    def header(self, name):
        got = [v for k, v in self.headers if k.lower() == name]
        return got[0] if got else None

    def json(self):
        return json.loads(self.body)

    def code(self):
        try:
            return self.json()["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return None


class Client:
    """A connection to the sidecar. send and read may be used apart."""

    def __init__(self, port, timeout=20.0, host="127.0.0.1", rcvbuf=None):
        self.sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if rcvbuf:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.sock.settimeout(timeout * SLOW)
        self.sock.connect((host, port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buf = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def send(self, method, path, body=b"", headers=(), length=None, chunked=None, version="1.1"):
        pairs = list(headers.items()) if isinstance(headers, dict) else list(headers)
        if not isinstance(body, bytes):
            body = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        text = f"{method} {path} HTTP/{version}\r\nHost: test\r\n"
        text += "".join(f"{k}: {v}\r\n" for k, v in pairs)
        if chunked:
            text += "Transfer-Encoding: chunked\r\n"
            body = (
                b"".join(
                    b"%x\r\n%s\r\n" % (len(body[i : i + chunked]), body[i : i + chunked])
                    for i in range(0, len(body), chunked)
                )
                + b"0\r\n\r\n"
            )
        elif body or length is not None or method == "POST":
            text += f"Content-Length: {len(body) if length is None else length}\r\n"
        self.sock.sendall((text + "\r\n").encode("latin-1") + body)

    def fill(self):
        data = self.sock.recv(65536)
        self.buf += data
        return bool(data)

    def line(self):
        while b"\r\n" not in self.buf:
            if not self.fill():
                raise ConnectionError("ended in a line")
        text, self.buf = self.buf.split(b"\r\n", 1)
        return text.decode("latin-1")

    def head(self):
        version, status = self.line().split(" ", 2)[:2]
        assert version == "HTTP/1.1"
        headers = []
        while True:
            text = self.line()
            if not text:
                return int(status), headers
            headers.append(tuple(text.split(": ", 1)))

    def upto(self, n):
        while len(self.buf) < n:
            if not self.fill():
                return False
        return True

    def chunk(self):
        """The next chunk's bytes, b"" at the clean end, None when the connection broke."""
        try:
            size = int(self.line(), 16)
            if not self.upto(size + 2):
                return None
        except (ConnectionError, OSError):
            return None
        data, self.buf = self.buf[:size], self.buf[size + 2 :]
        return data

    def read(self, is_head=False):
        status, headers = self.head()
        while status == 100:
            status, headers = self.head()
        reply = Reply(status, headers, b"", "clean", [])
        if is_head or status in (204, 304):
            return reply
        if reply.header("transfer-encoding") == "chunked":
            while True:
                data = self.chunk()
                if data is None:
                    reply.ended = "broken"
                    reply.body += self.buf
                    return reply
                if not data:
                    return reply
                reply.body += data
                reply.chunks.append(data)
        if reply.header("content-length") is not None:
            n = int(reply.header("content-length"))
            if not self.upto(n):
                reply.ended = "broken"
            reply.body, self.buf = self.buf[:n], self.buf[n:]
            return reply
        try:
            while self.fill():
                pass
        except ConnectionError:
            reply.ended = "broken"
        reply.body, self.buf = self.buf, b""
        return reply

    def ask(self, method, path, body=b"", headers=(), **how):
        self.send(method, path, body, headers, **how)
        return self.read(method == "HEAD")

    def closed(self):
        """True when the sidecar closed the connection."""
        try:
            while self.fill():
                pass
            return True
        except ConnectionError:
            return True
        except (socket.timeout, TimeoutError):
            return False

    def drop(self):
        self.sock.close()

    def reset(self):
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def ask(port, body, prefill=None, headers=(), path="/v1/chat/completions", method="POST", **how):
    """One request on a connection of its own."""
    pairs = list(headers.items()) if isinstance(headers, dict) else list(headers)
    pairs.append(("content-type", "application/json"))
    if prefill is not None:
        pairs.append(("x-prefiller-host-port", prefill))
    with Client(port) as c:
        return c.ask(method, path, body, pairs, **how)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 9}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}


def silent(engine, req):
    if req.conn.hang():
        engine.ended += 1
    raise ConnectionError


def fixed(status, body, headers=None, reason="Fine"):
    return lambda engine, req: req.conn.reply(status, body, headers, reason)


class Pair:
    """Prefill engine, decode engine, sidecar. The test sets tap."""

    tap = None

    def __init__(self, prefill, decode, adapter="vllm_nixl", **env):
        self.p, self.d = Engine(prefill), Engine(decode)
        self.s = Sidecar(self.d.port, adapter, **env)
        self.port = self.s.port

    def ask(self, body, **how):
        return ask(self.port, body, self.p.authority, **how)

    def idle(self):
        """No request runs any more."""
        return wait_for(lambda: self.s.metric("requests_inflight") == 0, 5)

    def end(self, name):
        self.tap.ok(self.idle(), f"{name}: no request is left running")
        self.tap.ok(self.s.stop() == 0, f"{name}: the sidecar ends with 0", self.s.log.decode())
        self.tap.same(self.p.errors + self.d.errors, [], f"{name}: the engines understood everything")
        self.p.close()
        self.d.close()


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
        return True
    except OSError:
        return False
