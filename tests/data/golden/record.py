"""Stands between clients and a server, and writes down what both say, in the order in which it
passed.

    python3 record.py PORT-OF-THE-SERVER FILE COMMAND [ARGUMENT ...]

runs the command with the address to connect to as its last argument. A line of the file is one
whole command or reply: the number of its connection, `>` or `<`, and the bytes, escaped as Rust
does. What a server says of itself and its machine, to commands that are not RLOCK's, is left out.
"""

import selectors
import socket
import subprocess
import sys


def end_of(data, start):
    """Where the message ends that begins at `start`; None if not all of it is there."""
    line = data.find(b"\r\n", start)
    if line < 0:
        return None
    kind, rest, end = data[start : start + 1], data[start + 1 : line], line + 2
    if kind in b"$=!" and rest != b"-1":
        end += int(rest) + 2
        return end if end <= len(data) else None
    if kind in b"*~>%" and rest != b"-1":
        for _ in range(int(rest) * (2 if kind == b"%" else 1)):
            end = end_of(data, end)
            if end is None:
                return None
    return end


def escaped(data):
    short = {9: "\\t", 10: "\\n", 13: "\\r", 34: '\\"', 39: "\\'", 92: "\\\\"}
    return "".join(short.get(b) or (chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in data)


def main():
    port, file, command = int(sys.argv[1]), open(sys.argv[2], "w"), sys.argv[3:]
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
    client = subprocess.Popen([*command, url])
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    connections = 0
    asked = {}
    while client.poll() is None or len(watched.get_map()) > 1:
        for key, _ in watched.select(0.1):
            if key.data is None:
                connections += 1
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                for own, other, sign in [(near, far, ">"), (far, near, "<")]:
                    data = (other, connections, sign, bytearray())
                    watched.register(own, selectors.EVENT_READ, data)
                continue
            other, connection, sign, unread = key.data
            data = key.fileobj.recv(65536)
            if not data:
                for end in (key.fileobj, other):
                    watched.unregister(end)
                    end.close()
                break
            other.sendall(data)
            unread += data
            while unread and (end := end_of(unread, 0)):
                message = escaped(unread[:end])
                del unread[:end]
                of_ours = asked.setdefault(connection, [])
                if sign == ">":
                    of_ours.append("RLOCK." in message)
                elif not of_ours.pop(0):
                    message = ""
                print(f"{connection} {sign} {message}".rstrip(), file=file)
    sys.exit(client.returncode)


main()
