"""Replicas for system tests: a bare publisher and subscriber (tests/helpers/peertool.c), messages, loads."""
import subprocess

from node import BUILD, free_port, wait_for

TOPIC = b"dynamo.slot-tracker.v1"
AFFINITY = b"dynamo.session-affinity.v1"


class Peer:
    """Sockets of a replica that is no node."""

    def __init__(self):
        self.proc = subprocess.Popen([f"{BUILD}/tests/helpers/peertool"], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True, bufsize=1)
        self.at = f"tcp://127.0.0.1:{free_port()}"
        self.joins = 0
        self.do(f"bind {self.at}")

    def ask(self, line):
        self.proc.stdin.write(line + "\n")
        self.proc.stdin.flush()
        return self.proc.stdout.readline().strip()

    def do(self, line):
        answer = self.ask(line)
        if not answer.startswith("ok"):
            raise RuntimeError(f"{line[:60]}: {answer[:200]}")
        return answer

    def join(self, n=1):
        """Waits for n more subscriptions: nothing published from now on is lost."""
        self.joins += n
        self.do(f"joined {self.joins} 20000")

    def send(self, *frames):
        self.do("send " + " ".join(f.hex() or "-" for f in frames))

    def event(self, **kw):
        self.send(TOPIC, event(**kw))

    def listen(self, port):
        self.do(f"sub tcp://127.0.0.1:{port}")

    def recv(self, ms=10000):
        """The next message as frames, None if there is none."""
        answer = self.ask(f"recv {ms}")
        return [bytes.fromhex(h) for h in answer.split()[1:]] if answer.startswith("ok") else None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.proc.stdin.close()
        self.proc.wait(10)
        self.proc.stdout.close()


def pack(v):
    """msgpack in the smallest forms."""
    if v is None:
        return b"\xc0"
    if isinstance(v, bool):
        return b"\xc3" if v else b"\xc2"
    if isinstance(v, int):
        for first, limit, size in ((None, 0x80, 1), (0xcc, 1 << 8, 1), (0xcd, 1 << 16, 2), (0xce, 1 << 32, 4),
                                   (0xcf, 1 << 64, 8)):
            if v < limit:
                return (b"" if first is None else bytes([first])) + v.to_bytes(size, "big")
    if isinstance(v, str):
        raw = v.encode()
        n = len(raw)
        head = (bytes([0xa0 | n]) if n < 32 else b"\xd9" + bytes([n]) if n < 256
                else b"\xda" + n.to_bytes(2, "big"))
        return head + raw
    if isinstance(v, dict):
        return bytes([0x80 | len(v)]) + b"".join(pack(k) + pack(x) for k, x in v.items())
    n = len(v)
    return (bytes([0x90 | n]) if n < 16 else b"\xdc" + n.to_bytes(2, "big")) + b"".join(map(pack, v))


def event(data="Free", rid="a", worker=1, rank=0, router=11, model="default", group="default", size=4, lora=None):
    """A message of the lifecycle topic; data: "Free", "MarkPrefillCompleted", or add(...)."""
    return pack({"model_name": model, "routing_group": group, "block_size": size,
                 "event": {"request_id": rid, "worker": {"worker_id": worker, "dp_rank": rank}, "data": data,
                           "router_id": router, "lora_name": lora}})


def add(seq, tokens, track=True, output=None):
    hint = None if tokens is None else {"initial_effective_prefill_tokens": tokens,
                                        "expected_prefill_duration": None}
    return {"AddRequest": {"token_sequence": seq, "track_prefill_tokens": track, "expected_output_tokens": output,
                           "prefill_load_hint": hint}}


def unpack(raw):
    """The value that a message holds."""
    value, rest = _unpack(raw)
    assert not rest
    return value


def _unpack(b):
    t, b = b[0], b[1:]
    if t < 0x80:
        return t, b
    if t < 0x90:
        return _pairs(t & 15, b)
    if t < 0xa0:
        return _items(t & 15, b)
    if t < 0xc0:
        return b[:t & 31].decode(), b[t & 31:]
    if t in (0xc0, 0xc2, 0xc3):
        return {0xc0: None, 0xc2: False, 0xc3: True}[t], b
    size = {0xcc: 1, 0xcd: 2, 0xce: 4, 0xcf: 8, 0xd9: 1, 0xda: 2, 0xdb: 4, 0xdc: 2, 0xdd: 4}[t]
    n, b = int.from_bytes(b[:size], "big"), b[size:]
    if t < 0xd0:
        return n, b
    return (b[:n].decode(), b[n:]) if t < 0xdc else _items(n, b)


def _items(n, b):
    out = []
    for _ in range(n):
        v, b = _unpack(b)
        out.append(v)
    return out, b


def _pairs(n, b):
    out = {}
    for _ in range(n):
        k, b = _unpack(b)
        out[k], b = _unpack(b)
    return out, b


def loads(node, model="default", group="default"):
    """{(worker, rank): (requests, blocks, prefill tokens)}"""
    return {(r["worker_id"], r["dp_rank"]): (r["active_requests"], r["potential_decode_blocks"],
                                             r["potential_prefill_tokens"])
            for part in node.call("GET", f"/loads?model_name={model}&routing_group={group}")[1]
            for r in part["loads"]}


def total(node):
    """Sums of the loads of the default partition."""
    return tuple(map(sum, zip(*loads(node).values()))) or (0, 0, 0)


def events(node):
    """{what became of events: how many}, without those of which there were none."""
    out = {}
    for line in node.call("GET", "/metrics")[1].splitlines():
        if line.startswith("kvpick_peer_event_"):
            name, n = line[len("kvpick_peer_event_"):].split()
            if int(float(n)):
                out[name.removesuffix("_total")] = int(float(n))
    return out


def linked(node, peer):
    """Makes the node listen to a bare replica and waits for its subscription."""
    node.call("POST", "/replica_sync/register_peer", {"endpoint": peer.at})
    peer.join()


def equal(a, b):
    """Waits until two nodes show the same loads."""
    return wait_for(lambda: loads(a) == loads(b))
