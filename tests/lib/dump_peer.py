"""Peers to recover an index from, of every kind: GET /<kind>/dump is answered as badly as the kind says."""
import http.server
import socket
import socketserver
import threading
import time


class Peer(socketserver.ThreadingTCPServer):
    """Answers GET /<kind>/dump as badly as the kind says. `good` is the text of a right dump."""
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, good):
        super().__init__(("127.0.0.1", 0), Handler)
        self.good, self.asked, self.go, self.hold = good, [], threading.Event(), threading.Event()
        self.first = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    def at(self, kind):
        return f"http://127.0.0.1:{self.server_address[1]}/{kind}"

    def handle_error(self, request, client_address):
        pass  # clients that go away are what is tested


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def head(self, status=200, length=None, **fields):
        self.send_response(status)
        for k, v in {"content_type": "application/json", **fields}.items():
            self.send_header(k.replace("_", "-"), v)
        if length is not None:
            self.send_header("content-length", str(length))
        self.end_headers()
        self.close_connection = True

    def whole(self, body, **fields):
        self.head(length=len(body), **fields)
        self.wfile.write(body)

    def chunked(self, pieces):
        self.head(transfer_encoding="chunked")
        for p in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(p), p))
        self.wfile.write(b"0\r\n\r\n")

    def do_GET(self):
        kind = self.path.split("/")[1]
        good = self.server.good
        self.server.asked.append(self.path)
        getattr(self, "on_" + kind)(good)

    def on_good(self, good):
        self.whole(good)

    def on_held(self, good):
        """Answers when told to; the dump is as it was when it was asked for."""
        self.server.hold.set()
        self.server.go.wait(60)
        self.whole(good)

    def on_first(self, _):
        """Fails when told to."""
        self.server.first.wait(60)
        self.head(404, 0)

    def on_chunks(self, good):
        self.chunked(good[i:i + 7] for i in range(0, len(good), 7))

    def on_empty(self, _):
        self.whole(b"{}")

    def on_missing(self, _):
        self.head(404, 0)

    def on_notyet(self, _):
        self.head(503, 0)

    def on_moved(self, _):
        self.head(302, 0, location=self.server.at("good") + "/dump")

    def on_html(self, _):
        self.whole(b"<html>{}</html>", content_type="text/html")

    def on_list(self, _):
        self.whole(b"[]")

    def on_garbage(self, _):
        self.whole(b"\x00\xff" * 500)

    def on_cut(self, good):
        self.head(length=len(good))
        self.wfile.write(good[:len(good) // 2])

    def on_cutchunk(self, good):
        self.head(transfer_encoding="chunked")
        self.wfile.write(b"%x\r\n%s" % (len(good), good[:len(good) // 2]))

    def on_cuttext(self, good):
        self.whole(good[:-2])

    def on_reset(self, good):
        self.head(length=len(good))
        self.wfile.write(good[:len(good) // 2])
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def on_announced(self, _):
        self.head(length=1 << 40)

    def endless(self, piece):
        self.head(transfer_encoding="chunked")
        while True:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def on_endless(self, good):
        """An event after the other, without end."""
        at = good.index(b"[") + 1
        event = good[at:good.index(b"}]}}", at)] + b"}]}},\"dp_rank\":0}},"
        event = b"{\"worker_id\":7,\"event\":{\"event_id\":0,\"data\":{\"removed\":{\"block_hashes\":[1]}}}},"
        self.head(transfer_encoding="chunked")
        self.wfile.write(b"%x\r\n%s\r\n" % (at, good[:at]))
        while True:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event) * 100, event * 100))

    def on_spaces(self, _):
        self.endless(b" " * 65536)

    def on_silent(self, _):
        self.server.go.wait(30)

    def on_drip(self, good):
        self.head(length=len(good))
        for i in range(len(good)):
            self.wfile.write(good[i:i + 1])
            time.sleep(0.05)  # a peer this slow is what is asked for

    def on_role(self, good):
        self.whole(good, x_kvpick_dump_role="prefill")

    def on_zipped(self, good):
        self.whole(good, content_encoding="gzip")

    def on_twice(self, good):
        self.send_response(200)
        self.send_header("content-length", str(len(good)))
        self.send_header("content-length", str(len(good) + 1))
        self.end_headers()
        self.close_connection = True

    def on_error(self, _):
        self.whole(b'{"default:default":{"error":"indexer offline"}}')

    def on_nokey(self, _):
        self.whole(b'{"m":{"block_size":4,"events":[]}}')

    def on_null(self, _):
        self.whole(b'{"m:g":{"block_size":4,"events":[{"worker_id":3,"residency_domain":null,'
                   b'"event":{"event_id":1,"data":"cleared"}}]}}')

    def on_negative(self, _):
        self.whole(b'{"m:g":{"block_size":4,"events":[{"worker_id":3,"event":{"event_id":1,'
                   b'"data":{"removed":{"block_hashes":[-1]}}}}]}}')
