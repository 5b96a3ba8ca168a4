"""torch.distributed.checkpoint through this library: what ``dcp.save`` writes is committed, verified and kept here.

::

    dcp.save(state, storage_writer=StorageWriter("s3://bucket/run", step=100))
    dcp.load(state, storage_reader=StorageReader("s3://bucket/run"))
"""

from __future__ import annotations

from resilient.integrations.dcp.reading import StorageReader
from resilient.integrations.dcp.writing import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
