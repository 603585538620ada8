"""A node with prefill and decode workers for tests: they come from a workers file, their loads from kvpickctl."""
import json
import os
import re

from envoy import REQUEST_BODY, REQUEST_HEADERS, body, headers
from epp import COMPLETIONS, FULL, MODEL, Epp, prompt
from node import wait_for

NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
DEST, PREFILLER = "x-gateway-destination-endpoint", "x-prefiller-host-port"


class Disagg(Epp):
    """workers: [(id, role, host:port, more members)]."""

    def __init__(self, renderer, workers, env=None):
        super().__init__(renderer, env={**NO_EVENTS, "DYN_EPP_TOPOLOGY_MODE": "disaggregated", **(env or {})})
        self.path = os.path.join(self.dir.name, "workers.yaml")
        self.args = [*self.args, "--workers", self.path]
        self.write(workers)

    def write(self, workers):
        self.roles = {w[0]: w[1] for w in workers}
        text = "workers:\n"
        for wid, role, at, *more in workers:
            members = {"worker_id": wid, "endpoint": f"http://{at}", "block_size": 4, "model_name": MODEL,
                       **(more[0] if more else {})}
            if role:
                members["role"] = role
            text += "- " + "\n  ".join(f"{k}: {v}" for k, v in members.items()) + "\n"
        with open(self.path + ".new", "w", encoding="utf-8") as f:
            f.write(text)
        os.rename(self.path + ".new", self.path)

    def start(self):
        super().start()
        self.settled()
        # each process sees within a heartbeat that the workers are known
        for _ in range(6):
            if not wait_for(self.answers, 10):
                raise RuntimeError("the workers are not known\n" + self.log_text())
        return self

    def __exit__(self, *exc):
        code, text = self.stop(), self.log_text()
        if code or "Sanitizer" in text:
            raise RuntimeError(f"the node ended with {code}\n{text}")
        super().__exit__(*exc)

    def answers(self):
        envoy = self.envoy()
        s = envoy.stream(headers(REQUEST_HEADERS, [(":method", "GET"), (":path", "/v1/models")], end=True, config=FULL))
        head = s.reply()
        envoy.close()
        return head and head.text != "pod reflector cache not ready"

    def table(self, verb):
        code, text = self.ctl("--json", verb)
        if code:
            raise RuntimeError(text)
        rows = next(v for v in json.loads(text).values() if isinstance(v, list))
        return rows

    def settled(self):
        """The catalogue is what the file says."""
        want = sorted(self.roles)
        if not wait_for(lambda: sorted(int(w["worker_id"]) for w in self.table("workers")
                                       if w["lifecycle"] == "schedulable") == want, 20):
            raise RuntimeError(f"workers {want}: {self.table('workers')}\n{self.log_text()}")

    def roles_load(self):
        """{worker: (prefill tokens, blocks, requests)} of everything that is not idle, of both roles."""
        return {int(w["worker_id"]): (w["prefill_tokens"], w["blocks"], w["requests"])
                for w in self.table("workers") if w["requests"] or w["prefill_tokens"] or w["blocks"]}

    def ids(self):
        rows = self.table("resv")
        return sorted(r["selection_id"] for r in rows)

    def pids(self):
        return self.children()["kvpick-extproc"]

    def plan(self, name):
        return self.counter(f"plan_{name}_total")




def ask(envoy, data=None, path=COMPLETIONS, more=b""):
    """Sends a request and waits for nothing."""
    return envoy.stream(headers(REQUEST_HEADERS, path, config=FULL, more=more),
                        body(REQUEST_BODY, prompt(1, 4) if data is None else data, True))


def uuid_of(name):
    got = re.fullmatch(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/(prefill|decode)", name)
    return got.groups() if got else (None, None)
