"""What a compiled kernel takes of a GPU, read from its machine code: an ELF file, as NVIDIA's tools write it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # attributes that .nv.info has of each function
_ELF, _NVIDIA = b"\x7fELF\x02", 190  # how a file of 64 bits begins, and for which machine it is
_SIZED = 0x04  # the format of attributes whose value is a function's symbol and a number


@dataclass(frozen=True)
class Resources:
    registers: int  # of a thread, at most
    stack: int  # bytes of a thread in slow memory: what registers had no room for is there


def resources(code: bytes) -> Resources:
    """The most that a kernel takes of those in a file: machine code for a GPU, or an object that has it inside."""
    found: dict[int, int] = {_FRAME_SIZE: 0, _REGISTERS: 0}
    for cubin in _cubins(code):
        for attribute, value in _attributes(_section(cubin, ".nv.info")):
            if attribute in found:
                found[attribute] = max(found[attribute], value)
    if not found[_REGISTERS]:
        raise ValueError("no machine code for a GPU in this file; expected what CuTe's compiler exports")
    return Resources(found[_REGISTERS], found[_FRAME_SIZE])


def _cubins(code: bytes) -> Iterator[bytes]:
    """From where each begins."""
    at = code.find(_ELF)
    while at >= 0:
        if struct.unpack_from("<H", code, at + 18)[0] == _NVIDIA:
            yield code[at:]
        at = code.find(_ELF, at + 1)


def _section(elf: bytes, name: str) -> bytes:
    """The contents of a section of a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    texts = headers[names][4]
    for header in headers:
        begin = texts + header[0]
        if elf[begin : elf.index(b"\0", begin)].decode() == name:
            return elf[header[4] : header[4] + header[5]]
    return b""


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if size >= 8:
                yield attribute, struct.unpack_from("<I", info, at + 4)[0]
            at += size
