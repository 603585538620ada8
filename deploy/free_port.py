import random
import socket


def free_port():
    """A port that nobody listens on. It is bound later, by somebody else: so it is none of those (from 32768 on) that
    connections of others get meanwhile."""
    while True:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", random.SystemRandom().randrange(10240, 32768)))
                return s.getsockname()[1]
            except OSError:
                continue


if __name__ == "__main__":
    print(free_port())
