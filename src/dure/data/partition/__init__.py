"""Partitions: assignments of examples to clients.

A partition is data: a sequence of index tensors, a tensor for each client. It is a pure function of
(clients, examples, seed), so that every rank, the simulation and the deployed server compute the
same partition. Every example belongs to exactly one client, and every client has at least 1. For a
single client every partition is 0..n-1.

    IID            a random permutation, cut into parts equal to within 1             McMahan
    LabelShards    sorted by label, cut into s * clients equal shards, s a client       McMahan
    Dirichlet      for every class, its share on each client ~ Dirichlet(alpha, ...)    Yurochkin
    QuantitySkew   IID in its labels, but the sizes ~ Dirichlet(alpha, ...)             Li
    FeatureSkew    sorted by the first principal component of the inputs, to a chosen degree
    Blocks         consecutive examples, s blocks of them a client
    NaturalKey     a client is a hospital, a speaking role, ..., by their sorted names

If a draw leaves a client with fewer than `minimum` examples, it gets examples of the client with
the most. (The papers draw again until every client has enough, which for many clients and a small
alpha never ends.)

Text forms: `iid`, `label-shards:2`, `dirichlet:0.3`, `dirichlet:0.3:10` (minimum),
`quantity-skew:0.5`, `feature-skew:0.8`, `blocks:2`, `natural-key`; `parse` reads the result of
`str`. A new partition is a file of its own here and a line below. A user's own is a subclass of
`Partition` in any file, and its text is `my_parts.py:Mine:0.3`.
"""

from __future__ import annotations

from dure.data.partition.description import PartitionDescription as PartitionDescription
from dure.data.partition.description import describe as describe
from dure.data.partition.partition import ClientParts as ClientParts
from dure.data.partition.partition import Partition as Partition
from dure.settings import listed, read

# In the order in which messages list them.
# isort: off
from dure.data.partition.iid import IID as IID
from dure.data.partition.label_shards import LabelShards as LabelShards
from dure.data.partition.dirichlet import Dirichlet as Dirichlet
from dure.data.partition.quantity_skew import QuantitySkew as QuantitySkew
from dure.data.partition.feature_skew import FeatureSkew as FeatureSkew
from dure.data.partition.blocks import Blocks as Blocks
from dure.data.partition.natural_key import NaturalKey as NaturalKey
# isort: on

PARTITIONS: dict[str, type[Partition]] = listed(globals(), Partition)
"""Every partition by the name that begins its text form."""


def parse(text: str) -> Partition:
    """Return the partition of a text: "iid", "label-shards:2", "my_parts.py:Mine:3", ...

    Raises ValueError for an unknown name, for too many values, and for invalid values.
    """
    return read(text, PARTITIONS, "partition", Partition)
