#include "linear_bn/dispatch.h"

namespace cutlass_bn::linear_bn {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The only row of a matrix may have any stride; the hardware still wants one that it could use.
int64_t leading_dimension(MatrixView const& m, DType dtype) {
  return m.rows == 1 ? round_up(m.columns, 16 / static_cast<int64_t>(size_of(dtype))) : m.row_stride;
}

char const* reason_against_fusing(Request const& r, gemm::Operands const& operands) {
  if (r.x.rows == 0 || r.w.rows == 0 || r.x.columns == 0) return "a matrix without elements";
  if (r.compute_capability != 90) return "the GEMM kernels need compute capability 9.0 (Hopper)";
  if (r.dtype == DType::kFloat32 && !r.allow_tf32) return "float32 matrix products in full precision (torch.backends.cuda.matmul)";
  bool const rows_contiguous = (r.x.columns == 1 || r.x.column_stride == 1) && (r.w.columns == 1 || r.w.column_stride == 1);
  if (!rows_contiguous) return "the rows of input or weight are not contiguous";
  if (operands.ldx < operands.k || operands.ldw < operands.k) return "the rows of input or weight overlap";
  if (r.out_row_stride * size_of(r.out_dtype) % 16 != 0) return "the rows of the output are not a multiple of 16 bytes";
  return gemm::unsupported_reason(operands);
}

}  // namespace

Plan choose_plan(Request const& r) {
  Plan plan;
  plan.operands.x = r.x.data;
  plan.operands.w = r.w.data;
  plan.operands.ldx = leading_dimension(r.x, r.dtype);
  plan.operands.ldw = leading_dimension(r.w, r.dtype);
  plan.operands.m = r.x.rows;
  plan.operands.n = r.w.rows;
  plan.operands.k = r.x.columns;
  plan.operands.dtype = r.dtype;
  if (char const* const reason = reason_against_fusing(r, plan.operands)) {
    plan.reason = reason;
    return plan;
  }
  plan.path = Path::kFused;
  plan.tile = gemm::choose_tile(plan.operands.m, plan.operands.n, r.sm_count);
  return plan;
}

std::string describe(Plan const& plan) {
  if (plan.path == Path::kPortable) return message("portable: ", plan.reason);
  return message("fused: ", gemm::name_of(plan.tile), " tile");
}

}  // namespace cutlass_bn::linear_bn
