"""What one client seals, one other can open, and a server that changes anything is refused."""

from __future__ import annotations

import io
import os
import tracemalloc
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from dure.wire import hpke
from dure.wire.boxes import BoxKey, Member
from dure.wire.sealing import SealedMessageContext, SealError, seal, sealed_size, unseal
from dure.wire.signatures import Key
from dure.wire.tensors import pieces, receive

RUN = "8f14e45fceea167a"
IDENTITIES = [Key.make() for _ in range(3)]
BOXES = [BoxKey.make() for _ in range(3)]
MEMBERS = [
    box.member(identity, number, f"ward {number}", RUN)
    for number, (identity, box) in enumerate(zip(IDENTITIES, BOXES, strict=True))
]
ABOUT = SealedMessageContext(RUN, turn=7, sender=0, receiver=1)
MESSAGES = st.binary(max_size=80)


def sent(message, about: SealedMessageContext = ABOUT) -> bytearray:
    return seal(message, to=MEMBERS[about.receiver], identity=IDENTITIES[about.sender], about=about)


def opened(sealed, about: SealedMessageContext = ABOUT) -> bytearray:
    return unseal(sealed, box=BOXES[about.receiver], sender=MEMBERS[about.sender], about=about)


def refused(sealed, about: SealedMessageContext = ABOUT) -> SealError:
    with pytest.raises(SealError) as error:
        opened(sealed, about)
    return error.value


@given(st.lists(MESSAGES, max_size=5))
def test_the_receiver_opens_what_the_sender_sealed(parts) -> None:
    message = b"".join(parts)
    for sealed in (sent(parts), sent(map(memoryview, parts)), sent(message)):
        assert opened(sealed) == message
        assert len(sealed) == sealed_size(len(message), MEMBERS[1], IDENTITIES[0], ABOUT)


@pytest.mark.parametrize("size", [hpke.STRIDE - 1, hpke.STRIDE, 2 * hpke.STRIDE + 5])
def test_a_message_of_several_strides_comes_whole(size) -> None:
    message = os.urandom(size)
    assert opened(sent([message[:1000], memoryview(message)[1000:]])) == message


def test_a_model_is_sealed_as_the_stream_of_its_tensors() -> None:
    model = {
        "weight": torch.randn(3, 5).T,
        "half": torch.randn(7).to(torch.bfloat16),
        "steps": torch.tensor(5),
        "none": torch.empty(0, 4),
    }
    stream = io.BytesIO(opened(sent(pieces(model))))
    came = receive(stream.readinto, 1 << 20)
    assert came.keys() == model.keys()
    assert all(torch.equal(came[name], model[name]) for name in model)


@given(st.binary(min_size=16, max_size=60))
def test_nothing_of_the_message_is_in_what_travels(message) -> None:
    sealed = sent(message)
    assert message not in sealed
    assert sent(message)[-len(message) :] != sealed[-len(message) :]


@given(MESSAGES, st.data())
def test_any_flipped_bit_is_refused(message, data) -> None:
    sealed = sent(message)
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert refused(sealed).kind in ("not sealed", "not signed", "changed")


@given(MESSAGES, st.data())
def test_what_was_cut_off_or_added_is_refused(message, data) -> None:
    sealed = sent(message)
    refused(sealed[: data.draw(st.integers(0, len(sealed) - 1))])
    refused(sealed + data.draw(st.binary(min_size=1, max_size=20)))


@pytest.mark.parametrize("cut", [1, 16, 17, 20])
def test_a_message_that_came_in_part_says_how_much_is_missing(cut) -> None:
    error = refused(sent(b"head")[:-cut])
    assert error.kind == "changed"
    assert (
        f"20 encrypted bytes were sent by client 0 (ward 0), but {20 - cut} were received"
        in str(error)
    )


@given(st.binary(max_size=400))
def test_any_other_bytes_are_refused(sealed) -> None:
    refused(sealed)


ABOUTS = st.builds(
    SealedMessageContext,
    run=st.sampled_from([RUN, "c9f0f895fb98ab91"]),
    turn=st.integers(0, 3),
    sender=st.integers(0, 2),
    receiver=st.integers(0, 2),
)


@given(ABOUTS, ABOUTS)
def test_it_can_be_opened_as_what_it_is_and_as_nothing_else(was, said) -> None:
    to = BOXES[was.receiver].member(IDENTITIES[was.receiver], was.receiver, "b", was.run)
    sealed = seal(b"head", to=to, identity=IDENTITIES[was.sender], about=was)
    if was == said:
        assert opened(sealed, said) == b"head"
    else:
        refused(sealed, said)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"turn": 8}, "other turn", "for turn 7, but this is turn 8"),
        ({"run": "other"}, "other run", f"for the run {RUN}, but this is the run other"),
        ({"receiver": 2}, "not for me", "for client 1, not for client 2"),
        ({"sender": 2}, "not signed", "not signed by client 2 (ward 2)"),
    ],
)
def test_a_refusal_says_what_came_instead(change, kind, said) -> None:
    error = refused(sent(b"head"), replace(ABOUT, **change))
    assert error.kind == kind
    assert said in str(error)
    assert "\n" not in str(error)


def test_another_client_cannot_send_in_the_name_of_one() -> None:
    # It signs with its own key, which is all that it has.
    sealed = seal(b"head", to=MEMBERS[1], identity=IDENTITIES[2], about=ABOUT)
    assert refused(sealed).kind == "not signed"


def test_another_client_cannot_pass_off_a_message_as_its_own() -> None:
    sealed = sent(b"head")
    at = sealed.index(b"\n") + 1 + hpke.PUBLIC
    own = IDENTITIES[2].sign(bytes(sealed[:at]))
    error = refused(sealed[:at] + own + sealed[at + 64 :], replace(ABOUT, sender=2))
    assert error.kind == "other sender"


def test_the_encryption_itself_is_bound_to_the_first_line() -> None:
    # As by a sender who signs another line over the same encrypted message.
    sealed = sent(b"head")
    at = sealed.index(b"\n") + 1
    line = bytes(sealed[:at]).replace(b",7,0,", b",8,0,") + sealed[at : at + hpke.PUBLIC]
    again = line + IDENTITIES[0].sign(line) + sealed[at + hpke.PUBLIC + 64 :]
    assert refused(again, replace(ABOUT, turn=8)).kind == "changed"


def test_a_message_for_an_older_box_key_says_so() -> None:
    old = BoxKey.make().member(IDENTITIES[1], 1, "ward 1", RUN)
    sealed = seal(b"head", to=old, identity=IDENTITIES[0], about=ABOUT)
    error = refused(sealed)
    assert error.kind == "not for me"
    assert "another box key" in str(error)


def test_nothing_is_sealed_for_a_box_key_that_its_client_has_not_signed() -> None:
    mine = BoxKey.make().public
    swapped = Member(1, "ward 1", MEMBERS[1].identity, mine, MEMBERS[1].signature)
    elsewhere = BOXES[1].member(IDENTITIES[1], 1, "ward 1", "other")
    for to in (swapped, elsewhere):
        with pytest.raises(ValueError, match="has not signed the box key"):
            seal(b"head", to=to, identity=IDENTITIES[0], about=ABOUT)


def test_who_it_is_for_and_from_has_to_be_who_it_is_about() -> None:
    with pytest.raises(ValueError, match="about client 1, and not for client 2"):
        seal(b"head", to=MEMBERS[2], identity=IDENTITIES[0], about=ABOUT)
    with pytest.raises(ValueError, match="about client 0, and not from client 2"):
        unseal(sent(b"head"), box=BOXES[1], sender=MEMBERS[2], about=ABOUT)


def test_a_box_key_that_gives_no_secret_is_refused() -> None:
    box = BoxKey.make()
    box.public = "00" * 32
    to = box.member(IDENTITIES[1], 1, "ward 1", RUN)
    assert not to.is_true(RUN)
    with pytest.raises(ValueError, match="has not signed the box key"):
        seal(b"head", to=to, identity=IDENTITIES[0], about=ABOUT)


def test_one_copy_of_the_message_is_made_on_each_side() -> None:
    size = 24 << 20
    parts = [bytes(size // 3)] * 3
    tracemalloc.start()
    try:
        sealed = sent(parts)
        _, sealing = tracemalloc.get_traced_memory()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        message = opened(sealed)
        opening = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(message) == size
    assert sealing < 1.05 * size
    assert opening < 1.05 * size


def test_the_secret_is_that_of_the_standard() -> None:
    # RFC 9180, A.1.1.
    private = X25519PrivateKey.from_private_bytes(
        bytes.fromhex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8")
    )
    travels = bytes.fromhex("37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431")
    dh = private.exchange(X25519PublicKey.from_public_bytes(travels))
    secret = hpke._shared(dh, travels, private.public_key().public_bytes_raw())
    assert secret.hex() == "fe0e18c9f024ce43799ae393c7e8fe8fce9d218875e8227b0187c04e7d2ea1fc"


def test_what_was_sealed_once_is_opened_for_ever() -> None:
    def identity(first: int) -> Key:
        return Key(Ed25519PrivateKey.from_private_bytes(bytes(range(first, first + 32))))

    box = BoxKey(X25519PrivateKey.from_private_bytes(bytes(range(64, 96))))
    sender = box.member(identity(0), 0, "a", "run")
    sealed = (
        b'["dure sealed 1","run",7,0,'
        b'"03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8",1,'
        b'"79a631eede1bf9c98f12032cdeadd0e7a079398fc786b88cc846ec89af85a51a",4]\n'
    ) + bytes.fromhex(
        "bc23d2430fad8b7a5e244a92cc089b63f11829adfd9f33f7b07054d481a0ae0e"
        "2c1db4a690fafccefe60ae5a442c7c81aec66fa6aed5c31267ae01285c470294"
        "004f5bc5a0696221b0e5ef42c36b483efe7bef7d6f30e4e1f9719fce969c3707"
        "a44c1ea0c2571c851aba4da5288ed57618a8e53b"
    )
    about = SealedMessageContext("run", turn=7, sender=0, receiver=1)
    assert unseal(sealed, box=box, sender=sender, about=about) == b"head"


def test_it_is_hpke() -> None:
    other = pytest.importorskip("cryptography.hazmat.primitives.hpke")
    suite = other.Suite(other.KEM.X25519, other.KDF.HKDF_SHA256, other.AEAD.AES_256_GCM)
    private, public = BOXES[1].private, bytes.fromhex(BOXES[1].public)
    encrypted = bytearray(5 + hpke.TAG)
    travels = hpke.encrypt(
        public, b"info", [memoryview(b"he"), memoryview(b"ad!")], memoryview(encrypted)
    )
    assert suite.decrypt(travels + encrypted, private, b"info") == b"head!"

    whole = memoryview(suite.encrypt(b"head!", private.public_key(), b"info"))
    room = bytearray(5 + hpke.SLACK)
    hpke.decrypt(private, bytes(whole[:32]), b"info", whole[32:], memoryview(room))
    assert room[:5] == b"head!"


def test_a_private_key_is_not_shown() -> None:
    assert repr(BOXES[0]) == f"BoxKey({BOXES[0].public})"
