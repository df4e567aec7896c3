"""Real servers with the module, a network that fails, and waits with a deadline."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

import redis

SERVER = os.environ.get("RLOCK_SERVER", "redis-server")
MODULE = os.environ["RLOCK_MODULE"]


def until(condition, seconds=20):
    """What the condition gives, as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "in time"
        time.sleep(0.005)
    return value


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    def __init__(self, *config):
        self.port = free_port()
        self.config, self.folder = config, tempfile.TemporaryDirectory()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.db = redis.Redis.from_url(self.url, protocol=2)
        self.start()

    def start(self):
        words = [SERVER, "--port", str(self.port), "--dir", self.folder.name, "--save", ""]
        words += ["--logfile", "log", "--loadmodule", MODULE, *self.config]
        self.process = subprocess.Popen(words)

        def answers():
            if self.process.poll() is not None:  # a connection has the port for a moment
                self.process = subprocess.Popen(words)
            with contextlib.suppress(redis.ConnectionError):
                return self.db.ping()

        until(answers)

    def signal(self, number):
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def stop(self):
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.db.close()
        self.folder.cleanup()

    def run(self, *words):
        return self.db.execute_command(*words)

    def info(self, name="lock"):
        info = self.run("RLOCK.INFO", name)
        return dict(zip(info[::2], info[1::2]))

    def waiters(self):
        return sum(waiters for _, waiters, _ in self.run("RLOCK.LIST"))

    def left_over(self):
        """Locks, waiters and sessions."""
        locks = [key for key in self.db.keys("*") if key not in (b"counter", b"data")]
        return locks + self.run("RLOCK.LIST") + self.run("RLOCK.SESSIONS")

    def connections(self):
        """Those of sessions: the last command of each, by the connection's number."""
        clients = self.db.client_list()
        mine = ("rlock.info", "rlock.list", "rlock.sessions")
        return {
            each["id"]: each["cmd"]
            for each in clients
            if each["cmd"].startswith("rlock.") and each["cmd"] not in mine
        }

    def kill(self, which=lambda command: True):
        for number, command in self.connections().items():
            if which(command):
                self.run("CLIENT", "KILL", "ID", number)


class Sentinel:
    """One that watches the primary under the name `locks`, and decides alone."""

    def __init__(self, primary):
        self.folder, self.port = tempfile.TemporaryDirectory(), free_port()
        file = os.path.join(self.folder.name, "sentinel.conf")
        with open(file, "w") as config:
            config.write(f"port {self.port}\n")
            config.write(f"sentinel monitor locks 127.0.0.1 {primary.port} 1\n")
        words = [SERVER, file, "--sentinel", "--dir", self.folder.name, "--logfile", "log"]
        self.process = subprocess.Popen(words)
        self.db = redis.Redis(port=self.port, protocol=2)

    def master(self):
        """What it knows; nothing while it does not answer."""
        with contextlib.suppress(redis.RedisError):
            return self.db.sentinel_master("locks")

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.db.close()
        self.folder.cleanup()


class Proxy:
    """Passes bytes on. Holds back the replies on the connections that `deaf` names by number."""

    def __init__(self, port, here=0):
        self.to, self.listener = port, socket.create_server(("127.0.0.1", here))
        self.pairs, self.deaf = [], set()
        self.url = f"redis://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.to))
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                number = len(self.pairs)
                self.pairs.append((client, server))
                for words in ((client, server, None), (server, client, number)):
                    threading.Thread(target=self.carry, args=words, daemon=True).start()

    def carry(self, here, there, number):
        with contextlib.suppress(OSError):
            while data := here.recv(65536):
                while number is not None and (number in self.deaf or "all" in self.deaf):
                    time.sleep(0.005)
                there.sendall(data)
        for one in (here, there):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self):
        """Ends all connections."""
        for pair in self.pairs:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.deaf.clear()
        self.listener.close()
