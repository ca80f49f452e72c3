#include "lockstep/comm/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

namespace lockstep::comm {
namespace {

// Elements that are combined at a time: partial results stay in the first cache.
constexpr int64_t kTile = 1024;

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>;

// to[i] = function(left[i], right[i]) / divisor. Left and right may be `to`, but overlap it in no
// other way.
template <bool kDivide, typename To, typename Left, typename Right, typename Function>
[[gnu::always_inline]] inline void CombineTwo(To* to, const Left* left, const Right* right,
                                              int64_t count, Accumulator<To> divisor,
                                              Function function) {
  using Value = Accumulator<To>;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const auto value =
        static_cast<Value>(function(static_cast<Value>(left[i]), static_cast<Value>(right[i])));
    to[i] = static_cast<To>(kDivide ? static_cast<Value>(value / divisor) : value);
  }
}

template <bool kDivide, typename T, typename Function>
[[gnu::always_inline]] inline void CombineAll(T* output, const std::vector<const void*>& inputs,
                                              int64_t count, Function function) {
  using Value = Accumulator<T>;
  const size_t ranks = inputs.size();
  const auto divisor = static_cast<Value>(ranks);
  Value total[kTile];
  for (int64_t start = 0; start < count; start += kTile) {
    const int64_t tile = std::min(kTile, count - start);
    const auto input = [&](size_t rank) { return static_cast<const T*>(inputs[rank]) + start; };
    T* to = output + start;
    if (ranks == 1) {
      std::copy_n(input(0), tile, to);
    } else if (ranks == 2) {
      CombineTwo<kDivide>(to, input(0), input(1), tile, divisor, function);
    } else {
      CombineTwo<false>(total, input(0), input(1), tile, divisor, function);
      for (size_t rank = 2; rank + 1 < ranks; ++rank) {
        CombineTwo<false>(total, total, input(rank), tile, divisor, function);
      }
      CombineTwo<kDivide>(to, total, input(ranks - 1), tile, divisor, function);
    }
  }
}

template <bool kDivide, typename T, typename Function>
[[gnu::target("avx2")]] void CombineAvx2(T* output, const std::vector<const void*>& inputs,
                                         int64_t count, Function function) {
  CombineAll<kDivide>(output, inputs, count, function);
}

// The same operations on more elements at a time give the same bits, so ranks may differ in it.
template <bool kDivide, typename T, typename Function>
void Combine(T* output, const std::vector<const void*>& inputs, int64_t count, Function function) {
  static const bool avx2 = __builtin_cpu_supports("avx2") != 0;
  if (avx2) {
    CombineAvx2<kDivide>(output, inputs, count, function);
  } else {
    CombineAll<kDivide>(output, inputs, count, function);
  }
}

template <typename T>
void ReduceAs(void* output, const std::vector<const void*>& inputs, int64_t count, ReduceOp op) {
  T* to = static_cast<T*>(output);
  switch (op) {
    case ReduceOp::kSum:
      return Combine<false>(to, inputs, count, [](auto a, auto b) { return a + b; });
    case ReduceOp::kAverage:
      return Combine<true>(to, inputs, count, [](auto a, auto b) { return a + b; });
    case ReduceOp::kMin:
      return Combine<false>(to, inputs, count, [](auto a, auto b) { return b < a ? b : a; });
    case ReduceOp::kMax:
      return Combine<false>(to, inputs, count, [](auto a, auto b) { return a < b ? b : a; });
    case ReduceOp::kProduct:
      return Combine<false>(to, inputs, count, [](auto a, auto b) { return a * b; });
  }
}

}  // namespace

void Reduce(void* output, const std::vector<const void*>& inputs, int64_t count,
            at::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case at::kFloat:
      return ReduceAs<float>(output, inputs, count, op);
    case at::kDouble:
      return ReduceAs<double>(output, inputs, count, op);
    case at::kHalf:
      return ReduceAs<c10::Half>(output, inputs, count, op);
    case at::kBFloat16:
      return ReduceAs<c10::BFloat16>(output, inputs, count, op);
    case at::kInt:
      return ReduceAs<int32_t>(output, inputs, count, op);
    case at::kLong:
      return ReduceAs<int64_t>(output, inputs, count, op);
    case at::kByte:
      return ReduceAs<uint8_t>(output, inputs, count, op);
    default:
      break;  // Validate() has refused it
  }
}

}  // namespace lockstep::comm
