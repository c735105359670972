"""Shards: training data in files on a disk, of which memory holds a few windows at a time.

A shard is a file, or several files with a common name, with columns of equally many rows; a row is
an example:

    NAME.safetensors   a tensor a column
    NAME.COLUMN.npy    a file a column
    NAME.arrow         record batches, as a file or as a stream, the format of
    NAME.feather       `save_to_disk` of Hugging Face's `datasets`
    NAME.parquet       row groups

Arrow and Parquet need the extra `dure[arrow]`. Inputs and targets are chosen by the names of the
columns. Before the first batch only headers are read, and of Arrow and Parquet a group of rows.

    files      files that are shards, and their headers
    columns    safetensors and npy: consecutive rows in the file
    arrow      Arrow and Parquet: rows in groups
    windows    a few windows in memory, the next window read ahead (`dure.data.block_shuffling`)
    shards     `Shards`: the examples

Sources: huggingface.co/docs/safetensors; numpy.lib.format; arrow.apache.org/docs/format;
parquet.apache.org.
"""

from __future__ import annotations

from dure.data.shards.shards import Shards as Shards
