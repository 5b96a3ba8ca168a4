"""How large an element of each dtype is, by the short name that torch gives it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

ITEMSIZE: Final = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint64": 8,
        "uint32": 4,
        "uint16": 2,
        "uint8": 1,
        "bool": 1,
    }
)
"""Bytes per element. A dtype that is not here cannot be stored by format version 1."""

SAFETENSORS_NAME: Final = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
        "complex64": "C64",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
    }
)
"""The same dtypes in the words of the safetensors format; those it lacks are missing here."""
