"""`Network`: what a run folder knows of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure.deploy.world import Network
from dure.run.registry import decode_world, encode
from dure.wire.certificates import issue_server, make_authority


def test_a_world_with_certificates_can_be_resumed() -> None:
    world = Network(certificate="server.pem", client_ca="authority.pem")
    assert decode_world(encode(world)) == world
    assert world.certificate == str(Path.cwd() / "server.pem"), "from wherever it is resumed"


def test_a_certificate_that_is_renewed_or_refused_has_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dure.deploy.world.RELOAD_SECONDS", 0.0)
    caplog.set_level("INFO", "dure.server.events")
    make_authority(tmp_path)
    pair = issue_server(tmp_path)
    _, look = Network(certificate=str(pair.certificate)).context()
    look()
    assert caplog.messages == []
    pair.certificate.write_text("half a certificate")
    with pytest.warns(UserWarning, match="the renewed certificate is not used"):
        look()
    # Said once, and not every few seconds.
    look()
    issue_server(tmp_path)
    look()
    assert caplog.messages == ["certificate refused", "certificate renewed"]
    refused = caplog.records[0]
    assert refused.levelname == "WARNING"
    assert str(pair.certificate) in refused.about["reason"]  # type: ignore[attr-defined]
