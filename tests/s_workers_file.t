#!/usr/bin/env python3
"""Workers from a watched YAML file: registered, changed, deleted with the file; a bad version changes nothing; the
Endpoint Picker without Kubernetes and without the Selection API."""
import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from envoy import Envoy
from epp import COMPLETIONS, MODEL, Epp, Renderer, prompt, routed
from node import BUILD, Node, Tap, wait_for, worker

tap = Tap()
NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}


def entry(i, **extra):
    members = {"worker_id": i, "endpoint": f"http://10.0.0.{i}:8000", "block_size": 4, **extra}
    return "- " + "\n  ".join(f"{k}: {v}" for k, v in members.items()) + "\n"


def write(path, *entries, text=None):
    """As an editor does: a new file in place of the old one."""
    with open(path + ".new", "w", encoding="utf-8") as f:
        f.write(text if text is not None else "workers:\n" + "".join(entries))
    os.rename(path + ".new", path)


def ids(node):
    return {w["worker_id"]: w for w in node.call("GET", "/workers")[1]}


def becomes(node, want, name):
    tap.ok(wait_for(lambda: set(ids(node)) == set(want)), name, sorted(ids(node)))


def with_file(*args, env=None):
    node = Node(*args, env={**NO_EVENTS, **(env or {})})
    path = os.path.join(node.dir.name, "workers.yaml")
    node.args = [*node.args, "--workers", path]
    return node, path


def life():
    node, path = with_file()
    write(path, entry(1), entry(2, max_num_batched_tokens=100))
    with node:
        becomes(node, {1, 2}, "workers of the file are registered")
        tap.ok(wait_for(lambda: all(w["lifecycle"] == "schedulable" for w in ids(node).values())), "and schedulable")
        node.call("POST", "/workers", worker(9))
        status, booked = node.call("POST", "/select_and_reserve", {"token_ids": list(range(16))})
        tap.same(status, 200, "a booking")
        write(path, entry(1), entry(2, max_num_batched_tokens=200), entry(3))
        becomes(node, {1, 2, 3, 9}, "one more in the file; the one that came over HTTP is left alone")
        tap.ok(wait_for(lambda: ids(node)[2]["max_num_batched_tokens"] == 200), "a changed one")
        tap.same(sum(r["active_requests"] for p in node.call("GET", "/loads")[1] for r in p["loads"]), 1,
                 "R28: no change of the file touches a booking")
        node.call("DELETE", "/reservations/" + booked["selection_id"])
        taken, bad = node.counted("discovery_file_read"), node.counted("discovery_file_bad")
        for text in ("workers:\n" + entry(1) + entry(1), "workers:\n- worker_id: 1\n  blocksize: 4\n", "workers: [", ""):
            write(path, text=text)
            tap.ok(wait_for(lambda: node.counted("discovery_file_bad") == bad + 1), f"refused: {text!r}")
            bad += 1
        os.unlink(path)
        tap.ok(wait_for(lambda: node.counted("discovery_file_bad") == bad + 1), "a file that is gone, too")
        tap.same((node.counted("discovery_file_read"), set(ids(node))), (taken, {1, 2, 3, 9}), "nothing has changed")
        tap.ok("unknown member: blocksize" in node.log_text() and "line 3" in node.log_text(), "the log says where")
        write(path, entry(2, max_num_batched_tokens=200))
        becomes(node, {2, 9}, "those that left the file are deleted")
        node.call("DELETE", "/workers/2")
        write(path, entry(2, max_num_batched_tokens=200), entry(9, routing_group="other"))
        becomes(node, {2, 9}, "one that was deleted over HTTP comes back with the next version")
        tap.ok(wait_for(lambda: ids(node)[9]["routing_group"] == "other"), "an id in both: the file wins")
        # A process that dies knows afterwards what it had registered.
        pid, = node.children()["kvpick-discovery"]
        os.kill(pid, signal.SIGSTOP)
        write(path, entry(9, routing_group="other"))
        os.kill(pid, signal.SIGKILL)
        becomes(node, {9}, "killed: the next one deletes what its predecessor had registered")
        write(path, text="nonsense")
        pid, = wait_for(lambda: [p for p in node.children().get("kvpick-discovery", []) if p != pid])
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: [p for p in node.children().get("kvpick-discovery", []) if p != pid])
        bad = node.counted("discovery_file_bad")
        tap.ok(wait_for(lambda: node.counted("discovery_file_bad") > bad) and set(ids(node)) == {9},
               "killed with a bad file: its workers stay, the node goes on")
        write(path, entry(5))
        becomes(node, {5}, "and the next good one counts")
        os.kill(node.children()["kvpick-indexer"][0], signal.SIGKILL)
        write(path, entry(5), entry(6))
        becomes(node, {5, 6}, "an indexer that dies meanwhile")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
        tap.same(node.stop(), 0, "the node stops with exit code 0")


def wrong_at_start():
    node, path = with_file()
    write(path, text="workers: {}\n")
    done = subprocess.run([f"{BUILD}/kvpick", "run", *node.args], env=node.env, capture_output=True, text=True,
                          timeout=30, check=False)
    tap.ok(done.returncode == 2 and "KVPICK_WORKERS_FILE" in done.stderr and "workers is not a list" in done.stderr,
           "a file that is wrong at the start: the node does not start", done.stderr[-800:])
    node.dir.cleanup()


def endpoint_picker():
    """EPP only: ready when the file has been read, whether there is a worker or not."""
    renderer = Renderer()
    node = Epp(renderer, env={**NO_EVENTS, "KVPICK_MODE": "epp"})
    path = os.path.join(node.dir.name, "workers.yaml")
    node.args = [*node.args, "--workers", path]
    node.healthy = lambda: " discovery.run " in node.log_text()
    write(path)
    with node:
        health = Envoy(f"127.0.0.1:{node.health_port}")
        tap.ok(wait_for(lambda: health.health("readiness") == b"\x08\x01"), "ready with an empty list")
        envoy = node.envoy()
        _, head, _ = routed(envoy, COMPLETIONS, prompt(1, 4))
        tap.same((head.status, head.text), (503, "no endpoints available"), "which serves nobody")
        write(path, *[entry(i, model_name=MODEL) for i in (1, 2, 3)])
        seen, fresh = set(), iter(range(100, 100000))

        def spread():
            s, h, _ = routed(envoy, COMPLETIONS, prompt(next(fresh), 4))
            seen.add(h.destination)
            s.reset()
            return seen >= {f"10.0.0.{i}:8000" for i in (1, 2, 3)}
        tap.ok(wait_for(spread, 20), "requests go to the workers of the file", seen)
        seen.clear()
        write(path, entry(2, model_name=MODEL, endpoint="http://10.0.0.77:9000"))

        def moved():
            s, h, _ = routed(envoy, COMPLETIONS, prompt(1, 4))
            s.reset()
            return h.destination == "10.0.0.77:9000"
        tap.ok(wait_for(moved), "R04: a changed endpoint counts")
        after = {routed(envoy, COMPLETIONS, prompt(i, 4))[1].destination for i in range(30)}
        tap.same(after, {"10.0.0.77:9000"}, "R04: and no old one")
        envoy.close()
        health.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
        tap.same(node.stop(), 0, "the node stops with exit code 0")


def not_ready_yet():
    """Requests before the first picture is complete."""
    renderer = Renderer()
    node = Epp(renderer, env={**NO_EVENTS, "KVPICK_MODE": "both"})
    path = os.path.join(node.dir.name, "workers.yaml")
    node.args = [*node.args, "--workers", path, "--max-ranks", "8192"]
    write(path, *[entry(i, model_name=MODEL) for i in range(1, 6000)])
    caught = set()

    def healthy():
        """Looked at every few milliseconds from the start on: the process that registers is stopped as it appears."""
        for pid in node.children().get("kvpick-discovery", []):
            os.kill(pid, signal.SIGSTOP)
            caught.add(pid)
        return caught and Node.healthy(node)
    node.healthy = healthy
    with node:
        health = Envoy(f"127.0.0.1:{node.health_port}")
        envoy = node.envoy()
        _, head, _ = routed(envoy, COMPLETIONS, prompt(1, 4))
        tap.same((head.status, head.text, health.health("readiness")),
                 (503, "pod reflector cache not ready", b"\x08\x02"), "workers are still being registered: 503")
        tap.same(len(caught), 1, "by one process")
        for pid in caught:
            os.kill(pid, signal.SIGCONT)
        tap.ok(wait_for(lambda: health.health("readiness") == b"\x08\x01", 60), "then ready")
        tap.ok(routed(envoy, COMPLETIONS, prompt(1, 4))[1].destination, "and served")
        envoy.close()
        health.close()
        tap.same(node.stop(), 0, "the node stops with exit code 0")


for test in (life, wrong_at_start, endpoint_picker, not_ready_yet):
    test()
sys.exit(tap.done())
