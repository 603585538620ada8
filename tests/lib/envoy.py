"""Plays the proxy of ext_proc: protobuf written by hand, so that it shares nothing with the server, and streams
over grpcio. Where this Python has no grpcio but the system's has, the test starts itself again with that one."""
import os
import queue
import subprocess
import sys
import threading

from node import SLOW, skip

try:
    import grpc
except ImportError:
    SYSTEM = "/usr/bin/python3"
    if os.path.realpath(sys.executable) == os.path.realpath(SYSTEM) or not os.path.exists(SYSTEM) or subprocess.run(
            [SYSTEM, "-c", "import grpc"], capture_output=True, check=False).returncode:
        skip("python3-grpcio is not installed")
    os.execv(SYSTEM, [SYSTEM, *sys.argv])

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
WAIT = 10 * SLOW
DUPLEX, BUFFERED, STREAMED, NONE = 4, 2, 1, 0
REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY, REQUEST_TRAILERS, RESPONSE_TRAILERS = 2, 3, 4, 5, 6, 7
ANSWER = {1: "request_headers", 2: "response_headers", 3: "request_body", 4: "response_body",
          5: "request_trailers", 6: "response_trailers", 7: "immediate"}
SUBSET = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
SERVED = ("envoy.lb", "x-gateway-destination-endpoint-served")


# ---- protobuf ----

def varint(n):
    out = b""
    while n >= 128:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def num(field, n):
    return varint(field << 3) + varint(n) if n else b""


def sub(field, data):
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def fields(data):
    """{field: [values]} of a message; submessages stay bytes."""
    out, i = {}, 0

    def take():
        nonlocal i
        n = shift = 0
        while True:
            n |= (data[i] & 127) << shift
            shift += 7
            i += 1
            if data[i - 1] < 128:
                return n
    while i < len(data):
        key = take()
        if key & 7 == 0:
            out.setdefault(key >> 3, []).append(take())
        else:
            n = take()
            out.setdefault(key >> 3, []).append(data[i:i + n])
            i += n
    return out


def one(message, *path, default=b""):
    """The value at a path of field numbers."""
    for p in path[:-1]:
        message = fields(message).get(p, [b""])[-1]
    return fields(message).get(path[-1], [default])[-1]


def value(v):
    return sub(3, v) if isinstance(v, str) else sub(6, b"".join(sub(1, value(x)) for x in v))


def metadata(place, v):
    namespace, key = place
    return sub(8, sub(1, sub(1, namespace) + sub(2, sub(1, sub(1, key) + sub(2, value(v))))))


def header_map(pairs):
    return sub(1, b"".join(sub(1, sub(1, k) + sub(3, v)) for k, v in pairs))


def headers(kind, pairs, end=False, config=None, more=b""):
    """more: encoded metadata. config: (request mode, response mode)."""
    out = sub(kind, header_map(pairs) + num(3, int(end))) + more
    if config:
        out += sub(11, num(1, config[0]) + num(2, config[1]) + num(3, 1))
    return out


def body(kind, data, end=False):
    return sub(kind, (sub(1, data) if data else b"") + num(2, int(end)))


def trailers(kind):
    return sub(kind, b"")


class Reply:
    """An answer of the picker."""

    def __init__(self, data):
        self.data = data
        all_fields = fields(data)
        self.kind = next((ANSWER[k] for k in all_fields if k in ANSWER), None)
        inner = next((v[-1] for k, v in all_fields.items() if k in ANSWER), b"")
        common = one(inner, 1)
        self.status = one(inner, 1, 1, default=0) if self.kind == "immediate" else 0
        self.text = one(inner, 3).decode() if self.kind == "immediate" else ""
        mutation = one(inner, 2) if self.kind == "immediate" else one(common, 2)
        self.set = {}
        for option in fields(mutation).get(1, []):
            self.set[one(option, 1, 1).decode()] = one(option, 1, 3).decode()
        self.removed = [x.decode() for x in fields(mutation).get(2, [])]
        self.clear_route_cache = one(common, 5, default=0)
        piece = fields(common).get(3)
        self.piece = one(piece[0], 3, 1) if piece else None
        self.end = bool(one(piece[0], 3, 2, default=0)) if piece else False
        self.destination = self.set.get("x-gateway-destination-endpoint")
        entry = one(data, 8, 1)
        self.metadata = one(entry, 2, 5, 1, 2, 3).decode() if entry else None

    def __repr__(self):
        return f"{self.kind} {self.status or ''} {self.text} {self.set} {self.piece!r}"[:300]


# ---- streams ----

class Stream:
    """One HTTP request as the proxy shows it to the picker."""

    def __init__(self, envoy):
        self.out, self.got = queue.Queue(), queue.Queue()
        self.call = envoy.method(iter(self.out.get, None), timeout=120)
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self):
        try:
            for message in self.call:
                self.got.put(Reply(message))
        except grpc.RpcError:
            pass
        self.got.put(None)

    def send(self, *messages):
        for m in messages:
            self.out.put(m)
        return self

    def reply(self):
        """The next answer; None when the stream has ended."""
        return self.got.get(timeout=WAIT)

    def silent(self, seconds=0.05):
        """No answer for a moment."""
        try:
            self.got.put(self.got.get(timeout=seconds))
            return False
        except queue.Empty:
            return True

    def half_close(self):
        self.out.put(None)
        return self

    def reset(self):
        self.call.cancel()
        self.out.put(None)

    def status(self):
        return self.call.code()

    def details(self):
        return self.call.details()


class Envoy:
    def __init__(self, target, credentials=None, options=()):
        opts = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1), *options]
        self.channel = (grpc.secure_channel(target, credentials, opts) if credentials
                        else grpc.insecure_channel(target, opts))
        self.method = self.channel.stream_stream(PROCESS)
        self.health_method = self.channel.unary_unary(CHECK)

    def stream(self, *messages):
        return Stream(self).send(*messages)

    def health(self, service):
        """The answer's bytes, or the gRPC status."""
        try:
            return self.health_method(sub(1, service) if service else b"", timeout=WAIT)
        except grpc.RpcError as e:
            return e.code()

    def close(self):
        self.channel.close()
