"""Shards: training data in files on a disk, of which memory holds a few windows at a time.

A shard is a file, or some files of one name, with columns of equally many rows; a row is an
example:

    NAME.safetensors   a tensor a column
    NAME.COLUMN.npy    a file a column
    NAME.arrow         record batches, as a file or as a stream, which is what
    NAME.feather       `save_to_disk` of Hugging Face's `datasets` writes
    NAME.parquet       row groups

Arrow and Parquet need the extra `dure[arrow]`. Which columns are the inputs and the targets, their
names say. Before the first batch headers are read, and of Arrow and Parquet a group of rows.

    files      which files are shards, and what their headers say
    columns    safetensors and npy: rows lie one after another in the file
    arrow      Arrow and Parquet: rows lie in groups
    windows    a few windows in memory, the next one read ahead (`dure.data.arrangement`)
    shards     `Shards`: the examples

Sources: huggingface.co/docs/safetensors; numpy.lib.format; arrow.apache.org/docs/format;
parquet.apache.org.
"""

from __future__ import annotations

from dure.data.shards.shards import Shards as Shards
