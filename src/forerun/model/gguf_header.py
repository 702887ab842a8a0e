"""Whether a `.gguf` file is whole: its header walked once, every length held against the file.

The `gguf` library maps the file and trusts its lengths; this looks first, and reads no tensor.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from ..errors import ModelFileError, UnsupportedModel

__all__ = ["check_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_UINT32 = 4
# Bytes of each scalar type of metadata, by the number that stands for it in the file.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_DIMENSIONS = 4


class _Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.at = 0

    def skip(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` and say where they began."""
        start, end = self.at, self.at + num_bytes
        if end > len(self._data):
            raise ModelFileError(
                f"{self._path}: cut short inside {what}: found {len(self._data)} bytes, "
                f"expected at least {end}; fetch the file again"
            )
        self.at = end
        return start

    def uint32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self._data, self.skip(4, what))[0])

    def uint64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self._data, self.skip(8, what))[0])

    def string(self, what: str) -> str:
        length = self.uint64(what)
        start = self.skip(length, what)
        return self._data[start : start + length].decode("utf-8", errors="replace")

    def skip_value(self, kind: int, what: str) -> None:
        if kind == _STRING:
            self.skip(self.uint64(what), what)
        elif kind == _ARRAY:
            element, count = self.uint32(what), self.uint64(what)
            if element in _SCALAR_BYTES:
                self.skip(count * _SCALAR_BYTES[element], what)
                return
            if element != _STRING:
                raise UnsupportedModel(f"{self._path}: {what} is an array of type {element}")
            for _ in range(count):
                self.skip(self.uint64(what), what)
        elif kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind], what)
        else:
            raise ModelFileError(f"{self._path}: {what} has type {kind}; expected one of 0 to 12")


def check_header(path: Path) -> None:
    """Raise unless the header parses and every tensor it lists lies inside the file.

    Raises:
        ModelFileError: no GGUF file, or one cut short, with what was found and expected.
        UnsupportedModel: a version or tensor type that no one here can read.
    """
    with path.open("rb") as file:
        magic = file.read(4)
        if magic != _MAGIC:
            raise ModelFileError(f"{path}: starts with {magic!r}; expected {_MAGIC!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _walk(_Cursor(data, path), path, len(data))


def _walk(cursor: _Cursor, path: Path, file_bytes: int) -> None:
    cursor.skip(4, "the magic")
    version = cursor.uint32("the version")
    if version not in _VERSIONS:
        raise UnsupportedModel(f"{path}: GGUF version {version}; supported: 2, 3 (little-endian)")
    num_tensors = cursor.uint64("the tensor count")
    num_keys = cursor.uint64("the metadata count")
    alignment = GGUF_DEFAULT_ALIGNMENT
    for _ in range(num_keys):
        key = cursor.string("a metadata key")
        kind = cursor.uint32(key)
        if key == "general.alignment" and kind == _UINT32:
            alignment = cursor.uint32(key)
        else:
            cursor.skip_value(kind, key)
    if alignment < 1 or alignment & (alignment - 1):
        raise ModelFileError(f"{path}: general.alignment={alignment}; expected a power of two")
    ends = [_tensor_end(cursor, path) for _ in range(num_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    for name, end in ends:
        if data_start + end > file_bytes:
            raise ModelFileError(
                f"{path}: cut short: tensor {name!r} ends at byte {data_start + end}, "
                f"the file has {file_bytes}; fetch it again"
            )


def _tensor_end(cursor: _Cursor, path: Path) -> tuple[str, int]:
    """Read one tensor's entry; where its data ends, counted from where all data starts."""
    name = cursor.string("a tensor name")
    num_dimensions = cursor.uint32(name)
    if num_dimensions > _MAX_DIMENSIONS:
        raise ModelFileError(
            f"{path}: tensor {name!r} has {num_dimensions} dimensions; "
            f"expected at most {_MAX_DIMENSIONS}"
        )
    dimensions = [cursor.uint64(name) for _ in range(num_dimensions)]
    kind = cursor.uint32(name)
    offset = cursor.uint64(name)
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise UnsupportedModel(f"{path}: tensor {name!r} has the unknown type {kind}") from None
    if dimensions and dimensions[0] % block:
        raise ModelFileError(
            f"{path}: rows of tensor {name!r} have {dimensions[0]} elements; expected a "
            f"multiple of the block size {block}"
        )
    return name, offset + prod(dimensions) // block * block_bytes
