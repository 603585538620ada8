"""Random clients of a node for the soak: each call is one act of a client, good or bad, and judges the answer.

A client is one process with its own generator; what it finds wrong it tells as text."""
import contextlib
import http.client
import json
import random
import socket
import struct
import time

from engine import BLOCK, CLEAR, pack, stored, tokens
from node import worker

MODELS = ("default", "other")
PROMPTS = 40      # prompts known to all clients and engines
SHARED_IDS = 30   # ids that several clients book
KEPT_MAX = 60     # live bookings a client remembers
CHURNED = range(10, 16)
QUEUE_S = 0.3     # so long a client waits its turn, then it leaves


class Client:
    def __init__(self, port, number, seed):
        self.port, self.number = port, number
        self.rnd = random.Random(f"{seed}/{number}")
        self.conn = None
        self.mine = {}      # id -> time of booking: live as far as this client knows
        self.counts, self.faults = {}, []
        self.serial = 0
        self.acts = [(self.book, 24), (self.free_one, 16), (self.progress, 10), (self.forget, 2),
                     (self.duplicate, 5), (self.shared, 5), (self.replay, 7), (self.explicit, 5), (self.select, 6),
                     (self.look, 8), (self.session, 6), (self.bad, 8), (self.unknown, 3), (self.leave, 9),
                     (self.leave_pipelined, 3), (self.leave_waiting, 2)]

    # -- talking --

    def fault(self, text):
        if len(self.faults) < 20:
            self.faults.append(f"client {self.number}: {text}")

    def call(self, method, path, body=None, legal=(200,), headers=None, raw=None):
        """One exchange on the kept connection; checks status and that the answer is JSON."""
        if self.conn is None or self.rnd.random() < 0.02:
            self.hang_up()
            self.conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        head = dict(headers or {})
        text = raw
        if body is not None:
            text = json.dumps(body)
            head.setdefault("Content-Type", "application/json")
        patient = not path.startswith("/select")
        try:
            self.conn.request(method, path, text, head)
            self.conn.sock.settimeout(60 if patient else QUEUE_S)
            reply = self.conn.getresponse()
            status, data = reply.status, reply.read()
            if reply.will_close:
                self.hang_up()
        except (OSError, http.client.HTTPException) as e:
            self.hang_up()
            if isinstance(e, TimeoutError) and not patient:
                self.counts["gave up"] = self.counts.get("gave up", 0) + 1
                for _ in range(3): # its own bookings are what it waits for
                    self.free_one()
                return 0, None
            self.fault(f"{method} {path}: {type(e).__name__} {e}")
            return 0, None
        try:
            data = json.loads(data) if path != "/metrics" else data
        except ValueError:
            self.fault(f"{method} {path}: answer is no JSON: {data[:200]}")
        if status not in legal:
            self.fault(f"{method} {path} {str(text)[:200]}: {status} {str(data)[:300]}")
        self.counts[status] = self.counts.get(status, 0) + 1
        return status, data

    def hang_up(self):
        if self.conn is not None:
            self.conn.close()
        self.conn = None

    def new_id(self):
        self.serial += 1
        return f"c{self.number}-{self.serial}" + "x" * self.rnd.choice((0, 0, 0, 10, 300, 4000))

    def prompt(self):
        first = self.rnd.choice((self.rnd.randrange(1, PROMPTS), self.rnd.randrange(1000, 40000)))
        if self.rnd.random() < 0.3:
            n = self.rnd.choice((1, 8, 200))
            return {"block_hashes": [first * 1000 + i for i in range(n)], "isl_tokens": n * BLOCK,
                    "sequence_hashes": [first * 999983 + i for i in range(n)]}
        return {"token_ids": tokens(first, self.rnd.choice((1, 4, 16, 100)))[:-self.rnd.randrange(1, BLOCK)]}

    def request(self, **more):
        body = {"model_name": self.rnd.choice(MODELS), **self.prompt(), **more}
        for key, odds, make in (
                ("expected_output_tokens", 0.2, lambda: self.rnd.randrange(1, 5000)),
                ("priority_jump", 0.1, lambda: self.rnd.random() * 10),
                ("strict_priority", 0.1, lambda: self.rnd.randrange(4)),
                ("allowed_worker_ids", 0.1, lambda: [1, 2, *self.rnd.sample(CHURNED, 3)]),
                ("affinity_target", 0.05, lambda: {"worker_id": self.rnd.choice(CHURNED)}),
                ("routing_constraints", 0.05, lambda: {"preferred_taints": {"fast": 2.0}}),
                ("router_config_override", 0.1, lambda: {"router_temperature": self.rnd.random(),
                                                         "overlap_score_credit": 0.5})):
            if self.rnd.random() < odds:
                body[key] = make()
        return body

    # 500: the worker went while it was chosen; 503: nobody is left who may be chosen, or full.
    BOOK_LEGAL = (200, 400, 409, 500, 503)

    def note(self, status, reply):
        if status == 200:
            self.mine[reply["selection_id"]] = time.monotonic()
        elif status == 500 and "no longer schedulable" not in str(reply):
            self.fault(f"500: {reply}")

    # -- acts --

    def book(self):
        named = {"selection_id": self.new_id()} if self.rnd.random() < 0.8 else {}
        legal = (200, 500, 503)
        self.note(*self.call("POST", "/select_and_reserve", self.request(**named), legal))

    def pick(self):
        return self.rnd.choice(list(self.mine)) if self.mine else None

    def free_one(self):
        for _ in range(1 + len(self.mine) // KEPT_MAX):
            sid = self.pick()
            if sid is None:
                return
            self.mine.pop(sid)
            # 404: expired, or its worker went
            self.call("DELETE", f"/reservations/{sid}", legal=(200, 404))

    def progress(self):
        sid = self.pick()
        if sid is None:
            return
        if self.rnd.random() < 0.5:
            self.call("POST", f"/reservations/{sid}/prefill_complete", legal=(200, 404))
        else:
            body = self.rnd.choice(({}, {"decay_fraction": self.rnd.random()}))
            self.call("POST", f"/reservations/{sid}/output_block", body, legal=(200, 404, 503))

    def forget(self):
        if self.mine and len(self.mine) < KEPT_MAX:
            self.mine.pop(self.pick())

    def duplicate(self):
        sid = self.pick()
        if sid is None:
            return
        self.note(*self.call("POST", "/select_and_reserve", self.request(selection_id=sid), self.BOOK_LEGAL))

    def shared(self):
        sid = f"shared-{self.rnd.randrange(SHARED_IDS)}"
        if self.rnd.random() < 0.5:
            self.call("POST", "/select_and_reserve", self.request(selection_id=sid), self.BOOK_LEGAL)
        else:
            self.call("DELETE", f"/reservations/{sid}", legal=(200, 404))

    def replay(self):
        body = self.request(selection_id=self.new_id())
        status, _ = self.call("POST", "/select", body, (200, 500, 503))
        if status != 200 or self.rnd.random() < 0.2:
            return
        again = {"model_name": body["model_name"], "selection_id": body["selection_id"]}
        for _ in range(self.rnd.choice((1, 1, 2))):
            status, reply = self.call("POST", "/reservations", again, (201, 404, 409, 500, 503))
            self.note(200 if status == 201 else status, reply)

    def explicit(self):
        body = {"model_name": self.rnd.choice(MODELS), **self.prompt(), "selection_id": self.new_id(), "dp_rank": 0,
                "worker_id": self.rnd.choice((1, 2, *CHURNED))}
        status, reply = self.call("POST", "/reservations", body, (201, 404, 500, 503))
        self.note(200 if status == 201 else status, reply)

    def select(self):
        self.call("POST", "/select", self.request(advisory=self.rnd.random() < 0.5), (200, 500, 503))

    def look(self):
        path = self.rnd.choice(("/loads", "/workers", "/ready", "/health", "/potential_loads", "/overlap_scores",
                                "/loads?model_name=other", "/metrics"))
        if path in ("/potential_loads", "/overlap_scores"):
            self.call("POST", path, {"model_name": self.rnd.choice(MODELS), **self.prompt()}, (200, 503))
        else:
            self.call("GET", path, legal=(200, 503))

    def session(self):
        body = self.request(selection_id=self.new_id(), session_id=f"s{self.rnd.randrange(200)}")
        self.note(*self.call("POST", "/select_and_reserve", body, self.BOOK_LEGAL))

    def bad(self):
        good = json.dumps(self.request(selection_id="bad"))
        at = self.rnd.randrange(len(good))
        kind = self.rnd.randrange(6)
        legal, head = (400, 422), {"Content-Type": "application/json"}
        if kind == 0:
            text = good[:at]
        elif kind == 1:
            text, legal, head = good, (415,), {"Content-Type": "text/plain"}
        elif kind == 2:
            text = json.dumps({"token_ids": self.rnd.choice(([-1], ["a"], 5, [2 ** 32], [1.5], [[1]]))})
        elif kind == 3:
            text = json.dumps({"token_ids": [1], "session_id": "s" * 257})
        elif kind == 4:
            text = "[" * self.rnd.randrange(1, 3000)
        else:
            text = json.dumps(self.request(selection_id="x" * 4097))
        self.call("POST", self.rnd.choice(("/select_and_reserve", "/select")), legal=legal, headers=head, raw=text)

    def unknown(self):
        method, path, legal = self.rnd.choice((
            ("DELETE", "/reservations/none", 404), ("POST", "/reservations/none/prefill_complete", 404),
            ("GET", "/nowhere", 404), ("PUT", "/workers", 405), ("DELETE", "/workers/x", 400),
            ("DELETE", "/workers/999999", 404), ("GET", "/workers?model_name=%zz", 400),
            ("GET", "/reservations/%ff", 405)))
        self.call(method, path, legal=(legal,))

    def bytes_of(self, body):
        text = json.dumps(body).encode()
        return (b"POST /select_and_reserve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(text)) + text

    def away(self, data, pause=0.0):
        """Sends data on a connection of its own and leaves."""
        with contextlib.suppress(OSError):
            s = socket.create_connection(("127.0.0.1", self.port), timeout=20)
            how = self.rnd.randrange(3)
            if how == 0:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.sendall(data)
            if how == 2:
                s.shutdown(socket.SHUT_WR)
            if pause:
                time.sleep(pause)
            s.close()
        self.counts["left"] = self.counts.get("left", 0) + 1

    def leave(self):
        data = self.bytes_of(self.request(selection_id=self.new_id()))
        self.away(data[:self.rnd.randrange(len(data) + 1)])

    def leave_pipelined(self):
        data = b"".join(self.bytes_of(self.request(selection_id=self.new_id()))
                        for _ in range(self.rnd.randrange(2, 12)))
        self.away(data[:self.rnd.randrange(len(data) + 1)])

    def leave_waiting(self):
        self.away(self.bytes_of(self.request(selection_id=self.new_id())), self.rnd.random() * 0.02)

    def run(self, until):
        doers, weights = zip(*self.acts)
        while time.monotonic() < until and not self.faults:
            for act in self.rnd.choices(doers, weights, k=50):
                act()
        for sid in list(self.mine):
            self.call("DELETE", f"/reservations/{sid}", legal=(200, 404))
        self.hang_up()


class Churn(Client):
    """Creates, changes and deletes workers, and publishes what their engines cache."""

    def __init__(self, port, number, seed, engines):
        super().__init__(port, number, seed)
        self.engines, self.seq = engines, [0] * len(engines)
        self.acts = [(self.post, 4), (self.patch, 3), (self.delete, 3), (self.events, 20)]

    def post(self):
        w = self.rnd.choice(CHURNED)
        ranks = self.rnd.choice((1, 1, 2, 3))
        engine = self.rnd.choice(self.engines)
        body = worker(w, model_name=self.rnd.choice(MODELS), data_parallel_size=ranks,
                      kv_events_endpoints={str(r): engine.at for r in range(ranks)}, total_kv_blocks=1000,
                      max_num_batched_tokens=self.rnd.choice((2048, 8192)))
        if self.rnd.random() < 0.2:
            body[self.rnd.choice(("block_size", "endpoint", "max_num_batched_tokens"))] = None
        if self.rnd.random() < 0.1:
            body["block_size"] = 8
        self.call("POST", "/workers", body, (201, 503))

    def patch(self):
        body = self.rnd.choice((
            {"max_num_batched_tokens": self.rnd.randrange(1024, 10000)}, {"taints": ["fast"]}, {"taints": []},
            {"data_parallel_size": self.rnd.choice((1, 2))}, {"endpoint": ""}, {"endpoint": "http://10.9.9.9:1"},
            {"total_kv_blocks": 5000}, {"stable_routing_id": "r" * self.rnd.randrange(60)}))
        self.call("PATCH", f"/workers/{self.rnd.choice(CHURNED)}", body, (200, 404, 503))

    def delete(self):
        self.call("DELETE", f"/workers/{self.rnd.choice(CHURNED)}", legal=(200, 404, 503))

    def events(self):
        i = self.rnd.randrange(len(self.engines))
        if self.rnd.random() < 0.02:
            self.engines[i].do("forget")
        self.engines[i].send(self.seq[i], self.batch(), self.rnd.choice(("live", "pub", "pub", "pub", "keep")))
        self.seq[i] += 1

    def batch(self):
        first, blocks = self.rnd.randrange(1, PROMPTS), self.rnd.randrange(1, 26)
        if self.rnd.random() < 0.01:
            return CLEAR
        if self.rnd.random() < 0.4:
            names = [first * 1000 + i + 1 for i in range(25, -1, -1)]
            return pack([1.0, [{"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}], None])
        return stored(first, 0, blocks, medium=self.rnd.choice(("GPU", "GPU", "CPU_PINNED", "DISK")))
