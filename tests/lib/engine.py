"""KV events for system tests: batches as engines send them, and an engine's publisher (tests/helpers/pubtool.c)."""
import struct
import subprocess

from node import BUILD, SLOW, free_port, wait_for, worker

BLOCK = 4


def pack(v):
    """msgpack, as far as engines use it."""
    if v is None:
        return b"\xc0"
    if isinstance(v, float):
        return b"\xcb" + struct.pack(">d", v)
    if isinstance(v, int):
        return bytes([v]) if 0 <= v < 128 else b"\xcf" + struct.pack(">Q", v)
    if isinstance(v, str):
        return b"\xda" + struct.pack(">H", len(v.encode())) + v.encode()
    if isinstance(v, dict):
        return b"\xde" + struct.pack(">H", len(v)) + b"".join(pack(k) + pack(x) for k, x in v.items())
    return b"\xdc" + struct.pack(">H", len(v)) + b"".join(pack(x) for x in v)


def tokens(first, blocks):
    """Tokens of `blocks` blocks that no other `first` shares."""
    return [first * 100000 + i for i in range(blocks * BLOCK)]


def stored(first, start, end, rank=None, **extra):
    """A batch that stores blocks start..end of prompt `first`; external hash of block i is first * 1000 + i + 1."""
    name = [first * 1000 + i + 1 for i in range(start, end)]
    event = {"type": "BlockStored", "block_hashes": name,
             "parent_block_hash": first * 1000 + start if start else None,
             "token_ids": tokens(first, end)[start * BLOCK:], "block_size": BLOCK, "lora_id": None,
             "medium": "GPU", "lora_name": None}
    event.update(extra)
    return pack([1.0, [event], rank])


def depth(node, first, blocks, **extra):
    """{(worker, rank): device blocks} of a prompt."""
    status, scores = node.call("POST", "/overlap_scores", dict(token_ids=tokens(first, blocks), **extra))
    if status != 200:
        raise RuntimeError(f"overlap_scores: {status} {scores}")
    return {(w["worker_id"], w["dp_rank"]): w["device_blocks"] for w in scores["workers"]}


def becomes(tap, node, first, blocks, want, name, **extra):
    """The index comes to hold so much of a prompt."""
    got = wait_for(lambda: (d := depth(node, first, blocks, **extra)) == want and d) or \
        depth(node, first, blocks, **extra)
    tap.same(got, want, name)


CLEAR = pack([1.0, [{"type": "AllBlocksCleared"}], None])


class Engine:
    """A publisher with a replay service (tests/helpers/pubtool.c)."""

    def __init__(self, replay=True):
        self.proc = subprocess.Popen([f"{BUILD}/tests/helpers/pubtool"], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True, bufsize=1)
        self.joins = 0
        self.at = f"tcp://127.0.0.1:{free_port()}"
        self.replay_at = f"tcp://127.0.0.1:{free_port()}" if replay else None
        self.do(f"bind {self.at}")
        if replay:
            self.do(f"replay {self.replay_at}")

    def do(self, line):
        self.proc.stdin.write(line + "\n")
        self.proc.stdin.flush()
        answer = self.proc.stdout.readline().strip()
        if not answer.startswith("ok"):
            raise RuntimeError(f"{line[:60]}: {answer}")
        return answer

    def send(self, seq, payload, verb="pub"):
        self.do(f"{verb} {seq} {payload.hex()}")

    def subscribed(self):
        """Waits for one more subscription than before."""
        self.joins += 1
        self.do(f"joined {self.joins} {20000 * SLOW}")

    def asked(self, n):
        """Waits for the n-th replay request; its start."""
        return int(self.do(f"requested {n} {10000 * SLOW}").split()[2])

    def body(self, worker_id, **extra):
        more = {"replay_endpoint": self.replay_at} if self.replay_at else {}
        return worker(worker_id, self.at, **more, **extra)

    def register(self, node, worker_id, **extra):
        status, record = node.call("POST", "/workers", self.body(worker_id, **extra))
        if status != 201 or record["lifecycle"] != "schedulable":
            raise RuntimeError(f"worker {worker_id}: {status} {record}")
        self.subscribed()

    def close(self):
        self.proc.stdin.close()
        self.proc.wait(10)
