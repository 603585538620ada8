#!/usr/bin/env python3
"""KV events over a real node: publishers' sockets -> indexer -> /overlap_scores. Publisher restart, gaps, clears,
both reply shapes, a worker registered anew, adapters and salts, tiers, holes, and an indexer killed in between."""
import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import CLEAR, Engine, becomes, depth, pack, stored, tokens
from node import Node, Tap, wait_for, worker

tap = Tap()


def restart(node):
    e = Engine(replay=False)
    e.register(node, 1)
    for s in range(10):
        e.send(s, stored(1, s, s + 1))
    becomes(tap, node, 1, 10, {(1, 0): 10}, "ten blocks of a publisher")
    e.do("restart")
    e.subscribed()
    e.send(0, stored(2, 0, 1))
    becomes(tap, node, 2, 1, {(1, 0): 1}, "a restarted publisher: its new block is there")
    tap.same(depth(node, 1, 10), {(1, 0): 0}, "and nothing of the old one")
    node.call("DELETE", "/workers/1")
    e.close()


def gap(node, replay, frames):
    e = Engine(replay=replay)
    e.do(f"frames {frames}")
    e.register(node, 2)
    for s in range(6):
        e.send(s, stored(3, s, s + 1), "keep" if s in (3, 4) else "pub")
    if replay:
        becomes(tap, node, 3, 6, {(2, 0): 6}, f"two lost batches come by replay ({frames} frames)")
        tap.same(e.asked(1), 3, "asked from the first one lost")
    else:
        becomes(tap, node, 3, 6, {(2, 0): 3}, "without replay the chain ends before the gap")
        e.send(6, stored(4, 0, 2))
        becomes(tap, node, 4, 2, {(2, 0): 2}, "and the stream goes on")
    node.call("DELETE", "/workers/2")
    e.close()


def no_end(node):
    e = Engine()
    e.do("end off")
    e.register(node, 3)
    for s in range(4):
        e.send(s, stored(5, s, s + 1), "keep" if s == 1 else "pub")
    e.send(4, stored(5, 4, 5))
    becomes(tap, node, 5, 5, {(3, 0): 5}, "a replay without an end marker does not stop the live stream")
    node.call("DELETE", "/workers/3")
    e.close()


def clear(node):
    a, b, c = Engine(False), Engine(False), Engine(False)
    node.call("POST", "/workers", worker(1, data_parallel_size=2, kv_events_endpoints={"0": a.at, "1": b.at}))
    a.subscribed()
    b.subscribed()
    c.register(node, 2)
    for e in (a, b, c):
        e.send(0, stored(6, 0, 4))
    becomes(tap, node, 6, 4, {(1, 0): 4, (1, 1): 4, (2, 0): 4}, "three ranks hold one prefix")
    a.send(1, CLEAR)
    becomes(tap, node, 6, 4, {(1, 0): 0, (1, 1): 4, (2, 0): 4}, "a clear empties exactly the emitting rank")
    a.send(2, stored(6, 0, 2))
    becomes(tap, node, 6, 4, {(1, 0): 2, (1, 1): 4, (2, 0): 4}, "which then fills again")
    status, _ = node.call("PATCH", "/workers/1", {"kv_events_endpoints": {"0": c.at, "1": b.at}})
    c.subscribed()
    tap.same((status, depth(node, 6, 4)), (200, {(1, 0): 0, (1, 1): 4, (2, 0): 4}),
             "a moved event endpoint empties one rank and keeps the other")
    for w in (1, 2):
        node.call("DELETE", f"/workers/{w}")
    for e in (a, b, c):
        e.close()


def anew(node):
    e = Engine()
    e.register(node, 4)
    for s in range(10):
        e.send(s, stored(7, s, s + 1))
    becomes(tap, node, 7, 11, {(4, 0): 10}, "a chain of ten batches")
    node.call("DELETE", "/workers/4")
    e.register(node, 4)
    tap.same(depth(node, 7, 11), {(4, 0): 0}, "registered anew: empty")
    e.send(10, stored(7, 10, 11))
    becomes(tap, node, 7, 11, {(4, 0): 11}, "the next batch brings the whole chain back")
    tap.same(e.asked(1), 0, "asked from 0")
    before = depth(node, 7, 11)
    for _ in range(20):
        node.call("POST", "/workers", e.body(4))
        node.call("PATCH", "/workers/4", {"kv_transfer_domain": "rack"})
    tap.same(depth(node, 7, 11), before, "equal registrations and label patches keep the blocks")
    node.call("DELETE", "/workers/4")
    e.close()


def limits():
    """What the settings of KV events change."""
    with Node(env={"KVPICK_KV_CLEAR_ON_LOSS": "true", "KVPICK_KV_MAX_PAYLOAD_BYTES": "1024", "KVPICK_KV_RECV_HWM": "0",
                   "KVPICK_KV_REPLAY_TIMEOUT_MS": "100", "KVPICK_KV_REPLAY_COOLDOWN_MS": "0"}) as node:
        e = Engine(False)
        e.register(node, 1)
        e.send(0, stored(1, 0, 3))
        becomes(tap, node, 1, 3, {(1, 0): 3}, "three blocks")
        e.send(1, stored(1, 3, 30))
        e.send(2, stored(2, 0, 2))
        becomes(tap, node, 2, 2, {(1, 0): 2}, "a batch over KVPICK_KV_MAX_PAYLOAD_BYTES is not applied, the next one is,")
        tap.same((depth(node, 1, 3), node.counted("indexer_event_lost")), ({(1, 0): 0}, 1),
                 "and with KVPICK_KV_CLEAR_ON_LOSS the rank has forgotten what came before the loss")
        e.close()
        node.call("DELETE", "/workers/1")
        e = Engine()
        e.do("end off")
        e.register(node, 2)
        for s in (0, 3, 6):
            e.send(s, stored(3, 0, 2), "live")
        becomes(tap, node, 3, 2, {(2, 0): 2}, "a replay service that does not answer")

        def asked():
            return [node.counted(f"indexer_{what}") for what in ("gap_found", "replay_requested", "replay_fetched")]
        wait_for(lambda: asked()[0] == 3)
        tap.ok(asked()[1] - asked()[2] == 2, "is asked for both of its gaps: there is no cooldown", asked())
        tap.same(node.counted("indexer_replay_impossible"), 1, "but that of the engine without one")
        e.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def media():
    """Blocks of an engine that caches under pad values in place of the token that stands for an image."""
    image, obj = 500, 0x123456789abcdef0
    pad = 1000000 + (obj & 0x3fffffff)
    prompt = [7, image, image, 8] + [9, 10, 11, 12]
    infos = [{"mm_objects": [{"mm_hash": obj}]}, None]
    for env, want in ({}, 0), ({"KVPICK_MM_IMAGE_TOKEN_ID": str(image)}, 2):
        with Node(env=env) as node:
            e = Engine(False)
            e.register(node, 1)
            e.send(0, stored(1, 0, 2, token_ids=[pad if t == image else t for t in prompt]))
            e.send(1, stored(2, 0, 2))
            becomes(tap, node, 2, 2, {(1, 0): 2}, "two batches")
            status, scores = node.call("POST", "/overlap_scores", {"token_ids": prompt, "block_mm_infos": infos})
            tap.same((status, [w["device_blocks"] for w in scores.get("workers", [])]), (200, [want]),
                     f"{want} blocks with an image are found with {env or 'no placeholder'}")
            e.close()


def namespaces(node):
    e = Engine(False)
    e.register(node, 5)
    e.send(0, stored(8, 0, 4, lora_name="a"))
    e.send(1, stored(9, 0, 4, cache_salt="s"))
    becomes(tap, node, 8, 4, {(5, 0): 4}, "blocks of an adapter match requests for it", lora_name="a")
    becomes(tap, node, 9, 4, {(5, 0): 4}, "blocks with a salt match requests with it", cache_salt="s")
    tap.same([depth(node, 8, 4)[(5, 0)], depth(node, 8, 4, lora_name="b")[(5, 0)],
              depth(node, 9, 4)[(5, 0)], depth(node, 9, 4, cache_salt="t")[(5, 0)]], [0, 0, 0, 0],
             "and no others")
    node.call("DELETE", "/workers/5")
    e.close()


def killed(node):
    e = Engine()
    e.register(node, 6)
    for s in range(5):
        e.send(s, stored(10, s, s + 1))
    becomes(tap, node, 10, 7, {(6, 0): 5}, "blocks before the indexer is killed")
    status, booked = node.call("POST", "/select_and_reserve", {"token_ids": tokens(10, 7), "selection_id": "x"})
    os.kill(node.children()["kvpick-indexer"][0], signal.SIGKILL)
    e.send(5, stored(10, 5, 6), "keep")
    tap.same((status, depth(node, 10, 7)), (200, {(6, 0): 5}), "lookups go on without it")
    wait_for(lambda: len(node.children().get("kvpick-indexer", [])) == 1)
    status, _ = node.call("PATCH", "/workers/6", {"total_kv_blocks": 1000})
    tap.same(status, 200, "its successor answers commands")
    e.subscribed()
    becomes(tap, node, 10, 7, {(6, 0): 6}, "and fetches what came meanwhile, without waiting for a live batch")
    tap.same(e.asked(1), 5, "from where its predecessor stopped")
    e.send(6, stored(10, 6, 7))
    becomes(tap, node, 10, 7, {(6, 0): 7}, "then the stream goes on")
    tap.same(node.call("DELETE", "/reservations/x")[0], 200, "bookings were kept")
    node.call("DELETE", "/workers/6")
    e.close()


def killed_namespaces(node):
    """What the stream said once only is not lost with the indexer, and no replay service gives it back."""
    e = Engine(False)
    e.register(node, 7)
    e.send(0, stored(11, 0, 3, cache_salt="s"))
    e.send(1, stored(12, 0, 3, lora_name="a"))
    e.send(2, stored(13, 0, 3, group_idx=1, kv_cache_spec_kind="full_attention"))
    e.send(3, stored(11, 3, 4))
    becomes(tap, node, 11, 6, {(7, 0): 4}, "a block inherits its parent's salt", cache_salt="s")
    for life in (0, 1):
        os.kill(node.children()["kvpick-indexer"][0], signal.SIGKILL)
        e.subscribed()
        e.send(4 + 3 * life, stored(11, 4 + life, 5 + life))
        e.send(5 + 3 * life, stored(12, 3 + life, 4 + life))
        e.send(6 + 3 * life, stored(13, 3 + life, 4 + life, group_idx=1))
        becomes(tap, node, 11, 6, {(7, 0): 5 + life}, "after a kill, too", cache_salt="s")
        becomes(tap, node, 12, 5, {(7, 0): 4 + life}, "or its adapter", lora_name="a")
        becomes(tap, node, 13, 5, {(7, 0): 4 + life}, "and the cache group is known")
    tap.same([depth(node, 11, 6)[(7, 0)], depth(node, 12, 5)[(7, 0)]], [0, 0], "nothing went without")
    node.call("DELETE", "/workers/7")
    e.close()


def row_of(node, first, blocks, worker_id=9):
    """[device, host extension, disk and external extension, credit] of a worker for a prompt."""
    status, scores = node.call("POST", "/overlap_scores", {"token_ids": tokens(first, blocks)})
    for w in scores.get("workers", []) if status == 200 else []:
        if w["worker_id"] == worker_id:
            return [w["device_blocks"], w["host_pinned_extension_blocks"], w["disk_extension_blocks"],
                    w["router_credit_blocks"]]
    raise RuntimeError(f"overlap_scores: {status} {scores}")


def row_becomes(node, first, blocks, want, name, worker_id=9):
    wait_for(lambda: row_of(node, first, blocks, worker_id) == want)
    tap.same(row_of(node, first, blocks, worker_id), want, name)


def hashes(first, blocks, medium="CPU"):
    """A store that tells hashes only."""
    return stored(first, 0, blocks, token_ids=[], block_size=0, medium=medium)


def removed(names, medium="GPU"):
    return pack([1.0, [{"type": "BlockRemoved", "block_hashes": names, "medium": medium}], None])


def tiers(node):
    """Blocks go on from tier to tier; a gap ends what counts; a clear is for all tiers."""
    e = Engine(False)
    e.register(node, 9)
    e.send(0, stored(20, 0, 2))
    e.send(1, stored(20, 2, 5, medium="CPU"))
    e.send(2, stored(20, 5, 6, medium="DISK"))
    e.send(3, stored(20, 6, 8, medium="EXTERNAL"))
    row_becomes(node, 20, 9, [2, 3, 3, 2 + 3 * .75 + 3 * .25], "a prompt over four tiers")
    status, s = node.call("POST", "/select", {"token_ids": tokens(20, 9)})
    tap.same((status, s["overlap"], s["effective_prefill_tokens"]),
             (200, {"longest_matched": 32, "gpu": 8, "dp": {"0": 8}, "cpu": 20, "disk": 32}, 36 - 20),
             "a selection reports them one upon the other and counts them by weight")
    os.kill(node.children()["kvpick-indexer"][0], signal.SIGKILL)
    e.subscribed()
    e.send(4, stored(20, 8, 9, medium="EXTERNAL"))
    row_becomes(node, 20, 9, [2, 3, 4, 2 + 3 * .75 + 4 * .25], "a killed indexer's successor goes on with them")
    e.send(5, removed([20003], "CPU"))
    row_becomes(node, 20, 9, [2, 0, 0, 2], "a gap ends it")
    e.send(6, stored(20, 2, 3, medium="CPU"))
    row_becomes(node, 20, 9, [2, 3, 4, 2 + 3 * .75 + 4 * .25], "until it is filled")
    e.send(7, CLEAR)
    row_becomes(node, 20, 9, [0, 0, 0, 0], "a clear empties every tier")
    node.call("DELETE", "/workers/9")
    e.close()


def unknown_in_batch(node):
    """An unknown block in a removal is counted, the rest is applied, wherever it stands in the batch."""
    e = Engine(False)
    e.register(node, 9)
    seq = 0
    for medium, at in (("CPU", 1), ("DISK", 2), ("GPU", 0)):
        for place in range(3):
            first = 21 + 10 * at + place
            e.send(seq, stored(first, 0, 8, medium=medium))
            want = [0, 0, 0]
            want[at] = 8
            wait_for(lambda: row_of(node, first, 8)[:3] == want)
            before = row_of(node, first, 8)[:3]
            unknown = node.counted("indexer_block_unknown")
            names = [first * 1000 + i for i in (1, 4, 8)]
            names.insert((1, 0, 3)[place], 987654321)
            e.send(seq + 1, removed(names, medium))
            wait_for(lambda: row_of(node, first, 8)[:3] == [0, 0, 0])
            e.send(seq + 2, stored(first, 0, 1, medium=medium))
            want = [0, 0, 0]
            want[at] = 3
            wait_for(lambda: row_of(node, first, 8)[:3] == want)
            tap.same((sum(before), row_of(node, first, 8)[:3],
                      node.counted("indexer_block_unknown") - unknown), (8, want, 1),
                     f"{medium}: blocks 0, 3 and 7 are gone, one hash was unknown (place {place})")
            seq += 3
    node.call("DELETE", "/workers/9")
    e.close()


def without_tokens(node):
    """A lower-tier store that tells hashes only attaches to blocks that are known; the rest is counted."""
    e, other = Engine(False), Engine(False)
    e.register(node, 9)
    other.register(node, 10)
    e.send(0, stored(60, 0, 8))
    e.send(1, hashes(60, 6))
    e.send(2, removed([60001 + i for i in range(8)]))
    row_becomes(node, 60, 8, [0, 6, 0, 6 * .75], "six of eight blocks stay in host memory")
    other.send(0, hashes(60, 4, "DISK"))
    row_becomes(node, 60, 8, [0, 0, 4, 1], "another rank attaches to what the first one told", 10)
    lost = node.counted("indexer_radix_unattached")
    lines = len(node.log_text().splitlines())
    e.send(3, hashes(61, 3))
    wait_for(lambda: node.counted("indexer_radix_unattached") == lost + 3)
    tap.same((node.counted("indexer_radix_unattached") - lost, row_of(node, 60, 8)),
             (3, [0, 6, 0, 6 * .75]), "hashes that nobody knows are counted and change nothing")
    for seq in range(4, 1004):
        e.send(seq, hashes(62, 3))
    wait_for(lambda: node.counted("indexer_radix_unattached") == lost + 3003)
    tap.same(node.counted("indexer_radix_unattached"), lost + 3003, "a thousand more")
    tap.ok(len(node.log_text().splitlines()) - lines <= 1, "and no line in the log for each")
    for w in (9, 10):
        node.call("DELETE", f"/workers/{w}")
    for x in (e, other):
        x.close()


def holes(node):
    """Every holder counts, from block 0 on and up to its first hole, whatever the order of events."""
    have = {11: [(0, 4)], 12: [(0, 8)], 13: [(0, 8)], 14: [(0, 8)]}
    gone = {12: [0, 1], 14: [2]}
    engines = {w: Engine(False) for w in have}
    seq = dict.fromkeys(have, 0)

    def send(w, payload):
        engines[w].send(seq[w], payload)
        seq[w] += 1

    for w, e in engines.items():
        e.register(node, w)
    want = {(11, 0): 4, (12, 0): 0, (13, 0): 8, (14, 0): 2}
    for turn in range(4):
        first = 70 + turn
        order = sorted(have, key=lambda w: (w * 7 + turn * 5) % 11)
        for w in order:
            for a, b in have[w]:
                send(w, stored(first, a, b))
            send(w, removed([first * 1000 + 1 + i for i in gone.get(w, [])]))
        becomes(tap, node, first, 8, want, f"four holders of one prefix (order {order})")
        send(13, removed([first * 1000 + 1]))
        becomes(tap, node, first, 8, {**want, (13, 0): 0}, "without its first block: nothing")
        send(13, stored(first, 0, 1))
        becomes(tap, node, first, 8, want, "with it again: everything")
        for w in have:
            send(w, CLEAR)
        becomes(tap, node, first, 8, {k: 0 for k in want}, "and cleared")
    for w, e in engines.items():
        node.call("DELETE", f"/workers/{w}")
        e.close()


def refused(node):
    """An address that nobody can connect to: the worker serves, and people are told."""
    status, record = node.call("POST", "/workers", worker(8, "ipc:///tmp/" + "x" * 130))
    tap.same((status, record["lifecycle"]), (201, "schedulable"), "a refused event address: schedulable")
    wait_for(lambda: "worker 8 rank 0" in node.ctl("errors")[1])
    tap.ok("events of worker 8 rank 0: connect" in node.ctl("errors")[1], "kvpickctl errors says why",
           node.ctl("errors")[1])
    tap.ok(wait_for(lambda: "kvpick_indexer_listener_retried_total 0" not in node.call("GET", "/metrics")[1]),
           "and it is tried again")
    node.call("DELETE", "/workers/8")


with Node() as node:
    restart(node)
    gap(node, False, 3)
    gap(node, True, 3)
    gap(node, True, 2)
    no_end(node)
    clear(node)
    anew(node)
    namespaces(node)
    killed(node)
    killed_namespaces(node)
    tiers(node)
    unknown_in_batch(node)
    without_tokens(node)
    holes(node)
    refused(node)
limits()
media()
sys.exit(tap.done())
