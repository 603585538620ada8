"""Prints a port that nobody listens on. It is bound later, by somebody else: so it is none of those (from 32768 on) that
connections get meanwhile."""
import random
import socket

while True:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", random.SystemRandom().randrange(10240, 32768)))
            print(s.getsockname()[1])
            break
        except OSError:
            continue
