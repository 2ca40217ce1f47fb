"""DataProto, the table that travels between the rooms of the house, and what is done with whole tables."""

from __future__ import annotations

from quadriga.protocol.columns import (
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from quadriga.protocol.data_proto import DataProto, DataProtoItem, collate_fn
from quadriga.protocol.future import DataProtoFuture, all_gather_data_proto
from quadriga.protocol.padding import (
    DataProtoConfig,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from quadriga.protocol.stored_column import Store, StoredColumn
from quadriga.protocol.values import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "Store",
    "StoredColumn",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "union_two_dict",
    "unpad_dataproto",
]
