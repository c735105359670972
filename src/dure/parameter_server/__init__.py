"""Servers that each own a range of keys; workers that push gradients and pull weights."""

from dure.parameter_server.processes.user_loop import join
from dure.parameter_server.processes.user_loop_worker import Worker

__all__ = ["Worker", "join"]
