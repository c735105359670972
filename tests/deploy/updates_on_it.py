"""Run by test_syncing.py on a forgetful disk: receives updates, and asks what the disk has of them.

Arguments: the folder, and what to leave out: nothing, "content" (files are not synced), "folder"
(names are not synced). Prints a line for every update that was acknowledged and lost.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

from forgetful_disk import what_it_has

from dure.deploy import updates
from dure.deploy.updates import Updates, Upload

folder, left_out = Path(sys.argv[1]), sys.argv[2]
luck = random.Random(3)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write(upload: Upload, content: bytes) -> None:
    part = upload.part(upload.offset)
    for begin in range(0, len(content), 150):
        part.add(content[begin : begin + 150])
    part.done(digest(content))


def lost(acknowledged: dict[int, bytes]) -> None:
    for luckily in (None, luck):
        place = what_it_has(folder, folder.with_name("found"), luckily)
        if acknowledged and not (place / "updates").is_dir():
            print("lost the folder")
            continue
        again = Updates(place / "updates")
        for ticket, content in acknowledged.items():
            if ticket not in again.all() or again.digest(ticket) != digest(content):
                print("lost", ticket, flush=True)
        # What was not complete is gone on with, whatever is left of it.
        stream = content_of(99)
        upload = again.open(99, len(stream), digest(stream))
        write(upload, stream[upload.offset :])
        upload.complete()


def content_of(ticket: int) -> bytes:
    return random.Random(ticket).randbytes(3000)


if left_out == "content":
    updates._sync = lambda path: None
if left_out == "folder":
    updates.sync_folder = lambda path: None
under_way = Updates(folder / "updates")
done: dict[int, bytes] = {}
for ticket in range(5):
    for number, part in ((ticket, content_of(ticket)), (99, content_of(99))):
        upload = under_way.open(number, len(part), digest(part))
        for _ in range(2 if number == 99 else 6):
            piece = part[upload.offset : upload.offset + 500 - 300 * (number == 99)]
            write(upload, piece)
            lost(done)
    under_way.open(ticket, 3000, digest(content_of(ticket))).complete()
    done[ticket] = content_of(ticket)
    lost(done)
print("took", len(done))
