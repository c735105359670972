"""Partitions: which example belongs to which client.

A partition is data: a sequence of index tensors, one a client. It is a pure function of (clients,
n, labels or keys, seed), so that every rank, the simulation and the deployed server compute the
same one. Every example belongs to exactly one client, and every client has at least one. For one
client every partition is 0..n-1.

    IID            a random permutation, cut into parts equal to within one                        McMahan
    LabelShards    sorted by label, cut into s * clients shards equal to within one, s a client    McMahan
    Dirichlet      for every class, its share on each client ~ Dirichlet(alpha, ..., alpha)        Yurochkin
    QuantitySkew   IID in its labels, but the sizes ~ Dirichlet(alpha, ..., alpha)                 Li
    NaturalKey     a client is a hospital, a speaking role, ..., in the order of their sorted names

Where a draw leaves a client with fewer than `minimum` examples, it is given some of the client's
that then has most. (The papers draw again until nobody is short, which for many clients and a small
alpha never ends.)

Written as text: `iid`, `label-shards:2`, `dirichlet:0.3`, `dirichlet:0.3:10` (minimum),
`quantity-skew:0.5`, `natural-key`; `parse` reads what `str` writes.

Sources: H. B. McMahan et al., AISTATS 2017, section 3 (MNIST: 200 shards of 300, two a client); M.
Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019; Q. Li
et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from dure.randomness.seeds import derive, generator
from dure.settings import read, write

EVEN = 1e100
"""An alpha from which on all shares of a Dirichlet distribution are equal in float64; sums of much
larger overflow."""

MOST_HISTOGRAMS = 10_000
"""Clients up to which descriptions have a label histogram of each."""

MOST_NUMBERS = 10_000_000
"""And numbers up to which they have them."""


class Parts(Sequence[Tensor]):
    """The examples of each client, as one tensor and where each client's begin: a million clients
    are two tensors.

    owners: the client of each example, int64 of shape (n,). The examples of a client are in
    ascending order.
    """

    def __init__(self, owners: Tensor, clients: int) -> None:
        self.owners = owners
        self.sizes = torch.bincount(owners, minlength=clients)
        self._indices = owners.sort(stable=True).indices
        self._starts: list[int] = [0, *self.sizes.cumsum(0).tolist()]

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Parts:
        """From the examples of each client, which are all of 0..n-1."""
        everything = torch.cat(list(parts))
        owners = torch.empty_like(everything)
        owners[everything] = torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
        return cls(owners, len(parts))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, client: int) -> Tensor: ...

    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...

    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        if isinstance(client, slice):
            return [self[one] for one in range(*client.indices(len(self)))]
        starts = self._starts
        count = len(starts) - 1
        if not -count <= client < count:
            raise IndexError(f"there is no client {client} among {count}")
        client %= count
        return self._indices[starts[client] : starts[client + 1]]


@dataclass(frozen=True)
class Partition:
    """What all partitions have in common: a name, a text form, and `divide`."""

    name: ClassVar[str]

    def divide(
        self,
        clients: int | None,
        n: int,
        labels: Tensor | None = None,
        keys: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Parts:
        """One sorted int64 tensor of indices into 0..n-1 for each client.

        clients: how many; None only where the data say it (`NaturalKey`).
        labels: class indices of shape (n,), for the partitions by label; keys: n names, for
            `NaturalKey`.

        Raises ValueError if the examples are too few, or have not the labels or keys that are
        needed.
        """
        if clients is None:
            raise ValueError(f"how many clients? the partition {self} does not say it")
        if clients < 1:
            raise ValueError(f"the number of clients has to be at least 1, not {clients}")
        if clients > n:
            raise ValueError(f"{clients} clients cannot share {n} examples: each needs one")
        if clients == 1:
            return Parts(torch.zeros(n, dtype=torch.int64), 1)
        return self._divide(clients, n, labels, keys, seed)

    def _divide(
        self, clients: int, n: int, labels: Tensor | None, keys: Sequence[str] | None, seed: int
    ) -> Parts:
        """`divide` for at least two clients and as many examples."""
        raise NotImplementedError

    @property
    def description(self) -> str:
        """The partition in words, as reports show it."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The text that `parse` reads: the name and the fields, without those at the end that are
        default."""
        return write(self)


@dataclass(frozen=True)
class IID(Partition):
    """Every client has a random sample of all, of equal size to within one."""

    name: ClassVar[str] = "iid"

    def _divide(
        self, clients: int, n: int, labels: Tensor | None, keys: Sequence[str] | None, seed: int
    ) -> Parts:
        return Parts(
            _dealt(
                torch.randperm(n, generator=generator(seed, "partition")), torch.arange(clients)
            ),
            clients,
        )

    @property
    def description(self) -> str:
        return "IID, equal sizes"


@dataclass(frozen=True)
class LabelShards(Partition):
    """Sorted by label and cut into equal shards, of which each client draws `per_client`.

    With two shards a client most clients have examples of two classes only.
    """

    name: ClassVar[str] = "label-shards"
    per_client: int = 2

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise ValueError(
                f"label shards: a client needs at least 1 shard, not {self.per_client}"
            )

    def _divide(
        self, clients: int, n: int, labels: Tensor | None, keys: Sequence[str] | None, seed: int
    ) -> Parts:
        count = self.per_client * clients
        if count > n:
            raise ValueError(
                f"{n} examples cannot be cut into {count} shards ({self.per_client} a client): "
                "take fewer clients or fewer shards a client"
            )
        by_label = _needed(labels, n, self).sort(stable=True).indices
        drawn = torch.randperm(count, generator=generator(seed, "partition"))
        owner_of_shard = torch.empty_like(drawn)
        owner_of_shard[drawn] = torch.arange(clients).repeat_interleave(self.per_client)
        return Parts(_dealt(by_label, owner_of_shard), clients)

    @property
    def description(self) -> str:
        return f"label shards, {self.per_client} a client"


@dataclass(frozen=True)
class Dirichlet(Partition):
    """The clients' shares of every class are drawn from a symmetric Dirichlet distribution.

    alpha: small is skewed (0.1: a client has most of a few classes), large is even (100: like IID).
    minimum: the fewest examples a client has.
    """

    name: ClassVar[str] = "dirichlet"
    alpha: float = 0.5
    minimum: int = 1

    def __post_init__(self) -> None:
        _check_skew(self)

    def _divide(
        self, clients: int, n: int, labels: Tensor | None, keys: Sequence[str] | None, seed: int
    ) -> Parts:
        labels = _needed(labels, n, self)
        random = np.random.default_rng(derive(seed, "partition"))
        rounding = np.random.default_rng(derive(seed, "rounding of shares"))
        parts: list[list[Tensor]] = [[] for _ in range(clients)]
        for label in torch.unique(labels):
            members = (labels == label).nonzero().flatten()
            shuffled = members[torch.from_numpy(random.permutation(len(members)))]
            counts = _counts(_shares(random, self.alpha, clients), len(members), rounding)
            for part, share in zip(parts, shuffled.split(counts), strict=True):
                part.append(share)
        return Parts.of(_filled([torch.cat(part) for part in parts], self.minimum, random))

    @property
    def description(self) -> str:
        return f"label skew, Dirichlet({self.alpha:g})"


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """The clients' sizes are drawn from a symmetric Dirichlet distribution; their labels are a
    random sample.

    alpha: small is skewed (one client has most), large is even. minimum: the fewest examples a
    client has.
    """

    name: ClassVar[str] = "quantity-skew"
    alpha: float = 0.5
    minimum: int = 1

    def __post_init__(self) -> None:
        _check_skew(self)

    def _divide(
        self, clients: int, n: int, labels: Tensor | None, keys: Sequence[str] | None, seed: int
    ) -> Parts:
        random = np.random.default_rng(derive(seed, "partition"))
        shuffled = torch.from_numpy(random.permutation(n))
        return Parts.of(
            _filled(_cut(shuffled, _shares(random, self.alpha, clients)), self.minimum, random)
        )

    @property
    def description(self) -> str:
        return f"quantity skew, Dirichlet({self.alpha:g})"


@dataclass(frozen=True)
class NaturalKey(Partition):
    """One client for each key, client k that of `sorted(set(keys))[k]`. A single client has all the
    data."""

    name: ClassVar[str] = "natural-key"

    def divide(
        self,
        clients: int | None,
        n: int,
        labels: Tensor | None = None,
        keys: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Parts:
        """As `Partition.divide`; clients None means as many as there are keys."""
        if clients is None:
            clients = len(set(_keys(keys, n)))
        return super().divide(clients, n, labels, keys, seed)

    def _divide(
        self, clients: int, n: int, labels: Tensor | None, keys: Sequence[str] | None, seed: int
    ) -> Parts:
        keys = _keys(keys, n)
        names = sorted(set(keys))
        if clients != len(names):
            some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"the data have {len(names)} natural clients ({some}), not {clients}: "
                f"leave the number of clients out, or give {len(names)}"
            )
        number = {name: client for client, name in enumerate(names)}
        return Parts(torch.tensor([number[key] for key in keys]), clients)

    @property
    def description(self) -> str:
        return "natural clients, by key"


PARTITIONS: dict[str, type[Partition]] = {
    partition.name: partition
    for partition in (IID, LabelShards, Dirichlet, QuantitySkew, NaturalKey)
}
"""Every partition by the name its text form begins with."""


def parse(text: str) -> Partition:
    """The partition that `text` names: "iid", "label-shards:2", "dirichlet:0.3", ...

    Raises ValueError for an unknown name, for too many values, and for values that are not what
    they should be.
    """
    return read(text, PARTITIONS, "partition")


@dataclass(frozen=True)
class Description:
    """What a partition gave each client; as a dict it is the `partition` entry of a run's
    config.json.

    description: the partition in words. counts: examples of each client. label_histograms: for each
        client how often it has each class, None without labels or for more than 10,000 clients.
        classes: their names, for printing only.
    """

    description: str
    counts: list[int]
    label_histograms: list[list[int]] | None
    classes: list[str] | None = None

    def as_dict(self) -> dict[str, Any]:
        """description, counts and label_histograms, of types that JSON has."""
        return {
            "description": self.description,
            "counts": self.counts,
            "label_histograms": self.label_histograms,
        }

    def __str__(self) -> str:
        """A table of at most 20 clients, with the classes across."""
        shown = range(min(len(self.counts), 20))
        rows = [["client", "examples", *(self.classes or [])]]
        for client in shown:
            histogram = self.label_histograms[client] if self.label_histograms else []
            rows.append([str(client), str(self.counts[client]), *map(str, histogram)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        hidden = len(self.counts) - len(shown)
        sizes = f"{min(self.counts)} to {max(self.counts)} examples each"
        title = f"{self.description}: {len(self.counts)} clients, {sizes}"
        return "\n".join([title, *lines, *([f"... and {hidden} clients more"] if hidden else [])])


def describe(
    partition: Partition,
    parts: Sequence[Tensor],
    labels: Tensor | None,
    classes: Sequence[str] | None = None,
) -> Description:
    """Counts and, where there are labels of shape (n,), label histograms of the clients' `parts`.

    classes: the labels' names; without them the classes are 0..max(labels).
    """
    divided = parts if isinstance(parts, Parts) else Parts.of(parts)
    counts: list[int] = divided.sizes.tolist()
    if labels is None or len(counts) > MOST_HISTOGRAMS:
        return Description(partition.description, counts, None)
    number = max(int(labels.max()) + 1, len(classes or ()))
    if int(labels.min()) < 0 or number * len(counts) > MOST_NUMBERS:  # no classes 0, 1, …
        return Description(partition.description, counts, None)
    together = torch.bincount(divided.owners * number + labels, minlength=number * len(counts))
    histograms: list[list[int]] = together.view(-1, number).tolist()
    names = (
        list(classes)
        if classes is not None and len(classes) == number
        else list(map(str, range(number)))
    )
    return Description(partition.description, counts, histograms, names)


def _dealt(order: Tensor, owners: Tensor) -> Tensor:
    """The owner of each example, where `order` is cut into parts equal to within one, the k-th of
    `owners[k]`."""
    n, count = len(order), len(owners)
    sizes = torch.full((count,), n // count)
    sizes[: n % count] += 1
    dealt = torch.empty_like(order)
    dealt[order] = owners.repeat_interleave(sizes)
    return dealt


def _needed(labels: Tensor | None, n: int, partition: Partition) -> Tensor:
    if labels is None:
        raise ValueError(
            f"the partition {partition} needs one class label an example, which these data have "
            f"not: "
            "take iid, quantity-skew or natural-key"
        )
    if labels.shape != (n,):
        raise ValueError(f"labels have the shape {tuple(labels.shape)}, expected ({n},)")
    return labels


def _keys(keys: Sequence[str] | None, n: int) -> Sequence[str]:
    if keys is None:
        raise ValueError(
            "the partition natural-key needs a key for each example, which these data have not"
        )
    if len(keys) != n:
        raise ValueError(f"there are {len(keys)} keys for {n} examples")
    return keys


def _check_skew(partition: Dirichlet | QuantitySkew) -> None:
    if not (partition.alpha > 0 and math.isfinite(partition.alpha)):
        raise ValueError(
            f"{partition.name}: alpha has to be a positive number, not {partition.alpha}"
        )
    if partition.minimum < 1:
        raise ValueError(
            f"{partition.name}: a client needs at least 1 example, not {partition.minimum}"
        )


def _shares(random: np.random.Generator, alpha: float, clients: int) -> np.ndarray:
    return random.dirichlet(np.full(clients, min(alpha, EVEN)))


def _cut(indices: Tensor, shares: np.ndarray) -> list[Tensor]:
    """`indices` cut into consecutive parts of these shares of its length."""
    ends = np.rint(shares.cumsum()[:-1] * len(indices)).astype(int)
    return list(indices.tensor_split(ends.tolist()))


def _counts(shares: np.ndarray, n: int, random: np.random.Generator) -> list[int]:
    """n whole things by these shares, each rounded up or down so that on average it is exact
    (systematic sampling).

    Which are rounded up is drawn anew in each call: else the same clients would have what is left
    of every class.
    """
    order = random.permutation(len(shares))
    ends = np.floor(shares[order].cumsum() / shares.sum() * n + random.random())
    ends[-1] = n
    counts = np.empty(len(shares), dtype=int)
    counts[order] = np.diff(np.minimum(ends, n), prepend=0)
    found: list[int] = counts.tolist()
    return found


def _filled(parts: list[Tensor], minimum: int, random: np.random.Generator) -> list[Tensor]:
    """The parts with at least `minimum` examples each, the missing ones taken at random from the
    largest."""
    total, sizes = sum(map(len, parts)), [len(part) for part in parts]
    if minimum * len(parts) > total:
        raise ValueError(f"{len(parts)} clients cannot have {minimum} of {total} examples each")
    for poor in range(len(parts)):
        while sizes[poor] < minimum:
            rich = max(range(len(parts)), key=sizes.__getitem__)
            # The giver keeps its minimum. The largest has more than that, or the total would not be
            # enough.
            count = min(minimum - sizes[poor], sizes[rich] - minimum)
            shuffled = parts[rich][torch.from_numpy(random.permutation(sizes[rich]))]
            parts[poor], parts[rich] = torch.cat([parts[poor], shuffled[:count]]), shuffled[count:]
            sizes[poor], sizes[rich] = len(parts[poor]), len(parts[rich])
    return parts
