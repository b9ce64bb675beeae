"""Makes Triton's interpreter compute bfloat16 and float8 as a GPU does. Call ``install`` before the first
kernel runs.

The interpreter of triton 3.6 holds bfloat16 as the bit patterns it is made of. Products and sums of those are
silently wrong, and a float32 is truncated to it, not rounded. With numpy >= 2.4 it also refuses loops whose
bounds are computed. Half of its time goes into looking up again what never changes; it is kept here instead.
"""

from __future__ import annotations

import inspect
from operator import index
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from numpy.typing import NDArray

ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply"}
PLAIN_NUMBERS = {("fp32", float), ("fp32", int), ("int32", int), ("int64", int)}
"""Types of a tensor and of a Python number. An operation on such a pair computes in the tensor's type."""
E4M3_VALUES: NDArray[np.float32] = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def install() -> None:
    """Once per process; more do no harm."""
    builder: Any = interpreter.InterpreterBuilder
    if hasattr(builder, "bfloat16_as_on_a_gpu"):
        return
    builder.bfloat16_as_on_a_gpu = True
    cast, convert, binary, unary = (
        builder.cast_impl,
        builder.create_fp_to_fp,
        builder.binary_op,
        builder.unary_op,
    )

    def create_dot(self: Any, a: Any, b: Any, c: Any, *precision: Any) -> Any:
        # in float64, for the order of BLAS's sums depends on where in the matrix a row stands
        exact_a, exact_b = (_as_float32(x).astype(np.float64) for x in (a, b))
        return interpreter.TensorHandle((exact_a @ exact_b + c.data).astype(c.data.dtype), c.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if _is_bfloat16(source) and target.scalar != tl.bfloat16:
            wide = _widened(source)
            return wide if target.scalar == tl.float32 else cast(self, wide, target)
        if target.scalar == tl.bfloat16 and not _is_bfloat16(source):
            exact = source if source.dtype.scalar == tl.float32 else cast(self, source, tl.float32)
            return _narrowed(exact.data)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar == tl.float8e4nv:
            exact = interpreter.TensorHandle(E4M3_VALUES[source.data], tl.float32)
            return exact if target.scalar == tl.float32 else cast_impl(self, exact, target)
        if target.scalar == tl.float8e4nv:
            exact = _widened(source).data.astype(np.float32)
            return interpreter.TensorHandle(
                torch.from_numpy(exact).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), tl.float8e4nv
            )
        if _is_bfloat16(source) != (target.scalar == tl.bfloat16):
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        if not (_is_bfloat16(a) and _is_bfloat16(b)):
            return binary(self, a, b, op)
        result = op(_widened(a).data, _widened(b).data)
        return interpreter.TensorHandle(result, tl.int1) if result.dtype == bool else _narrowed(result)

    def unary_op(self: Any, a: Any, op: Any) -> Any:
        return _narrowed(op(_widened(a).data)) if _is_bfloat16(a) else unary(self, a, op)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    builder.binary_op, builder.unary_op = binary_op, unary_op
    _let_scalars_bound_loops()
    _keep_what_never_changes()


def _keep_what_never_changes() -> None:
    module: Any = interpreter
    builtins: dict[Any, list[str]] = {}
    numpy_types: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    numpy_type = module._get_np_dtype

    def patch_builtin(package: Any, *rest: Any) -> None:  # at each launch and each call of another kernel
        if package not in builtins:
            builtins[package] = [name for name, it in inspect.getmembers(package) if tl.core.is_builtin(it)]
        for name in builtins[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                module._patch_attr(package, name, member, *rest)

    def get_np_dtype(of: Any) -> Any:
        scalar = of.scalar
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type(scalar)
        return numpy_types[scalar.name]

    def set_type(self: Any, handle: Any, of: Any) -> None:
        self.handle, self.type, self.dtype = handle, of, of.scalar
        sizes = (*of.shape.values,) if of.is_block() else ()
        if sizes not in shapes:
            make(self, handle, of)
            shapes[sizes] = self.numel, self.shape
        self.numel, self.shape = shapes[sizes]

    def set_block(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *map(index, shape))
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element)

    def refuse_overflow(self: Any, a: Any, b: Any, operation: Any) -> None:
        """Addresses are signed. Triton's own test takes five operations, and stands idle by default."""
        if a.dtype.name in ("int8", "int16", "int32"):
            exact = getattr(np, ARITHMETIC[operation.__name__])(
                a.handle.data.astype(np.int64), b.handle.data.astype(np.int64)
            )
            limits = np.iinfo(a.handle.data.dtype)
            if exact.min() < limits.min or exact.max() > limits.max:
                raise OverflowError(f"{operation.__name__} of {a.dtype}")

    def checked_types(self: Any, a: Any, b: Any, *rest: Any, **more: Any) -> Any:
        alike = type(a) is type(b) is tensor and a.shape is b.shape and a.dtype is b.dtype
        if alike and not (a.dtype.is_ptr() or more.get("div_or_mod") or rest[3:]):
            return a, b
        if type(a) is tensor and (a.dtype.name, type(b)) in PLAIN_NUMBERS and abs(b) < 1 << 31:
            numbers = np.full(a.handle.data.shape, b, a.handle.data.dtype)
            return a, tensor(interpreter.TensorHandle(numbers, a.dtype), a.type)
        return check_types(self, a, b, *rest, **more)

    def cast_if_needed(self: Any, a: Any, target: Any, *rest: Any) -> Any:
        return a if a.dtype is target.scalar else cast(self, a, target, *rest)

    def same_type(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def unwrapped(of: Any) -> Any:
        return of.value if type(of) is constexpr else unwrap(of) if isinstance(of, sequences) else of

    semantic: Any = tl.semantic.TritonSemantic
    constexpr, sequences = tl.core.constexpr, (list, tuple, tl.core.tuple)
    unwrap: Any = tl.core._unwrap_if_constexpr
    equal: Any = tl.core.dtype.__eq__
    tensor: Any = tl.core.tensor
    block_type: Any = tl.core.block_type
    make, tensor.__init__ = tensor.__init__, set_type
    make_block, block_type.__init__ = block_type.__init__, set_block
    module._patch_builtin, module._get_np_dtype = patch_builtin, get_np_dtype
    semantic.binary_op_sanitize_overflow_impl = refuse_overflow
    check_types, semantic.binary_op_type_checking_impl = semantic.binary_op_type_checking_impl, checked_types
    cast, semantic.cast = semantic.cast, cast_if_needed
    tl.core.dtype.__eq__, module.tl.core._unwrap_if_constexpr = same_type, unwrapped
    module.TensorHandle.__post_init__ = lambda self: None
    _patch_once_a_launch()


def _patch_once_a_launch() -> None:
    """The interpreter redirects Triton's language once more at each call of one kernel by another, which
    changes nothing: all of it stays redirected until the launch ends."""
    module: Any = interpreter
    executor: Any = interpreter.GridExecutor
    patch, run = module._patch_lang, executor.__call__
    redirected: set[str] = set()  # modules whose names of the language are, in this launch

    def patch_language(kernel: Any) -> Any:
        if kernel.__module__ in redirected:
            return module._LangPatchScope()
        redirected.add(kernel.__module__)
        return patch(kernel)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        redirected.clear()
        return run(self, *args, **kwargs)

    module._patch_lang, executor.__call__ = patch_language, launch


def _let_scalars_bound_loops() -> None:
    patch: Any = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *rest: Any) -> Any:
        result = patch(tensor, *rest)

        def index(self: Any) -> int:
            return int(np.asarray(self.handle.data).reshape(-1)[0])

        if rest and hasattr(rest[0], "set_attr"):
            rest[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index
        return result

    module: Any = interpreter
    module._patch_lang_tensor = patch_lang_tensor


def _is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _widened(handle: Any) -> Any:
    """Widen bfloat16 to float32."""
    if not _is_bfloat16(handle):
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _as_float32(handle: Any) -> NDArray[Any]:
    values: NDArray[Any] = (
        E4M3_VALUES[handle.data] if handle.dtype.scalar == tl.float8e4nv else _widened(handle).data
    )
    return values


def _narrowed(values: NDArray[Any]) -> Any:
    """Rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    return interpreter.TensorHandle(
        np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16), tl.bfloat16
    )
