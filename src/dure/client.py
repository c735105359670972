"""Clients of a federation that are trained by a trainer of another library.

dure.client.patch(trainer, url)    the trainer's `train` takes part in the federation at `url`
"""

from __future__ import annotations

from dure.trainers.patch import patch as patch
