"""Stored number formats, and the few vector instructions that the kernels are built from.

Instructions are LLVM's, of 16 lanes; a processor with narrower vectors splits them.

Storage formats: bfloat16 travels as uint16 (its bits), two neighbours forming one 32-bit pair
whose halves widen to float32 in one instruction each; float32 as itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = ["bits_of", "narrow", "settle", "widen"]

LANES = 16


def has_feature(name: str) -> bool:
    """Say whether code may use a processor's ability, by its LLVM name: what numba compiles for.

    That is the processor at hand, unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES ask for another; of
    another only what is spelt out is used.
    """
    asked: str | None = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    if asked is not None:
        return f"+{name}" in asked.split(",")
    if numba.config.CPU_NAME is not None:  # type: ignore[attr-defined]
        return False
    return bool(llvmlite.binding.get_host_cpu_features().get(name))


# Whether one register holds 16 lanes; there are 32 such registers then, else 16 of half the size.
WIDE = has_feature("avx512f")

F32, I32, I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
VEC_F32, VEC_I32 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


@intrinsic
def _as_f32(_context: Any, _bits: Any) -> Any:
    return types.float32(types.uint32), lambda c, b, s, a: b.bitcast(a[0], F32)


@intrinsic
def bits_of(_context: Any, _value: Any) -> Any:
    return types.uint32(types.float32), lambda c, b, s, a: b.bitcast(a[0], I32)


def widen(value: Any) -> Any:
    """Turn a stored element (bfloat16 bits or float32) into float32."""
    raise NotImplementedError("for compiled code only")


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint16:
        return lambda value: _as_f32(np.uint32(value) << np.uint32(16))
    return lambda value: value


def narrow(value: Any, like: Any) -> Any:
    """Round a float32 to the format of the array `like`: to nearest, ties to even."""
    raise NotImplementedError("for compiled code only")


@overload(narrow, inline="always")
def _narrow(value, like):
    if like.dtype == types.uint16:
        return lambda value, like: _round_bf16(value)
    return lambda value, like: value


@njit(inline="always")
def settle(value, like):
    """Round a float32 to what the format of the array `like` can hold, still as float32."""
    return widen(narrow(value, like))


@njit(inline="always")
def _round_bf16(value):
    bits = bits_of(np.float32(value))
    carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16((bits + carry) >> np.uint32(16))


def pointer(context: Any, builder: Any, array_type: Any, array: Any, at: Any, element: Any) -> Any:
    """Point at element `at` of an array, seen as a run of `element`s."""
    data = context.make_array(array_type)(context, builder, array).data
    here = builder.gep(data, [at])
    return builder.bitcast(here, ir.PointerType(element))


def load_vector(builder: Any, pointer: Any, index: Any) -> Any:
    """Load 16 consecutive 32-bit elements, wherever they lie."""
    element = builder.gep(pointer, [index])
    vector = VEC_F32 if pointer.type.pointee == F32 else VEC_I32
    return builder.load(builder.bitcast(element, ir.PointerType(vector)), align=4)


def store_vector(builder: Any, value: Any, pointer: Any, index: Any) -> None:
    """Store 16 consecutive 32-bit elements, wherever they lie."""
    element = builder.gep(pointer, [index])
    builder.store(value, builder.bitcast(element, ir.PointerType(value.type)), align=4)


def load_stored(builder: Any, pointer: Any, index: Any) -> Any:
    """Load 16 consecutive stored elements (bfloat16 bits or float32) as float32."""
    if pointer.type.pointee == F32:
        return load_vector(builder, pointer, index)
    halves = ir.PointerType(ir.VectorType(I16, LANES))
    loaded = builder.load(builder.bitcast(builder.gep(pointer, [index]), halves), align=2)
    return low_half(builder, builder.zext(loaded, VEC_I32))


def store_rounded(builder: Any, value: Any, pointer: Any, index: Any) -> None:
    """Store 16 float32 in the pointer's format, rounded to nearest, ties to even."""
    if pointer.type.pointee == F32:
        store_vector(builder, value, pointer, index)
        return
    bits = builder.lshr(builder.bitcast(round_bf16(builder, value), VEC_I32), VEC_I32([16] * LANES))
    halves = builder.trunc(bits, ir.VectorType(I16, LANES))
    place = builder.bitcast(builder.gep(pointer, [index]), ir.PointerType(halves.type))
    builder.store(halves, place, align=2)


def round_bf16(builder: Any, value: Any) -> Any:
    """Round 16 float32 to what bfloat16 can hold, still as float32."""
    bits = builder.bitcast(value, VEC_I32)
    odd = builder.and_(builder.lshr(bits, VEC_I32([16] * LANES)), VEC_I32([1] * LANES))
    carry = builder.add(odd, VEC_I32([0x7FFF] * LANES))
    kept = builder.and_(builder.add(bits, carry), VEC_I32([0xFFFF0000] * LANES))
    return builder.bitcast(kept, VEC_F32)


def splat(builder: Any, scalar: Any) -> Any:
    """Copy a scalar into every lane."""
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def call_lanes(builder: Any, name: str, *operands: Any) -> Any:
    """Call an LLVM intrinsic over vectors of float32, such as `floor` or `maxnum`."""
    kind = ir.FunctionType(VEC_F32, [VEC_F32] * len(operands))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, operands)


def fold_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes of a vector into one scalar, in a fixed order: halves onto halves."""
    width = LANES // 2
    while width:
        order = [*range(width, 2 * width), *[0] * (LANES - width)]
        mask = ir.Constant(ir.VectorType(I32, LANES), order)
        other = builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)
        vector = combine(vector, other)
        width //= 2
    return builder.extract_element(vector, I32(0))


def fma(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """total + a * b."""
    # fmuladd: fused where the processor has it, two instructions where not; never a library call
    return call_lanes(builder, "fmuladd", a, b, total)


def low_half(builder: Any, pairs: Any) -> Any:
    """Widen the first bfloat16 of each pair."""
    return builder.bitcast(builder.shl(pairs, VEC_I32([16] * LANES)), VEC_F32)


def high_half(builder: Any, pairs: Any) -> Any:
    """Widen the second bfloat16 of each pair."""
    return builder.bitcast(builder.and_(pairs, VEC_I32([0xFFFF0000] * LANES)), VEC_F32)


def sum_loop(
    builder: Any, count: Any, totals: list[Any], body: Callable[..., list[Any]]
) -> list[Any]:
    """Run `body(index, totals) -> totals` for index 0..count-1 with the totals in registers."""
    before = builder.block
    loop = builder.append_basic_block("sum")
    after = builder.append_basic_block("summed")
    builder.cbranch(builder.icmp_signed(">", count, count.type(0)), loop, after)
    builder.position_at_end(loop)
    index = builder.phi(count.type)
    carried = [builder.phi(total.type) for total in totals]
    updated = body(index, list(carried))
    following = builder.add(index, count.type(1))
    end = builder.block
    for phi, first, later in zip(
        [index, *carried], [count.type(0), *totals], [following, *updated], strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(later, end)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    results = [builder.phi(total.type) for total in totals]
    for phi, first, later in zip(results, totals, updated, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, end)
    return results
