// Which element of an epilogue subtile a thread's i-th value is. wgmma fixes it: a warp holds 16
// rows, lane / 4 is the row and lane % 4 the column pair; a thread's values alternate over two
// columns, then two rows 8 apart, then groups of 8 columns.
#pragma once

#include "cute/tensor.hpp"

namespace cutlass_bn::gemm {

// Layout: of a thread's coordinates, (values, _, groups, subtiles along M, subtiles along N).
template <class CoordinateLayout>
constexpr bool is_accumulator_order() {
  using namespace cute;
  using Layout = remove_cvref_t<CoordinateLayout>;
  using Column = decltype(as_arithmetic_tuple(Layout{}(_1{})));
  using Row = decltype(as_arithmetic_tuple(Layout{}(_2{})));
  using Group = decltype(as_arithmetic_tuple(Layout{}(_4{})));
  return is_same_v<Column, ArithmeticTuple<_0, _1>> && is_same_v<Row, ArithmeticTuple<_8, _0>> &&
         is_same_v<Group, ArithmeticTuple<_0, _8>>;
}

// Column of the i-th value within the subtile.
CUTE_HOST_DEVICE constexpr int column_of_value(int i, int thread) {
  return i / 4 * 8 + thread % 4 * 2 + i % 2;
}

}  // namespace cutlass_bn::gemm
