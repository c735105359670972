"""Verbs that need no tensor import no torch, which takes seconds: on a run that was served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SERVED = """
import sys
from pathlib import Path
from dure.cli.main import main
from dure.record.seal import sha256_of
from dure.record.settings import config_digest, canonical_json, with_sums
from dure.run.lineage import signed
from dure.wire.signatures import Key
from dure.deploy.server.register import FILE, Register

run = Path("run")
run.mkdir()
config = {"task": {"name": "mine"}, "strategy": {"name": "fed-avg"}, "seed": 0, "run": "r"}
lineage = {**config, "system": {}, "rounds": 1, "made": "", "versions": {},
           "config_sha256": config_digest(config)}
(run / "config.json").write_bytes(canonical_json(with_sums(config)))
(run / "summary.json").write_bytes(canonical_json({"lineage": lineage}))
(run / "model.safetensors").write_bytes(b"weights")
said = signed(lineage, sha256_of(run / "model.safetensors"), Key.load_or_create(Path("server.pem")))
(run / "model.lineage.json").write_bytes(canonical_json(said))
Register(run / FILE, 2).close()
(run / "audit.jsonl").touch()
"""

VERBS = """
verify run
backup run copy
clients invite run
clients list run
clients withdraw run
roster key --state site
roster key --state site
roster owner owner.pem
roster sign members --key owner.pem --federation mine
roster show roster.json
list .
show run
report run
certificates init --folder authority
systems
audit run/audit.jsonl
"""

EACH = """
for line in sys.stdin.read().strip().splitlines():
    if line.startswith("roster sign"):
        key = Key.load_or_create(Path("site") / "key.pem")
        Path("members").write_text(f"0 a {key.public}\\n")
    status = main(line.split())
    assert status == 0, f"dure {line} ended with {status}"
    assert "torch" not in sys.modules, f"dure {line} imported torch"
"""


def test_verbs_that_need_no_tensor_do_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVED + EACH],
        input=VERBS,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
