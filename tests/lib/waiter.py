"""Clients of the queue for system tests: one request a connection, answered when its turn has come."""
import json
import os
import random
import socket
import time
import zlib

LONG = os.environ.get("KVP_LONG") == "1"  # the long forms of tests, see `make long`
SEED = int(os.environ.get("KVP_SEED", time.time_ns()))


def seeded():
    print(f"# KVP_SEED={SEED}")
    return random.Random(SEED)


def prompt(sid, isl=4):
    """A prompt that shares nothing with any other id."""
    blocks = range(isl // 4)
    return {"model_name": "default", "isl_tokens": isl, "block_hashes": [zlib.crc32(f"b{sid}/{i}".encode()) for i in blocks],
            "sequence_hashes": [zlib.crc32(f"s{sid}/{i}".encode()) for i in blocks]}


def request(sid, isl=4, **more):
    """The bytes of a select_and_reserve."""
    body = json.dumps({**prompt(sid, isl), "selection_id": sid, **more}).encode()
    return (b"POST /select_and_reserve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body)


class Client:
    """A connection."""

    def __init__(self, node):
        self.node = node
        self.sock = socket.create_connection(("127.0.0.1", node.port))
        self.head = b""

    def answered(self, seconds=0.0):
        """Status of the answer; 0 for a broken connection, None while there is none."""
        self.sock.settimeout(seconds or 0.001)
        while len(self.head) < 12:
            try:
                more = self.sock.recv(65536)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError:
                return 0
            if not more:
                return 0
            self.head += more
        return int(self.head.split()[1])

    def served_by(self):
        """The HTTP process that holds the other end of this connection."""
        ends = (self.node.port, self.sock.getsockname()[1])
        with open("/proc/net/tcp", encoding="ascii") as f:
            for line in list(f)[1:]:
                word = line.split()
                if tuple(int(word[i].split(":")[1], 16) for i in (1, 2)) == ends:
                    inode = f"socket:[{word[9]}]"
        for pid in self.node.children()["kvpick-httpd"]:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    if os.readlink(f"/proc/{pid}/fd/{fd}") == inode:
                        return pid
                except OSError:
                    pass
        return None

    def reset(self):
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()

    def close(self):
        self.sock.close()


class Waiter(Client):
    """One select_and_reserve on a connection of its own; the answer is read when it is there."""

    def __init__(self, node, sid, isl=4, **more):
        super().__init__(node)
        self.sid = sid
        self.sock.sendall(request(sid, isl, **more))


def part(node):
    return node.call("GET", "/loads")[1][0]


def waiting(node):
    return part(node)["pending_count"]


def total(node):
    return [sum(r[k] for r in part(node)["loads"]) for k in (
        "potential_prefill_tokens", "potential_decode_blocks", "active_requests")]


def free(node, sid):
    return node.call("DELETE", f"/reservations/{sid}")[0]
