"""Server of a secure sum, as a state machine: messages for clients out, their answers in.

    sum of the masked vectors of the survivors S, in arrival order        Σ_S y_u
    seed b_u of each survivor, from `threshold` of its shares             - PRG(b_u)
    private key s_v of each v that shared keys and is not in S            ∓ PRG(s_uv), u in S ∩ A(v)
    remainder                                                             Σ_S x_u      mod 2^32

Clients may drop out at any stage while the threshold remains. A client drops out by not answering
before a stage is closed, or by an answer that violates the protocol. Secrets from shares are
compared with their owner's public key or commitment before use: wrong shares are detected; the sum
is right or missing.

Blame for a wrong share follows from messages to the server alone, so that no client is blamed on
another client's word:

    a share in stage 4 that does not fit its owner's commitment   the holder that gave the share
    a missing share in stage 4, reported as fitting before        the holder that did not give it
    shares that fit, and a secret that does not                   their owner
    shares reported as unusable by more than a third of the       their owner: at least one of the
    holders, and by two or more                                   reporting holders is honest
    shares reported as unusable by fewer holders                  no client: either side may lie
    a sum that no vectors of so many clients make                 no client: vectors are masked

The fourth case is checked before any client unmasks: clients contribute to a single sum of a model.

Memory: one vector and the sum. Cost, n clients, l of them dropped after they shared keys, m shares
each, d elements: n + l m keystreams of d elements, l m agreements of keys, and O(m^2) for the
coefficients that put secrets together, once for all clients whose shares have the same holders.

Source: Bonawitz et al., CCS 2017, figure 4; Bell et al., CCS 2020, algorithm 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.errors import AgreementError
from dure.federated.privacy.secure_aggregation import shamir
from dure.federated.privacy.secure_aggregation.agreement import KeyPair, agree
from dure.federated.privacy.secure_aggregation.cohort import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    STAGES,
    UNMASK,
    MaskingCohort,
    SumContext,
    commitment,
    graph_seed,
    is_ascending,
    keys_text,
    mask_sign,
    own_mask,
    pair_key_info,
    share_commitment,
    stages,
    survivors_text,
)
from dure.federated.privacy.secure_aggregation.masks import add_masks
from dure.federated.privacy.secure_aggregation.messages import (
    SPENT,
    Advertised,
    Body,
    Confirmed,
    Keys,
    Masked,
    Offer,
    Pieces,
    ProtocolError,
    PublicKeys,
    SealedSharePair,
    SharesForNeighbours,
    SharesFromNeighbours,
    Survivors,
    SurvivorSignature,
    TooFewError,
    Unmask,
    Unmasked,
    from_body,
    to_body,
)
from dure.federated.privacy.secure_aggregation.recovery import recover
from dure.protocol.messages import WantedTensor
from dure.wire.signatures import is_signed

SITS_OUT = "it has helped to unmask a sum of this model, and sits out until that is another one"
"""Reason that a client is in no sum."""

Fits = Callable[[int, bytes], bool]
"""Function (client, secret) -> whether this is the client's secret."""


class SecureSumServer:
    """Server of a single secure sum.

    Args:
        context: all facts of the sum.
        roster: the clients' public keys, in the format of `dure.wire.signatures`; None without
            signatures.

    Attributes:
        stage: the current stage; None after the last stage.
        lost: reason by dropped client. The vector of a client that drops out after its masked input
            is
            in the sum.
        guilty: proven violation of the protocol, by client.
        spent: clients that helped to unmask an earlier sum of this model.
        helped: clients that helped to unmask this sum.

    Raises ValueError for a context with which no sum is possible.
    """

    def __init__(self, context: SumContext, roster: Mapping[int, str] | None = None) -> None:
        context.check()
        self._context = context
        self._digest = context.digest()
        self._roster = roster
        self._stages = list(stages(context, roster is not None))
        self.stage: int | None = self._stages.pop(0)
        self.lost: dict[int, str] = {}
        self.guilty: dict[int, str] = {}
        self.spent: set[int] = set()
        self.helped: set[int] = set()
        # Clients of the current stage, and clients that have answered.
        self._asked: tuple[int, ...] = context.members
        self._answered: set[int] = set()
        self._keys: dict[int, Advertised] = {}
        self._public: set[bytes] = set()
        self._cohort: MaskingCohort
        self._seed: bytes
        self._commitments: dict[int, bytes] = {}
        # Commitments by owner, then by holder: (to the private key's share, to the seed's share).
        self._share_commitments: dict[int, dict[int, tuple[bytes, bytes]]] = defaultdict(dict)
        # Owners of unusable shares, by the holder that reported them.
        self._unfit: dict[int, tuple[int, ...]] = {}
        # Sealed shares: by receiver, then by sender.
        self._boxes: dict[int, dict[int, SealedSharePair]] = defaultdict(dict)
        self._sharing: tuple[int, ...] = ()
        self._total: Tensor | None = None
        self._survivors: tuple[int, ...] = ()
        self._signatures: dict[int, bytes] = {}
        # Shares: by owner, then by holder.
        self._seeds: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._privates: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._result: tuple[Tensor, list[int]] | None = None

    def __repr__(self) -> str:
        at = "over" if self.stage is None else STAGES[self.stage]
        return f"Server({len(self._context.members)} members, {at})"

    @property
    def context(self) -> SumContext:
        """Facts of the sum."""
        return self._context

    def ask(self) -> dict[int, bytes]:
        """Return the message for each client at the current stage."""
        if self.stage == ADVERTISE:
            return self._to_all(Offer(self._context))
        if self.stage == SHARE:
            return self._ask_to_share()
        if self.stage == MASK:
            return {client: self._shares_for(client) for client in self._asked}
        if self.stage == CONFIRM:
            return self._to_all(Survivors(self._survivors))
        if self.stage == UNMASK:
            signed = tuple(
                SurvivorSignature(one, self._signatures[one]) for one in sorted(self._signatures)
            )
            return self._to_all(Unmask(self._survivors, signed))
        return {}

    def wants(self, stage: int) -> tuple[WantedTensor, ...]:
        """Return the forms of the tensors in answers of a stage."""
        return (WantedTensor("int32", (self._context.length,)),) if stage == MASK else ()

    def take(self, client: int, body: bytes, tensors: Sequence[Tensor] = ()) -> bool:
        """Take an answer to the current stage; returns whether the answer counts.

        A second answer, and an answer of a client outside of the stage, change nothing. A wrong
        answer removes the client (`lost`).
        """
        known = client in self._asked and client not in self._answered and client not in self.lost
        if not known or self.stage is None:
            return False
        if self.stage == UNMASK:
            self.helped.add(client)
        if self.stage == ADVERTISE and body == SPENT:
            self.spent.add(client)
            self.lost[client] = SITS_OUT
            return False
        try:
            self._take(client, body, tensors)
        except ProtocolError as error:
            self._blame(client, f"{self._at()}: {error}")
            return False
        self._answered.add(client)
        return True

    def lacks(self) -> list[int]:
        """Return clients without an answer if the given shares cannot unmask the sum; else []."""
        if self.stage != UNMASK:
            return []
        try:
            self._enough([client for client in self._asked if client in self._answered])
        except TooFewError:
            return [one for one in self._asked if one not in self._answered | self.lost.keys()]
        return []

    def close_stage(self) -> None:
        """Move to the next stage with the clients that have answered this stage.

        Raises TooFewError if they are too few: the sum then fails.
        """
        there = tuple(client for client in self._asked if client in self._answered)
        for client in self._asked:
            if client not in self._answered:
                self.lost.setdefault(client, f"{self._at()}: it did not answer")
        self._enough(there)
        self._end_of_stage(there)
        self._asked = there
        self._answered = set()
        self.stage = self._stages.pop(0) if self._stages else None

    def result(self) -> tuple[Tensor, list[int]]:
        """Return the sum modulo 2^32 as int32, and the clients in it; after the last stage.

        Raises TooFewError if too many shares are missing or wrong to remove the masks.
        """
        if self.stage is not None:
            raise ValueError(
                "the sum is available only after the last stage, and the current stage is "
                f"{self._at()}"
            )
        if self._result is None:
            self._result = (self._unmasked(), list(self._survivors))
        return self._result

    # For a restarted server

    def state(self) -> dict[str, Any]:
        """Return the state for a restart before any client has given shares: a tree of tensors.

        The state suffices to ask for shares and to remove the masks. It contains no secret of a
        client.
        """
        assert self.stage == UNMASK
        assert self._total is not None
        saved = _Saved(
            context=self._context,
            signed=self._roster is not None,
            lost=self.lost,
            guilty=self.guilty,
            spent=sorted(self.spent),
            keys=self._keys,
            present=self._cohort.present,
            seed=self._seed,
            commitments=self._commitments,
            share_commitments=self._share_commitments,
            unfit=self._unfit,
            sharing=self._sharing,
            survivors=self._survivors,
            asked=self._asked,
            signatures=self._signatures,
        )
        encoded = bytearray(msgspec.msgpack.encode(saved))
        return {"saved": torch.frombuffer(encoded, dtype=torch.uint8), "total": self._total}

    @classmethod
    def resumed(cls, state: Mapping[str, Any], roster: Mapping[int, str] | None) -> SecureSumServer:
        """Return the server with this state."""
        saved = msgspec.msgpack.decode(bytes(state["saved"].numpy()), type=_Saved)
        server = cls(saved.context, roster if saved.signed else None)
        server.stage = UNMASK
        server._stages = []
        server.lost = saved.lost
        server.guilty = saved.guilty
        server.spent = set(saved.spent)
        server._keys = saved.keys
        server._seed = saved.seed
        server._cohort = MaskingCohort(saved.context, saved.present, saved.seed)
        server._commitments = saved.commitments
        server._share_commitments.update(saved.share_commitments)
        server._unfit = saved.unfit
        server._sharing = saved.sharing
        server._survivors = saved.survivors
        server._asked = saved.asked
        server._signatures = saved.signatures
        server._total = state["total"].clone()
        return server

    def _blame(self, client: int, reason: str) -> None:
        self.lost.setdefault(client, reason)
        self.guilty.setdefault(client, reason)

    def _at(self) -> str:
        return "after the last stage" if self.stage is None else f'at "{STAGES[self.stage]}"'

    def _to_all(self, message: Body) -> dict[int, bytes]:
        body = to_body(message)
        return dict.fromkeys(self._asked, body)

    def _ask_to_share(self) -> dict[int, bytes]:
        present = self._cohort.present
        told = {
            client: PublicKeys(client, keys.channel, keys.mask, keys.signature)
            for client, keys in self._keys.items()
        }
        if self._context.complete:
            return self._to_all(Keys(present, self._seed, tuple(told[one] for one in present)))
        bodies = {}
        for client in self._asked:
            keys = tuple(told[holder] for holder in self._cohort.holders(client))
            bodies[client] = to_body(Keys(present, self._seed, keys))
        return bodies

    def _shares_for(self, client: int) -> bytes:
        # Only shares of clients that shared in time: all others have masks with exactly these.
        boxes = self._boxes[client]
        there = [sender for sender in self._sharing if sender in boxes]
        return to_body(SharesFromNeighbours(tuple(boxes[sender] for sender in there)))

    def _take(self, client: int, body: bytes, tensors: Sequence[Tensor]) -> None:
        if self.stage == ADVERTISE:
            self._take_keys(client, from_body(body, Advertised))
        elif self.stage == SHARE:
            self._take_shares(client, from_body(body, SharesForNeighbours))
        elif self.stage == MASK:
            self._take_vector(client, from_body(body, Masked), tensors)
        elif self.stage == CONFIRM:
            self._take_signature(client, from_body(body, Confirmed))
        else:
            self._take_pieces(client, from_body(body, Unmasked))

    def _take_keys(self, client: int, keys: Advertised) -> None:
        if self._roster is not None:
            text = keys_text(self._digest, client, keys.channel, keys.mask)
            if not self._is_signed(client, text, keys.signature):
                raise ProtocolError("its keys are not signed by its key in the roster")
        elif len(keys.signature) not in (0, 64):
            raise ProtocolError("its signature is none")
        public = {keys.channel, keys.mask}
        if len(public) < 2 or public & self._public:
            raise ProtocolError("its keys are not its own")
        for key in public:
            _check_key(key)
        self._public |= public
        self._keys[client] = keys

    def _is_signed(self, client: int, text: bytes, signature: bytes) -> bool:
        assert self._roster is not None
        public = self._roster.get(client)
        return public is not None and is_signed(public, text, signature)

    def _take_shares(self, client: int, shared: SharesForNeighbours) -> None:
        to = tuple(one.client for one in shared.shares)
        if to != self._cohort.neighbours(client):
            raise ProtocolError("it has not shared its keys with just its neighbours")
        said = [each for one in shared.shares for each in (one.private, one.seed)]
        if not all(len(each) == 32 for each in said):
            raise ProtocolError("it has not committed to its shares: its dure is an earlier one")
        self._commitments[client] = shared.commitment
        commitments = self._share_commitments[client]
        for one in shared.shares:
            self._boxes[one.client][client] = SealedSharePair(
                client, one.box, one.private, one.seed
            )
            commitments[one.client] = one.private, one.seed

    def _take_vector(self, client: int, masked: Masked, tensors: Sequence[Tensor]) -> None:
        senders = set(self._boxes[client]) & set(self._sharing)
        if not is_ascending(masked.unfit) or not set(masked.unfit) <= senders:
            raise ProtocolError("it names clients whose shares it was not given")
        if len(tensors) != 1:
            raise ProtocolError(f"it has sent {len(tensors)} tensors, and not 1")
        (vector,) = tensors
        if vector.dtype != torch.int32 or tuple(vector.shape) != (self._context.length,):
            raise ProtocolError(
                f"its vector is {vector.dtype} {list(vector.shape)}, and not int32 "
                f"[{self._context.length}]"
            )
        if self._total is None:
            self._total = torch.zeros(self._context.length, dtype=torch.int32)
        # In arrival order: a sum modulo 2^32 is the same in every order.
        self._total += vector
        self._unfit[client] = masked.unfit

    def _take_signature(self, client: int, confirmed: Confirmed) -> None:
        text = survivors_text(self._digest, self._survivors)
        if not self._is_signed(client, text, confirmed.signature):
            raise ProtocolError("it has not signed the list of survivors that it was told")
        self._signatures[client] = confirmed.signature

    def _take_pieces(self, client: int, unmasked: Unmasked) -> None:
        survivors = set(self._survivors)
        held = set(self._cohort.holders(client)) & set(self._sharing) - set(self._unfit[client])
        _check_owners(unmasked.survivors, held & survivors)
        _check_owners(unmasked.lost, held - survivors)
        _check_all(held - {one.client for one in (*unmasked.survivors, *unmasked.lost)})
        for one in unmasked.survivors:
            self._seeds[one.client][client] = one.piece
        for one in unmasked.lost:
            self._privates[one.client][client] = one.piece

    def _enough(self, there: Sequence[int]) -> None:
        least = self._context.least
        if self.stage == UNMASK:
            # The survivors are fixed: now only the number of shares of each secret matters.
            least = self._context.threshold
        if len(there) < least:
            raise TooFewError(
                f"secure aggregation of round {self._context.round}: {len(there)} of "
                f"{len(self._context.members)} clients have answered {self._at()}, but {least} "
                "are needed: wait longer for them, or select more clients"
            )
        # In SecAgg+ a client may lose the few holders of its shares although many clients remain.
        if self.stage == ADVERTISE or self._context.complete:
            return
        everybody = set(there)
        for client in self._sharing or there:
            holders = len(everybody.intersection(self._cohort.holders(client)))
            if holders < self._context.threshold:
                raise TooFewError(
                    f"secure aggregation of round {self._context.round}: {holders} of the "
                    f"{len(self._cohort.holders(client))} holders of shares of client {client} "
                    f"have answered {self._at()}, but {self._context.threshold} are needed: plan "
                    "for a larger fraction of drop-outs"
                )

    def _end_of_stage(self, there: tuple[int, ...]) -> None:
        if self.stage == ADVERTISE:
            keys = [key for one in there for key in (self._keys[one].channel, self._keys[one].mask)]
            self._seed = graph_seed(self._digest, keys)
            self._cohort = MaskingCohort(self._context, there, self._seed)
        elif self.stage == SHARE:
            self._sharing = there
        elif self.stage == MASK:
            self._survivors = there
            self._boxes.clear()
            self._check_shares_held(there)

    def _check_shares_held(self, there: tuple[int, ...]) -> None:
        """Check that every secret can be recovered at the end; raises TooFewError if not.

        No client has unmasked anything yet, so all can take part in another sum of this model.
        """
        saying: dict[int, list[int]] = defaultdict(list)
        for holder in there:
            for owner in self._unfit[holder]:
                saying[owner].append(holder)
        everybody = set(there)
        failed = ""
        for owner, holders in saying.items():
            whole = self._cohort.holders(owner)
            if len(holders) > max(1, len(whole) // 3):
                self._blame(
                    owner,
                    f'at "{STAGES[SHARE]}": its shares do not open or fit its commitments, say '
                    f"{len(holders)} of the {len(whole)} who hold them",
                )
            have = len(everybody.intersection(whole)) - len(holders)
            if have < self._context.threshold:
                failed = (
                    f"secure aggregation of round {self._context.round}: {have} of {len(whole)} "
                    f"have a share of client {owner}'s secret, but {self._context.threshold} are "
                    "needed: its shares cannot be decrypted or do not match, according to "
                    f"clients {_listed(holders)}"
                )
        if failed:
            raise TooFewError(failed)

    # After the last stage

    def _unmasked(self) -> Tensor:
        assert self._total is not None
        survivors = set(self._survivors)
        gone = [client for client in self._sharing if client not in survivors]
        # All secrets first: if a secret is missing, the total stays unchanged.
        seeds = self._rebuilt("seed", self._survivors, self._seeds, self._is_seed)
        privates = self._rebuilt("private", gone, self._privates, self._is_private)
        masks = [(own_mask(self._digest, one, seed), -1) for one, seed in seeds.items()]
        for client, private in privates.items():
            masks += self._masks_with(client, KeyPair.of(private), survivors)
        total = self._total
        self._total = None
        add_masks(total, masks)
        return total

    def _masks_with(
        self, client: int, own: KeyPair, survivors: set[int]
    ) -> list[tuple[bytes, int]]:
        """Return keys and signs of the survivors' masks with a dropped client."""
        masks = []
        for other in self._cohort.neighbours(client):
            if other in survivors:
                about = pair_key_info("mask", self._digest, client, other)
                key = agree(own, self._keys[other].mask, about)
                masks.append((key, -mask_sign(other, client)))
        return masks

    def _is_seed(self, client: int, secret: bytes) -> bool:
        return commitment(self._digest, client, secret) == self._commitments[client]

    def _is_private(self, client: int, secret: bytes) -> bool:
        return KeyPair.of(secret).public == self._keys[client].mask

    def _rebuilt(
        self,
        purpose: str,
        owners: Iterable[int],
        shares: Mapping[int, Mapping[int, bytes]],
        fits: Fits,
    ) -> dict[int, bytes]:
        """Return the secret of each owner, from its shares by holder.

        Shares are compared with commitments only if a secret does not fit, so the usual case is
        cheap.
        """
        places = {owner: self._by_place(owner, shares.get(owner, {})) for owner in owners}
        threshold = self._context.threshold
        try:
            secrets = shamir.join_many(list(places.values()), threshold)
        except ValueError:
            # Some share is malformed: each secret is recovered separately.
            secrets = [b""] * len(places)
        found = dict(zip(places, secrets, strict=True))
        for owner, secret in found.items():
            if not (secret and fits(owner, secret)):
                found[owner] = self._recovered(purpose, owner, places[owner], fits)
        return found

    def _by_place(self, owner: int, shares: Mapping[int, bytes]) -> dict[int, bytes]:
        holders = self._cohort.holders(owner)
        threshold = self._context.threshold
        if len(shares) < threshold:
            raise TooFewError(
                f"secure aggregation of round {self._context.round}: {len(shares)} of "
                f"{len(holders)} have a share of client {owner}'s secret, but {threshold} are "
                "needed: the client did not share it with all, or clients have received "
                "different information"
            )
        return {at: shares[holder] for at, holder in enumerate(holders) if holder in shares}

    def _is_committed(self, purpose: str, owner: int, holder: int, share: bytes) -> bool:
        """Return whether the owner has committed to the holder's share.

        Blames the holder if not.
        """
        # A client has no commitment to its own share; for a wrong own share the owner is to blame.
        if owner == holder:
            return True
        private, seed = self._share_commitments[owner][holder]
        found = share_commitment(purpose, self._digest, owner, holder, share)
        if found == (seed if purpose == "seed" else private):
            return True
        self._blame(
            holder,
            f'at "{STAGES[UNMASK]}": its share of client {owner}\'s secret is not the one that '
            f"client {owner} has committed to, and that it has said to have",
        )
        return False

    def _recovered(
        self, purpose: str, owner: int, shares: Mapping[int, bytes], fits: Fits
    ) -> bytes:
        """Return the secret of an owner; blames the owner for shares of another secret."""
        threshold = self._context.threshold
        holders = self._cohort.holders(owner)
        shares = {
            at: share
            for at, share in shares.items()
            if self._is_committed(purpose, owner, holders[at], share)
        }
        if len(shares) < self._context.threshold:
            raise TooFewError(
                f"secure aggregation of round {self._context.round}: {len(shares)} of "
                f"{len(holders)} have sent the share of client {owner}'s secret that matches its "
                f"commitment, but {self._context.threshold} are needed"
            )
        # The owner has committed to each share, except the owner's own, which comes last.
        order = sorted(shares, key=lambda at: holders[at] == owner)
        found = recover(shares, threshold, lambda secret: fits(owner, secret), order)
        if found.secret is None or found.wrong:
            self._blame(
                owner,
                f'at "{STAGES[SHARE]}": its shares, which are those that it has committed to, are '
                f"not of the secret that it has advertised or committed to",
            )
        if found.secret is None:
            raise TooFewError(
                f"secure aggregation of round {self._context.round}: the shares of client "
                f"{owner}'s secret do not give the advertised secret: the client has shared "
                "another one"
            )
        return found.secret


class _Saved(msgspec.Struct, frozen=True):
    """State of a server before "unmask", without the sum; names as in `SecureSumServer`."""

    context: SumContext
    signed: bool
    lost: dict[int, str]
    guilty: dict[int, str]
    spent: list[int]
    keys: dict[int, Advertised]
    present: tuple[int, ...]
    seed: bytes
    commitments: dict[int, bytes]
    share_commitments: dict[int, dict[int, tuple[bytes, bytes]]]
    unfit: dict[int, tuple[int, ...]]
    sharing: tuple[int, ...]
    survivors: tuple[int, ...]
    asked: tuple[int, ...]
    signatures: dict[int, bytes]


def _listed(clients: Sequence[int]) -> str:
    """Return the first five clients as text."""
    more = f" and {len(clients) - 5} more" if len(clients) > 5 else ""
    return ", ".join(map(str, clients[:5])) + more


def _check_owners(pieces: Pieces, allowed: set[int]) -> None:
    """Check that a client gives shares of allowed owners alone; raises ProtocolError."""
    owners = tuple(one.client for one in pieces)
    if not is_ascending(owners) or not set(owners) <= allowed:
        raise ProtocolError("it gives shares twice, out of order, or of clients it was not asked")


def _check_all(missing: set[int]) -> None:
    """Check that no promised share is missing; raises ProtocolError."""
    if missing:
        raise ProtocolError(
            f"it gives no share of client {min(missing)}'s secret, and has not said before that it "
            f"has none"
        )


def _check_key(public: bytes) -> None:
    """Check that a public key yields a secret; raises ProtocolError for a key of low order."""
    try:
        agree(_ANY, public, b"")
    except AgreementError:
        raise ProtocolError("its keys are no keys") from None


_ANY = KeyPair.of(bytes(31) + b"\1")
"""Any private key: a public key of low order fails with every private key."""
