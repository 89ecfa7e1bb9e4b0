"""Connections of all processes of a job with the first one, which tell at once that one is gone.

A process that is killed cannot say so, but the kernel closes its connections, whatever it was
doing; a machine that is lost no longer answers the kernel's probes. ``jax.distributed`` waits for
heartbeats instead, for 100 seconds by default.
"""

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

from penzai_shard.library_apis.jax_api import coordinator_host, receive_message, send_message

_KEY = "penzai_shard/connections"
_LEAVING = b"."
_LONGEST_GREETING = 200
_SECONDS_TO_CONNECT = 10.0
# Of a machine that is lost: probed when silent for so long, so often, and so many times.
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 8, "TCP_KEEPCNT": 3}


class Connections:
    """This process's connections: those of all others in process 0, and one elsewhere."""

    def __init__(
        self, me: int, count: int, on_loss: Callable[[int], None], say: Callable[[str], None]
    ) -> None:
        """Begins to listen, or to connect, in a thread.

        Args:
            me: The number of this process.
            count: How many processes there are.
            on_loss: Called in the thread with the number of a process that is gone.
            say: Called with what the user must know.
        """
        self._me, self._count = me, count
        self._on_loss, self._say = on_loss, say
        self._others: dict[int, socket.socket] = {}
        self._is_closed = False
        self._wakes, self._wake = socket.socketpair()
        watch = self._serve if me == 0 else self._join
        self._thread = threading.Thread(target=watch, name="penzai-shard-watch", daemon=True)
        # A child that goes on without this process would keep its connections open.
        os.register_at_fork(after_in_child=self._forget)
        self._thread.start()

    def take_leave(self) -> None:
        """Says that this process ends on purpose, so that nobody takes it for lost."""
        for connection in list(self._others.values()):
            with contextlib.suppress(OSError):
                connection.sendall(_LEAVING)

    def close(self) -> None:
        """Ends the thread, after leave was taken."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._wake.sendall(b".")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait_for_others_to_end(self, seconds: float) -> None:
        """In process 0, in the thread: waits until the others have closed their connections."""
        with selectors.DefaultSelector() as selector:
            for connection in self._others.values():
                selector.register(connection, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(seconds)
                if not ready:
                    return
                for connection in (_socket_of(key) for key, _ in ready):
                    if not _received(connection):
                        selector.unregister(connection)

    def _serve(self) -> None:
        token = secrets.token_hex(16)
        with _listening(coordinator_host()) as server, selectors.DefaultSelector() as selector:
            send_message(_KEY, f"{server.getsockname()[1]} {token}")
            selector.register(server, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            greetings: dict[socket.socket, bytes] = {}
            while not self._is_closed:
                for key, _ in selector.select():
                    connection = _socket_of(key)
                    if connection is self._wakes:
                        continue
                    if connection is server:
                        with contextlib.suppress(OSError):
                            connection = server.accept()[0]
                            connection.setblocking(False)
                            greetings[connection] = b""
                            selector.register(connection, selectors.EVENT_READ)
                        continue
                    if connection not in greetings:
                        self._hear(key.data, connection, selector)
                        continue
                    data = _received(connection)
                    greeting = greetings[connection] = greetings[connection] + data
                    if greeting.endswith(b"\n"):
                        said, _, number = greeting.decode(errors="replace").partition(" ")
                        del greetings[connection]
                        if said == token and number.strip().isdecimal():
                            self._begin(int(number), connection, selector)
                            continue
                        data = b""
                    if not data or len(greeting) > _LONGEST_GREETING:
                        # A stranger.
                        greetings.pop(connection, None)
                        selector.unregister(connection)
                        connection.close()

    def _begin(
        self, number: int, connection: socket.socket, selector: selectors.BaseSelector
    ) -> None:
        _probe(connection)
        self._others[number] = connection
        selector.modify(connection, selectors.EVENT_READ, number)

    def _join(self) -> None:
        message = None
        while message is None:
            if self._is_closed:
                return
            try:
                message = receive_message(_KEY, 1.0)
            except Exception:
                return  # The job is over.
        port, token = message.split(" ")
        host = coordinator_host()
        try:
            connection = socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT)
            connection.sendall(f"{token} {self._me}\n".encode())
        except OSError as error:
            self._say(
                f"penzai-shard: process {self._me} cannot connect to port {port} of {host} "
                f"({error.strerror or error}), so that a process which is killed is noticed by "
                "jax.distributed alone, later."
            )
            return
        connection.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ, 0)
            selector.register(self._wakes, selectors.EVENT_READ)
            self._begin(0, connection, selector)
            while not self._is_closed:
                for key, _ in selector.select():
                    if key.fileobj is connection:
                        self._hear(0, connection, selector)

    def _hear(
        self, number: int, connection: socket.socket, selector: selectors.BaseSelector
    ) -> None:
        data = _received(connection)
        if data.endswith(_LEAVING):
            selector.unregister(connection)
        elif not data:
            selector.unregister(connection)
            del self._others[number]
            self._on_loss(number)

    def _forget(self) -> None:
        for connection in self._others.values():
            connection.close()


def _listening(host: str) -> socket.socket:
    """A socket at a free port of this machine, for this machine alone if the job is on loopback."""
    if host == "localhost" or host.startswith("127."):
        return socket.create_server((host, 0))
    if host == "::1":
        return socket.create_server((host, 0), family=socket.AF_INET6)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _probe(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        # Not every system has them all.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj


def _received(connection: socket.socket) -> bytes:
    """What is there to be read; nothing once the connection is closed or lost."""
    try:
        return connection.recv(4096)
    except BlockingIOError:
        return b" "
    except OSError:
        return b""
