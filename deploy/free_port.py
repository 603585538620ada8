import random
import socket
import sys

given = set()


def free_port():
    """A port that nobody listens on. It is bound later, by somebody else: so it is none of those (from 32768 on) that
    connections of others get meanwhile, and none that this process was given before."""
    while True:
        port = random.SystemRandom().randrange(10240, 32768)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in given:
            given.add(port)
            return port


if __name__ == "__main__":
    print(*(free_port() for _ in range(int(sys.argv[1]))))
