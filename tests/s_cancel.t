#!/usr/bin/env python3
"""A client that leaves, at every point of its select_and_reserve: while it waits, at the moment of the grant, between
booking and answer, before its request was even read, and while its request is half sent. Nothing is left of it at
once: no place in the queue, no id, no load, no session. A stopped process (SIGSTOP, shorter than the supervisor
minds) holds the moment still."""
import os
import signal
import socket
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import Node, Tap, wait_for, worker
from waiter import LONG, Client, Waiter, free, part, request, seeded, total, waiting

tap = Tap()
ENV = {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_QUEUE_THRESHOLD": "0",
       "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0",  # a prompt booked before weighs as much as ever
       "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "3600"}
rnd = seeded()
TIMES = 200 if LONG else 20
LEAVE = {"reset": Client.reset, "closed": Client.close}


def nothing_left(node, what, ids):
    gone = wait_for(lambda: waiting(node) == 0 and total(node) == [0, 0, 0])
    tap.ok(gone, f"{what}: nobody waits, no load", part(node))
    tap.same([s for s in ids if free(node, s) != 404], [], f"{what}: no id is in use")
    code, text = node.ctl("check")
    tap.ok(code == 0, f"{what}: kvpickctl check finds no fault", text)


def take(node, sid):
    """Makes the one rank busy."""
    w = Waiter(node, sid)
    if w.answered(10) != 200:
        tap.ok(False, f"{sid} is booked", part(node))
    w.close()


def while_waiting(node, how):
    take(node, "hold")
    waiters = [Waiter(node, f"w{i}", session_id=f"chat{i}") for i in range(TIMES)]
    wait_for(lambda: waiting(node) == TIMES)
    for w in waiters:
        LEAVE[how](w)
    tap.ok(wait_for(lambda: waiting(node) == 0), f"{how} while waiting: the places are free", waiting(node))
    free(node, "hold")
    nothing_left(node, f"{how} while waiting", [w.sid for w in waiters])
    again = [Waiter(node, f"v{i}", session_id=f"chat{i}") for i in range(3)]
    for _ in range(len(again)):
        for w in wait_for(lambda: [w for w in again if w.answered() == 200]):
            again.remove(w)
            free(node, w.sid)
    tap.ok(not again, f"{how} while waiting: its sessions can be booked anew")
    nothing_left(node, f"{how}, sessions", [])


def client_of_another(node, pid):
    """A connection that another process than pid has accepted."""
    while True:
        c = Client(node)
        if wait_for(c.served_by) != pid:
            return c
        c.close()


def at_grant(node, how):
    """The waiter's process stands still while another one gives it the rank; when it goes on, the answer and the
    client's end are there together."""
    ids = []
    for i in range(TIMES // 10):
        take(node, "hold")
        w = Waiter(node, f"g{i}")
        wait_for(lambda: waiting(node) == 1)
        pid = w.served_by()
        other = client_of_another(node, pid)
        os.kill(pid, signal.SIGSTOP)
        other.sock.sendall(b"DELETE /reservations/hold HTTP/1.1\r\nHost: x\r\n\r\n")
        freed = other.answered(10)
        LEAVE[how](w)
        os.kill(pid, signal.SIGCONT)
        other.close()
        ids.append(w.sid)
        if freed != 200 or not wait_for(lambda: total(node) == [0, 0, 0]):
            tap.ok(False, f"{how} at the grant: round {i}", (freed, part(node)))
            break
    nothing_left(node, f"{how} at the grant", ids)


def before_answer(node, how):
    """The client leaves right behind its request. Its end may overtake the answer, which the server sees and undoes
    the booking; or the answer was already in the client's kernel: then it frees the id itself, as the README says.
    With its process stopped meanwhile, request and end are there together: always undone."""
    ids, before, crossed = [f"b{i}" for i in range(TIMES)], node.counted("httpd_reply_undelivered"), 0
    for sid in ids:
        LEAVE[how](Waiter(node, sid))

        def settled(sid=sid):
            nonlocal crossed
            crossed += free(node, sid) == 200
            return total(node) == [0, 0, 0] and waiting(node) == 0
        wait_for(settled)
    nothing_left(node, f"{how} behind the request", ids)
    undone = node.counted("httpd_reply_undelivered") - before
    print(f"# of {TIMES} bookings {undone:.0f} were undone, {crossed} freed by the client")
    ids = []
    for i in range(TIMES // 10):
        w = Waiter(node, f"s{i}")
        w.answered(10)
        free(node, w.sid)
        pid = w.served_by()
        os.kill(pid, signal.SIGSTOP)
        w.sock.sendall(request(f"t{i}"))
        LEAVE[how](w)
        os.kill(pid, signal.SIGCONT)
        ids.append(f"t{i}")
        wait_for(lambda: total(node) == [0, 0, 0])
    nothing_left(node, f"{how} while its process stood still", ids)


def half_sent(node):
    ids = []
    for i in range(TIMES):
        text = request(f"p{i}")
        s = socket.create_connection(("127.0.0.1", node.port))
        s.sendall(text[:rnd.randrange(1, len(text))])
        s.close()
        ids.append(f"p{i}")
    nothing_left(node, "half a request", ids)


def answered_in_time(node):
    """The other side of it: who ends its sending side and reads on keeps its booking; so does who reads the answer
    and then resets the connection."""
    w = Waiter(node, "half")
    w.sock.shutdown(socket.SHUT_WR)
    tap.same(w.answered(10), 200, "a client that only ended its sending side is answered")
    w.close()
    tap.same(free(node, "half"), 200, "and its booking stays")
    w = Waiter(node, "reset")
    w.answered(10)
    w.reset()
    wait_for(lambda: node.counted("httpd_connection_open") <= 1)
    tap.same(free(node, "reset"), 200, "as does that of one that read the answer before it reset")


def main():
    with Node("--httpd-processes", "3", "--session-affinity-ttl-secs", "60", env=ENV) as node:
        node.call("POST", "/workers", worker(1, max_num_batched_tokens=512))
        for how in LEAVE:
            while_waiting(node, how)
            at_grant(node, how)
            before_answer(node, how)
        half_sent(node)
        answered_in_time(node)
        tap.same(node.stop(), 0, "the node ends with exit code 0")
    return tap.done()


sys.exit(main())
