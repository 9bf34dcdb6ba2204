// The two ways through a matrix, by which of its dimensions is adjacent in memory. For split.cu,
// which checks what they are given.
#pragma once

#include "linear_bn/split/split.h"

namespace cutlass_bn::linear_bn {

// k_stride is 1: a row's elements are adjacent. `vectorized`: 16 bytes can be read at a time.
void launch_split_rows(SplitSource const& source, SplitMatrix const& result, bool vectorized,
                       cudaStream_t stream);

// row_stride is 1: a column's are. maxima: scratch, [rows].
void launch_split_columns(SplitSource const& source, SplitMatrix const& result, uint32_t* maxima,
                          bool vectorized, cudaStream_t stream);

}  // namespace cutlass_bn::linear_bn
