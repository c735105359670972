"""A client of a secure sum, as a state machine: the server's messages in, its answers out.

    0 advertise   two X25519 key pairs: c seals shares, s makes masks. Both public keys go out,
                  signed with the client's identity over the context
    1 share       b, 32 random bytes; b and the private s are divided among the holders H(u), each
                  sealed for its holder; the server gets a commitment to b
    2 mask        y_u = x_u + PRG(b) + Σ_{v > u} PRG(s_uv) - Σ_{v < u} PRG(s_uv)      mod 2^32
                  over the neighbours v whose shares came: they have masks with u
    3 confirm     u signs the list of survivors (malicious variant)
    4 unmask      of each v that it holds shares of: its share of b_v, where v is among the
                  survivors, and else of v's private s. Never both

A client believes nothing that it can compare. The context is what it knows itself; members,
threshold and neighbours are held against the protocol's bounds; keys are held against the roster,
if there is one. It answers every stage once: the same message again gets the same answer, another
one is refused. What it needs for one stage alone is forgotten with it. A refusal changes nothing.

With a roster it holds against a server that lies, as long as fewer than n/3 clients lie with it;
without, and with SecAgg+, against a server that follows the protocol and is curious.

Cost, n neighbours, d elements: 2 n agreements of keys, O(n^2) multiplications for the shares, and
n + 1 keystreams of d elements.

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
from dure.federated.privacy.secure_aggregation.agreement import KeyPair, agree, open_, seal
from dure.federated.privacy.secure_aggregation.cohort import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    STAGES,
    Cohort,
    Context,
    addressed,
    checks_consistency,
    commitment,
    is_ascending,
    keys_text,
    mask_sign,
    own_mask,
    pair,
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
    Sealed,
    Share,
    Shared,
    Shares,
    Survivors,
    Unmask,
    Unmasked,
    from_body,
    to_body,
)
from dure.randomness.secret import Secret
from dure.wire.signatures import Key, is_signed


# No repr: what a log prints of them would be secrets.
@dataclass(frozen=True, repr=False)
class _Own:
    """Stage 0: the client's keys. private: the 32 bytes that `mask` was made of."""

    channel: KeyPair
    mask: KeyPair
    private: bytes


@dataclass(frozen=True, repr=False)
class _Shared:
    """Stage 1. channels: keys under which shares travel. masks: keys of the masks with each
    neighbour. seed: of the client's own mask; piece: its own share of that."""

    cohort: Cohort
    channels: dict[int, bytes]
    masks: dict[int, bytes]
    seed: bytes
    piece: bytes


@dataclass(frozen=True, repr=False)
class _Pieces:
    """What is held of another client: a share of its private key of masks, and one of its seed."""

    private: bytes
    seed: bytes

    def commitments(self, digest: bytes, owner: int, holder: int) -> tuple[bytes, bytes]:
        """To the two shares."""
        return (
            share_commitment("private", digest, owner, holder, self.private),
            share_commitment("seed", digest, owner, holder, self.seed),
        )


@dataclass(frozen=True, repr=False)
class _Answer:
    """A stage that was answered. asked: digest of what the server said."""

    asked: bytes
    body: bytes
    tensor: Tensor | None


class Client:
    """One member of one sum.

    number: its own. context: what it knows itself of the sum, and what the server said of the rest
    (`messages.context_of`). secret: where its keys come from. vector: gives the int32 tensor of
    `context.length` elements, once, to be masked in place. identity: signs. roster: everybody's
    public keys, as `dure.wire.signatures` writes them, agreed upon without the server. minimum: the
    fewest clients of a sum that it takes part in.

    Raises ValueError for a roster without an identity, or in which the client's own key differs.
    """

    def __init__(
        self,
        number: int,
        context: Context,
        secret: Secret,
        vector: Callable[[], Tensor],
        *,
        identity: Key | None = None,
        roster: Mapping[int, str] | None = None,
        minimum: int = 2,
    ) -> None:
        if roster is not None and (identity is None or roster.get(number) != identity.public):
            raise ValueError(
                f"the roster has another key of client {number} than its own: agree on the roster "
                f"again"
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
        # What stages leave for later ones; each is there once its stage was answered.
        self._own: _Own
        self._shared: _Shared
        self._senders: tuple[int, ...]
        self._held: dict[int, _Pieces]
        self._survivors: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Client({self._number}, {len(self._answered)} of {len(self._stages)} stages)"

    @property
    def semi_honest(self) -> bool:
        """Whether it holds against a server only that follows the protocol."""
        return not checks_consistency(self._context, self._roster is not None)

    def answer(self, stage: int, body: bytes) -> tuple[bytes, Tensor | None]:
        """The answer to the server's message of a stage; a tensor with the masked input alone.

        Raises ProtocolError, in one sentence, for what no server asks that follows the protocol;
        nothing has changed then.
        """
        asked = hashlib.sha256(body).digest()
        if stage in self._answered:
            return self._again(stage, asked)
        expected = self._stages[len(self._answered) :][:1]
        if (stage,) != expected:
            raise ProtocolError(
                f"the server asks for {_named(stage)}, and it is the turn of "
                f"{_named(*expected) if expected else 'nothing more'}"
            )
        answer, tensor = self._do(stage, body)
        if MASK in self._answered:
            self.forget_vector()
        self._answered[stage] = _Answer(asked, answer, tensor)
        return answer, tensor

    def forget_vector(self) -> None:
        """The masked vector, once it was given, has arrived: it needs no memory any more."""
        self._answered[MASK] = replace(self._answered[MASK], tensor=None)

    def _again(self, stage: int, asked: bytes) -> tuple[bytes, Tensor | None]:
        before = self._answered[stage]
        if before.asked != asked:
            raise ProtocolError(f"the server asks for {_named(stage)} twice, and differently")
        if stage == MASK and before.tensor is None:
            raise ProtocolError(f"the server asks for {_named(stage)} again after it has gone on")
        return before.body, before.tensor

    def _do(self, stage: int, body: bytes) -> tuple[bytes, Tensor | None]:
        if stage == ADVERTISE:
            return _alone(self._advertise(from_body(body, Offer)))
        if stage == SHARE:
            return _alone(self._share(from_body(body, Keys)))
        if stage == MASK:
            vector, unfit = self._mask(from_body(body, Shares))
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

    def _check(self, offered: Context) -> None:
        own = self._context
        field = own.differs(offered)
        if field:
            raise ProtocolError(
                f"the server's secure aggregation has another {field} than client {self._number} "
                f"knows of"
            )
        if self._number not in own.members:
            raise ProtocolError(f"client {self._number} is not among the members of the sum")
        self._enough(own.members, "members")
        try:
            own.check()
        except ValueError as error:
            raise ProtocolError(f"the server's secure aggregation cannot be: {error}") from None

    def _enough(self, clients: Sequence[int], what: str) -> None:
        if len(clients) < self._minimum:
            raise ProtocolError(
                f"the sum would have {len(clients)} {what}, and this client takes part in sums of "
                f"{self._minimum} or more"
            )

    def _key(self, purpose: str) -> bytes:
        # All that sets this client and sum apart from others: a simulation never repeats a key.
        position = (self._number, *self._context.position())
        return self._secret.key(f"secure aggregation, {purpose}", *position)

    # Stage 1: share keys

    def _share(self, keys: Keys) -> Shared:
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
        # Its keys have done what they were for, and the next stages need what came of them.
        del self._own
        self._shared = _Shared(cohort, channels, masks, seed, pieces[self._number].seed)
        boxes = tuple(
            self._sealed(channel, other, pieces[other]) for other, channel in channels.items()
        )
        return Shared(commitment(self._digest, self._number, seed), boxes)

    def _cohort_of(self, keys: Keys) -> Cohort:
        present = keys.present
        if not is_ascending(present) or not set(present) <= set(self._context.members):
            raise ProtocolError("the server lists clients twice, out of order, or of another sum")
        if self._number not in present:
            raise ProtocolError(f"the server says that client {self._number} has no keys")
        self._many(present, "have keys")
        return Cohort(self._context, present, keys.seed)

    def _many(self, clients: Sequence[int], what: str) -> None:
        least = self._context.least
        if len(clients) < least:
            raise ProtocolError(f"{len(clients)} clients {what}, and {least} have to")
        self._enough(clients, f"clients that {what}")

    def _keys_in(self, keys: Keys, cohort: Cohort) -> dict[int, PublicKeys]:
        """What the neighbours have advertised, after all checks."""
        if tuple(one.client for one in keys.keys) != cohort.holders(self._number):
            raise ProtocolError("the server gives the keys of others than the client's neighbours")
        told = {one.client: one for one in keys.keys}
        own = told.pop(self._number)
        if (own.channel, own.mask) != (self._own.channel.public, self._own.mask.public):
            raise ProtocolError(f"the server gives client {self._number} other keys as its own")
        public = [key for one in keys.keys for key in (one.channel, one.mask)]
        if len(set(public)) < len(public):
            raise ProtocolError("the server gives one key to two clients, or for two purposes")
        for one in told.values():
            self._vouched(one)
        return told

    def _vouched(self, one: PublicKeys) -> None:
        """Raises ProtocolError for keys that the roster does not vouch for."""
        if self._roster is None:
            return
        text = keys_text(self._digest, one.client, one.channel, one.mask)
        if not _is_signed(self._roster, one.client, text, one.signature):
            raise ProtocolError(
                f"client {one.client} has not signed its keys for this sum: the server has put "
                f"others in their place, or has told it of another sum"
            )

    def _agreed(self, own: KeyPair, their: bytes, purpose: str, other: int) -> bytes:
        try:
            return agree(own, their, pair(purpose, self._digest, self._number, other))
        except AgreementError:
            raise ProtocolError(f"the server gives a key of client {other} that is none") from None

    def _divided(self, seed: bytes, holders: int) -> list[_Pieces]:
        """Of each holder its share of the private key of masks, and of the seed."""
        secrets = [self._own.private, seed]
        drawn = self._key("shares")
        privates, seeds = shamir.split_many(secrets, holders, self._context.threshold, drawn)
        return [_Pieces(*both) for both in zip(privates, seeds, strict=True)]

    def _sealed(self, channel: bytes, to: int, pieces: _Pieces) -> Sealed:
        about = addressed(self._digest, self._number, to)
        box = seal(channel, pieces.private + pieces.seed, about)
        return Sealed(to, box, *pieces.commitments(self._digest, self._number, to))

    # Stage 2: masked input

    def _mask(self, told: Shares) -> tuple[Tensor, tuple[int, ...]]:
        """The vector, and the neighbours whose shares do not open or fit."""
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
            raise ProtocolError("the server gives shares twice, out of order, or of no neighbour")
        if self._context.complete:
            self._many((*senders, self._number), "have shared keys")
        self._holders((*senders, self._number), "have shared keys")

    def _holders(self, clients: Collection[int], what: str) -> None:
        """Raises ProtocolError for too few who hold shares of this client."""
        there = len(set(clients) & set(self._shared.cohort.holders(self._number)))
        if there < self._context.threshold:
            raise ProtocolError(
                f"{there} of those who hold shares of client {self._number} {what}, and "
                f"{self._context.threshold} have to"
            )

    def _opened(self, told: Shares) -> dict[int, _Pieces]:
        """Of each neighbour its two shares. What does not open, or is not what its owner has
        committed to, is left out: others may hold enough of that neighbour's."""
        held = {}
        for one in told.shares:
            address = addressed(self._digest, one.client, self._number)
            try:
                opened = open_(self._shared.channels[one.client], one.box, address)
            except AgreementError:
                continue
            pieces = _Pieces(opened[: shamir.SHARE], opened[shamir.SHARE :])
            fits = pieces.commitments(self._digest, one.client, self._number)
            if (one.private, one.seed) == fits:
                held[one.client] = pieces
        there = len(held) + 1
        if there < self._context.threshold:
            raise ProtocolError(
                f"the shares of {there} clients open, and {self._context.threshold} have to: the "
                f"server has told others of another model, list, length or threshold"
            )
        return held

    def _masks(self, senders: Sequence[int]) -> list[tuple[bytes, int]]:
        """Keys and signs of all masks of the vector."""
        own = (own_mask(self._digest, self._number, self._shared.seed), 1)
        masks = self._shared.masks
        return [own, *((masks[other], mask_sign(self._number, other)) for other in senders)]

    # Stage 3: consistency check

    def _confirm(self, told: Survivors) -> Confirmed:
        self._check_survivors(told.clients)
        # There is this stage only with a roster, and no roster without an identity.
        assert self._identity is not None
        self._survivors = told.clients
        return Confirmed(self._identity.sign(survivors_text(self._digest, told.clients)))

    def _check_survivors(self, survivors: tuple[int, ...]) -> None:
        cohort = self._shared.cohort
        if not is_ascending(survivors) or not all(client in cohort for client in survivors):
            raise ProtocolError("the server lists survivors twice, out of order, or of another sum")
        if self._number not in survivors:
            raise ProtocolError(
                f"client {self._number} has sent its vector, and the server says that it was lost"
            )
        strange = set(survivors) & set(cohort.neighbours(self._number)) - set(self._senders)
        if strange:
            raise ProtocolError(
                f"client {min(strange)} is to have survived, and has no masks with client "
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
        # One list tells which of the two shares goes out, so there is no client of which both do.
        # And the list is the first and the last one: with the answer all shares are forgotten.
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
            raise ProtocolError("the server's survivors are not those that this client has signed")
        assert self._roster is not None
        signers = tuple(one.client for one in told.signatures)
        if not is_ascending(signers) or not set(signers) <= set(told.survivors):
            raise ProtocolError("the server gives signatures twice, out of order, or of the lost")
        self._many(signers, "have signed the survivors")
        text = survivors_text(self._digest, told.survivors)
        for one in told.signatures:
            if not _is_signed(self._roster, one.client, text, one.signature):
                raise ProtocolError(
                    f"client {one.client} has not signed these survivors: the server has told it "
                    f"of others"
                )


def _alone(body: Body) -> tuple[bytes, None]:
    return to_body(body), None


def _named(stage: int) -> str:
    return f'"{STAGES[stage]}"' if 0 <= stage < len(STAGES) else "a stage that there is not"


def _shares(pieces: Mapping[int, bytes]) -> tuple[Share, ...]:
    return tuple(Share(client, pieces[client]) for client in sorted(pieces))


def _is_signed(roster: Mapping[int, str], client: int, text: bytes, signature: bytes) -> bool:
    public = roster.get(client)
    return public is not None and is_signed(public, text, signature)
