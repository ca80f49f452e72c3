#include "lockstep/comm/inprocess/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

namespace lockstep::comm::inprocess {
namespace {

template <typename T>
void ReduceAs(T* output, const std::vector<const void*>& inputs, int64_t count, ReduceOp op) {
  using Accumulator =
      std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float,
                         T>;
  const auto combine = [&](auto function) {
    for (int64_t i = 0; i < count; ++i) {
      auto total = static_cast<Accumulator>(static_cast<const T*>(inputs[0])[i]);
      for (size_t rank = 1; rank < inputs.size(); ++rank) {
        total = static_cast<Accumulator>(
            function(total, static_cast<Accumulator>(static_cast<const T*>(inputs[rank])[i])));
      }
      if (op == ReduceOp::kAverage) total = total / static_cast<Accumulator>(inputs.size());
      output[i] = static_cast<T>(total);
    }
  };
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return combine([](Accumulator a, Accumulator b) { return a + b; });
    case ReduceOp::kMin:
      return combine([](Accumulator a, Accumulator b) { return std::min(a, b); });
    case ReduceOp::kMax:
      return combine([](Accumulator a, Accumulator b) { return std::max(a, b); });
    case ReduceOp::kProduct:
      return combine([](Accumulator a, Accumulator b) { return a * b; });
  }
}

}  // namespace

void Reduce(void* output, const std::vector<const void*>& inputs, int64_t count,
            at::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case at::kFloat:
      return ReduceAs(static_cast<float*>(output), inputs, count, op);
    case at::kDouble:
      return ReduceAs(static_cast<double*>(output), inputs, count, op);
    case at::kHalf:
      return ReduceAs(static_cast<c10::Half*>(output), inputs, count, op);
    case at::kBFloat16:
      return ReduceAs(static_cast<c10::BFloat16*>(output), inputs, count, op);
    case at::kInt:
      return ReduceAs(static_cast<int32_t*>(output), inputs, count, op);
    case at::kLong:
      return ReduceAs(static_cast<int64_t*>(output), inputs, count, op);
    case at::kByte:
      return ReduceAs(static_cast<uint8_t*>(output), inputs, count, op);
    default:
      break;  // Validate() has refused it
  }
}

}  // namespace lockstep::comm::inprocess
