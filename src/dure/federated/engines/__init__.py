"""Engines: local training of many clients, as fast as the machine allows.

The engine `loop` defines the result of every other engine.
"""
