"""What a compiled program copies, and in which order it calls, from the text of its optimized HLO."""

from __future__ import annotations

import math
import re

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\("
    r"(?:[^%)]*%(?P<first_operand>[\w.\-]+))?"
)
_TARGET = re.compile(r'custom_call_target="(\w+)"')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_ITEM_NBYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}
# What names a buffer, hands it on or updates it in place. A fusion is judged by the computation that it
# calls, whose instructions stand in the text as well.
_NO_NEW_BUFFER = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "optimization-barrier"),
    *("while", "conditional", "call", "fusion"),
    *("scatter", "dynamic-update-slice"),
}


def new_buffers(text: str, nbytes: int) -> list[str]:
    """The instructions, those in fusions included, that write an array of `nbytes` or more anew."""
    found = []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match["opcode"] in _NO_NEW_BUFFER:
            continue
        if match["opcode"] == "custom-call" and "output_to_operand_aliasing" in line:
            continue
        if max(map(_nbytes, _ARRAY.findall(match["type"])), default=0) >= nbytes:
            found.append(line.strip())
    return found


def call_chain(text: str, last: str) -> list[str]:
    """The custom calls from which the call of target `last` descends through first operands, it first."""
    lines = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            lines[match["name"]] = (match["first_operand"], _TARGET.search(line))
    (name,) = (n for n, (_, target) in lines.items() if target is not None and target[1] == last)
    chain = []
    while name is not None:
        name, target = lines[name]
        if target is not None:
            chain.append(target[1])
    return chain


def _nbytes(array: tuple[str, str]) -> int:
    dtype, dims = array
    if dtype in _ITEM_NBYTES:
        item_nbytes = _ITEM_NBYTES[dtype]
    else:  # f32, u8, f8e4m3fn, ...
        bits = re.match(r"[a-z](\d+)", dtype)
        item_nbytes = int(bits[1]) // 8 if bits else 0  # a token has no bytes
    return item_nbytes * math.prod(int(d) for d in dims.split(",") if d)
