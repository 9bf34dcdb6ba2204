#include "linear_bn/policy.h"

#include <algorithm>

#include "common/math.h"

namespace cutlass_bn::linear_bn {
namespace {

#ifdef CUTLASS_BN_NO_GEMM
constexpr bool kHasGemm = false;
#else
constexpr bool kHasGemm = true;
#endif

// The only row of a matrix may have any stride; the hardware still wants one that it could use.
int64_t leading_dimension(MatrixView const& m, DType dtype) {
  return m.rows == 1 ? round_up(m.columns, 16 / static_cast<int64_t>(size_of(dtype)))
                     : m.row_stride;
}

// Of any of the GEMMs.
char const* reason_against_gemm(Request const& r) {
  if (r.x.rows == 0 || r.w.rows == 0 || r.x.columns == 0) return "a matrix without elements";
  if (r.compute_capability != 90) return "the GEMM kernels need compute capability 9.0 (Hopper)";
  if (!kHasGemm) return "the library was built without 90 in CUTLASS_BN_ARCHITECTURES";
  if (r.dtype == DType::kFloat32 && r.fp32_products == Fp32Products::kIeee)
    return "IEEE float32 products were asked for";
  if (r.out_row_stride * size_of(r.out_dtype) % 16 != 0)
    return "the rows of the output are not a multiple of 16 bytes";
  return nullptr;
}

char const* reason_against_fusing(Request const& r, gemm::Operands const& operands) {
  if (char const* const reason = reason_against_gemm(r)) return reason;
  bool const rows_contiguous = (r.x.columns == 1 || r.x.column_stride == 1) &&
                               (r.w.columns == 1 || r.w.column_stride == 1);
  if (!rows_contiguous) return "the rows of input or weight are not contiguous";
  if (operands.ldx < operands.k || operands.ldw < operands.k)
    return "the rows of input or weight overlap";
  return gemm::unsupported_reason(operands);
}

// Whether the split, all of its kernels together, is faster than SGEMM and as exact:
// docs/notes/2026-11-29-split-fp32.md has the measured grid. The products have to make up for
// launches, for tiles of 128 rows and for the passes over the operands.
bool split_pays(int64_t m, int64_t n, int64_t k) {
  double const outputs = double(m) * double(n);
  bool const exact = k >= 64;  // the planes' own error is that of so many roundings
  bool const many_tiles = std::min(m, n) > 64 && outputs >= 1 << 19;
  return exact && many_tiles && outputs * double(k) >= 1 << 28 &&
         outputs / double(m + n) * double(k) >= 1 << 15;
}

Plan choose_split_plan(Request const& r) {
  Plan plan;
  auto const x = split_source(r.x), w = split_source(r.w);
  if (char const* const reason = reason_against_gemm(r)) {
    plan.reason = reason;
  } else if (!x || !w) {
    plan.reason =
        "neither the rows nor the columns of input or weight are contiguous, or they overlap";
  } else if (std::max(x->rows, w->rows) > gemm::kMaxDimension || x->k > kMaxSplitK) {
    plan.reason = "rows of nearly 2^31 or more, or K of 2^30 or more";
  } else if (!split_pays(x->rows, w->rows, x->k)) {
    plan.reason = "SGEMM is faster or more exact at this size";
  } else {
    plan.path = Path::kSplit;
    plan.split.x = *x;
    plan.split.w = *w;
    plan.tile = choose_split_tile(plan.split, r.sm_count);
  }
  return plan;
}

}  // namespace

std::optional<SplitSource> split_source(MatrixView const& m) {
  auto const* const data = static_cast<float const*>(m.data);
  int64_t const row_stride = m.rows == 1 ? m.columns : m.row_stride,
                k_stride = m.columns == 1 ? m.rows : m.column_stride;
  if ((m.columns == 1 || k_stride == 1) && row_stride >= m.columns)
    return SplitSource{data, m.rows, m.columns, row_stride, 1};
  if ((m.rows == 1 || m.row_stride == 1) && k_stride >= m.rows)
    return SplitSource{data, m.rows, m.columns, 1, k_stride};
  return std::nullopt;
}

Plan choose_plan(Request const& r) {
  if (r.dtype == DType::kFloat32 && r.fp32_products == Fp32Products::kSplit)
    return choose_split_plan(r);
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

ProductPath choose_product(MatrixView const& a, MatrixView const& b, Fp32Products fp32_products,
                           int compute_capability) {
  int64_t const m = a.rows, k = a.columns, n = b.columns;
  double const outputs = double(m) * double(n), products = outputs * double(k);
  if (compute_capability != 90) return ProductPath::kPlain;
  if (fp32_products == Fp32Products::kSplit) {
    bool const pays = std::min({m, k, n}) >= 512 && outputs >= 1 << 19 && products >= 1 << 28;
    bool const fits = std::max(m, n) <= gemm::kMaxDimension && k <= kMaxSplitK;
    return kHasGemm && pays && fits ? ProductPath::kSplit : ProductPath::kPlain;
  }
  // Tensor cores take TF32 with k adjacent in both operands alone. Where it is in neither, mending
  // one gains the most, and the smaller one costs less; where it is in a, b has to be small beside
  // the product (docs/notes/2026-11-29-tf32-transpose.md).
  if (fp32_products != Fp32Products::kTf32 || b.column_stride != 1 ||
      products < double(int64_t{1} << 31)) {
    return ProductPath::kPlain;
  }
  if (a.row_stride == 1 && outputs >= 1 << 20)
    return m < n ? ProductPath::kTransposeA : ProductPath::kTransposeB;
  bool const b_is_small = m >= 8192 && m >= 2 * k && outputs >= 1 << 23;
  return a.column_stride == 1 && b_is_small ? ProductPath::kTransposeB : ProductPath::kPlain;
}

}  // namespace cutlass_bn::linear_bn
