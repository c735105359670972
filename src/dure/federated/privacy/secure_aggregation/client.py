"""Client of a secure sum, as a state machine: a message of the server in, an answer out.

    0 advertise   two X25519 key pairs: c seals shares, s makes masks. Both public keys go out,
                  signed with the client's identity over the context
    1 share       b, 32 random bytes; b and the private s are divided among the holders H(u), each
                  sealed for its holder; the server gets a commitment to b
    2 mask        y_u = x_u + PRG(b) + Σ_{v > u} PRG(s_uv) - Σ_{v < u} PRG(s_uv)      mod 2^32
                  over the neighbours v whose shares arrived: they have masks with u
    3 confirm     u signs the list of survivors (malicious variant)
    4 unmask      for each v whose shares u holds: the share of b_v if v survived, or else the share
                  of v's private s. Never both

A client verifies all it can compare. The context consists of the client's own knowledge; members,
threshold and neighbours are checked against the protocol's bounds; keys are checked against the
roster, if the client has a roster. A client answers each stage once: the same message gets the same
answer again, a different message raises an error. State that only a single stage needs is deleted
after that stage. An error changes no state.

With a roster the protocol is secure against a malicious server with fewer than n/3 colluding
clients. Without a roster, and with SecAgg+, the protocol is secure against a semi-honest server.

Cost, n neighbours, d elements: 2 n agreements of keys, O(n^2) multiplications for the shares, and n
+ 1 keystreams of d elements.

Source: Bonawitz et al., CCS 2017, figure 4; Bell et al., CCS 2020, algorithm 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dure.errors import AgreementError
from dure.federated.privacy.secure_aggregation import shamir
from dure.federated.privacy.secure_aggregation.agreement import KeyPair, agree, open_sealed, seal
from dure.federated.privacy.secure_aggregation.cohort import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    STAGES,
    MaskingCohort,
    SumContext,
    commitment,
    is_ascending,
    keys_text,
    mask_sign,
    own_mask,
    pair_key_info,
    share_associated_data,
    share_commitment,
    stages,
    survivors_text,
)
from dure.federated.privacy.secure_aggregation.masks import add_masks
from dure.federated.privacy.secure_aggregation.messages import (
    Advertised,
    Body,
    Confirmed,
    Keys,
    Masked,
    Offer,
    ProtocolError,
    PublicKeys,
    SealedSharePair,
    SecretShare,
    SharesForNeighbours,
    SharesFromNeighbours,
    Survivors,
    Unmask,
    Unmasked,
    from_body,
    to_body,
)
from dure.randomness.secret import Secret
from dure.wire.signatures import Key, is_signed


# No repr: a log would print secrets.
@dataclass(frozen=True, repr=False)
class _Own:
    """Keys of stage 0. `private` holds the 32 bytes behind the key pair `mask`."""

    channel: KeyPair
    mask: KeyPair
    private: bytes


@dataclass(frozen=True, repr=False)
class _Shared:
    """State after stage 1.

    Args:
        cohort: members with keys, and their neighbours.
        channels: keys that seal the shares, by neighbour.
        masks: keys of the pairwise masks, by neighbour.
        seed: seed of the client's own mask.
        piece: the client's own share of `seed`.
    """

    cohort: MaskingCohort
    channels: dict[int, bytes]
    masks: dict[int, bytes]
    seed: bytes
    piece: bytes


@dataclass(frozen=True, repr=False)
class _Pieces:
    """Shares of another client's secrets: its private mask key, and the seed of its own mask."""

    private: bytes
    seed: bytes

    def commitments(self, digest: bytes, owner: int, holder: int) -> tuple[bytes, bytes]:
        """Return the commitments to the two shares."""
        return (
            share_commitment("private", digest, owner, holder, self.private),
            share_commitment("seed", digest, owner, holder, self.seed),
        )


@dataclass(frozen=True, repr=False)
class _Answer:
    """An answered stage. `asked` is the digest of the server's message."""

    asked: bytes
    body: bytes
    tensor: Tensor | None


class SecureSumClient:
    """Member of a secure sum.

    Args:
        number: the client's number.
        context: the client's own knowledge of the sum, with the server's values for the rest
            (`messages.context_of`).
        secret: source of the client's keys.
        vector: function that returns the int32 tensor of `context.length` elements. The client
            calls it
            once and masks the tensor in place.
        identity: signing key; None without signatures.
        roster: public keys of all clients, in the format of `dure.wire.signatures`, agreed upon
            without
            the server; None without signatures.
        minimum: fewest clients of a sum that the client joins.

    Raises ValueError for a roster without an identity, or with another key for this client.
    """

    def __init__(
        self,
        number: int,
        context: SumContext,
        secret: Secret,
        vector: Callable[[], Tensor],
        *,
        identity: Key | None = None,
        roster: Mapping[int, str] | None = None,
        minimum: int = 2,
    ) -> None:
        if roster is not None and (identity is None or roster.get(number) != identity.public):
            raise ValueError(
                f"the roster has a different key for client {number}: agree on the roster again"
            )
        self._number = number
        self._context = context
        self._digest = context.digest()
        self._secret = secret
        self._vector = vector
        self._identity = identity
        self._roster = roster
        self._minimum = minimum
        self._stages = stages(context, roster is not None)
        self._answered: dict[int, _Answer] = {}
        # State for later stages; each attribute exists after its stage was answered.
        self._own: _Own
        self._shared: _Shared
        self._senders: tuple[int, ...]
        self._held: dict[int, _Pieces]
        self._survivors: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Client({self._number}, {len(self._answered)} of {len(self._stages)} stages)"

    def answer(self, stage: int, body: bytes) -> tuple[bytes, Tensor | None]:
        """Return the answer to the server's message of a stage; with a tensor in stage 2 alone.

        Raises ProtocolError, with a single sentence, for a message that violates the protocol; the
        state is unchanged.
        """
        asked = hashlib.sha256(body).digest()
        if stage in self._answered:
            return self._again(stage, asked)
        expected = self._stages[len(self._answered) :][:1]
        if (stage,) != expected:
            raise ProtocolError(
                f"the server asks for {_named(stage)}, but the next stage is "
                f"{_named(*expected) if expected else 'none'}"
            )
        answer, tensor = self._do(stage, body)
        if MASK in self._answered:
            self.forget_vector()
        self._answered[stage] = _Answer(asked, answer, tensor)
        return answer, tensor

    def forget_vector(self) -> None:
        """Free the masked vector after it was delivered."""
        self._answered[MASK] = replace(self._answered[MASK], tensor=None)

    def _again(self, stage: int, asked: bytes) -> tuple[bytes, Tensor | None]:
        before = self._answered[stage]
        if before.asked != asked:
            raise ProtocolError(
                f"the server asks for {_named(stage)} twice, with different content"
            )
        if stage == MASK and before.tensor is None:
            raise ProtocolError(f"the server asks for {_named(stage)} again after a later stage")
        return before.body, before.tensor

    def _do(self, stage: int, body: bytes) -> tuple[bytes, Tensor | None]:
        if stage == ADVERTISE:
            return _alone(self._advertise(from_body(body, Offer)))
        if stage == SHARE:
            return _alone(self._share(from_body(body, Keys)))
        if stage == MASK:
            vector, unfit = self._mask(from_body(body, SharesFromNeighbours))
            return to_body(Masked(unfit)), vector
        if stage == CONFIRM:
            return _alone(self._confirm(from_body(body, Survivors)))
        return _alone(self._unmask(from_body(body, Unmask)))

    # Stage 0: advertise keys

    def _advertise(self, offer: Offer) -> Advertised:
        self._check(offer.context)
        channel = KeyPair.of(self._key("channel"))
        private = self._key("mask")
        mask = KeyPair.of(private)
        self._own = _Own(channel, mask, private)
        signature = b""
        if self._identity is not None:
            text = keys_text(self._digest, self._number, channel.public, mask.public)
            signature = self._identity.sign(text)
        return Advertised(channel.public, mask.public, signature)

    def _check(self, offered: SumContext) -> None:
        own = self._context
        field = own.differs(offered)
        if field:
            raise ProtocolError(
                f"the server's secure aggregation has a different {field} than client "
                f"{self._number} expects"
            )
        if self._number not in own.members:
            raise ProtocolError(f"client {self._number} is not among the members of the sum")
        self._enough(own.members, "members")
        try:
            own.check()
        except ValueError as error:
            raise ProtocolError(
                f"the server's settings of secure aggregation are invalid: {error}"
            ) from None

    def _enough(self, clients: Sequence[int], what: str) -> None:
        if len(clients) < self._minimum:
            raise ProtocolError(
                f"the sum would have {len(clients)} {what}, but this client takes part only in "
                f"sums of {self._minimum} or more"
            )

    def _key(self, purpose: str) -> bytes:
        # The position is unique to this client and sum: a simulation never repeats a key.
        position = (self._number, *self._context.position())
        return self._secret.key(f"secure aggregation, {purpose}", *position)

    # Stage 1: share keys

    def _share(self, keys: Keys) -> SharesForNeighbours:
        cohort = self._cohort_of(keys)
        theirs = self._keys_in(keys, cohort)
        channels = {}
        masks = {}
        for other, told in theirs.items():
            channels[other] = self._agreed(self._own.channel, told.channel, "channel", other)
            masks[other] = self._agreed(self._own.mask, told.mask, "mask", other)
        seed = self._key("own mask")
        holders = cohort.holders(self._number)
        pieces = dict(zip(holders, self._divided(seed, len(holders)), strict=True))
        # The next stages need only the derived keys.
        del self._own
        self._shared = _Shared(cohort, channels, masks, seed, pieces[self._number].seed)
        boxes = tuple(
            self._sealed(channel, other, pieces[other]) for other, channel in channels.items()
        )
        return SharesForNeighbours(commitment(self._digest, self._number, seed), boxes)

    def _cohort_of(self, keys: Keys) -> MaskingCohort:
        present = keys.present
        if not is_ascending(present) or not set(present) <= set(self._context.members):
            raise ProtocolError("the server lists clients twice, out of order, or of another sum")
        if self._number not in present:
            raise ProtocolError(f"the server lists no keys for client {self._number}")
        self._many(present, "have keys")
        return MaskingCohort(self._context, present, keys.seed)

    def _many(self, clients: Sequence[int], what: str) -> None:
        least = self._context.least
        if len(clients) < least:
            raise ProtocolError(f"{len(clients)} clients {what}, but at least {least} are needed")
        self._enough(clients, f"clients that {what}")

    def _keys_in(self, keys: Keys, cohort: MaskingCohort) -> dict[int, PublicKeys]:
        """Return the neighbours' advertised keys, after all checks."""
        if tuple(one.client for one in keys.keys) != cohort.holders(self._number):
            raise ProtocolError(
                "the server sends keys of clients that are not the client's neighbours"
            )
        told = {one.client: one for one in keys.keys}
        own = told.pop(self._number)
        if (own.channel, own.mask) != (self._own.channel.public, self._own.mask.public):
            raise ProtocolError(f"the server sends client {self._number} wrong keys as its own")
        public = [key for one in keys.keys for key in (one.channel, one.mask)]
        if len(set(public)) < len(public):
            raise ProtocolError("the server sends one key for two clients, or for two purposes")
        for one in told.values():
            self._vouched(one)
        return told

    def _vouched(self, one: PublicKeys) -> None:
        """Check the signature of a neighbour's keys against the roster; raises ProtocolError."""
        if self._roster is None:
            return
        text = keys_text(self._digest, one.client, one.channel, one.mask)
        if not _is_signed(self._roster, one.client, text, one.signature):
            raise ProtocolError(
                f"client {one.client} has not signed its keys for this sum: the server has "
                "replaced them, or has sent the client another sum"
            )

    def _agreed(self, own: KeyPair, their: bytes, purpose: str, other: int) -> bytes:
        try:
            return agree(own, their, pair_key_info(purpose, self._digest, self._number, other))
        except AgreementError:
            raise ProtocolError(f"the server sends an invalid key of client {other}") from None

    def _divided(self, seed: bytes, holders: int) -> list[_Pieces]:
        """Return each holder's shares of the private mask key and of the seed."""
        secrets = [self._own.private, seed]
        drawn = self._key("shares")
        privates, seeds = shamir.split_many(secrets, holders, self._context.threshold, drawn)
        return [_Pieces(*both) for both in zip(privates, seeds, strict=True)]

    def _sealed(self, channel: bytes, to: int, pieces: _Pieces) -> SealedSharePair:
        about = share_associated_data(self._digest, self._number, to)
        box = seal(channel, pieces.private + pieces.seed, about)
        return SealedSharePair(to, box, *pieces.commitments(self._digest, self._number, to))

    # Stage 2: masked input

    def _mask(self, told: SharesFromNeighbours) -> tuple[Tensor, tuple[int, ...]]:
        """Return the masked vector, and the neighbours whose shares do not open or fit."""
        senders = tuple(one.client for one in told.shares)
        self._check_senders(senders)
        held = self._opened(told)
        masks = self._masks(senders)
        vector = self._vector()
        form = (self._context.length,)
        if vector.dtype != torch.int32 or tuple(vector.shape) != form:
            raise ValueError(f"the vector is {vector.dtype} {list(vector.shape)}, not int32 {form}")
        add_masks(vector, masks)
        del self._vector
        self._senders = senders
        self._held = held
        return vector, tuple(one for one in senders if one not in held)

    def _check_senders(self, senders: tuple[int, ...]) -> None:
        cohort = self._shared.cohort
        neighbours = set(cohort.neighbours(self._number))
        if not is_ascending(senders) or not set(senders) <= neighbours:
            raise ProtocolError(
                "the server sends shares twice, out of order, or of clients that are not neighbours"
            )
        if self._context.complete:
            self._many((*senders, self._number), "have shared keys")
        self._holders((*senders, self._number), "have shared keys")

    def _holders(self, clients: Collection[int], what: str) -> None:
        """Check that enough holders of this client's shares are present; raises ProtocolError."""
        there = len(set(clients) & set(self._shared.cohort.holders(self._number)))
        if there < self._context.threshold:
            raise ProtocolError(
                f"{there} of the holders of shares of client {self._number} {what}, but at least "
                f"{self._context.threshold} are needed"
            )

    def _opened(self, told: SharesFromNeighbours) -> dict[int, _Pieces]:
        """Return the two shares of each neighbour.

        Shares that do not open, or do not match their owner's commitment, are left out: other
        holders may have enough shares of that neighbour.
        """
        held = {}
        for one in told.shares:
            address = share_associated_data(self._digest, one.client, self._number)
            try:
                opened = open_sealed(self._shared.channels[one.client], one.box, address)
            except AgreementError:
                continue
            pieces = _Pieces(opened[: shamir.SHARE], opened[shamir.SHARE :])
            fits = pieces.commitments(self._digest, one.client, self._number)
            if (one.private, one.seed) == fits:
                held[one.client] = pieces
        there = len(held) + 1
        if there < self._context.threshold:
            raise ProtocolError(
                f"the shares of {there} clients can be decrypted, but at least "
                f"{self._context.threshold} are needed: the server has sent other clients another "
                "model, list, length or threshold"
            )
        return held

    def _masks(self, senders: Sequence[int]) -> list[tuple[bytes, int]]:
        """Return keys and signs of all masks of the vector."""
        own = (own_mask(self._digest, self._number, self._shared.seed), 1)
        masks = self._shared.masks
        return [own, *((masks[other], mask_sign(self._number, other)) for other in senders)]

    # Stage 3: consistency check

    def _confirm(self, told: Survivors) -> Confirmed:
        self._check_survivors(told.clients)
        # This stage exists only with a roster, and a roster requires an identity.
        assert self._identity is not None
        self._survivors = told.clients
        return Confirmed(self._identity.sign(survivors_text(self._digest, told.clients)))

    def _check_survivors(self, survivors: tuple[int, ...]) -> None:
        cohort = self._shared.cohort
        if not is_ascending(survivors) or not all(client in cohort for client in survivors):
            raise ProtocolError("the server lists survivors twice, out of order, or of another sum")
        if self._number not in survivors:
            raise ProtocolError(
                f"client {self._number} has sent its vector, but the server lists it as lost"
            )
        strange = set(survivors) & set(cohort.neighbours(self._number)) - set(self._senders)
        if strange:
            raise ProtocolError(
                f"client {min(strange)} is listed as a survivor, but has no masks with client "
                f"{self._number}"
            )
        self._many(survivors, "have survived")
        self._holders(survivors, "have survived")

    # Stage 4: unmask

    def _unmask(self, told: Unmask) -> Unmasked:
        self._check_survivors(told.survivors)
        if CONFIRM in self._stages:
            self._check_signatures(told)
        survivors = set(told.survivors)
        # The survivor list decides which of the two shares goes out, never both: both would reveal
        # the vector. All shares are deleted with the answer, so a second list finds none.
        seeds = {self._number: self._shared.piece}
        privates = {}
        for other, pieces in self._held.items():
            if other in survivors:
                seeds[other] = pieces.seed
            else:
                privates[other] = pieces.private
        del self._held
        del self._shared
        return Unmasked(_shares(seeds), _shares(privates))

    def _check_signatures(self, told: Unmask) -> None:
        if told.survivors != self._survivors:
            raise ProtocolError(
                "the server's list of survivors differs from the list that this client has signed"
            )
        assert self._roster is not None
        signers = tuple(one.client for one in told.signatures)
        if not is_ascending(signers) or not set(signers) <= set(told.survivors):
            raise ProtocolError(
                "the server sends signatures twice, out of order, or of lost clients"
            )
        self._many(signers, "have signed the survivors")
        text = survivors_text(self._digest, told.survivors)
        for one in told.signatures:
            if not _is_signed(self._roster, one.client, text, one.signature):
                raise ProtocolError(
                    f"client {one.client} has not signed these survivors: the server has sent it "
                    "another list"
                )


def _alone(body: Body) -> tuple[bytes, None]:
    return to_body(body), None


def _named(stage: int) -> str:
    return f'"{STAGES[stage]}"' if 0 <= stage < len(STAGES) else "a stage that there is not"


def _shares(pieces: Mapping[int, bytes]) -> tuple[SecretShare, ...]:
    return tuple(SecretShare(client, pieces[client]) for client in sorted(pieces))


def _is_signed(roster: Mapping[int, str], client: int, text: bytes, signature: bytes) -> bool:
    public = roster.get(client)
    return public is not None and is_signed(public, text, signature)
