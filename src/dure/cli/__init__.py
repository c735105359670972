"""What a person types, and what the terminal shows."""

from dure.worlds.processes.fork_server import server

server.keeps_here(__name__)
