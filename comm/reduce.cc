#include "lockstep/comm/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

namespace lockstep::comm {
namespace {

// Elements that are combined at a time: loops over them vectorise, and they stay in the cache.
constexpr int64_t kTile = 1024;

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>;

template <typename T, typename Function>
void Combine(T* output, const std::vector<const void*>& inputs, int64_t count, bool average,
             Function function) {
  Accumulator<T> total[kTile];
  for (int64_t start = 0; start < count; start += kTile) {
    const int64_t tile = std::min(kTile, count - start);
    const T* first = static_cast<const T*>(inputs[0]) + start;
    for (int64_t i = 0; i < tile; ++i) total[i] = static_cast<Accumulator<T>>(first[i]);
    for (size_t rank = 1; rank < inputs.size(); ++rank) {
      const T* next = static_cast<const T*>(inputs[rank]) + start;
      for (int64_t i = 0; i < tile; ++i) {
        total[i] =
            static_cast<Accumulator<T>>(function(total[i], static_cast<Accumulator<T>>(next[i])));
      }
    }
    if (average) {
      const auto ranks = static_cast<Accumulator<T>>(inputs.size());
      for (int64_t i = 0; i < tile; ++i) total[i] = total[i] / ranks;
    }
    for (int64_t i = 0; i < tile; ++i) output[start + i] = static_cast<T>(total[i]);
  }
}

template <typename T>
void ReduceAs(void* output, const std::vector<const void*>& inputs, int64_t count, ReduceOp op) {
  T* to = static_cast<T*>(output);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return Combine(to, inputs, count, op == ReduceOp::kAverage,
                     [](auto a, auto b) { return a + b; });
    case ReduceOp::kMin:
      return Combine(to, inputs, count, /*average=*/false,
                     [](auto a, auto b) { return b < a ? b : a; });
    case ReduceOp::kMax:
      return Combine(to, inputs, count, /*average=*/false,
                     [](auto a, auto b) { return a < b ? b : a; });
    case ReduceOp::kProduct:
      return Combine(to, inputs, count, /*average=*/false, [](auto a, auto b) { return a * b; });
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
